"""The mixer of a MambaVision block: an SSM on one half of the channels, next to a half that bypasses it.

    x, z    = in_proj(u);   x = silu(conv(x)),   z = silu(conv(z))
    out     = out_proj([ssm(x), z])

    u, out      `[B, L, d]`, the L positions of a window in raster order
    x, z        `[B, L, h]`, h = d / 2; the filters see both sides

With Mamba the SSM is that of the release, with its parameter names:

    dt, B, C = x_proj(x);   dt = softplus(dt_proj(dt) + dt_proj.bias);   A = -exp(A_log)
    M_t      = gamma_t M_{t-1} + NS(tau (dt_t x_t) B_t^T)
    S_t      = exp(dt_t A) * S_{t-1} + M_t
    ssm(x)_t = S_t C_t + D x_t

Every other backbone uses its whole layer of `muonssm.layers`, h wide, as the SSM.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muonssm.layers import build_mixer
from muonssm.layers.momentum import Momentum
from muonssm.ops import muon_selective_scan
from muonssm.ops.dtypes import compute_dtype

from .config import VisionConfig


class VisionMixer(nn.Module, ABC):
    """What all backbones share; each implements `ssm`."""

    def __init__(self, dim: int, config: VisionConfig) -> None:
        super().__init__()
        half = dim // 2
        self.in_proj = nn.Linear(dim, dim, bias=False)
        self.conv1d_x = nn.Conv1d(half, half, config.d_conv, groups=half, bias=False)
        self.conv1d_z = nn.Conv1d(half, half, config.d_conv, groups=half, bias=False)
        self.out_proj = nn.Linear(dim, dim, bias=False)

    @abstractmethod
    def ssm(self, x: Tensor) -> Tensor:
        """Apply the memory to x `[B, L, h]`; the output has the same shape."""

    def forward(self, u: Tensor) -> Tensor:
        filters = torch.cat([self.conv1d_x.weight, self.conv1d_z.weight])  # one convolution for both halves
        xz = F.conv1d(self.in_proj(u).mT, filters, padding="same", groups=filters.shape[0])
        x, z = F.silu(xz.mT).chunk(2, dim=-1)
        return self.out_proj(torch.cat([self.ssm(x), z], dim=-1))


class MambaVisionMixer(VisionMixer):
    """A mixer with Mamba's scan; parameters have the names and shapes of the release, so its weights load unchanged."""

    def __init__(self, dim: int, config: VisionConfig) -> None:
        super().__init__(dim, config)
        half, N = dim // 2, config.d_state
        self.splits = [math.ceil(dim / 16), N, N]
        self.x_proj = nn.Linear(half, sum(self.splits), bias=False)
        self.dt_proj = nn.Linear(self.splits[0], half)
        self.A_log = nn.Parameter(torch.arange(1, N + 1, dtype=torch.float32).repeat(half, 1).log())
        self.D = nn.Parameter(torch.ones(half))
        self.momentum = Momentum(half, 1, config.muon, config.momentum)
        self.impl = "auto"  # implementation of the scan, as in `Mixer`

    def ssm(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(x)
        dt, B, C = self.x_proj(x).split(self.splits, dim=-1)
        # The release adds the bias in the projection and again in the scan, its weights were trained that way, and the
        # paper builds on it. Doubling the bias has no more effect on training than doubling its learning rate.
        bias = 2 * self.dt_proj.bias.to(dtype)
        dt = F.softplus(F.linear(dt, self.dt_proj.weight).to(dtype) + bias)
        muon = self.momentum(self.momentum.gate(x))
        y, _ = muon_selective_scan(x, dt, -self.A_log.to(dtype).exp(), B, C, muon=muon, impl=self.impl)
        return torch.addcmul(y, x, self.D.to(y.dtype))


class LayerMixer(VisionMixer):
    """A mixer with a layer of `muonssm.layers` as its SSM."""

    def __init__(self, dim: int, config: VisionConfig) -> None:
        super().__init__(dim, config)
        self.layer = build_mixer(config.backbone, dim // 2, config.muon, **config.ssm_dims())

    def ssm(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def vision_mixer(dim: int, config: VisionConfig) -> VisionMixer:
    """Build the mixer of a block with `dim` channels."""
    return MambaVisionMixer(dim, config) if config.backbone == "mamba" else LayerMixer(dim, config)
