"""Pictures of what a vision model predicts: Grad-CAM of a classifier, boxes and masks of a detector, classes of pixels.

    explain("runs/compare-vision-demo", [])           # images of the test set, plain beside Muon

One PNG per image: the image, the target where it is known, and a column per run. Each task draws its own predictions
(`ImageTask.draw_predictions`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from muonssm.checks import check_int
from muonssm.lab.core.experiment import Experiment
from muonssm.lab.core.files import atomic
from muonssm.lab.core.run_folder import RunFolder

from . import TASKS
from .image_files import read_image
from .image_task import ImageTask, LabeledImage, TrainedRun
from .pictures import Panel, join_panels, to_rgb


def explain(
    run: str | Path, images: Sequence[str | Path], count: int = 8, output: str | Path | None = None
) -> list[Path]:
    """Write a picture per image into `output` (default: RUN/explain); return their paths.

    Args:
        run: a finished run, or a comparison, whose first plain run and first Muon run are shown side by side.
        images: image files; if empty, `count` images of the test set, evenly spaced.
        count: number of test images.
        output: a folder.
    """
    check_int("count", count, 1)
    runs = _load_runs(Path(run))
    task, metadata = runs[0].task, runs[0].metadata
    items = [_read(Path(path), metadata) for path in images] if images else _test_images(task, count)
    folder = Path(run) / "explain" if output is None else Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for item in items:
        panels = [Panel("image", to_rgb(item.image)), *task.draw_predictions(item, runs)]
        written.append(folder / f"{item.name}.png")
        with atomic(written[-1]) as temporary:
            join_panels(panels).save(temporary, format="PNG")
    return written


def _load_runs(path: Path) -> list[TrainedRun]:
    experiment = Experiment.read(path)
    if experiment.is_single_run:
        folders = {"run": RunFolder(path)}
    else:
        folders = {v: experiment.folder(experiment.first_run(v)) for v in experiment.trained_variants}
    runs = []
    for name, folder in folders.items():
        recipe, metadata, model = folder.load_model(*TASKS)
        assert isinstance(recipe.task, ImageTask)
        runs.append(TrainedRun(name, recipe.task, metadata, model))
    return runs


def _read(path: Path, metadata: dict[str, Any]) -> LabeledImage:
    return LabeledImage(path.stem, read_image(path, metadata["channels"]))


def _test_images(task: ImageTask, count: int) -> list[LabeledImage]:
    data = task.load_data()
    split: Any = data.validation if data.test is None else data.test
    chosen = [int(index) for index in np.linspace(0, len(split) - 1, min(count, len(split)))]
    return [LabeledImage(f"test-{index:05d}", *task.labeled_image(split, index)) for index in chosen]
