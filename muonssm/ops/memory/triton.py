"""The memory recurrence by Triton kernels: the chunked form, forward and backward, and a single step for decoding.

The kernels scale the writes, follow the bounds of packed sequences and mask unfilled chunks themselves. A forward pass
is four launches (measure, solve, states, output) and keeps only its inputs. The backward pass repeats the first three,
then launches backward_states, values, scores, keys and gates. docs/design/gpu.md lists the intermediate tensors and the
costs.

    inputs           q, k [B, L, H, m];  v [B, L, H, d];  log_alpha, beta [B, L, H];  gamma [B, L, H] with ones;
                     inject [B, L, H], if it is given
    S0, M0, S, M     [N, H, d, m], one state per sequence
    kept             intermediate tensors [chunks, H, ...], by their names in the kernels
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import launch
from ..custom_op import custom_op
from ..muon import Muon
from ..triton import config, support
from .kernels import common
from .kernels.aot import KERNELS
from .types import MemoryInputs

C = config.CHUNK
BY_COLUMNS = ("memory_states", "memory_backward_states", "memory_output", "memory_step")  # one program per block of d
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def run_raw(
    inputs: MemoryInputs,
    eta: float,
    muon: Muon,
    state: tuple[Tensor, ...] | None,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y `[B, L, H, d]` in v's dtype and the last S, M in float32, from the caller's inputs."""
    v = inputs.v
    call = launch.prepare_memory(inputs, eta, muon, state, cu_seqlens, dtype)
    function = memory_triton if call.recorded or not launch.is_eager(v) else _forward
    y, S, M = function(call.tensors, call.S, call.M, call.offsets, *call.settings, call.step)
    return y.to(v.dtype), S, M


