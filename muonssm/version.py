"""The version, in a file of its own so that building the package need not import torch."""

__version__ = "0.1.0.dev0"
