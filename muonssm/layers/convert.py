"""Load and export weights under the parameter names of transformers and flash-linear-attention (fla).

Mamba and Mamba-2 have the names of the original release and of transformers. For the delta rule this library has one
projection `in_proj` with rows [q; k; v; gates] and one convolution where the others have several; the maps in this file
concatenate and split them.

    Weights     a state dict: parameter names to tensors
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from muonssm.ops import Muon

from .deltanet import DeltaNet
from .gated_deltanet import GatedDeltaNet
from .mamba import Mamba
from .mamba2 import Mamba2
from .mixer import Mixer
from .momentum_deltanet import MomentumDeltaNet

Weights = Mapping[str, Tensor]
AnyMixer = TypeVar("AnyMixer", bound=Mixer)


@dataclass(frozen=True)
class WeightMap:
    """Rename the state dict of one mixer, from another library's names to ours and back."""

    to_ours: Callable[[Weights, Any], dict[str, Tensor]]
    to_theirs: Callable[[Weights, Any], dict[str, Tensor]]


def load_weights(mixer: AnyMixer, weights: Weights, source: str) -> AnyMixer:
    """Load another library's parameters into `mixer`, in place.

    Args:
        mixer: a mixer with a map for `source`.
        weights: parameter names, without a prefix, to tensors.
        source: `"transformers"` (MambaMixer, Mamba2Mixer, Qwen3-Next's gated delta net) or `"fla"`
            (flash-linear-attention's DeltaNet, GatedDeltaNet and MomentumDeltaNet).

    A learned momentum, which no other library has, keeps its values. Any other missing or unknown name and any other
    shape is an error, and nothing is loaded.
    """
    ours = to_ours(mixer, weights, source)
    parameters = dict(mixer.named_parameters())
    missing = [name for name in parameters if name not in ours and not is_learned_momentum(name)]
    unknown = [name for name in ours if name not in parameters]
    if missing or unknown:
        raise ValueError(
            f"weights must be those of one {type(mixer).__name__} of {source!r}, without a prefix; "
            f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}"
        )
    for name, tensor in ours.items():
        expected = parameters[name].shape
        if tensor.shape != expected:
            raise ValueError(f"{name} must have shape {list(expected)}, got {list(tensor.shape)}")
    with torch.no_grad():
        for name, tensor in ours.items():
            parameters[name].copy_(tensor)
    return mixer


def export_weights(mixer: Mixer, target: str) -> dict[str, Tensor]:
    """Return the mixer's parameters under another library's names, without a learned momentum."""
    own = {name: p.detach() for name, p in mixer.named_parameters() if not is_learned_momentum(name)}
    return to_theirs(mixer, own, target)


def to_ours(mixer: Mixer, weights: Weights, source: str) -> dict[str, Tensor]:
    """Rename another library's state dict of one mixer to our names."""
    return _find_map(mixer, source).to_ours(weights, mixer)


def to_theirs(mixer: Mixer, weights: Weights, target: str) -> dict[str, Tensor]:
    """Rename our state dict of one mixer to another library's names."""
    return _find_map(mixer, target).to_theirs(weights, mixer)


def is_learned_momentum(name: str) -> bool:
    """Whether a parameter belongs to a learned momentum, which no other library has."""
    return name.startswith("momentum.")


