"""A run's folder: what is in it, written so that a killed run leaves whole files or none.

recipe.json         everything that was set
versions.json       what it ran with
facts.json          classes, channels and statistics of the data
history.json        loss and scores of every epoch; timing.json how long it took
metrics.json        scores of the kept weights on validation data, and of the test part, scored once; its being
                    there means that the run is over
model.safetensors   the weights that are kept; last.safetensors those of the last epoch, where others are kept.
                    A language model's folder has config.json and the tokenizer too: transformers loads it
snapshots/          the weights at the start and at every validation, where the recipe asks for them
checkpoints/        to resume from
tensorboard/        the same curves
"""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muonssm.version import __version__

from .files import atomic
from .recipe import Recipe

SNAPSHOTS = "snapshots"
PACKAGES = ("torch", "transformers", "accelerate", "numpy", "safetensors")


class RunFolder:
    """Reading and writing of one run. Of several processes only the first writes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.writes = os.environ.get("RANK", "0") == "0"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def is_over(self) -> bool:
        """Whether the run came to its end."""
        return (self.path / "metrics.json").is_file()

    def check(self, name: str, settings: Any, resume: bool) -> None:
        """Raises unless the folder is free, or is to be resumed and has the same settings in its file `name`."""
        if not self.writes or not (self.path / name).is_file():
            return
        if not resume:
            raise ValueError(f"{self.path} has a run already; --resume takes it up, --output names another folder")
        if self.read(name) != as_json(settings):
            raise ValueError(f"{self.path} has a run of other settings; --output may name another folder")

    def begin(self, name: str, settings: Any) -> None:
        """Makes the folder, with its settings in the file `name` and what it runs with."""
        if self.writes:
            self.path.mkdir(parents=True, exist_ok=True)
        versions = {package: metadata.version(package) for package in PACKAGES}
        self.write("versions.json", {"muonssm": __version__, "threads": torch.get_num_threads(), **versions})
        self.write(name, settings)

    def last_checkpoint(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest checkpoint that is whole, and its state: the trainer writes that last."""
        found = sorted(self.checkpoints.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        for path in reversed(found):
            try:
                return path, json.loads((path / "trainer_state.json").read_text())
            except (OSError, ValueError):
                continue
        return None

    def write(self, name: str, content: Any) -> None:
        """A JSON file, all of it or nothing."""
        if not self.writes:
            return
        with atomic(self.path / name) as part:
            part.write_text(json.dumps(_finite(content), indent=1, allow_nan=False))

    def read(self, name: str) -> Any:
        """A JSON file of the run."""
        path = self.path / name
        if not path.is_file():
            raise ValueError(f"RUN is {str(self.path)!r}, which has no {name}; it may be the folder of a finished run")
        return json.loads(path.read_text())

    def record(self, name: str, resume: bool) -> tuple[Callable[[Any], None], Any]:
        """A file for a job that saves as it goes: how to write it, and what an earlier one left, if it is resumed."""
        there = (self.path / name).is_file()
        if there and not resume:
            raise ValueError(f"{self.path / name} is there already; --resume keeps it, or move it away")
        return functools.partial(self.write, name), self.read(name) if there else None

    def save_weights(self, name: str, weights: dict[str, Tensor]) -> None:
        """A safetensors file, all of it or nothing."""
        from safetensors.torch import save_file

        if not self.writes:
            return
        with atomic(self.path / name) as part:
            tensors = {key: tensor.contiguous() for key, tensor in weights.items()}
            save_file(tensors, part, metadata={"format": "pt"})

    def save_snapshot(self, step: int, weights: dict[str, Tensor]) -> None:
        """The weights after a step, unless they are there."""
        name = f"{SNAPSHOTS}/step-{step:07d}.safetensors"
        if self.writes and not (self.path / name).is_file():
            (self.path / SNAPSHOTS).mkdir(parents=True, exist_ok=True)
            self.save_weights(name, {key: tensor.detach().cpu().clone() for key, tensor in weights.items()})

    def snapshots(self) -> dict[int, Path]:
        """Files of weights by the step that they are of, first to last."""
        found = sorted((self.path / SNAPSHOTS).glob("step-*.safetensors"))
        return {int(path.stem.rpartition("-")[2]): path for path in found}

    def keep(self, files: list[Path]) -> None:
        """Copies of files."""
        for file in files if self.writes else ():
            with atomic(self.path / file.name) as part:
                shutil.copyfile(file, part)

    def save_model(self, model: Any, weights: dict[str, Tensor]) -> None:
        """The weights as model.safetensors; of a transformers model everything that loads it again.

        Not by its `save_pretrained`, which needs all processes where weights are sharded.
        """
        tied = getattr(model, "all_tied_weights_keys", {})
        self.save_weights("model.safetensors", {name: value for name, value in weights.items() if name not in tied})
        if self.writes and hasattr(model, "generation_config"):
            model.config.save_pretrained(self.path)
            model.generation_config.save_pretrained(self.path)

    def load_model(self, *kinds: str) -> tuple[Recipe, Any, Any]:
        """The recipe, the facts of its data, and the trained model; raises if the task is none of `kinds`."""
        recipe, facts = Recipe.from_dict(self.read("recipe.json")), self.read("facts.json")
        if kinds and recipe.kind not in kinds:
            raise ValueError(
                f"RUN is {str(self.path)!r}, a run of {recipe.kind}; it may be a run of {' or '.join(kinds)}"
            )
        model = recipe.task.rebuild_model(facts, self.path)
        self.load_weights(model, self.path / "model.safetensors")
        return recipe, facts, model.eval()

    def load_weights(self, model: Any, path: Path) -> None:
        """Puts a file of this run's weights into its model."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            weights = load_file(path)
            tied = getattr(model, "all_tied_weights_keys", {})
            weights |= {name: weights[source] for name, source in tied.items() if source in weights}
            model.load_state_dict(weights)
        except (SafetensorError, RuntimeError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"RUN is {str(self.path)!r}, whose {path.name} cannot be used: {reason}") from error


def as_json(content: Any) -> Any:
    """What reading gives back of what is written."""
    return json.loads(json.dumps(_finite(content)))


def _finite(content: Any) -> Any:
    """JSON has no nan and no inf: they become null."""
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
