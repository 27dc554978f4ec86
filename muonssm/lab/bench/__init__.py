"""Measuring: our implementations and their peers side by side in one run. Speeds are reported as ratios."""
