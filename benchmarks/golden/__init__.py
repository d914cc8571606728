"""The comparisons of `benchmarks/goldens.py` between two checkouts: one module per section."""
