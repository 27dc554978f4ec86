"""The diagonal recurrence by the Triton kernels in `kernels/`: forward, backward and single step, on raw inputs.

Half-precision inputs are converted in registers; states and sums are float32.

    inputs           x, dt [B, L, D];  B, C [B, L, N];  gamma [B, L, 1] with ones
    A                [D, N], or None for LongHorn's gate
    S0, M0, S, M     [sequences, D, N]
    S_saved, M_saved [segments, D, N], states before every 64 steps, for the backward pass
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

from .. import launch
from ..custom_op import custom_op
from ..muon import Muon
from ..triton import config, support
from .kernels import bwd_scan as backward_kernels
from .kernels.common import Inputs, Span, States, Tile
from .kernels.fwd_pieces import Summary, carry, summarize
from .kernels.fwd_scan import forward as forward_kernel
from .kernels.step import step as step_kernel
from .kernels.write_scale import Norms, Rows, Shape, Write, finish, write_scales


def run_raw(
    inputs: tuple[Tensor, ...],
    A: Tensor | None,
    muon: Muon,
    state: tuple[Tensor, ...] | None,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y `[B, L, D]` in x's dtype and the last S, M in float32, from the caller's x, dt, B, C."""
    x = inputs[0]
    call = launch.prepare_selective(inputs, A, muon, state, cu_seqlens is not None, dtype)
    offsets = None if cu_seqlens is None else cu_seqlens.to(x.device, torch.int64).contiguous()
    function = selective_triton if call.recorded or not launch.is_eager(x) else _forward
    y, S, M, *_ = function(call.tensors, call.A, call.S, call.M, offsets, *call.settings, call.recorded, call.step)
    return y, S, M


