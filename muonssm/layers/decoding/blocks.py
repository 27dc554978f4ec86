"""`build_program`: the steps of a whole model. Those of mixers are in `mixers.py`, those of attention and MLPs here."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from muonssm.ops import decode_steps as steps

from ..mixer import Mixer
from .mixers import add_mixer
from .model_parts import ModelParts
from .program import Builder, Input, Program, Rows, UnsupportedError, WindowSlot
from .weights import PackedMatrix

FIXED_FREQUENCIES = ("default", "linear", "yarn", "llama3")  # types of rotary embeddings
NORMS = ("RMSNorm", "MambaRMSNorm", "Mamba2RMSNorm", "MistralRMSNorm")


def build_program(model: nn.Module, parts: ModelParts, weights: str, packed: dict[int, PackedMatrix]) -> Program:
    """Build the program of a model; raise UnsupportedError with the reason if it has none."""
    modules = _modules(model)
    b = Builder(weights, packed)
    table: Any = parts.embedding.weight
    head: Any = parts.head
    if type(parts.embedding) is not nn.Embedding or parts.embedding.max_norm is not None:
        raise UnsupportedError(f"its embedding is a {type(parts.embedding).__name__} or has max_norm")
    width = table.shape[1]
    h = b.buffer("residual", width)
    rotary = _embed(b, parts, h)
    for layer, block in enumerate(parts.blocks):
        _check_norm(block.norm)
        if isinstance(block.mixer, Mixer):
            add_mixer(b, layer, block.mixer, block.norm, h)
        else:
            _add_attention(b, layer, block.mixer, block.norm, h, rotary, parts.window)
        if block.mlp is not None and block.mlp_norm is not None:
            _add_mlp(b, block.mlp, block.mlp_norm, h)
    _check_norm(parts.norm)
    vocabulary = head.weight.shape[0]
    b.project(Input(h, width, parts.norm), [b.linear(head)], Rows(0, vocabulary), last=1)
    children = [(child._modules, name, grandchild) for child in modules for name, grandchild in child._modules.items()]
    owners = [
        (child._parameters, name, parameter) for child in modules for name, parameter in child._parameters.items()
    ]
    hooks = [hooks for child in modules for hooks in (child._forward_hooks, child._forward_pre_hooks)]
    return Program(
        b.steps, b.mixers, b.windows, b.memory, b.pointed, b.copied, b.scratch, table.shape[0], vocabulary,
        children + owners, hooks,
    )  # fmt: skip


def _modules(model: nn.Module) -> list[nn.Module]:
    """Return all modules inside of the model; raise if one of them does more than its class says."""
    modules = [module for module in model.modules() if module is not model]
    for module in modules:
        if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
            raise UnsupportedError(f"its {type(module).__name__} has a hook")
    return modules


def _check_norm(norm: nn.Module) -> None:
    if type(norm).__name__ not in NORMS:
        raise UnsupportedError(f"a norm is a {type(norm).__name__}")


def _embed(b: Builder, parts: ModelParts, h: Rows) -> Rows | None:
    """Append the embedding; return the rows of the rotary embedding's angles, if there is one."""
    table: Any = parts.embedding.weight
    step = steps.EmbedStep(columns=table.shape[1], table=b.matrix(table))
    step.out, step.out_step = h
    angles = None
    if parts.rotary is not None:
        if parts.rotary.rope_type not in FIXED_FREQUENCIES:
            raise UnsupportedError(f"its rotary embedding is {parts.rotary.rope_type!r}")
        frequencies: Any = parts.rotary.inv_freq
        step.angles, step.scaling = frequencies.numel(), float(parts.rotary.attention_scaling)  # type: ignore[arg-type]
        angles = b.buffer("angles", 2 * step.angles)
        step.frequencies = b.derived(Tensor.float, frequencies).data_ptr()
        step.rotary, step.rotary_step = angles
    b.add(steps.EMBED, step)
    return angles


def _add_attention(
    b: Builder, layer: int, attention: Any, norm: nn.Module, h: Rows, rotary: Rows | None, window: int
) -> None:
    """Append h = h + attention(norm(h)) over the last `window` tokens."""
    if type(attention).__name__ != "MistralAttention" or rotary is None:
        raise UnsupportedError(f"a layer is a {type(attention).__name__}")
    size, projections = attention.head_dim, [attention.q_proj, attention.k_proj, attention.v_proj]
    heads, key_heads = (projections[i].out_features // size for i in range(2))
    p = b.buffer("projections", sum(layer.out_features for layer in projections))
    b.project(Input(h, attention.q_proj.in_features, norm), list(map(b.linear, projections)), p)
    y = b.buffer("outputs", heads * size)
    step = steps.AttendStep(heads, key_heads, size, window, scale=attention.scaling)
    (step.p, step.p_step), (step.y, step.y_step) = p, y
    step.rotary, step.rotary_step = rotary
    b.windows.append(WindowSlot(layer, step, size))
    b.add(steps.ATTEND, step)
    b.project(Input(y, heads * size), [b.linear(attention.o_proj)], h, add=1)


def _add_mlp(b: Builder, mlp: Any, norm: nn.Module, h: Rows) -> None:
    """Append h = h + down(silu(gate(norm(h))) up(norm(h)))."""
    _check_norm(norm)
    if type(mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
        raise UnsupportedError(f"the activation of an MLP is {type(mlp.act_fn).__name__}")
    u = b.buffer("mlp", mlp.up_proj.out_features)
    pair = [b.linear(mlp.gate_proj), b.linear(mlp.up_proj)]
    b.project(Input(h, mlp.up_proj.in_features, norm), pair, u, swiglu=1)
    b.project(Input(u, mlp.up_proj.out_features), [b.linear(mlp.down_proj)], h, add=1)
