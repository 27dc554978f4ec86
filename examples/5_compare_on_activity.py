"""Plain against Muon on smartwatch windows, through the Python API: the same data, initial weights, batches and budget.

Needs the extra `activity`; the data comes with seglearn. Two epochs of a small model and a single pair of runs show how
it works; they are far too little to draw conclusions. Run: python examples/5_compare_on_activity.py
"""

import tempfile

from muonssm.lab.core.torchvision_cpu import prepare_torchvision

prepare_torchvision()  # for a torchvision that was built for CUDA beside a CPU build of torch; see docs/guide/vision.md

from muonssm.lab.core.compare import compare, table  # noqa: E402
from muonssm.lab.core.recipe import Recipe  # noqa: E402

changes = ["model.backbone=longhorn", "data.rate=12.5", "data.length=128", "training.epochs=2"]  # as after --set
recipe = Recipe.load("watch-small", changes)
with tempfile.TemporaryDirectory() as folder:
    result = compare(recipe, folder)
print(table(result))
