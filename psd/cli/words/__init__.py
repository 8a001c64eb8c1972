"""Input and output of the commands: arguments, logs, and text for terminals. Must not know jobs."""
