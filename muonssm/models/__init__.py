"""Models: layers stacked into something a user trains."""
