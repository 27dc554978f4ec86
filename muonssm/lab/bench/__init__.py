"""Benchmarks of our implementations and their peers, side by side in one process. Speeds are reported as ratios."""
