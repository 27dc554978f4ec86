"""Batch norms over the batch of all processes, so that several processes train like one.

torch's own `SyncBatchNorm` runs on GPUs only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class SharedBatchNorm(_BatchNorm):
    """A batch norm whose mean and variance in training are those of all processes' batches together.

    Attributes:
        shared: set it to False to use this process's batch alone.
    """

    shared = True

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"input must have two axes or more, got {list(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize `[B, C, ...]` per channel; the running statistics move as in torch's batch norms."""
        if not (self.training and self.shared):
            return super().forward(input)
        self._check_input_dim(input)
        axes = [axis for axis in range(input.ndim) if axis != 1]
        column = (1, -1, *(1,) * (input.ndim - 2))
        wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        count = wide.new_tensor([input.numel() / input.shape[1]])
        total = _Sum.apply(torch.cat([wide.sum(axes), count]))
        count = total[-1].detach()
        mean = total[:-1] / count
        centered = wide - mean.view(column)
        variance = _Sum.apply(centered.square().sum(axes)) / count
        self._track(mean.detach(), variance.detach() * (count / (count - 1)))
        y = centered * torch.rsqrt(variance + self.eps).view(column)
        if self.affine:
            y = y * self.weight.view(column) + self.bias.view(column)
        return y.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if not self.track_running_stats or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        weight = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            assert running is not None
            running.lerp_(new.to(running.dtype), weight)


class _Sum(torch.autograd.Function):
    """The sum of a tensor over all processes; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total


def share_batch_norms(model: nn.Module) -> None:
    """Replace the batch norms inside `model`; parameters, buffers and their names stay."""
    for name, child in model.named_children():
        if isinstance(child, _BatchNorm) and not isinstance(child, SharedBatchNorm):
            settings = (child.num_features, child.eps, child.momentum, child.affine, child.track_running_stats)
            shared = SharedBatchNorm(*settings).train(child.training)
            shared.load_state_dict(child.state_dict(), assign=True)
            for key, parameter in child.named_parameters():
                shared.register_parameter(key, parameter)
            setattr(model, name, shared)
        else:
            share_batch_norms(child)
