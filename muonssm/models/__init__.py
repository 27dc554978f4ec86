"""Models: layers stacked into something a user trains."""

from muonssm.lab.core.torchvision_cpu import prepare_torchvision

prepare_torchvision()  # before a model here imports transformers or timm, which import torchvision if it is installed
