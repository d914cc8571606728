"""The counts of `benchmarks/map.py`: of the sources, and of the files that runs use."""
