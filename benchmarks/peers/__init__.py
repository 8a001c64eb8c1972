"""Scripts that benchmarks run as processes of their own, some by other interpreters."""
