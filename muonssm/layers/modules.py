"""Small parts that mixers share: the convolution's filters, norms, and initial values."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muonssm.ops.causal_conv import Convolved, causal_convolution
from muonssm.ops.dtypes import compute_dtype


class ShortConvolution(nn.Module):
    """Filters for `causal_convolution`, named, shaped and initialised as those of `nn.Conv1d(C, C, K, groups=C)`."""

    def __init__(self, channels: int, size: int, bias: bool) -> None:
        super().__init__()
        bound = size**-0.5
        self.weight = nn.Parameter(torch.empty(channels, 1, size).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound)) if bias else None

    def forward(self, x: Tensor, tail: Tensor | None, cu_seqlens: Tensor | None, impl: str) -> Convolved:
        return causal_convolution(x, self.weight, self.bias, tail=tail, cu_seqlens=cu_seqlens, impl=impl)

    def extra_repr(self) -> str:
        """What `print(mixer)` says."""
        return f"{self.weight.shape[0]}, size={self.weight.shape[2]}, bias={self.bias is not None}"


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32, times silu(gate) before or after the norm."""

    def __init__(self, size: int, eps: float = 1e-5, gate_first: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.gate_first = eps, gate_first

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        dtype = compute_dtype(x)
        if gate is None and x.dtype == self.weight.dtype == dtype:  # nothing to cast: what a decoding step does most
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        wide = x.to(dtype)
        if gate is not None and self.gate_first:
            wide = wide * F.silu(gate.to(dtype))
        wide = F.rms_norm(wide, (x.shape[-1],), self.weight.to(dtype), self.eps)
        if gate is not None and not self.gate_first:
            wide = wide * F.silu(gate.to(dtype))
        return wide.to(x.dtype)

    def extra_repr(self) -> str:
        """What `print(mixer)` says."""
        return f"{self.weight.shape[0]}, eps={self.eps:g}"


def unit(x: Tensor, scale: float = 1.0) -> Tensor:
    """x with a last axis of length `scale`, finite at zero: x scale / sqrt(x.x + 1e-6), computed in float32."""
    wide = x.to(compute_dtype(x))
    return (wide * (torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6) * scale)).to(x.dtype)


def step_size_bias(count: int) -> nn.Parameter:
    """Mamba's: the inverse softplus of step sizes that are log-uniform in [1e-3, 1e-1]."""
    low, high = math.log(1e-3), math.log(1e-1)
    dt = torch.exp(torch.rand(count) * (high - low) + low).clamp(min=1e-4)
    return nn.Parameter(dt + torch.log(-torch.expm1(-dt)))


def is_bare(module: nn.Module) -> bool:
    """Whether calling the module is its class's `forward` and nothing else: no hook, no forward of its own."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def is_own(layer: nn.Module) -> bool:
    """Whether the layer is W x + b and nothing else: no adapter in its place (LoRA, quantised), no hook."""
    return type(layer) is nn.Linear and is_bare(layer)
