"""Weights in and out: mixers from other libraries' modules, and their parameter names.

Mamba and Mamba-2 are named as in the original release and in transformers. For the delta rule this library makes one
projection `[q; k; v; ...]` and one convolution where others have several; the maps here join and cut them.

    Weights     a state dict: parameter name to tensor
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from muonssm.ops import Muon

from .delta_rule import DeltaRule, Heads
from .deltanet import DeltaNet
from .gated_deltanet import GatedDeltaNet
from .mamba import Mamba
from .mamba2 import Mamba2
from .mixer import Mixer

Weights = Mapping[str, Tensor]
AnyMixer = TypeVar("AnyMixer", bound=Mixer)


@dataclass(frozen=True)
class WeightMap:
    """How another library names a mixer's parameters. Both directions work on state dicts of one mixer."""

    to_ours: Callable[[Weights, Mixer], dict[str, Tensor]]
    to_theirs: Callable[[Weights, Mixer], dict[str, Tensor]]


def load_weights(mixer: AnyMixer, weights: Weights, source: str) -> AnyMixer:
    """Loads another library's parameters into `mixer`, in place.

    Args:
        mixer: any mixer with a map for `source`.
        weights: parameter names, without a prefix, to tensors.
        source: `"transformers"` (MambaMixer, Mamba2Mixer, Qwen3-Next's gated delta net) or `"fla"`
            (flash-linear-attention's DeltaNet and GatedDeltaNet).

    Parameters of a learned momentum, which no other library has, keep their values. Anything else that is missing, left
    over or of another shape is an error, and nothing is loaded.
    """
    ours = to_ours(mixer, weights, source)
    parameters = dict(mixer.named_parameters())
    missing = [name for name in parameters if name not in ours and not is_learned_momentum(name)]
    unknown = [name for name in ours if name not in parameters]
    if missing or unknown:
        raise ValueError(
            f"weights have {', '.join(unknown) or 'nothing'} too much and lack {', '.join(missing) or 'nothing'}; "
            f"they may be those of one {type(mixer).__name__} of {source!r}, without a prefix"
        )
    for name, tensor in ours.items():
        if tensor.shape != parameters[name].shape:
            found, wanted = list(tensor.shape), list(parameters[name].shape)
            raise ValueError(f"{name} has shape {found}; for this {type(mixer).__name__} it may be {wanted}")
    with torch.no_grad():
        for name, tensor in ours.items():
            parameters[name].copy_(tensor)
    return mixer


def export_weights(mixer: Mixer, target: str) -> dict[str, Tensor]:
    """The mixer's parameters under another library's names; what that library lacks (learned momentum) is left out."""
    own = {name: p.detach() for name, p in mixer.named_parameters() if not is_learned_momentum(name)}
    return to_theirs(mixer, own, target)


def to_ours(mixer: Mixer, weights: Weights, source: str) -> dict[str, Tensor]:
    """Another library's state dict of one mixer, under our names."""
    return _map_of(mixer, source).to_ours(weights, mixer)


def to_theirs(mixer: Mixer, weights: Weights, target: str) -> dict[str, Tensor]:
    """Our state dict of one mixer, under another library's names."""
    return _map_of(mixer, target).to_theirs(weights, mixer)


def is_learned_momentum(name: str) -> bool:
    """Whether a parameter is one that no other library has."""
    return name.startswith("momentum.")


def from_transformers(module: nn.Module, muon: Muon | None = None, momentum: str = "fixed") -> Mixer:
    """A mixer with the weights of transformers' `MambaMixer`, `Mamba2Mixer` or `Qwen3NextGatedDeltaNet`.

    Args:
        module: the loaded module; its weights are copied, with their dtypes and whether they are trained.
        muon: None or `Muon.off()` computes what the module does; `Muon()` adds momentum and normalisation.
        momentum: `"fixed"`, `"per_head"` or `"per_step"`.
    """
    kind = type(module).__name__
    if kind not in BUILDERS:
        raise TypeError(f"module is of type {kind}; it may be one of {tuple(BUILDERS)} of transformers")
    activation = getattr(module, "activation", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"module's activation is {activation!r}; it may be 'silu'")
    mixer = BUILDERS[kind](module, Muon.off() if muon is None else muon, momentum)
    mixer = mixer.to(next(module.parameters()).device).train(module.training)
    load_weights(mixer, module.state_dict(), "transformers")
    values = to_ours(mixer, module.state_dict(), "transformers")
    trained = {name: torch.full(p.shape, float(p.requires_grad)) for name, p in module.named_parameters()}
    for name, flag in to_ours(mixer, trained, "transformers").items():  # what was frozen stays so
        parameter = mixer.get_parameter(name)
        parameter.data = parameter.data.to(values[name].dtype)
        parameter.requires_grad_(bool(flag.any()))
    return mixer


