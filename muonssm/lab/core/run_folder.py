"""The folder of a run. Files are written atomically, so a killed run leaves complete files only.

recipe.json         all settings
versions.json       versions of the libraries, number of threads
metadata.json       classes, channels and statistics of the data
history.json        loss and scores of every epoch
timing.json         seconds of training, and tokens per second where tokens are counted
metrics.json        scores of the kept weights on the validation and test sets; written last: its presence means that
                    the run is finished
model.safetensors   the kept weights; last.safetensors has those of the last epoch, if others were kept.
                    transformers loads the folder of a model of its own: config.json and tokenizer are there too
snapshots/          weights at the start and at every validation, if training.snapshots is set
checkpoints/        to resume from
tensorboard/        learning curves
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
    """Reads and writes the folder of one run. With several processes only the first one writes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.writes = os.environ.get("RANK", "0") == "0"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def is_finished(self) -> bool:
        """Whether the run is finished."""
        return (self.path / "metrics.json").is_file()

    def check(self, name: str, settings: Any, resume: bool) -> None:
        """Raise unless the folder is free, or `resume` is set and its file `name` has the same settings."""
        if not self.writes or not (self.path / name).is_file():
            return
        if not resume:
            raise ValueError(
                f"--output must be a free folder, got {str(self.path)!r}, which has a run; --resume continues it"
            )
        if self.read(name) != as_json(settings):
            raise ValueError(
                f"--output must be a free folder, got {str(self.path)!r}, which has a run with other settings"
            )

    def begin(self, name: str, settings: Any) -> None:
        """Create the folder with its settings, in the file `name`, and versions.json."""
        if self.writes:
            self.path.mkdir(parents=True, exist_ok=True)
        versions = {package: metadata.version(package) for package in PACKAGES}
        self.write("versions.json", {"muonssm": __version__, "threads": torch.get_num_threads(), **versions})
        self.write(name, settings)

    def last_checkpoint(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest complete checkpoint and its trainer state, which the trainer writes last."""
        found = sorted(self.checkpoints.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        for path in reversed(found):
            try:
                return path, json.loads((path / "trainer_state.json").read_text())
            except (OSError, ValueError):
                continue
        return None

    def write(self, name: str, content: Any) -> None:
        """Write a JSON file atomically."""
        if not self.writes:
            return
        with atomic(self.path / name) as part:
            part.write_text(json.dumps(_finite(content), indent=1, allow_nan=False))

    def read(self, name: str) -> Any:
        """Read a JSON file of the run."""
        path = self.path / name
        if not path.is_file():
            raise ValueError(f"RUN must be the folder of a finished run, got {str(self.path)!r}, which has no {name}")
        return json.loads(path.read_text())

    def record(self, name: str, resume: bool) -> tuple[Callable[[Any], None], Any]:
        """Open a result file for a job that saves as it goes: return its writer, and its earlier content or None."""
        exists = (self.path / name).is_file()
        if exists and not resume:
            raise ValueError(f"{self.path / name} exists already; use --resume to continue it, or move it away")
        return functools.partial(self.write, name), self.read(name) if exists else None

    def save_weights(self, name: str, weights: dict[str, Tensor]) -> None:
        """Write a safetensors file atomically."""
        from safetensors.torch import save_file

        if not self.writes:
            return
        with atomic(self.path / name) as part:
            tensors = {key: tensor.contiguous() for key, tensor in weights.items()}
            save_file(tensors, part, metadata={"format": "pt"})

    def save_snapshot(self, step: int, weights: dict[str, Tensor]) -> None:
        """Save the weights after a step, unless the file exists."""
        name = f"{SNAPSHOTS}/step-{step:07d}.safetensors"
        if self.writes and not (self.path / name).is_file():
            (self.path / SNAPSHOTS).mkdir(parents=True, exist_ok=True)
            self.save_weights(name, {key: tensor.detach().cpu().clone() for key, tensor in weights.items()})

    def snapshots(self) -> dict[int, Path]:
        """The snapshot files by step, first to last."""
        found = sorted((self.path / SNAPSHOTS).glob("step-*.safetensors"))
        return {int(path.stem.rpartition("-")[2]): path for path in found}

    def copy(self, files: list[Path]) -> None:
        """Copy files into the folder."""
        for file in files if self.writes else ():
            with atomic(self.path / file.name) as part:
                shutil.copyfile(file, part)

    def save_model(self, model: Any, weights: dict[str, Tensor]) -> None:
        """Save model.safetensors; for a transformers model also the configuration files that load it again.

        Does not call `save_pretrained`, which needs all processes when weights are sharded.
        """
        tied = getattr(model, "all_tied_weights_keys", {})
        self.save_weights("model.safetensors", {name: value for name, value in weights.items() if name not in tied})
        if self.writes and hasattr(model, "generation_config"):
            model.config.save_pretrained(self.path)
            model.generation_config.save_pretrained(self.path)

    def load_model(self, *tasks: str) -> tuple[Recipe, dict[str, Any], Any]:
        """The recipe, the metadata of its data, and the trained model; raise if the task is none of `tasks`."""
        recipe, metadata_ = Recipe.from_dict(self.read("recipe.json")), self.read("metadata.json")
        if tasks and recipe.task_name not in tasks:
            wanted = " or ".join(tasks)
            raise ValueError(f"RUN must be a run of {wanted}, got {str(self.path)!r}, a run of {recipe.task_name}")
        model = recipe.task.rebuild_model(metadata_, self.path)
        self.load_weights(model, self.path / "model.safetensors")
        return recipe, metadata_, model.eval()

    def load_weights(self, model: Any, path: Path) -> None:
        """Load a weights file of this run into its model."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            weights = load_file(path)
            tied = getattr(model, "all_tied_weights_keys", {})
            weights |= {name: weights[source] for name, source in tied.items() if source in weights}
            model.load_state_dict(weights)
        except (SafetensorError, RuntimeError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"RUN is {str(self.path)!r}: its {path.name} cannot be loaded: {reason}") from error


def as_json(content: Any) -> Any:
    """The content as it reads back from a JSON file."""
    return json.loads(json.dumps(_finite(content)))


def _finite(content: Any) -> Any:
    """Replace nan and inf, which JSON does not have, by None."""
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
