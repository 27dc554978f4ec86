"""Small parts that mixers share: the short convolution, norms, head sizes and initial values."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muonssm.checks import check_int
from muonssm.ops.causal_conv import Convolved, causal_convolution
from muonssm.ops.dtypes import compute_dtype
from muonssm.ops.fused.cross_entropy import linear_cross_entropy
from muonssm.ops.fused.norms import rms_norm
from muonssm.ops.fused.support import SMALL


class ShortConvolution(nn.Module):
    """Causal depthwise convolution followed by silu: silu(bias + sum_j weight_j x_{t-K+1+j}), j = 0 .. K-1.

    Names, shapes and initial values are those of `nn.Conv1d(channels, channels, size, groups=channels)`.
    """

    def __init__(self, channels: int, size: int, bias: bool) -> None:
        super().__init__()
        bound = size**-0.5
        self.weight = nn.Parameter(torch.empty(channels, 1, size).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound)) if bias else None

    def forward(self, x: Tensor, tail: Tensor | None, cu_seqlens: Tensor | None, impl: str) -> Convolved:
        """Convolve x `[B, L, C]`; return the output and the last K - 1 inputs, `tail` of the next call."""
        return causal_convolution(x, self.weight, self.bias, tail=tail, cu_seqlens=cu_seqlens, impl=impl)

    def extra_repr(self) -> str:
        """Describe the module for `print(mixer)`."""
        return f"{self.weight.shape[0]}, size={self.weight.shape[2]}, bias={self.bias is not None}"


class GateProjection(nn.Linear):
    """W x in the dtype of x, plus the bias in float32 (float64 for float64 inputs): the logits of a gate."""

    def forward(self, x: Tensor, shared: int = 1) -> Tensor:
        """Compute the logits; with `shared` > 1 means of as many neighbors, by means of the weights, which is less."""
        weight: Tensor = self.weight
        bias: Tensor = self.bias
        if shared > 1:
            weight, bias = weight.unflatten(0, (-1, shared)).mean(1), bias.view(-1, shared).mean(1)
        dtype = compute_dtype(x)
        return F.linear(x, weight).to(dtype) + bias.to(dtype)


class LogitsProjection(nn.Linear):
    """W h, the logits of a language model; or, of labels, the loss, without the logits of all tokens.

    The loss is computed inside of the call, so that what a call does around it (FSDP2 gathers the weight) holds for it.
    """

    def forward(self, h: Tensor, labels: Tensor | None = None, ignore_index: int = -100) -> Tensor:
        """Return the logits `[..., V]` of h `[..., D]`, or the summed cross-entropy of labels `[tokens]`."""
        if labels is None:
            return super().forward(h)
        return linear_cross_entropy(h.reshape(-1, h.shape[-1]), self.weight, labels, ignore_index)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32.

    With a gate, the result is norm(x) * silu(gate), or norm(x * silu(gate)) with `gate_first`.
    """

    def __init__(self, size: int, eps: float = 1e-5, gate_first: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.gate_first = eps, gate_first

    def forward(self, x: Tensor, gate: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return the norm in x's dtype, or in `dtype`."""
        if gate is dtype is None and x.numel() < SMALL and x.dtype == self.weight.dtype == compute_dtype(x):
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)  # the common case of a decoding step
        return rms_norm(x, self.weight, self.eps, gate, self.gate_first, dtype)

    def extra_repr(self) -> str:
        """Describe the module for `print(mixer)`."""
        return f"{self.weight.shape[0]}, eps={self.eps:g}"


PLAIN_LINEAR = (nn.Linear, GateProjection, LogitsProjection)


def repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """Repeat the heads of x `[B, L, H, m]` so that there are `num_heads`; neighbors share one."""
    return x if x.shape[2] == num_heads else x.repeat_interleave(num_heads // x.shape[2], dim=2)


def step_size_bias(count: int) -> nn.Parameter:
    """Draw Mamba's initial step sizes, log-uniform in [1e-3, 1e-1], and return their inverse softplus."""
    low, high = math.log(1e-3), math.log(1e-1)
    dt = torch.exp(torch.rand(count) * (high - low) + low).clamp(min=1e-4)
    return nn.Parameter(dt + torch.log(-torch.expm1(-dt)))


def check_divisor(name: str, value: int, total_name: str, total: int) -> int:
    """Check that `value` is a positive integer that divides `total`."""
    check_int(name, value, 1)
    if total % value:
        raise ValueError(f"{name} must be a divisor of {total_name} = {total}, got {value}")
    return value


def channels_per_head(channels: int, head_dim: int | None) -> int:
    """Check `head_dim`, a divisor of the channels; None gives the largest divisor up to 64."""
    if head_dim is None:
        return max(size for size in range(1, 65) if channels % size == 0)
    return check_divisor("head_dim", head_dim, "expand * d_model", channels)


def size_per_head(name: str, size: int | None, total: float, num_heads: int) -> int:
    """Check `size`, the size of one head; None gives each of `num_heads` an equal share of `total`."""
    if size is not None:
        return check_int(name, size, 1)
    check_int("num_heads", num_heads, 1)
    if total % num_heads:
        raise ValueError(f"num_heads must be a divisor of {total:g}, got {num_heads}; otherwise give {name}")
    return int(total) // num_heads


def has_no_hooks(module: nn.Module) -> bool:
    """Whether calling the module runs its class's `forward` alone: no hook, no replaced `forward`."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def is_plain_linear(layer: nn.Module) -> bool:
    """Whether the layer computes W x + b and nothing else: no adapter (LoRA), no quantization, no hook."""
    return type(layer) in PLAIN_LINEAR and has_no_hooks(layer)


def is_sharded_projection(layer: nn.Module) -> bool:
    """Whether the layer is a `LogitsProjection` whose weight FSDP2 gathers around each call, without other hooks."""
    hooks = [*layer._forward_pre_hooks.values(), *layer._forward_hooks.values()]
    own = isinstance(layer, LogitsProjection) and "forward" not in layer.__dict__
    return own and all(getattr(hook, "__module__", "").startswith("torch.distributed.fsdp.") for hook in hooks)