def from_transformers(module: nn.Module, muon: Muon | None = None, momentum: str = "fixed") -> Mixer:
    """Build a mixer with the weights of transformers' `MambaMixer`, `Mamba2Mixer` or `Qwen3NextGatedDeltaNet`.

    Args:
        module: the loaded module. Its weights are copied with their dtypes and `requires_grad`.
        muon: None or `Muon.off()` computes what the module does; `Muon()` adds momentum and normalization.
        momentum: `"fixed"`, `"per_head"` or `"per_step"`.
    """
    name = type(module).__name__
    if name not in BUILDERS:
        raise TypeError(f"module must be one of {', '.join(BUILDERS)} of transformers, got {name}")
    activation = getattr(module, "activation", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"module must have the activation 'silu', got {activation!r}")
    mixer = BUILDERS[name](module, Muon.off() if muon is None else muon, momentum)
    mixer = mixer.to(next(module.parameters()).device).train(module.training)
    load_weights(mixer, module.state_dict(), "transformers")
    values = to_ours(mixer, module.state_dict(), "transformers")
    # Masks of trained parameters take the same way as the weights, so that frozen ones stay frozen.
    trained = {name: torch.full(p.shape, float(p.requires_grad)) for name, p in module.named_parameters()}
    for name, mask in to_ours(mixer, trained, "transformers").items():
        parameter = mixer.get_parameter(name)
        parameter.data = parameter.data.to(values[name].dtype)
        parameter.requires_grad_(bool(mask.any()))
    return mixer


def _mamba(module: Any, muon: Muon, momentum: str) -> Mixer:
    d_model, d_inner = module.hidden_size, module.intermediate_size
    mixer = Mamba(
        d_model, module.ssm_state_size, d_inner / d_model, module.time_step_rank, module.conv_kernel_size,
        module.in_proj.bias is not None, muon, momentum,
    )  # fmt: skip
    return _match_conv_bias(mixer, module)


def _mamba2(module: Any, muon: Muon, momentum: str) -> Mixer:
    d_model, d_inner = module.hidden_size, module.intermediate_size
    mixer = Mamba2(
        d_model, module.ssm_state_size, d_inner / d_model, module.head_dim, module.n_groups, module.conv_kernel_size,
        module.in_proj.bias is not None, muon, momentum,
    )  # fmt: skip
    low, high = module.time_step_limit
    mixer.dt_limit = (float(low), float(high))
    mixer.norm.eps = module.layer_norm_epsilon
    return _match_conv_bias(mixer, module)


def _match_conv_bias(mixer: Mixer, module: Any) -> Mixer:
    """Remove the convolution's bias if the original has none."""
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


# ---- Qwen3-Next: in_proj_qkvz has rows [q, k, v, z] per key head, in_proj_ba [b, a]; ours has [q, k, v, z, a, b] ----

_QWEN_PROJECTIONS = ("in_proj_qkvz.weight", "in_proj_ba.weight")


def _qwen_widths(mixer: GatedDeltaNet) -> tuple[list[int], list[int]]:
    """Count the rows per key head of q, k, v, z in in_proj_qkvz and of b, a in in_proj_ba."""
    shared = mixer.num_value_heads // mixer.num_heads
    values = shared * mixer.head_v_dim
    return [mixer.head_k_dim, mixer.head_k_dim, values, values], [shared, shared]


def _from_qwen(weights: Weights, mixer: GatedDeltaNet) -> dict[str, Tensor]:
    ours = dict(weights)
    _check_names(ours, _QWEN_PROJECTIONS, "Qwen3NextGatedDeltaNet of 'transformers'")
    blocks = []
    for name, widths in zip(_QWEN_PROJECTIONS, _qwen_widths(mixer), strict=True):
        per_head = ours.pop(name).unflatten(0, (mixer.num_heads, sum(widths)))
        blocks += [block.flatten(0, 1) for block in per_head.split(widths, dim=1)]
    q, k, v, z, b, a = blocks
    return {**ours, "in_proj.weight": torch.cat([q, k, v, z, a, b])}


def _to_qwen(weights: Weights, mixer: GatedDeltaNet) -> dict[str, Tensor]:
    theirs = dict(weights)
    if theirs.pop("gate_bias", None) is not None:
        raise ValueError("gate_bias must be False for Qwen3-Next, whose gates have no bias, got True")
    q, k, v, z, a, b = theirs.pop("in_proj.weight").split([*mixer.qkv_widths, *mixer.gate_widths])
    for name, blocks in zip(_QWEN_PROJECTIONS, ((q, k, v, z), (b, a)), strict=True):
        per_head = [block.unflatten(0, (mixer.num_heads, -1)) for block in blocks]
        theirs[name] = torch.cat(per_head, dim=1).flatten(0, 1)
    return theirs


