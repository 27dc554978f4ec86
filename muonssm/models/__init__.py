"""Models: layers stacked into networks that a user trains."""
