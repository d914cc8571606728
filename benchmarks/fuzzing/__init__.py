"""The kinds of `benchmarks/fuzz.py`, one module each, and their harness."""
