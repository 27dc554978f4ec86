"""The steps of each backbone's mixer: one function per class, named after the file of its `mix`.

Every function appends h = h + mixer(norm(h)) to a program: projections, the short convolution, the memory, and the
output projection with whatever stands before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from muonssm.ops import decode_steps as steps
from muonssm.ops.decode_steps import FIXED_GAMMA, HEAD_GAMMA, LONGEST_FILTER, STEP_GAMMA
from muonssm.ops.launch import write_numbers, write_struct
from muonssm.ops.muon import is_residual

from ..deltanet import DeltaNet
from ..gated_deltanet import GatedDeltaNet
from ..longhorn import LongHorn
from ..mamba import Mamba
from ..mamba2 import NO_LIMIT, Mamba2
from ..mixer import Mixer
from ..momentum_deltanet import LEAST_LOG_GAMMA, MomentumDeltaNet
from .program import Builder, Input, MixerSlot, Rows, UnsupportedError

GAMMA_KINDS = {"fixed": FIXED_GAMMA, "per_head": HEAD_GAMMA, "per_step": STEP_GAMMA}
NATIVE_IMPLS = ("auto", "native")


def add_mixer(b: Builder, layer: int, mixer: Mixer, norm: nn.Module, h: Rows) -> None:
    """Append the steps of `mixer`, layer number `layer` of the model."""
    functions = [f for kind, f in STEPS.items() if isinstance(mixer, kind) and type(mixer).mix is kind.mix]
    if not functions:
        raise UnsupportedError(f"its mixer {type(mixer).__name__} has no steps")
    if mixer.impl not in NATIVE_IMPLS:
        raise UnsupportedError(f"a mixer asks for impl={mixer.impl!r}")
    if mixer.bidirectional:
        raise UnsupportedError("a mixer is bidirectional")
    if mixer.muon.orthogonalize is not None:
        raise UnsupportedError("a mixer has the experiment Muon(orthogonalize=...)")
    if mixer.conv1d.weight.shape[2] > LONGEST_FILTER:
        raise UnsupportedError(f"a convolution has more than {LONGEST_FILTER} taps")
    functions[0](b, layer, mixer, norm, h)


def _project_in(b: Builder, mixer: Any, norm: nn.Module, h: Rows) -> Rows:
    """Append the projections of the input, followed by the logits of a momentum that depends on the step."""
    matrices, width = [b.linear(mixer.in_proj)], mixer.in_proj.out_features
    if mixer.momentum.variant == "per_step":
        matrices.append(b.matrix(mixer.momentum.weight))
        width += mixer.momentum.weight.shape[0]
    p = b.buffer("projections", width)
    b.project(Input(h, mixer.d_model, norm), matrices, p)
    return p


def _project_out(b: Builder, mixer: Any, x: Input, h: Rows) -> None:
    b.project(x, [b.linear(mixer.out_proj)], h, add=1)


def _convolve(b: Builder, mixer: Mixer, x: Rows) -> tuple[Rows, steps.ConvolveStep]:
    """Append the short convolution of the columns from `x` on; return its output."""
    conv = mixer.conv1d
    channels, _, K = conv.weight.shape
    out = b.buffer("convolved", channels)
    weight = b.derived(lambda w: w[:, 0].T, conv.weight)
    step = steps.ConvolveStep(channels, K, x.step, out.step)
    step.x, step.weight, step.bias, step.out = x.address, weight.data_ptr(), b.vector(conv.bias), out.address
    b.add(steps.CONVOLVE, step)
    return out, step


def _momentum(b: Builder, mixer: Any, step: steps.MemoryStep | steps.ScanStep, p: Rows) -> None:
    """Set where gamma comes from, and how a write is normalized."""
    step.p, step.p_step = p
    step.gamma_kind, step.gamma = GAMMA_KINDS[mixer.momentum.variant], float(mixer.muon.gamma)
    step.gamma_column = mixer.in_proj.out_features
    if step.gamma_kind != FIXED_GAMMA:
        step.gamma_bias = b.vector(mixer.momentum.bias)
    step.write = write_struct(write_numbers(mixer.muon))


def _matrix_memory(
    b: Builder,
    layer: int,
    mixer: Any,
    convolve: steps.ConvolveStep,
    step: steps.MemoryStep,
    q: Rows,
    k: Rows,
    v: Rows,
    eta: float,
) -> Rows:
    """Append the memory with these queries, keys and values; `step` has its sizes and its gates. Return y."""
    y = b.buffer("outputs", step.heads * step.d)
    (step.q, step.q_step), (step.k, step.k_step), (step.v, step.v_step), (step.y, step.y_step) = q, k, v, y
    step.eta, step.residual = eta, int(isinstance(mixer, MomentumDeltaNet) or is_residual(mixer.muon, eta))
    b.need_scratch(2 * (step.m + 64))
    b.add(steps.REMEMBER, step)
    channels, _, K = mixer.conv1d.weight.shape
    b.mixers.append(MixerSlot(layer, convolve, step, ((K - 1, channels), (step.heads, step.d, step.m))))
    return y


def _delta_sizes(mixer: Any, rule: int, heads: int) -> steps.MemoryStep:
    step = steps.MemoryStep(heads, mixer.num_heads, mixer.head_v_dim, mixer.head_k_dim, rule, unit=1)
    step.q_scale = mixer.head_k_dim**-0.5
    return step


def _qkv(mixer: Any, c: Rows) -> tuple[Rows, Rows, Rows]:
    keys = mixer.qkv_widths[0]
    return c, c.column(keys), c.column(2 * keys)


def _deltanet(b: Builder, layer: int, mixer: DeltaNet, norm: nn.Module, h: Rows) -> None:
    p = _project_in(b, mixer, norm, h)
    c, convolve = _convolve(b, mixer, p)
    step = _delta_sizes(mixer, steps.DELTA, mixer.num_heads)
    step.b_column = sum(mixer.qkv_widths)
    _momentum(b, mixer, step, p)
    y = _matrix_memory(b, layer, mixer, convolve, step, *_qkv(mixer, c), eta=1.0)
    z = p.column(step.b_column + mixer.num_heads) if len(mixer.gate_widths) > 1 else None
    _project_out(b, mixer, Input(y, step.heads * step.d, mixer.norm, z), h)


def _gated_deltanet(b: Builder, layer: int, mixer: GatedDeltaNet, norm: nn.Module, h: Rows) -> None:
    p = _project_in(b, mixer, norm, h)
    c, convolve = _convolve(b, mixer, p)
    step = _delta_sizes(mixer, steps.GATED_DELTA, mixer.num_value_heads)
    qkv, values, heads = sum(mixer.qkv_widths), mixer.gate_widths[0], mixer.num_value_heads
    step.a_column, step.b_column = qkv + values, qkv + values + heads
    step.gate_bias, step.dt_bias = b.vector(mixer.gate_bias), b.vector(mixer.dt_bias)
    step.A_log = b.vector(mixer.A_log)
    _momentum(b, mixer, step, p)
    y = _matrix_memory(b, layer, mixer, convolve, step, *_qkv(mixer, c), eta=1.0)
    _project_out(b, mixer, Input(y, values, mixer.norm, p.column(qkv)), h)


def _momentum_deltanet(b: Builder, layer: int, mixer: MomentumDeltaNet, norm: nn.Module, h: Rows) -> None:
    if mixer.gate_activation != "silu":
        raise UnsupportedError(f"a mixer has gate_activation={mixer.gate_activation!r}")
    p = _project_in(b, mixer, norm, h)
    c, convolve = _convolve(b, mixer, p)
    step = _delta_sizes(mixer, steps.MOMENTUM_DELTA, mixer.num_value_heads)
    qkv, values, heads = sum(mixer.qkv_widths), mixer.gate_widths[0], mixer.num_value_heads
    columns = [qkv + values + i * heads for i in range(4)]
    step.a_column, step.b_column, step.m_column, step.e_column = columns
    step.e_scale, step.least = mixer.d_model**-0.5, LEAST_LOG_GAMMA
    for name in ("dt_bias", "A_log", "D_log", "log_factor", "Mu_log", "mu_bias"):
        setattr(step, name, b.vector(getattr(mixer, name)))
    _momentum(b, mixer, step, p)
    y = _matrix_memory(b, layer, mixer, convolve, step, *_qkv(mixer, c), eta=1.0)
    _project_out(b, mixer, Input(y, values, mixer.norm, p.column(qkv)), h)


def _mamba2(b: Builder, layer: int, mixer: Mamba2, norm: nn.Module, h: Rows) -> None:
    p = _project_in(b, mixer, norm, h)
    inner, keys = mixer.d_inner, mixer.groups * mixer.d_state
    c, convolve = _convolve(b, mixer, p.column(inner))
    step = steps.MemoryStep(mixer.num_heads, mixer.groups, mixer.head_dim, mixer.d_state, steps.MAMBA2)
    step.a_column = 2 * inner + 2 * keys
    step.dt_bias, step.A_log = b.vector(mixer.dt_bias), b.vector(mixer.A_log)
    step.least, step.most = mixer.dt_limit if mixer.dt_limit != NO_LIMIT else (0.0, float("inf"))
    step.skip, step.skip_per_head = b.vector(mixer.D), 1
    step.z, step.z_step = p
    _momentum(b, mixer, step, p)
    k, q = c.column(inner), c.column(inner + keys)
    y = _matrix_memory(b, layer, mixer, convolve, step, q, k, c, eta=0.0)
    _project_out(b, mixer, Input(y, inner, mixer.norm), h)


def _longhorn(b: Builder, layer: int, mixer: LongHorn, norm: nn.Module, h: Rows) -> None:
    p = _project_in(b, mixer, norm, h)
    inner, R, N = mixer.d_inner, mixer.dt_rank, mixer.d_state
    c, convolve = _convolve(b, mixer, p)
    small = b.buffer("keys", R + 2 * N)
    b.project(Input(c, inner), [b.linear(mixer.x_proj)], small)
    k, q, z = small.column(R), small.column(R + N), p.column(inner)
    if mixer.form == "diagonal":
        logits = b.buffer("steps", inner)
        b.project(Input(small, R), [b.linear(mixer.dt_head)], logits)
        y = _diagonal_memory(b, layer, mixer, convolve, p, c, logits, small, None)
    else:
        heads = mixer.num_heads
        weight = b.derived(lambda weight: weight.unflatten(0, (-1, mixer.head_dim)).mean(1), mixer.dt_head.weight)
        bias = b.derived(lambda bias: bias.view(-1, mixer.head_dim).mean(1), mixer.dt_head.bias)
        # The logits of the write gates stand behind the keys, so that one row of `p` cannot hold both.
        logits = b.buffer("steps", heads)
        b.project(
            Input(small, R), [steps.Matrix(steps.FLOAT32_ROWS, heads, weight.data_ptr(), None, bias.data_ptr())], logits
        )
        step = steps.MemoryStep(heads, 1, mixer.head_dim, N, steps.LONGHORN)
        step.skip = b.vector(mixer.D)
        step.z, step.z_step = z
        _momentum(b, mixer, step, p)
        step.logits, step.logits_step = logits
        y = _matrix_memory(b, layer, mixer, convolve, step, q, k, c, eta=1.0)
    _project_out(b, mixer, Input(y, inner), h)


def _mamba(b: Builder, layer: int, mixer: Mamba, norm: nn.Module, h: Rows) -> None:
    p = _project_in(b, mixer, norm, h)
    inner, R, N = mixer.d_inner, mixer.dt_rank, mixer.d_state
    c, convolve = _convolve(b, mixer, p)
    small, dt = b.buffer("keys", R + 2 * N), b.buffer("steps", inner)
    b.project(Input(c, inner), [b.linear(mixer.x_proj)], small)
    b.project(Input(small, R), [b.linear(mixer.dt_proj)], dt, activation=steps.SOFTPLUS)
    A = b.derived(lambda A_log: -A_log.exp(), mixer.A_log).data_ptr()
    y = _diagonal_memory(b, layer, mixer, convolve, p, c, dt, small, A)
    _project_out(b, mixer, Input(y, inner), h)


def _diagonal_memory(
    b: Builder,
    layer: int,
    mixer: Any,
    convolve: steps.ConvolveStep,
    p: Rows,
    c: Rows,
    dt: Rows,
    small: Rows,
    A: int | None,
) -> Rows:
    """Append the selective scan of `c` with step sizes `dt`; return (y + D x) silu(z)."""
    inner, R, N = mixer.d_inner, mixer.dt_rank, mixer.d_state
    y = b.buffer("outputs", inner)
    step = steps.ScanStep(inner, N)
    (step.x, step.x_step), (step.dt, step.dt_step), (step.y, step.y_step) = c, dt, y
    step.B, step.B_step = small.column(R)
    step.C = small.column(R + N).address
    step.z, step.z_step = p.column(inner)
    step.A, step.skip = A, b.vector(mixer.D)
    _momentum(b, mixer, step, p)
    b.need_scratch(2 * (inner + 64))
    b.add(steps.SCAN, step)
    channels, _, K = mixer.conv1d.weight.shape
    b.mixers.append(MixerSlot(layer, convolve, step, ((K - 1, channels), (inner, N))))
    return y


STEPS: dict[type[Mixer], Callable[[Builder, int, Any, nn.Module, Rows], None]] = {
    Mamba: _mamba,
    Mamba2: _mamba2,
    DeltaNet: _deltanet,
    GatedDeltaNet: _gated_deltanet,
    LongHorn: _longhorn,
    MomentumDeltaNet: _momentum_deltanet,
}
