"""Seeded faults in trainings, see benchmarks/chaos.py."""