@functools.lru_cache(maxsize=64)
def _chunk_table(offsets: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return first step and length of every chunk `[n, 2]`, and the first chunk of each sequence `[N + 1]`, int32."""
    bounds = torch.tensor(offsets)
    counts = (bounds.diff() + C - 1) // C
    first = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    sequence = torch.repeat_interleave(torch.arange(counts.numel()), counts)
    start = bounds[sequence] + C * (torch.arange(sequence.numel()) - first[sequence])
    length = (bounds[sequence + 1] - start).clamp(max=C)
    table = torch.stack((start, length), dim=1).to(torch.int32)
    return table.to(device), first.to(device, torch.int32)


@dataclass(frozen=True)
class _Call:
    """The sizes and settings of one call; launches its kernels."""

    inputs: list[Tensor]  # q, k, v, log_alpha, beta, gamma, and inject if it is given
    offsets: tuple[int, ...]
    eta: float
    residual: bool
    momentum: bool
    write: list[float]

    @property
    def q(self) -> Tensor:
        return self.inputs[0]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Number of sequences, heads, value dimension, key dimension."""
        return len(self.offsets) - 1, *self.inputs[2].shape[2:], self.q.shape[3]

    @functools.cached_property
    def tables(self) -> tuple[Tensor, Tensor]:
        return _chunk_table(self.offsets, self.q.device)

    @property
    def programs(self) -> int:
        """Number of chunks times heads."""
        return self.tables[0].shape[0] * self.sizes[1]

    @functools.cached_property
    def architecture(self) -> str:
        return support.architecture(self.q.device)

    @property
    def operand(self) -> torch.dtype:
        return support.operand_dtype(self.q.dtype, self.architecture)

    def scratch(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate an intermediate tensor `[chunks, H, *shape]`."""
        return self.q.new_empty((self.tables[0].shape[0], self.sizes[1], *shape), dtype=dtype or self.operand)

    def launch(self, name: str, programs: int, **arguments: Any) -> None:
        """Launch a kernel with `arguments` and those settings of the call that it takes."""
        _, H, d, m = self.sizes
        cut = config.launch(name, max(d, m), self.architecture)
        BD, BM = min(cut.BD, config.padded(d)), min(cut.BM, config.padded(m))
        kernel = KERNELS[name]
        columns = triton.cdiv(d, BD) if name in BY_COLUMNS else 1
        inject = self.inputs[6] if len(self.inputs) == 7 else None
        gamma = self.inputs[5]
        steps, beta_outside, inside, outside, delta = self.write
        own = {
            **dict(zip(("q", "k", "v", "log_alpha", "beta", "gamma"), self.inputs[:6], strict=True)),
            "inject": inject, "INJECT": inject is not None,
            "RESIDUAL": self.residual, "BETA_OUTSIDE": bool(beta_outside),
            "H": H, "m": m, "d": d, "MP": config.padded(m), "DP": config.padded(d), "BD": BD, "BM": BM,
            "gamma_step": H if gamma.shape[0] * gamma.shape[1] > 1 else 0, "gamma_head": int(gamma.shape[2] > 1),
            "eta": self.eta, "ERASE": self.eta != 0.0, "MOMENTUM": self.momentum, "STEPS": int(steps),
            "inside": inside, "outside": outside, "delta": delta, "OPERAND": TYPES[self.operand],
            "PRECISION": support.dot_precision(self.q.dtype, self.architecture),
        } | arguments  # fmt: skip
        passed = {name: own[name] for name in kernel.arg_names}
        with _on(self.q.device):
            kernel[(programs, columns)](**passed, num_warps=cut.warps, num_stages=cut.stages)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _states(
    call: _Call, S0: Tensor | None, M0: Tensor | None, S_end: Tensor | None, M_end: Tensor | None, dy: Tensor | None
) -> dict[str, Tensor | None]:
    """Launch the first kernels: fill S_end and M_end if given; return intermediate tensors, with `dy` for backward."""
    chunks, first_chunk = call.tables
    N, H, d, m = call.sizes
    erase, backward = call.eta != 0.0, dy is not None
    kept: dict[str, Tensor | None] = {
        "chunks": chunks,
        "vectors": call.scratch(common.PLANES.value, C, dtype=torch.float32),
    }
    for name, width, needed in (
        ("WS", m, erase), ("WM", m, erase and call.momentum), ("W", d, erase),
        ("RS", m, erase and backward), ("RM", m, call.residual and backward), ("R", d, erase and backward),
    ):  # fmt: skip
        kept[name] = call.scratch(C, width) if needed else None
    kept |= {"S_all": call.scratch(m, d), "M_all": call.scratch(m, d) if call.momentum else None}
    if call.programs:
        call.launch("memory_measure", call.programs, **kept)
    if call.programs and erase:
        call.launch("memory_solve", call.programs, **kept, WU=kept["W"], RU=kept["R"], dy=dy, BACKWARD=backward)
    call.launch(
        "memory_states", N * H, **kept, first_chunk=first_chunk, S0=S0, M0=M0, S_end=S_end, M_end=M_end,
        STATE=S0 is not None, ENDS=S_end is not None,
    )  # fmt: skip
    return kept


def _forward(
    inputs: list[Tensor],
    S0: Tensor | None,
    M0: Tensor | None,
    offsets: Tensor,
    eta: float,
    residual: bool,
    momentum: bool,
    write: list[float],
    step: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, S, M; `step` asks for the single-step kernel."""
    call = _Call(inputs, tuple(offsets.tolist()), eta, residual, momentum, write)
    N, H, d, m = call.sizes
    v = inputs[2]
    y = torch.empty_like(v)
    S, M = (v.new_empty((N, H, d, m), dtype=torch.float32) for _ in range(2))
    if N and step:
        call.launch("memory_step", N * H, S0=S0, M0=M0, y=y, S_end=S, M_end=M, STATE=S0 is not None)
    elif N:
        kept = _states(call, S0, M0, S, M, None)
        if v.numel():
            call.launch("memory_output", call.programs, **kept, y=y)
    return y, S, M


memory_triton = custom_op("muonssm::memory_triton", _forward)


@memory_triton.register_fake
def _(inputs, S0, M0, offsets, eta, residual, momentum, write, step):  # type: ignore[no-untyped-def]
    q, _, v, *_ = inputs
    state = (offsets.numel() - 1, v.shape[2], v.shape[3], q.shape[3])
    return torch.empty_like(v), *(v.new_empty(state, dtype=torch.float32) for _ in range(2))


@functools.partial(custom_op, "muonssm::memory_triton_backward")
def _memory_triton_backward(
    grads: list[Tensor],
    inputs: list[Tensor],
    S0: Tensor | None,
    M0: Tensor | None,
    offsets: Tensor,
    eta: float,
    residual: bool,
    momentum: bool,
    write: list[float],
    dgates: bool,
) -> list[Tensor]:
    """Return the gradients of q, k, v, log_alpha, beta, gamma and inject (empty unless `dgates`), S0, M0.

    The last two are empty without S0.
    """
    out = _gradients(inputs, S0, dgates)
    call = _Call(inputs, tuple(offsets.tolist()), eta, residual, momentum, write)
    N, H, d, m = call.sizes
    if N == 0:
        return out
    dy, dS_end, dM_end = (x.contiguous() for x in grads)
    kept = _states(call, S0, M0, None, None, dy)
    kept |= {"dS_all": call.scratch(m, d), "dM_all": call.scratch(m, d) if momentum else None}
    names = ("dq", "dk", "dv", "dlog_alpha", "dbeta", "dgamma", "dinject", "dS0", "dM0")
    kept |= {"dy": dy, **dict(zip(names, out, strict=True))}
    call.launch(
        "memory_backward_states", N * H, **kept, first_chunk=call.tables[1], dS_end=dS_end, dM_end=dM_end,
        STATE=S0 is not None,
    )  # fmt: skip
    if call.programs:
        kept |= {"du": call.scratch(C, d), "dQK": call.scratch(C, C), "by_YU": call.scratch(C, C)}
        kept |= {name: call.scratch(C, C) if eta else None for name in ("dG", "by_RU")}
        kept |= {name: call.scratch(C, C) if eta and not residual else None for name in ("by_YW", "by_RW")}
        for name in ("memory_values", "memory_scores", "memory_keys", "memory_gates"):
            call.launch(name, call.programs, **kept, DGAMMA=dgates)
    return out


@_memory_triton_backward.register_fake
def _(grads, inputs, S0, M0, offsets, eta, residual, momentum, write, dgates):  # type: ignore[no-untyped-def]
    return _gradients(inputs, S0, dgates)


def _gradients(inputs: list[Tensor], S0: Tensor | None, dgates: bool) -> list[Tensor]:
    """Allocate the gradients."""
    beta = inputs[4]
    states = [torch.empty_like(S0) if S0 is not None else beta.new_empty(0) for _ in range(2)]
    gates = [beta.new_empty(beta.shape if dgates and i < len(inputs) else 0) for i in (5, 6)]
    return [*(torch.empty_like(x) for x in inputs[:5]), *gates, *states]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, S0, M0, offsets, *settings, _ = inputs
    ctx.save_for_backward(*tensors, S0, M0, offsets)
    ctx.settings = tuple(settings)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
    *inputs, S0, M0, offsets = ctx.saved_tensors
    q, _, v, _, beta, gamma, *inject = inputs
    state = (offsets.numel() - 1, v.shape[2], v.shape[3], q.shape[3])
    grads = launch.materialize(given, (v, beta, beta), (v.shape, state, state))
    eta, residual, momentum, write = ctx.settings
    momentum = momentum or given[2] is not None  # kernels without momentum ignore the gradient of the last M
    dgamma, dinject = ctx.needs_input_grad[0][5], bool(inject) and ctx.needs_input_grad[0][6]
    *first, by_gamma, by_inject, dS0, dM0 = _memory_triton_backward(
        grads, inputs, S0, M0, offsets, eta, residual, momentum, write, dgamma or dinject
    )
    by_gamma = by_gamma.sum_to_size(gamma.shape) if dgamma else None
    by_tensors = [*first, by_gamma, *([by_inject if dinject else None] if inject else [])]
    states = (None, None) if S0 is None else (dS0, dM0)
    return by_tensors, *states, *(None,) * 6


memory_triton.register_autograd(_backward, setup_context=_save)
