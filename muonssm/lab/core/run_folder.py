"""The folder of a run. Files are written atomically, so a killed run leaves complete files only.

recipe.json         all settings
versions.json       versions of the libraries, number of threads, float32 or bfloat16
metadata.json       classes, channels and statistics of the data
history.json        loss and scores of every epoch
timing.json         seconds of training, and tokens per second where tokens are counted
metrics.json        scores of the kept weights on the validation and test sets; written last: its presence means that
                    the run is finished
model.safetensors   the kept weights; last.safetensors has those of the last epoch, if others were kept.
                    For a model of transformers, which can load the folder, config.json and the tokenizer are here too
snapshots/          weights at the start and at every validation, if training.snapshots is set
checkpoints/        to resume from; see `checkpoints`
tensorboard/        learning curves
lock                only while a process works here; see `lock`
"""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muonssm.version import __version__

from .checkpoints import newest_whole
from .files import atomic, read_json, remove_leftovers
from .processes import is_first_process
from .recipe import Recipe
from .run_files import LISTS, check_content, check_metrics
from .task import Metric
from .untrusted import check_regular_file

SNAPSHOTS = "snapshots"
PACKAGES = ("torch", "transformers", "accelerate", "numpy", "safetensors")
SNAPSHOT = re.compile(r"step-([0-9]+)\.safetensors")


class RunFolder:
    """Reads and writes the folder of one run. With several processes only the first one writes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.writes = is_first_process()

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

    def begin(self, name: str, settings: Any, precision: str | None = None) -> None:
        """Create the folder with its settings, in the file `name`, and versions.json, for a run with its precision."""
        if self.writes:
            self.path.mkdir(parents=True, exist_ok=True)
        versions = {package: metadata.version(package) for package in PACKAGES}
        own = {} if precision is None else {"precision": precision}
        self.write("versions.json", {"muonssm": __version__, "threads": torch.get_num_threads(), **own, **versions})
        self.write(name, settings)

    def precision(self) -> str | None:
        """The precision that a run to be resumed was begun with; None for a new run."""
        if not (self.path / "versions.json").is_file() or not (self.path / "recipe.json").is_file():
            return None
        found = self.read("versions.json").get("precision")
        return found if found in ("float32", "bfloat16") else None

    def last_checkpoint(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest whole checkpoint and its trainer state; damaged ones are named and removed."""
        return newest_whole(self.checkpoints, remove=self.writes)

    def clean(self) -> None:
        """Remove what killed processes left behind; call it with the folder locked."""
        for path in (self.path, self.path / SNAPSHOTS) if self.writes else ():
            remove_leftovers(path)

    def write(self, name: str, content: Any) -> None:
        """Write a JSON file atomically."""
        if not self.writes:
            return
        with atomic(self.path / name) as part:
            part.write_text(json.dumps(_finite(content), indent=1, allow_nan=False), encoding="utf-8")

    def read(self, name: str, check: Callable[[Any], None] | None = None) -> Any:
        """Read a JSON file of the run; an error names it. `check` raises ValueError for a content that is wrong."""
        path = self.path / name
        if not path.is_file():
            raise ValueError(f"RUN must be the folder of a finished run, got {str(self.path)!r}, which has no {name}")
        content = read_json(path, list if name in LISTS else dict)
        try:
            check_content(name, content)
            if check is not None:
                check(content)
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        return content

    def read_metrics(self, metrics: Sequence[Metric]) -> dict[str, Any]:
        """Read metrics.json, which has a number or null for each metric of the task; an error names the file."""
        return self.read("metrics.json", functools.partial(check_metrics, names=[metric.name for metric in metrics]))

    def read_recipe(self) -> Recipe:
        """The recipe of the run; an error names the file."""
        content = self.read("recipe.json")
        try:
            return Recipe.from_dict(content)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.path / 'recipe.json'} is not a recipe: {error}") from error

    def record(
        self, name: str, resume: bool, check: Callable[[Any], None] | None = None
    ) -> tuple[Callable[[Any], None], Any]:
        """Open a result file for a job that saves as it goes: return its writer, and its earlier content or None."""
        exists = (self.path / name).is_file()
        if exists and not resume:
            raise ValueError(f"{self.path / name} exists already; use --resume to continue it, or move it away")
        return functools.partial(self.write, name), self.read(name, check) if exists else None

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
        names = {path: SNAPSHOT.fullmatch(path.name) for path in sorted((self.path / SNAPSHOTS).glob("*"))}
        return {int(found[1]): path for path, found in names.items() if found}

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
        recipe, metadata_ = self.read_recipe(), self.read("metadata.json")
        if tasks and recipe.task_name not in tasks:
            wanted = " or ".join(tasks)
            raise ValueError(f"RUN must be a run of {wanted}, got {str(self.path)!r}, a run of {recipe.task_name}")
        try:
            model = recipe.task.rebuild_model(metadata_, self.path)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{self.path / 'metadata.json'} does not fit the recipe: {reason}") from error
        self.load_weights(model, self.path / "model.safetensors")
        return recipe, metadata_, model.eval()

    def load_weights(self, model: Any, path: Path) -> None:
        """Load a weights file of this run into its model."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            check_regular_file(path)
            weights = load_file(path)
            tied = getattr(model, "all_tied_weights_keys", {})
            weights |= {name: weights[source] for name, source in tied.items() if source in weights}
            _check_kinds(model, weights)
            model.load_state_dict(weights)
        except (SafetensorError, RuntimeError, OSError) as error:
            lines = [line.strip() for line in str(error).splitlines()]
            reason = " ".join(lines[1:] or lines)  # torch says in the first line only that there are errors
            short = reason if len(reason) <= 500 else f"{reason[:500]}..."
            raise ValueError(f"RUN is {str(self.path)!r}: its {path.name} cannot be loaded: {short}") from error


def _check_kinds(model: Any, weights: dict[str, Tensor]) -> None:
    """Refuse integers where the model has floats and the reverse: loading would round them without a word."""
    for name, own in model.state_dict().items():
        found = weights.get(name, own)
        if found.is_floating_point() != own.is_floating_point():
            raise RuntimeError(f"{name} must be a tensor of {own.dtype}, got {found.dtype}")


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
