"""A job of psd-run: what belongs to it, and what to do next. Decides, but starts nothing."""
