"""What `benchmarks/goldens.py` compares between two checkouts: a module for each section."""
