"""What all tasks share: recipes, the trainer, run folders, comparisons."""
