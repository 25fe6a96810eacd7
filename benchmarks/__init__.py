"""Measurements of the product, as ratios within one run: ``python -m benchmarks.<name>``."""