def _mamba(module: Any, muon: Muon, momentum: str) -> Mixer:
    d_model, d_inner = module.hidden_size, module.intermediate_size
    mixer = Mamba(
        d_model, module.ssm_state_size, d_inner / d_model, module.time_step_rank, module.conv_kernel_size,
        module.in_proj.bias is not None, muon, momentum,
    )  # fmt: skip
    return _without_conv_bias(mixer, module)


def _mamba2(module: Any, muon: Muon, momentum: str) -> Mixer:
    d_model, d_inner = module.hidden_size, module.intermediate_size
    mixer = Mamba2(
        d_model, module.ssm_state_size, d_inner / d_model, module.head_dim, module.n_groups, module.conv_kernel_size,
        module.in_proj.bias is not None, muon, momentum,
    )  # fmt: skip
    low, high = module.time_step_limit
    mixer.dt_limit = (float(low), float(high))
    mixer.norm.eps = module.layer_norm_epsilon
    return _without_conv_bias(mixer, module)


def _without_conv_bias(mixer: Mixer, module: Any) -> Mixer:
    if module.conv1d.bias is None:
        mixer.conv1d.bias = None
    return mixer


def _qwen3_next(module: Any, muon: Muon, momentum: str) -> Mixer:
    mixer = GatedDeltaNet(
        module.hidden_size, module.num_k_heads, module.head_k_dim, module.head_v_dim, module.num_v_heads,
        module.conv_kernel_size, False, muon, momentum,
    )  # fmt: skip
    mixer.norm.eps = module.layer_norm_epsilon
    return mixer


BUILDERS: dict[str, Callable[[Any, Muon, str], Mixer]] = {
    "MambaMixer": _mamba,
    "Mamba2Mixer": _mamba2,
    "Qwen3NextGatedDeltaNet": _qwen3_next,
}


def _same(weights: Weights, mixer: Mixer) -> dict[str, Tensor]:
    return dict(weights)


# ---- Qwen3-Next: in_proj_qkvz has [q, k, v, z] of each key head, in_proj_ba [b, a]; ours is [q, k, v, z, a, b] ----


_QWEN_PROJECTIONS = ("in_proj_qkvz.weight", "in_proj_ba.weight")


def _qwen_widths(heads: Heads) -> tuple[list[int], list[int]]:
    """Rows of a key head in in_proj_qkvz and in in_proj_ba."""
    shared = heads.values // heads.keys
    return [heads.key_dim, heads.key_dim, shared * heads.value_dim, shared * heads.value_dim], [shared, shared]


def _from_qwen(weights: Weights, mixer: Mixer) -> dict[str, Tensor]:
    heads = _delta(mixer).heads
    ours = dict(weights)
    missing = [name for name in _QWEN_PROJECTIONS if name not in ours]
    if missing:
        raise ValueError(f"weights lack {', '.join(missing)}; they may be those of one Qwen3NextGatedDeltaNet")
    parts = []
    for name, widths in zip(_QWEN_PROJECTIONS, _qwen_widths(heads), strict=True):
        by_head = ours.pop(name).unflatten(0, (heads.keys, sum(widths)))
        parts += [part.flatten(0, 1) for part in by_head.split(widths, dim=1)]
    q, k, v, z, b, a = parts
    return {**ours, "in_proj.weight": torch.cat([q, k, v, z, a, b])}


