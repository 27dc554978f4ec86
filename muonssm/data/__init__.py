"""Data sets and generators, one file per source."""
