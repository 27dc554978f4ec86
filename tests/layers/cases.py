"""Every backbone, small, plain and with Muon: what the tests of mixers run over."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from muonssm import Muon, build_mixer
from muonssm.layers import Mixer

D_MODEL = 24
TOLERANCE = 1e-5  # relative RMS, float32: the bound for whole = split = steps = padded = packed


class Case(NamedTuple):
    """A backbone, its dimensions, and what is added to it."""

    name: str
    backbone: str
    dims: dict
    muon: Muon

    def build(self, dtype: torch.dtype = torch.float32, **more) -> Mixer:
        """The mixer with weights large enough that every part of it shows in the output."""
        torch.manual_seed(0)
        mixer = build_mixer(self.backbone, D_MODEL, self.muon, **{**self.dims, **more})
        with torch.no_grad():
            for name, parameter in mixer.named_parameters():
                if parameter.ndim > 1 and "A_log" not in name:
                    parameter.mul_(2)
        return mixer.to(dtype)


DIMS = {
    "mamba": ("mamba", {"d_state": 5}),
    "mamba2": ("mamba2", {"d_state": 10, "head_dim": 8, "groups": 2}),
    "deltanet": ("deltanet", {"num_heads": 2}),
    "gated_deltanet": ("gated_deltanet", {"num_heads": 2}),
    "gated_deltanet, shared keys": ("gated_deltanet", {"num_heads": 2, "num_value_heads": 4}),
    "longhorn": ("longhorn", {"d_state": 6, "head_dim": 12}),
    "longhorn, diagonal": ("longhorn", {"d_state": 6, "form": "diagonal"}),
}
KINDS = {
    "plain": (Muon.off(), {}),
    "muon": (Muon(), {}),
    "muon per head": (Muon(), {"momentum": "per_head"}),
    "muon per step": (Muon(), {"momentum": "per_step"}),
}
CASES = [
    Case(f"{name}, {kind}", backbone, {**dims, **more}, muon)
    for name, (backbone, dims) in DIMS.items()
    for kind, (muon, more) in KINDS.items()
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_backbone = pytest.mark.parametrize(
    "case", [case for case in CASES if case.name.endswith(", muon")], ids=lambda case: case.name
)


def inputs(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers from a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative RMS."""
    return ((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)).item()


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = TOLERANCE, what: str = "") -> None:
    assert found.shape == wanted.shape, what
    off = error(found, wanted)
    assert off <= tolerance, f"{what} off by {off:.2e}"


def assert_same_state(found, wanted, tolerance: float = TOLERANCE) -> None:
    assert_close(found.conv, wanted.conv, tolerance, "conv")
    assert_close(found.memory.S, wanted.memory.S, tolerance, "S")
    assert_close(found.memory.M, wanted.memory.M, tolerance, "M")