def _to_qwen(weights: Weights, mixer: Mixer) -> dict[str, Tensor]:
    heads = _delta(mixer).heads
    theirs = dict(weights)
    if theirs.pop("gate_bias", None) is not None:
        raise ValueError("the mixer has gate_bias; Qwen3-Next's gates have none, make it with gate_bias=False")
    q, k, v, z, a, b = theirs.pop("in_proj.weight").split([*heads.widths, heads.widths[2], heads.values, heads.values])
    for name, parts in zip(_QWEN_PROJECTIONS, ((q, k, v, z), (b, a)), strict=True):
        theirs[name] = torch.cat([part.unflatten(0, (heads.keys, -1)) for part in parts], dim=1).flatten(0, 1)
    return theirs


# ---- flash-linear-attention: one projection and one convolution each ----

_FLA_CONVOLUTIONS = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")
_FLA_NAMES = {"o_norm.weight": "norm.weight", "o_proj.weight": "out_proj.weight"}


def _fla_projections(mixer: Mixer) -> list[str]:
    """Names of the projections, in the order of ours."""
    if isinstance(mixer, GatedDeltaNet):
        return ["q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj"]
    return ["q_proj", "k_proj", "v_proj", "b_proj", *["g_proj"][: len(_delta(mixer).others) - 1]]


def _from_fla(weights: Weights, mixer: Mixer) -> dict[str, Tensor]:
    rest = dict(weights)
    names = [f"{name}.weight" for name in _fla_projections(mixer)]
    missing = [name for name in (*names, *_FLA_CONVOLUTIONS) if name not in rest]
    if missing:
        raise ValueError(f"weights lack {', '.join(missing)}; they may be those of one {type(mixer).__name__} of 'fla'")
    ours = {"in_proj.weight": torch.cat([rest.pop(name) for name in names])}
    ours["conv1d.weight"] = torch.cat([rest.pop(name) for name in _FLA_CONVOLUTIONS])
    if isinstance(mixer, GatedDeltaNet) and mixer.gate_bias is not None:
        zeros = mixer.gate_bias.new_zeros(mixer.heads.values)
        ours["gate_bias"] = torch.cat([rest.pop(f"{name}.bias", zeros) for name in ("a_proj", "b_proj")])
    return {**ours, **{_FLA_NAMES.get(name, name): tensor for name, tensor in rest.items()}}


def _to_fla(weights: Weights, mixer: Mixer) -> dict[str, Tensor]:
    heads, rest = _delta(mixer).heads, dict(weights)
    widths = [*heads.widths, *_delta(mixer).others]
    parts = rest.pop("in_proj.weight").split(widths)
    theirs = {f"{name}.weight": part for name, part in zip(_fla_projections(mixer), parts, strict=True)}
    theirs |= dict(zip(_FLA_CONVOLUTIONS, rest.pop("conv1d.weight").split(heads.widths), strict=True))
    if "gate_bias" in rest:
        a, b = rest.pop("gate_bias").chunk(2)
        theirs |= {"a_proj.bias": a, "b_proj.bias": b}
    back = {ours: name for name, ours in _FLA_NAMES.items()}
    return {**theirs, **{back.get(name, name): tensor for name, tensor in rest.items()}}


def _delta(mixer: Mixer) -> DeltaRule:
    assert isinstance(mixer, DeltaRule)
    return mixer


MAPS: dict[tuple[str, type[Mixer]], WeightMap] = {
    ("transformers", Mamba): WeightMap(_same, _same),
    ("transformers", Mamba2): WeightMap(_same, _same),
    ("transformers", GatedDeltaNet): WeightMap(_from_qwen, _to_qwen),
    ("fla", DeltaNet): WeightMap(_from_fla, _to_fla),
    ("fla", GatedDeltaNet): WeightMap(_from_fla, _to_fla),
}


def _map_of(mixer: Mixer, library: str) -> WeightMap:
    for (name, kind), weight_map in MAPS.items():
        if name == library and isinstance(mixer, kind):
            return weight_map
    known = ", ".join(f"{kind.__name__} of {name!r}" for name, kind in MAPS)
    raise ValueError(f"there is no map between {type(mixer).__name__} and {library!r}; there are: {known}")
