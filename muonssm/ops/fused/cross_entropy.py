"""Cross-entropy of linear logits, whose logits never exist for all tokens at once.

h [tokens, D];  weight [V, D];  logits = h weight^T;  labels [tokens]

    loss = sum over labels of (log(sum_v exp(logits_v)) - logits_label)
    dlogits = softmax(logits) - onehot(label),  dh = dlogits weight,  dweight = dlogits^T h

Blocks of tokens go through all of this in the forward pass, so that only one block of logits exists at a time; the
backward pass multiplies by the gradient of the loss. Sums over blocks have the same order in every run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import cpu_library, launch
from ..dtypes import full_precision
from .support import computed_in, has_kernel

BLOCK_NUMBERS = 1 << 24  # logits of one block
LEAST_ROWS, MOST_ROWS = 128, 1024  # tokens of one block: few are slow matmuls, many are much memory


def linear_cross_entropy(h: Tensor, weight: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Return the summed loss, a number in float32 (float64 for float64), of h `[tokens, D]` and labels `[tokens]`.

    Tokens with the label `ignore_index` do not count. Under autocast the logits have autocast's dtype; softmax and
    loss are computed in float32, as in transformers' `ForCausalLMLoss`.
    """
    labels = _check_labels(labels, weight.shape[0], ignore_index)
    if torch.is_autocast_enabled(h.device.type):
        dtype = torch.get_autocast_dtype(h.device.type)
        h, weight = h.to(dtype), weight.to(dtype)
    with full_precision(h.device):
        if launch.records_gradients((h, weight)):
            return _LinearCrossEntropy.apply(h, weight, labels)
        return sum(
            (_block(h[rows], weight, labels[rows], gradient=False)[0] for rows in _blocks(h, weight)),
            start=h.new_zeros((), dtype=computed_in(h)),
        )


def _check_labels(labels: Tensor, vocabulary: int, ignore_index: int) -> Tensor:
    """Return the labels with -1 in place of `ignore_index`; raise IndexError for one that is no token."""
    ignored = labels == ignore_index
    if not bool((ignored | ((labels >= 0) & (labels < vocabulary))).all()):
        found = labels[~ignored]
        worst = int(found.max() if int(found.max()) >= vocabulary else found.min())
        raise IndexError(f"labels must be in [0, {vocabulary}) or {ignore_index}, got {worst}")
    return labels.masked_fill(ignored, -1)


def _blocks(h: Tensor, weight: Tensor) -> list[slice]:
    """Divide the tokens, by the shapes alone."""
    rows = max(LEAST_ROWS, min(MOST_ROWS, BLOCK_NUMBERS // weight.shape[0] // 64 * 64))
    return [slice(first, first + rows) for first in range(0, h.shape[0], rows)]


def _block(h: Tensor, weight: Tensor, labels: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
    """Return the summed loss of a block, and its logits' gradient if that is asked for."""
    logits = F.linear(h, weight)
    wide = computed_in(h)
    if has_kernel(logits):
        losses = torch.empty(len(labels), dtype=wide)
        a = cpu_library.CrossEntropyArguments(
            launch.INPUT_TYPES[logits.dtype], torch.get_num_threads(), *logits.shape, gradient, 1.0
        )
        labels = labels.contiguous()
        a.logits, a.labels, a.losses = logits.data_ptr(), labels.data_ptr(), losses.data_ptr()
        cpu_library.call("cross_entropy", a)
        return losses.sum(), logits
    logs = logits.to(wide).log_softmax(-1)
    counted = labels >= 0
    place = labels.clamp(min=0)[:, None]
    loss = -(logs.gather(1, place)[:, 0] * counted).sum()
    if not gradient:
        return loss, logits
    by_logits = logs.exp_()
    by_logits.scatter_add_(1, place, by_logits.new_full(place.shape, -1.0))
    return loss, (by_logits * counted[:, None]).to(h.dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        by_h, by_weight = ctx.needs_input_grad[:2]
        wide = computed_in(h)
        loss, dweight = h.new_zeros((), dtype=wide), None
        dh = torch.empty_like(h) if by_h else None
        for rows in _blocks(h, weight):
            part, dlogits = _block(h[rows], weight, labels[rows], gradient=True)
            loss = loss + part
            if dh is not None:
                torch.mm(dlogits, weight, out=dh[rows])
            if by_weight:
                dweight = _add_product(dweight, dlogits.t(), h[rows], wide)
        if by_weight and dweight is None:  # no tokens
            dweight = torch.zeros_like(weight)
        ctx.save_for_backward(dh, dweight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dh, dweight = ctx.saved_tensors
        if grad.device.type != "cpu" or float(grad) != 1.0:
            dh, dweight = (None if d is None else d * grad.to(d.dtype) for d in (dh, dweight))
        return dh, None if dweight is None else dweight.to(ctx.weight_dtype), None


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Add a @ b to `total` in place; the sum over blocks has `dtype`, also where the products are narrower."""
    if total is None:
        return (a @ b).to(dtype)
    return total.addmm_(a, b) if a.dtype == dtype else total.add_(a @ b)
