"""Processes on this machine: their starts, ends, output, limits and directories. Must not know other hosts."""
