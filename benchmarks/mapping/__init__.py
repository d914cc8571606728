"""What `benchmarks/map.py` counts: the sources themselves, and what runs of them touch."""