class _Cut:
    """Blocks, pieces and launch options of one call, from the shapes of its inputs and the table of launches."""

    def __init__(
        self, inputs: list[Tensor], offsets: Tensor | None, momentum: bool, write: list[float], kernel: str
    ) -> None:
        x, _, B, _, gamma = inputs
        batch, self.L, self.D = x.shape
        self.N, self.steps = B.shape[2], batch * self.L
        self.sequences = batch if offsets is None else offsets.numel() - 1
        self.write = Write(int(write[0]), *write[2:])  # without beta outside, which the selective scan does not have
        self.launch = config.launch(kernel, self.N, support.architecture(x.device))
        self.rows = config.launch("selective_rows", self.N, support.architecture(x.device))
        self.tile = Tile(
            self.D,
            self.N,
            self.launch.BD,
            _power_of_two(self.N),
            config.SEGMENT,
            self.launch.steps,
            int(gamma.numel() > 1),
            int(self.write.STEPS >= 0),
            momentum,
        )
        self.span = self._span(offsets, support.architecture(x.device))
        self.grid = (self.sequences * self.span.pieces, self.blocks)
        self.options = {"num_warps": self.launch.warps, "num_stages": self.launch.stages}
        self.row_options = {"num_warps": self.rows.warps, "num_stages": self.rows.stages}

    def _span(self, offsets: Tensor | None, architecture: str) -> Span:
        """Cut sequences into pieces if the programs without pieces fill at most a third of the device."""
        longest = self.L if offsets is None else self.steps
        wanted = config.FILLED.get(architecture, config.FILLED["any"]) // max(1, self.sequences * self.blocks)
        pieces = min(wanted, longest // config.SHORTEST_PIECE)
        pieces = pieces if pieces >= 3 else 1
        piece = max(1, -(-longest // (pieces * config.SEGMENT))) * config.SEGMENT
        return Span(offsets, self.L, piece, max(1, -(-longest // piece)))

    @property
    def blocks(self) -> int:
        return -(-self.D // self.launch.BD)

    @property
    def shape(self) -> Shape:
        BLOCK_N = _power_of_two(self.N)
        BLOCK_D = min(self.rows.BD, _power_of_two(self.D))
        return Shape(self.D, self.N, BLOCK_D, BLOCK_N, self.blocks, max(1, self.rows.BD // BLOCK_N))

    @property
    def state(self) -> tuple[int, int, int]:
        return self.sequences, self.D, self.N

    def states(self, like: Tensor) -> States:
        """Allocate one S and M per piece."""
        return States(*(like.new_empty(self.grid[0], self.D, self.N) for _ in range(2)))

    @property
    def saved(self) -> tuple[int, int, int]:
        return self.steps // config.SEGMENT + self.sequences, self.D, self.N


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make the device of the tensors the current one, on which kernels are launched."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _power_of_two(size: int) -> int:
    return max(4, 1 << (size - 1).bit_length())


def _forward(
    inputs: list[Tensor],
    A: Tensor | None,
    S0: Tensor | None,
    M0: Tensor | None,
    offsets: Tensor | None,
    momentum: bool,
    write: list[float],
    save: bool,
    step: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return y, S, M, S_saved, M_saved, scales; `step` asks for the single-step kernel.

    The backward pass needs the last three: states before every 64 steps (empty unless `save`), and the scale and the
    norms of every write `[3, T]`.
    """
    x, dt, B, C, gamma = inputs
    cut = _Cut(inputs, offsets, momentum, write, "selective_step" if step else "selective_forward")
    y, S, M = x.new_empty(x.shape), gamma.new_empty(cut.state), gamma.new_empty(cut.state)
    S_saved, M_saved = (gamma.new_empty(cut.saved if kept else 0) for kept in (save, save and momentum))
    scales = gamma.new_empty(_scales_shape(x, write, step))
    with _on(x.device):
        if step:
            arguments = (Inputs(x, dt, B, C, A, gamma, None), States(S0, M0), y, States(S, M))
            step_kernel[cut.grid](*arguments, TILE=cut.tile, SHAPE=cut.shape, WRITE=cut.write, **cut.options)
            return y, S, M, S_saved, M_saved, scales
        scale = _scale(cut, x, dt, B, scales)
        given, saved = (
            Inputs(x, dt, B, C, A, gamma, scale),
            States(*(t if t.numel() else None for t in (S_saved, M_saved))),
        )
        start, end = States(S0, M0), States(S, M)
        if cut.span.pieces > 1:
            start, end = _pieces(cut, given, None, start), cut.states(gamma)
        forward_kernel[cut.grid](given, start, y, end, saved, *cut.span, TILE=cut.tile, **cut.options)
        if cut.span.pieces > 1:
            S, M = (t[cut.span.pieces - 1 :: cut.span.pieces].contiguous() for t in end)
    return y, S, M, S_saved, M_saved, scales


def _pieces(cut: _Cut, inputs: Inputs, dy: Tensor | None, outer: States) -> States:
    """Compute the states before each piece from those of its sequence; with dy, the adjoints after each piece."""
    summary = Summary(*(cut.states(inputs.gamma) + cut.states(inputs.gamma)), inputs.gamma.new_empty(cut.grid[0]))
    inner = cut.states(inputs.gamma)
    row = config.launch("selective_pieces", cut.N, support.architecture(inputs.x.device))
    tile, blocks = cut.tile._replace(BLOCK_D=row.BD, UNROLL=row.steps), -(-cut.D // row.BD)
    summarize[(cut.grid[0], blocks)](inputs, dy, summary, *cut.span, TILE=tile, num_warps=row.warps)
    across = (outer, summary, inner, cut.span.pieces)
    carry[(cut.sequences, blocks)](*across, TILE=tile, REVERSE=dy is not None, num_warps=row.warps)
    return inner


def _scales_shape(x: Tensor, write: list[float], step: bool) -> tuple[int, int]:
    return (1, 0 if step else 1) if write[0] < 0 else (3, 0 if step else x.shape[0] * x.shape[1])


def _scale(cut: _Cut, x: Tensor, dt: Tensor, B: Tensor, scales: Tensor) -> Tensor:
    """Compute the scale of each step's write, or one for all steps without normalization; store it in `scales`."""
    if cut.write.STEPS < 0:
        return scales.fill_(cut.write.INSIDE * cut.write.OUTSIDE)
    write_scales[(cut.steps,)](x, dt, B, Norms(*scales), SHAPE=cut.shape, WRITE=cut.write, **cut.row_options)
    return scales[0]


selective_triton = custom_op("muonssm::selective_triton", _forward)


@selective_triton.register_fake
def _(inputs, A, S0, M0, offsets, momentum, write, save, step):  # type: ignore[no-untyped-def]
    x, _, B, _, gamma = inputs
    sequences = x.shape[0] if offsets is None else offsets.numel() - 1
    state = (sequences, x.shape[2], B.shape[2])
    saved = (x.shape[0] * x.shape[1] // config.SEGMENT + sequences, *state[1:])
    shapes = (state, state, saved if save else (0,), saved if save and momentum else (0,))
    return x.new_empty(x.shape), *(gamma.new_empty(s) for s in (*shapes, _scales_shape(x, write, step)))


@functools.partial(custom_op, "muonssm::selective_triton_backward")
def _selective_triton_backward(
    grads: list[Tensor],
    inputs: list[Tensor],
    A: Tensor | None,
    saved: list[Tensor],
    offsets: Tensor | None,
    momentum: bool,
    write: list[float],
    dgamma: bool,
) -> list[Tensor]:
    """Return the gradients of x, dt, B, C, A (empty if A is None), gamma (empty unless `dgamma`), S0, M0."""
    x, dt, B, C, gamma = inputs
    dy, dS, dM = (t.contiguous() for t in grads)
    S_saved, M_saved, scales = saved
    cut = _Cut(inputs, offsets, momentum, write, "selective_backward")
    norms = Norms(*scales) if cut.write.STEPS >= 0 else Norms(scales, None, None)
    given = Inputs(x, dt, B, C, A, gamma, norms.scale)
    out = _gradients(inputs, A, cut.state, dgamma)
    parts = _parts(cut, gamma, A is not None, dgamma)
    slots = backward_kernels.scratch_tiles(config.SEGMENT, cut.tile.UNROLL)
    scratch = [gamma.new_empty(cut.grid[0] * slots, cut.D, cut.N) if kept else None for kept in (True, momentum)]
    end, start = States(dS, dM), States(*out[6:])
    with _on(x.device):
        if cut.span.pieces > 1:
            end, start = _pieces(cut, given, dy, end), cut.states(gamma)
        states = (end, start, States(S_saved, M_saved if momentum else None), States(*scratch))
        arguments = (given, dy, *states, parts, *cut.span)
        backward_kernels.backward[cut.grid](*arguments, TILE=cut.tile, SLOTS=slots, **cut.options)
        if cut.span.pieces > 1:
            out[6:] = (t[:: cut.span.pieces].contiguous() for t in start)
        dx, ddt, dB, dC, _, by_gamma, *_ = out
        finished = Rows(dx, ddt, dB, dC, by_gamma if dgamma else None)
        finish[(cut.steps,)](given, norms, parts, finished, SHAPE=cut.shape, WRITE=cut.write, **cut.row_options)
    out[4] = out[4] if parts.dA is None else parts.dA.sum(0).to(out[4].dtype)
    return out


def _parts(cut: _Cut, like: Tensor, dA: bool, dgamma: bool) -> backward_kernels.Gradients:
    """Allocate the partial gradients that the backward kernel leaves for `finish`."""
    steps, wide, narrow = cut.steps, (cut.blocks, cut.N), (cut.blocks,)
    shapes: list[Any] = [(steps, cut.D), (steps, cut.D), (steps, *wide), (steps, *wide)]
    shapes += [(steps, *narrow) if kept else None for kept in (cut.write.STEPS >= 0, dgamma)]
    shapes += [(cut.grid[0], cut.D, cut.N) if dA else None]
    return backward_kernels.Gradients(*(None if s is None else like.new_empty(s) for s in shapes))


@_selective_triton_backward.register_fake
def _(grads, inputs, A, saved, offsets, momentum, write, dgamma):  # type: ignore[no-untyped-def]
    return _gradients(inputs, A, grads[1].shape, dgamma)


def _gradients(inputs: list[Tensor], A: Tensor | None, state: Any, dgamma: bool) -> list[Tensor]:
    """Allocate the gradients, each in the dtype of its input."""
    x, _, _, _, gamma = inputs
    first = [t.new_empty(t.shape) for t in inputs[:4]]
    by_A = gamma.new_empty(0) if A is None else A.new_empty(A.shape)
    sizes: list[Any] = [(x.shape[0], x.shape[1], 1) if dgamma else 0, state, state]
    return [*first, by_A, *(gamma.new_empty(size) for size in sizes)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, A, S0, _, offsets, momentum, write, _, _ = inputs
    ctx.save_for_backward(*tensors, A, offsets, *output[3:])
    ctx.settings, ctx.stateless = (momentum, write), S0 is None
    ctx.set_materialize_grads(False)  # the saved states are large, and nothing differentiates them


def _backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
    *inputs, A, offsets, S_saved, M_saved, scales = ctx.saved_tensors
    x, _, B, _, gamma = inputs
    state = (x.shape[0] if offsets is None else offsets.numel() - 1, x.shape[2], B.shape[2])
    grads = launch.materialize(given[:3], (x, gamma, gamma), (x.shape, state, state))
    dgamma, saved = ctx.needs_input_grad[0][4], [S_saved, M_saved, scales]
    results = _selective_triton_backward(grads, inputs, A, saved, offsets, *ctx.settings, dgamma)
    *first, dA, by_gamma, dS0, dM0 = results
    by_gamma = by_gamma.sum_to_size(gamma.shape) if dgamma else None
    states = (None, None) if ctx.stateless else (dS0, dM0)
    return [*first, by_gamma], None if A is None else dA, *states, None, None, None, None, None


selective_triton.register_autograd(_backward, setup_context=_save)
