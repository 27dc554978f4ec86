"""How a trained classifier holds up on corrupted images, other renderings and hard photographs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from muonssm.lab.core.run_folder import RunFolder

from .augment import view_of
from .imagenet import synsets
from .robustness import evaluate_imagenet_c, evaluate_subset


def evaluate_robustness(run: str | Path, name: str, data: str | Path, batch_size: int = 64) -> Iterator[str]:
    """The scores as lines of text, and as RUN/NAME.json.

    Args:
        run: a finished run of image classification.
        name: `"imagenet-c"` (also of one's own classes, see `muonssm corrupt`), `"imagenet-r"` or `"imagenet-a"`.
        data: the folder of the images.
        batch_size: images at a time.
    """
    folder = RunFolder(run)
    recipe, metadata, model = folder.load_model("vision")
    if not Path(data).is_dir():
        raise ValueError(f"--data is {str(data)!r}, which is no folder; it may be that of {name}")

    @torch.inference_mode()
    def predict(images: Tensor) -> Tensor:
        return model(images)["logits"]

    view = view_of(recipe.task.augment, metadata)  # type: ignore[attr-defined]
    if name == "imagenet-c":
        scores = evaluate_imagenet_c(predict, Path(data), view, metadata["classes"], batch_size=batch_size)
    else:
        if tuple(metadata["classes"]) != synsets():
            raise ValueError(f"RUN is {str(run)!r}, which has other classes; for {name} it may be a run on ImageNet-1k")
        scores = evaluate_subset(predict, Path(data), name, view, batch_size=batch_size)  # type: ignore[assignment]
    folder.write(f"{name}.json", asdict(scores))
    return scores.lines()
