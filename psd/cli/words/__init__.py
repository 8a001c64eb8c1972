"""Words in and out: arguments, logs, and text for terminals. Must not know jobs."""
