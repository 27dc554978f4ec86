"""`Muon`: the memory rule that the paper adds to a backbone, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from muonssm.checks import check_choice, check_int, check_number, is_number

NORMALIZATIONS = ("newton_schulz", "frobenius", None)
POSITIONS = ("inside", "outside")
CORRECTIONS = ("memory", "momentum")
ORTHOGONALIZED = (None, "update", "read")


@dataclass(frozen=True, eq=False)
class Muon:
    """A memory rule: momentum, normalization of the write, and where the recall correction and the gates enter.

    The defaults are the paper's rule (eqs. 3 and 4, Definition 1). N is set by `normalization`:

        M_t = gamma_t M_{t-1} + N(tau beta_t v_t k_t^T)
        S_t = S_{t-1} alpha_t (I - beta_t eta k_t k_t^T) + M_t

    `Muon.off()` is the plain backbone, `Muon.residual()` puts the correction into the momentum, and `Muon.gated()` lets
    the gates scale the normalized write. docs/guide/rules.md says which one to take.

    Attributes:
        gamma: momentum decay in [0, 1]; 0 means no momentum. A float, or a tensor that receives gradients: a scalar,
            `[H]` (per head) or `[B, L, H]` (per step and head). For the selective scan H is 1.
        tau: scale of the write, > 0.
        delta: lower bound of the norm by which the write is divided, > 0.
        normalization: `"newton_schulz"` (Definition 1), `"frobenius"` (division by the norm only) or `None` (no
            normalization).
        ns_steps: number of Newton-Schulz steps, >= 1.
        tau_position: `"inside"` for N(tau X), the paper's equation, where tau cancels unless the norm is below `delta`;
            `"outside"` for tau N(X), the paper's text ("scales the normalized update").
        correction: where the recall S_{t-1} k_t is subtracted. `"memory"`: from S, as above. `"momentum"`: from the
            write, so that momentum accumulates the error (the residual rule):

                M_t = gamma_t M_{t-1} + N(tau beta_t v_t k_t^T) - alpha_t beta_t eta (S_{t-1} k_t) k_t^T
                S_t = alpha_t S_{t-1} + M_t

            Without a correction (eta 0, the selective scan) both are the same.
        beta_position: `"inside"` for N(beta X), where the write gate cancels unless the norm is below `delta`;
            `"outside"` for beta N(X), where it scales the write.
        orthogonalize: an experiment, None by default: Newton-Schulz on matrices of rank above one, after every 64 steps
            of a sequence and at its end. `"update"`: on the change of S over these steps. `"read"`: on the S that
            these steps start from, for reading only. The Frobenius norm is kept. Only `reference` and `chunked` run it.
    """

    gamma_is_known: ClassVar[bool] = False  # True in copies by `with_gamma`, whose values are not checked

    gamma: float | Tensor = 0.9
    tau: float = 0.6
    delta: float = 1e-6
    normalization: str | None = "newton_schulz"
    ns_steps: int = 1
    tau_position: str = "inside"
    correction: str = "memory"
    beta_position: str = "inside"
    orthogonalize: str | None = None

    def __post_init__(self) -> None:
        _check_gamma(self.gamma)
        check_number("tau", self.tau, low=0, open_low=True)
        check_number("delta", self.delta, low=0, open_low=True)
        check_choice("normalization", self.normalization, NORMALIZATIONS)
        check_int("ns_steps", self.ns_steps, least=1)
        check_choice("tau_position", self.tau_position, POSITIONS)
        check_choice("correction", self.correction, CORRECTIONS)
        check_choice("beta_position", self.beta_position, POSITIONS)
        check_choice("orthogonalize", self.orthogonalize, ORTHOGONALIZED)

    @classmethod
    def off(cls) -> Muon:
        """Return the rule of the plain backbone (eq. 1): no momentum, and the write beta_t v_t k_t^T as it is."""
        return cls(gamma=0.0, tau=1.0, normalization=None)

    @classmethod
    def residual(cls, gamma: float | Tensor = 0.5, **settings: Any) -> Muon:
        """Return the residual rule: momentum on the error v_t - S_{t-1} k_t, the write as it is.

        A repeated key converges to its value for every gamma, which the paper's rule does not. In a mixer, a learned
        gamma is suggested: `momentum="per_head"`.
        """
        return cls(**{"gamma": gamma, "tau": 1.0, "normalization": None, "correction": "momentum", **settings})

    @classmethod
    def gated(cls, gamma: float | Tensor = 0.5, **settings: Any) -> Muon:
        """Return the paper's rule with both gates outside: tau beta_t NS(v_t k_t^T), so that beta scales the write."""
        return cls(**{"gamma": gamma, "tau_position": "outside", "beta_position": "outside", **settings})

    def with_gamma(self, gamma: Tensor) -> Muon:
        """Return a copy with another gamma that is known to be in [0, 1].

        It is not checked, neither here nor by the operators, so that a NaN in a layer's input shows up in its output
        and does not raise.
        """
        other = object.__new__(Muon)
        for field in fields(self):
            object.__setattr__(other, field.name, getattr(self, field.name))
        object.__setattr__(other, "gamma", gamma)
        object.__setattr__(other, "gamma_is_known", True)
        return other

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Muon):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    def __hash__(self) -> int:
        values = (getattr(self, f.name) for f in fields(self) if f.name != "gamma")
        return hash(tuple(values))


def has_momentum(muon: Muon) -> bool:
    """Return False only where gamma is the number 0; the values of a gamma tensor are not looked at."""
    return isinstance(muon.gamma, Tensor) or muon.gamma != 0


def is_residual(muon: Muon, eta: float) -> bool:
    """Return whether the recall is subtracted in the momentum; without a correction (eta 0) it is not."""
    return muon.correction == "momentum" and eta != 0


def steps_of(muon: Muon) -> int:
    """Return the normalization as the kernels take it: Newton-Schulz steps, 0 for the norm alone, -1 for none."""
    return {None: -1, "frobenius": 0}.get(muon.normalization, muon.ns_steps)


def normalization_of(steps: int) -> dict[str, Any]:
    """Return the fields of `Muon` for what `steps_of` returned."""
    normalization = {-1: None, 0: "frobenius"}.get(steps, "newton_schulz")
    return {"normalization": normalization, "ns_steps": max(steps, 1)}


def _same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.device == b.device and a.device.type != "meta" and torch.equal(a, b))
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    return a == b


def _check_gamma(gamma: float | Tensor) -> None:
    if not isinstance(gamma, Tensor):
        if not is_number(gamma):
            raise TypeError(f"gamma must be a number or a floating-point tensor in [0, 1], got {gamma!r}")
        check_number("gamma", gamma, low=0, high=1)
        return
    if not gamma.is_floating_point():
        raise TypeError(f"gamma must be a number or a floating-point tensor in [0, 1], got a tensor of {gamma.dtype}")
    if torch.compiler.is_compiling() or gamma.device.type != "cpu" or gamma.numel() == 0:
        return
    check_gamma_values("gamma", gamma)


def check_gamma_values(name: str, gamma: Tensor) -> None:
    """Check that all values are in [0, 1]; NaN is not."""
    low, high = (bound.item() for bound in torch.aminmax(gamma.detach()))
    if not 0.0 <= low <= high <= 1.0:
        raise ValueError(f"{name} must be in [0, 1], got values from {low:.6g} to {high:.6g}")
