"""The commands of psdctl, one module for each, and helpers that several of them use."""
