"""Data sets of activity recognition, one file per published layout."""
