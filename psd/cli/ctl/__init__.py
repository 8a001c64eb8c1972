"""The commands of psdctl, a module each, and what several of them need."""
