"""Whether a run diverged: its training loss, or a weight, was not a finite number at some time.

The scores do not tell: the share of right answers of a model whose outputs are all NaN is a number, such as 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def why_diverged(log: Sequence[Mapping[str, Any]], *weights: Mapping[str, Tensor]) -> str | None:
    """The reason in words, from the trainer's log and the weights; None for a run that did not diverge."""
    for row in log:
        for key, name in (("loss", "training"), ("eval_loss", "validation")):
            if key in row and not math.isfinite(row[key]):
                return f"the {name} loss was not a finite number at step {row['step']}"
    for group in weights:
        for name, tensor in group.items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                return f"the weights {name} are not finite numbers"
    return None
