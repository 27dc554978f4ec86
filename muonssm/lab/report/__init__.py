"""The report: one HTML page on runs and comparisons."""
