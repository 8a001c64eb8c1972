"""Scripts that benchmarks run as separate processes, some by other interpreters."""
