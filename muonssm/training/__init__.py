"""Training: recipes, the trainer set-up, run folders and comparisons."""
