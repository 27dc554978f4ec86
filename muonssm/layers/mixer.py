"""`Mixer`: the call contract of all backbones: argument checks, padding, packing, decoding steps.

A backbone implements one method, `mix`, which is its whole computation from x to y in order. CONTRIBUTING.md has the
steps to add one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from muonssm.checks import check_bool, check_int
from muonssm.ops import Muon, split
from muonssm.ops.validate import check_dense

from .modules import RMSNorm, ShortConvolution, has_no_hooks
from .momentum import Momentum
from .sequences import Packing, Sequences
from .state import MixerState


class Mixer(nn.Module, ABC):
    """A sequence layer: `y, state = mixer(x, state=None, mask=None, cu_seqlens=None)`.

    Attributes:
        d_model: width of x and y.
        bidirectional: whether each step sees both sides of its sequence. Such a mixer takes and returns no state.
        impl: implementation of the operators, `"auto"` by default.
    """

    conv1d: ShortConvolution
    momentum: Momentum

    def __init__(self, d_model: int, bidirectional: bool) -> None:
        super().__init__()
        self.d_model = check_int("d_model", d_model, 1)
        self.bidirectional = check_bool("bidirectional", bidirectional)
        self.impl = "auto"

    def no_weight_decay(self) -> set[str]:
        """Name the parameters without weight decay, as in the original models (timm calls this method)."""
        return {name for name, _ in self.named_parameters() if name in ("A_log", "D", "dt_bias", "dt_proj.bias")}

    @property
    def muon(self) -> Muon:
        """Momentum and normalization; a learned gamma is in `momentum`."""
        return self.momentum.muon

    @abstractmethod
    def mix(self, x: Tensor, state: MixerState | None, sequences: Sequences) -> tuple[Tensor, MixerState]:
        """Compute y `[B, L, d_model]` and the next state; `forward` has checked the arguments.

        Args:
            x: `[B, L, d_model]`, without padding.
            state: state of the sequences so far; None at their start.
            sequences: bounds of packed sequences, and whether to process them in both directions.
        """

    def forward(
        self,
        x: Tensor,
        state: MixerState | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, MixerState | None]:
        """Mix along the sequence.

        Args:
            x: `[B, L, d_model]`.
            state: state returned by an earlier call, to continue its sequences; None starts new ones.
            mask: `[B, L]`, 0 at padding, which can be anywhere. Padded steps write nothing and their y is 0.
            cu_seqlens: int tensor `[N + 1]`, bounds of N sequences packed into one row (B = 1).

        Returns:
            y `[B, L, d_model]`, and the state after the last step, per row or per packed sequence. A bidirectional
            mixer returns None as its state.
        """
        self._check(x, state, mask, cu_seqlens)
        if split.current() is not None:
            self._check_split(mask)
            y, state = self.mix(x, state, Sequences(cu_seqlens))
            return y, state
        step = self.step(x, state, mask, cu_seqlens)
        if step is not None:
            return step
        packing = None if mask is None else Packing.from_mask(mask)
        if packing is None:
            y, state = self.mix(x, state, Sequences(cu_seqlens, self.bidirectional))
        else:
            B, L, _ = x.shape
            sequences = Sequences(packing.cu_seqlens, self.bidirectional)
            y, state = self.mix(packing.pack(x), packing.pack_state(state), sequences)
            y, state = packing.unpack(y, B, L), packing.unpack_state(state)
        return y, None if self.bidirectional else state

    def step(
        self,
        x: Tensor,
        state: MixerState | None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        norm: RMSNorm | None = None,
    ) -> tuple[Tensor, MixerState] | None:
        """Run a decoding step by the backbone's kernel; return None if this call is no such step or has no kernel.

        A decoding step is one token of each sequence, x `[B, 1, d_model]`, after a state, without padding, packing or
        gradients. With `norm` it is a step of the residual block x + mixer(norm(x)), for a caller that skips the calls
        of both modules: None if one of them has a hook.
        """
        if state is None or mask is not None or cu_seqlens is not None or x.shape[1] != 1 or torch.is_grad_enabled():
            return None
        if split.current() is not None:  # a piece of one step
            return None
        if norm is not None and not (has_no_hooks(self) and has_no_hooks(norm)):
            return None
        return self.step_kernel(x, state, norm)

    def step_kernel(self, x: Tensor, state: MixerState, norm: RMSNorm | None) -> tuple[Tensor, MixerState] | None:
        """Compute a decoding step in one kernel, or return None. A backbone with such a kernel overrides this."""
        return None

    def _check(self, x: Tensor, state: MixerState | None, mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a tensor [B, L, d_model], got {type(x).__name__}")
        check_dense("x", x)
        if x.ndim != 3 or x.shape[2] != self.d_model:
            raise ValueError(f"x must have shape [B, L, {self.d_model}], got {list(x.shape)}")
        if state is not None:
            packed = isinstance(cu_seqlens, Tensor)
            self._check_state(state, cu_seqlens.numel() - 1 if packed else x.shape[0])  # type: ignore[union-attr]
        if mask is None:
            return
        if cu_seqlens is not None:
            raise ValueError("mask must be None with cu_seqlens: packed sequences have no padding")
        if not isinstance(mask, Tensor):
            raise TypeError(f"mask must be a tensor [B, L], 0 at padding, got {type(mask).__name__}")
        if mask.shape != x.shape[:2]:
            raise ValueError(f"mask must have the shape [B, L] of x, {list(x.shape[:2])}, got {list(mask.shape)}")

    def _check_split(self, mask: Tensor | None) -> None:
        if self.bidirectional:
            raise ValueError("bidirectional must be False inside context_parallel, got True")
        if mask is not None:
            raise ValueError("mask must be None inside context_parallel, got a mask; pack sequences with cu_seqlens")

    def _check_state(self, state: MixerState, sequences: int) -> None:
        if self.bidirectional:
            raise ValueError("state must be None for a bidirectional mixer, which sees both sides of each step")
        if not isinstance(state, MixerState):
            raise TypeError(f"state must be None or a MixerState, got {type(state).__name__}")
        channels, _, K = self.conv1d.weight.shape
        if state.conv.shape[0] != sequences:
            raise ValueError(f"state must have as many sequences as x, {sequences}, got {state.conv.shape[0]}")
        if tuple(state.conv.shape[1:]) != (K - 1, channels):
            expected = [sequences, K - 1, channels]
            raise ValueError(f"state.conv must have shape {expected}, got {list(state.conv.shape)}")
