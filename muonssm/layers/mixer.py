"""`Mixer`: what all backbones share: the call contract, padding, packing, both directions.

A backbone says how x becomes queries, keys, values and gates (`project`, `recall`) and how the answer becomes y
(`readout`); everything about sequences is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor, nn

from muonssm.checks import is_int
from muonssm.ops import MemoryState, Muon

from .modules import RMSNorm, ShortConvolution
from .momentum import Momentum
from .sequences import Packing, both_bounds, both_ways, check_mask, mean_of_both
from .state import MixerState


class Projected(NamedTuple):
    """What a mixer makes of x, step by step.

    channels    `[B, L, C]`, to pass through the short convolution
    gates       `[B, L, ...]` each, for the memory
    output      `[B, L, ...]`, what gates the answer; None if nothing does
    """

    channels: Tensor
    gates: tuple[Tensor, ...]
    output: Tensor | None


class Call(NamedTuple):
    """What every call of an operator is given beside its tensors; see `muon_memory`."""

    muon: Muon
    state: MemoryState | None
    cu_seqlens: Tensor | None
    impl: str


class Mixer(nn.Module, ABC):
    """A sequence layer: `y, state = mixer(x, state=None, mask=None, cu_seqlens=None)`.

    Attributes:
        d_model: width of x and y.
        bidirectional: whether each step sees both sides; such a mixer has no state to continue from.
        impl: implementation of the operator, `"auto"` unless set.
    """

    conv1d: ShortConvolution
    momentum: Momentum

    def __init__(self, d_model: int, bidirectional: bool) -> None:
        super().__init__()
        if not isinstance(bidirectional, bool):
            raise TypeError(f"bidirectional is {bidirectional!r}; it may be True or False")
        self.d_model = d_model
        self.bidirectional = bidirectional
        self.impl = "auto"

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that weight decay should leave alone, as in the originals (timm asks by this name)."""
        return {name for name, _ in self.named_parameters() if name in ("A_log", "D", "dt_bias", "dt_proj.bias")}

    @property
    def muon(self) -> Muon:
        """Momentum and normalisation; a learned gamma is in `momentum`."""
        return self.momentum.muon

    @abstractmethod
    def project(self, x: Tensor) -> Projected:
        """x `[B, L, d_model]`, step by step, before the convolution."""

    @abstractmethod
    def recall(self, channels: Tensor, gates: tuple[Tensor, ...], call: Call) -> tuple[Tensor, MemoryState]:
        """What the memory answers `[B, L, ...]` to the convolved channels and the gates, and its last state."""

    @abstractmethod
    def readout(self, y: Tensor, output: Tensor | None) -> Tensor:
        """The answer, gated and projected to `[B, L, d_model]`."""

    def forward(
        self,
        x: Tensor,
        state: MixerState | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, MixerState | None]:
        """Mixes along the sequence.

        Args:
            x: `[B, L, d_model]`.
            state: what an earlier call returned, to continue its sequences; None starts from nothing.
            mask: `[B, L]`, 0 at padding, on either side or in between. Padding is left out: it writes nothing, changes
                no state, and y is 0 there.
            cu_seqlens: int tensor `[N + 1]`, bounds of N sequences packed into one row (B = 1), kept apart.

        Returns:
            y `[B, L, d_model]`, and the state after the last step: one for each row or packed sequence. None for a
            bidirectional mixer.
        """
        self._check(x, state, cu_seqlens)
        if mask is None:
            single = state is not None and cu_seqlens is None and x.shape[1] == 1
            return (self.step(x, state) if single else None) or self._run(x, state, cu_seqlens)  # type: ignore[arg-type]
        if cu_seqlens is not None:
            raise ValueError("mask and cu_seqlens were both given; packed sequences need no mask, leave one out")
        B, L, _ = x.shape
        live = check_mask(mask, B, L)
        if live.all():
            return self._run(x, state, None)
        packing = Packing.of(live)
        y, state = self._run(packing.pack(x), state, packing.cu_seqlens)
        return packing.unpack(y, B, L), state

    def step(self, x: Tensor, state: MixerState, norm: RMSNorm | None = None) -> tuple[Tensor, MixerState] | None:
        """One step of each sequence, x `[B, 1, d_model]`, where a backbone has a kernel for the whole of it.

        With `norm`, it is a step of the residual block x + mixer(norm(x)).
        """
        return None

    def _run(self, x: Tensor, state: MixerState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, MixerState | None]:
        channels, gates, output = self.project(x)
        gamma, bounds = self.momentum.gate(x), cu_seqlens
        if self.bidirectional:
            channels, *gates_ = (both_ways(t, cu_seqlens) for t in (channels, *gates))
            gates, bounds = tuple(gates_), both_bounds(cu_seqlens)
            gamma = None if gamma is None else both_ways(gamma, cu_seqlens)
        tail, memory = (None, None) if state is None else state
        channels, tail = self.conv1d(channels, tail, bounds, self.impl)
        y, memory = self.recall(channels, gates, Call(self.momentum(gamma), memory, bounds, self.impl))
        if self.bidirectional:
            return self.readout(mean_of_both(y, cu_seqlens), output), None
        return self.readout(y, output), MixerState(tail, memory)

    def _check(self, x: Tensor, state: MixerState | None, cu_seqlens: Tensor | None) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"x is of type {type(x).__name__}; it may be a tensor [B, L, d_model]")
        if x.ndim != 3 or x.shape[2] != self.d_model:
            raise ValueError(f"x has shape {list(x.shape)}; it may be [B, L, d_model] with d_model = {self.d_model}")
        if state is None:
            return
        if self.bidirectional:
            raise ValueError("state was given to a bidirectional mixer; it may be None, for each step sees both sides")
        if not isinstance(state, MixerState):
            raise TypeError(f"state is of type {type(state).__name__}; it may be None or a MixerState")
        packed = isinstance(cu_seqlens, Tensor)
        sequences = cu_seqlens.numel() - 1 if packed else x.shape[0]  # type: ignore[union-attr]
        if state.conv.shape[0] != sequences:
            raise ValueError(f"state has {state.conv.shape[0]} sequences; it may have {sequences}, as many as x")
        channels, _, K = self.conv1d.weight.shape
        if tuple(state.conv.shape[1:]) != (K - 1, channels):
            wanted = [sequences, K - 1, channels]
            raise ValueError(f"state.conv has shape {list(state.conv.shape)}; of this mixer it may be {wanted}")


def check_size(name: str, value: int, divides: tuple[str, int] | None = None) -> int:
    """A positive integer, which divides another size if told so."""
    if not is_int(value, 1):
        raise ValueError(f"{name} is {value!r}; it may be an integer >= 1")
    if divides is not None and divides[1] % value:
        raise ValueError(f"{name} is {value}; it may be a divisor of {divides[0]} = {divides[1]}")
    return value


def head_dim_of(channels: int, given: int | None) -> int:
    """Channels of a head: as given, or the largest divisor of all up to 64."""
    if given is None:
        return max(size for size in range(1, 65) if channels % size == 0)
    return check_size("head_dim", given, divides=("expand * d_model", channels))
