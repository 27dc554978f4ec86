"""What a training step of the language model computes in fused operations: the loss, and the SwiGLU of a block.

They compute what transformers' loss and MLP compute, in less time and memory, and give way to those where modules have
hooks or adapters, or a compiler traces the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.activations import ACT2FN
from transformers.loss.loss_utils import ForCausalLMLoss

from muonssm.layers.modules import LogitsProjection, has_no_hooks, is_plain_linear, is_sharded_projection
from muonssm.ops.fused.cross_entropy import linear_cross_entropy
from muonssm.ops.fused.swiglu import swiglu
from muonssm.ops.launch import is_eager

IGNORED = -100
SILU = (nn.SiLU, type(ACT2FN["silu"]))


def causal_lm_loss(
    h: Tensor,
    head: nn.Module,
    labels: Tensor | None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Any = None,
    ignore_index: int = IGNORED,
    **_: Any,
) -> Tensor:
    """Compute transformers' `ForCausalLMLoss` of the logits of h `[B, L, D]`, without the logits.

    The mean over the labels that count, or their sum divided by `num_items_in_batch`. `labels` are shifted here,
    `shift_labels` are not.
    """
    if shift_labels is None:
        shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]  # type: ignore[arg-type]
    flat = shift_labels.reshape(-1).to(h.device)
    if isinstance(head, LogitsProjection):
        total = head(h, flat, ignore_index)
    else:  # another head that was put in its place, as for a resized vocabulary
        total = linear_cross_entropy(h.reshape(-1, h.shape[-1]), head.weight, flat, ignore_index)  # type: ignore[arg-type]
    count = (flat != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    return total / (count.to(h.device) if isinstance(count, Tensor) else count)


def can_fuse_loss(h: Tensor, head: nn.Module, loss_function: Any) -> bool:
    """Whether `causal_lm_loss` computes what the model's own head and loss function do."""
    linear = is_plain_linear(head) or is_sharded_projection(head)
    return loss_function is ForCausalLMLoss and linear and head.bias is None and is_eager(h)


def matmul_dtype(h: Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast multiplies h, so that a norm can return it; None without autocast."""
    return torch.get_autocast_dtype(h.device.type) if torch.is_autocast_enabled(h.device.type) else None


def feed_forward(mlp: nn.Module, x: Tensor) -> Tensor:
    """Compute `mlp(x)`, a `MistralMLP`; during training in one operation that keeps less for the backward pass."""
    layers = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    plain = isinstance(mlp.act_fn, SILU) and has_no_hooks(mlp) and all(map(is_plain_linear, layers))  # type: ignore[arg-type]
    if not (plain and torch.is_grad_enabled() and is_eager(x)):
        return mlp(x)
    return swiglu(x, *(layer.weight for layer in layers))  # type: ignore[arg-type, union-attr]
