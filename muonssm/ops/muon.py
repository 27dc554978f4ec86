"""`Muon`: what the paper adds to a backbone, as one frozen value."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from muonssm.checks import is_int, is_number

NORMALIZATIONS = ("newton_schulz", "frobenius", None)
TAU_POSITIONS = ("inside", "outside")


@dataclass(frozen=True, eq=False)
class Muon:
    """Momentum and normalisation of the memory write (eqs. 3 and 4, Definition 1).

        M_t = gamma_t M_{t-1} + N(tau beta_t v_t k_t^T)         N chosen by `normalization`
        S_t = S_{t-1} alpha_t (I - beta_t eta k_t k_t^T) + M_t

    Attributes:
        gamma: momentum decay in [0, 1]; 0 means no momentum. A float, or a tensor `[H]` or `[B, L, H]` (for the
            selective scan `[1]` or `[B, L, 1]`; a 0-d tensor for either), which then receives gradients.
        tau: scale of the write, > 0.
        delta: floor of the Frobenius norm that the write is divided by, > 0.
        normalization: `"newton_schulz"`, `"frobenius"` (the division alone) or `None` (the write as it is).
        ns_steps: how often the Newton-Schulz polynomial is applied, >= 1.
        tau_position: `"inside"`, N(tau X), is the paper's equation, where tau cancels unless the write is below
            `delta`; `"outside"`, tau N(X), is what its text says ("scales the normalized update").
    """

    gamma: float | Tensor = 0.9
    tau: float = 0.6
    delta: float = 1e-6
    normalization: str | None = "newton_schulz"
    ns_steps: int = 1
    tau_position: str = "inside"

    def __post_init__(self) -> None:
        _check_gamma(self.gamma)
        _check_positive("tau", self.tau)
        _check_positive("delta", self.delta)
        if self.normalization not in NORMALIZATIONS:
            raise ValueError(f"normalization is {self.normalization!r}; it may be one of {NORMALIZATIONS}")
        if not is_int(self.ns_steps, 1):
            raise ValueError(
                f"ns_steps is {self.ns_steps!r}; it may be an integer >= 1 (zero steps are normalization='frobenius')"
            )
        if self.tau_position not in TAU_POSITIONS:
            raise ValueError(f"tau_position is {self.tau_position!r}; it may be one of {TAU_POSITIONS}")

    @classmethod
    def off(cls) -> Muon:
        """The plain backbone (eq. 1): no momentum, no normalisation, the write beta_t v_t k_t^T as it is."""
        return cls(gamma=0.0, tau=1.0, normalization=None)

    def with_gamma(self, gamma: Tensor) -> Muon:
        """The same with a gamma that a sigmoid made: not checked again, so that nan in an input shows in its output."""
        if torch.compiler.is_compiling():
            return replace(self, gamma=gamma)
        other = copy.copy(self)
        object.__setattr__(other, "gamma", gamma)
        return other

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Muon):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    def __hash__(self) -> int:
        values = (getattr(self, f.name) for f in fields(self) if f.name != "gamma")
        return hash(tuple(values))


def _same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.device == b.device and a.device.type != "meta" and torch.equal(a, b))
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    return a == b


def _check_gamma(gamma: float | Tensor) -> None:
    if isinstance(gamma, Tensor):
        if not gamma.is_floating_point():
            raise TypeError(f"gamma is a tensor of {gamma.dtype}; it may be a float or a floating-point tensor")
        if torch.compiler.is_compiling() or gamma.device.type != "cpu" or gamma.numel() == 0:
            return
        low, high = (bound.item() for bound in torch.aminmax(gamma.detach()))
        if not 0.0 <= low <= high <= 1.0:
            raise ValueError(f"gamma has values from {low:.6g} to {high:.6g}; they may be in [0, 1]")
    elif not is_number(gamma):
        raise TypeError(f"gamma is of type {type(gamma).__name__}; it may be a float or a floating-point tensor")
    elif not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma is {gamma!r}; it may be in [0, 1]")


def _check_positive(name: str, value: float) -> None:
    if not is_number(value):
        raise TypeError(f"{name} is of type {type(value).__name__}; it may be a float > 0")
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} is {value!r}; it may be a finite float > 0")
