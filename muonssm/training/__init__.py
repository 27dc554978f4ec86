"""Training: recipes, the trainer set-up, run folders and comparisons."""

from muonssm.torchvision_cpu import prepare_torchvision

prepare_torchvision()  # before transformers, which imports torchvision if it is installed