# ---- flash-linear-attention: one projection and one convolution for each of q, k, v and the gates ----

_FLA_CONVOLUTIONS = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")
_FLA_NAMES = {"o_norm.weight": "norm.weight", "o_proj.weight": "out_proj.weight"}


def _fla_projections(mixer: DeltaNet | GatedDeltaNet | MomentumDeltaNet) -> list[str]:
    """List fla's names of the projections, in the order of `in_proj`."""
    if isinstance(mixer, MomentumDeltaNet):
        names = ["q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj", "m_proj", "e_proj"]
    elif isinstance(mixer, GatedDeltaNet):
        names = ["q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj"]
    else:
        names = ["q_proj", "k_proj", "v_proj", "b_proj", *["g_proj"][: len(mixer.gate_widths) - 1]]
    return [f"{name}.weight" for name in names]


def _from_fla(weights: Weights, mixer: DeltaNet | GatedDeltaNet | MomentumDeltaNet) -> dict[str, Tensor]:
    rest = dict(weights)
    names = _fla_projections(mixer)
    _check_names(rest, (*names, *_FLA_CONVOLUTIONS), f"{type(mixer).__name__} of 'fla'")
    ours = {"in_proj.weight": torch.cat([rest.pop(name) for name in names])}
    ours["conv1d.weight"] = torch.cat([rest.pop(name) for name in _FLA_CONVOLUTIONS])
    if isinstance(mixer, GatedDeltaNet) and mixer.gate_bias is not None:
        zeros = mixer.gate_bias.new_zeros(mixer.num_value_heads)
        ours["gate_bias"] = torch.cat([rest.pop(f"{name}.bias", zeros) for name in ("a_proj", "b_proj")])
    return {**ours, **{_FLA_NAMES.get(name, name): tensor for name, tensor in rest.items()}}


def _to_fla(weights: Weights, mixer: DeltaNet | GatedDeltaNet | MomentumDeltaNet) -> dict[str, Tensor]:
    rest = dict(weights)
    blocks = rest.pop("in_proj.weight").split([*mixer.qkv_widths, *mixer.gate_widths])
    theirs = dict(zip(_fla_projections(mixer), blocks, strict=True))
    theirs |= dict(zip(_FLA_CONVOLUTIONS, rest.pop("conv1d.weight").split(mixer.qkv_widths), strict=True))
    if "gate_bias" in rest:
        a, b = rest.pop("gate_bias").chunk(2)
        theirs |= {"a_proj.bias": a, "b_proj.bias": b}
    back = {ours: name for name, ours in _FLA_NAMES.items()}
    return {**theirs, **{back.get(name, name): tensor for name, tensor in rest.items()}}


def _check_names(weights: Weights, names: tuple[str, ...], owner: str) -> None:
    missing = [name for name in names if name not in weights]
    if missing:
        raise ValueError(f"weights must be those of one {owner}; missing: {', '.join(missing)}")


MAPS: dict[tuple[str, type[Mixer]], WeightMap] = {
    ("transformers", Mamba): WeightMap(_same, _same),
    ("transformers", Mamba2): WeightMap(_same, _same),
    ("transformers", GatedDeltaNet): WeightMap(_from_qwen, _to_qwen),
    ("fla", DeltaNet): WeightMap(_from_fla, _to_fla),
    ("fla", GatedDeltaNet): WeightMap(_from_fla, _to_fla),
    ("fla", MomentumDeltaNet): WeightMap(_from_fla, _to_fla),
}


def _find_map(mixer: Mixer, library: str) -> WeightMap:
    for (name, mixer_class), weight_map in MAPS.items():
        if name == library and isinstance(mixer, mixer_class):
            return weight_map
    known = ", ".join(f"{name!r} for {mixer_class.__name__}" for name, mixer_class in MAPS)
    raise ValueError(f"source or target must be one of {known}; got {library!r} for {type(mixer).__name__}")
