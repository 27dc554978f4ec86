"""Small mixers of every backbone, plain and with Muon, that the tests of mixers run on.

The quick tier runs plain and Muon with a gamma per step for every backbone; the others are marked `full`.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from muonssm import Muon, build_mixer
from muonssm.layers import Mixer

D_MODEL = 24
TOLERANCE = 1e-5  # relative RMS error in float32: whole = split = stepwise = padded = packed


class Variant(NamedTuple):
    """A backbone, its arguments, and the Muon added to it."""

    name: str
    backbone: str
    dims: dict
    muon: Muon

    def build(self, dtype: torch.dtype = torch.float32, **more) -> Mixer:
        """Build the mixer with weights large enough that each of them affects the output."""
        torch.manual_seed(0)
        mixer = build_mixer(self.backbone, D_MODEL, self.muon, **{**self.dims, **more})
        with torch.no_grad():
            for name, parameter in mixer.named_parameters():
                if parameter.ndim > 1 and "A_log" not in name:
                    parameter.mul_(2)
        return mixer.to(dtype)


# A new backbone goes here: every test of the contract then runs on it.
DIMS = {
    "mamba": ("mamba", {"d_state": 5}),
    "mamba2": ("mamba2", {"d_state": 10, "head_dim": 8, "groups": 2}),
    "deltanet": ("deltanet", {"num_heads": 2}),
    "gated_deltanet": ("gated_deltanet", {"num_heads": 2}),
    "gated_deltanet, shared keys": ("gated_deltanet", {"num_heads": 2, "num_value_heads": 4}),
    "longhorn": ("longhorn", {"d_state": 6, "head_dim": 12}),
    "longhorn, diagonal": ("longhorn", {"d_state": 6, "form": "diagonal"}),
    "momentum_deltanet": ("momentum_deltanet", {"num_heads": 2, "num_value_heads": 4}),
    "momentum_deltanet, sigmoid": ("momentum_deltanet", {"num_heads": 2, "gate_activation": "sigmoid"}),
}
RULES = {
    "plain": (Muon.off(), {}),
    "muon": (Muon(), {}),
    "muon per head": (Muon(), {"momentum": "per_head"}),
    "muon per step": (Muon(), {"momentum": "per_step"}),
    "residual per step": (Muon.residual(), {"momentum": "per_step"}),
    "gated per head": (Muon.gated(), {"momentum": "per_head"}),
}
VARIANTS = [
    Variant(f"{name}, {rule}", backbone, {**dims, **more}, muon)
    for name, (backbone, dims) in DIMS.items()
    for rule, (muon, more) in RULES.items()
    if not (backbone == "momentum_deltanet" and "momentum" in more)  # its gamma is a gate of its own
    if not (muon == Muon.gated() and (backbone == "mamba" or dims.get("form") == "diagonal"))  # no gate outside
]


def parametrize(variants: list[Variant], quick_rules: tuple[str, ...]) -> pytest.MarkDecorator:
    """Parametrize over `variants`, and mark those of other rules as `full`."""
    marked = [
        pytest.param(variant, id=variant.name, marks=() if variant.name.endswith(quick_rules) else pytest.mark.full)
        for variant in variants
    ]
    return pytest.mark.parametrize("variant", marked)


each_variant = parametrize(VARIANTS, (", plain", ", muon per step"))
each_variant_slow = parametrize(VARIANTS, (", muon per step",))  # for tests that take a second per variant
each_operator = parametrize(  # one backbone per operator in the quick tier
    [variant for variant in VARIANTS if variant.name.endswith(", muon")], ("mamba, muon", "gated_deltanet, muon")
)
each_backbone = parametrize([variant for variant in VARIANTS if variant.name.endswith(", muon")], (", muon",))


def inputs(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw normal numbers from a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Compute the relative RMS error."""
    difference = (actual.double() - expected.double()).norm()
    return (difference / expected.double().norm().clamp(min=1e-30)).item()


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE, what: str = "") -> None:
    assert actual.shape == expected.shape, what
    error = relative_error(actual, expected)
    assert error <= tolerance, f"{what}: relative error {error:.2e}"


def assert_same_state(actual, expected, tolerance: float = TOLERANCE) -> None:
    assert_close(actual.conv, expected.conv, tolerance, "conv")
    assert_close(actual.memory.S, expected.memory.S, tolerance, "S")
    assert_close(actual.memory.M, expected.memory.M, tolerance, "M")
