"""`upcycle`: replace the mixers of a loaded transformers model by Muon mixers with the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from muonssm.ops import MemoryState, Muon

from .convert import BUILDERS, from_transformers, is_learned_momentum, to_ours, to_theirs
from .gated_deltanet import GatedDeltaNet
from .mamba import Mamba
from .mamba2 import Mamba2
from .mixer import Mixer
from .state import MixerState


def upcycle(model: nn.Module, muon: Muon = Muon(), momentum: str = "fixed") -> nn.Module:  # noqa: B008  frozen
    """Replace every Mamba, Mamba-2 or Qwen3-Next mixer in `model`, in place, and return the model.

    Args:
        model: a loaded transformers model (MambaForCausalLM, Mamba2ForCausalLM, Qwen3NextForCausalLM, their bases, or
            any other module with such mixers inside).
        muon: momentum and normalization to add. With `Muon.off()` the model computes what it did before.
        momentum: `"fixed"`, `"per_head"` or `"per_step"`.

    The weights are copied. Training, gradient checkpointing, padded batches and `generate()` of transformers work as
    before. State dicts keep transformers' names: `save_pretrained` writes a checkpoint of the original architecture,
    which can be loaded and upcycled again. A learned momentum has additional keys, which only `load_state_dict` on an
    upcycled model reads.
    """
    name = type(model).__name__
    if name in BUILDERS:
        raise ValueError(f"model must contain mixers, got a single {name}; use from_transformers")
    if any(isinstance(module, TransformersCall) for module in model.modules()):
        raise ValueError(
            f"model must not be upcycled already, got a {name} that is; for another rule, save_pretrained writes the "
            "original architecture: load that and upcycle it"
        )
    originals = [
        (parent, attribute, child)
        for parent in model.modules()
        for attribute, child in parent.named_children()
        if type(child).__name__ in BUILDERS
    ]
    if not originals:
        raise ValueError(f"model must contain one of {', '.join(BUILDERS)}, got a {name} without any")
    for parent, attribute, child in originals:
        setattr(parent, attribute, _as_layer(from_transformers(child, muon, momentum), child))
    if name.endswith("ForCausalLM"):
        from .decoding.transformers_models import use_native_decoding  # imports transformers, as `model` did

        use_native_decoding(model)
    return model


class TransformersCall(Mixer):
    """Give a `Mixer` the call of transformers' recurrent layers: a cache in, one tensor out.

    The cache holds the convolution's tail as its conv state, and S and M stacked as its recurrent state.
    """

    layer_idx: int

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **others: Any
    ) -> Tensor:
        """Compute y `[B, L, d_model]`; of the other arguments, use packed bounds (Mamba in transformers has none)."""
        state = None if cache_params is None else self._read(cache_params)
        L = hidden_states.shape[1]
        bounds = others.get("cu_seq_lens_q")
        mask = None if attention_mask is None or bounds is not None else attention_mask[:, -L:]
        y, state = super().forward(hidden_states, state, mask, bounds)
        if cache_params is not None:
            assert state is not None
            self._write(cache_params, state)
        return y

    def _read(self, cache: Any) -> MixerState | None:
        memory = cache.get_recurrent_state(self.layer_idx)
        conv = cache.get_conv_state(self.layer_idx)
        if memory is None or conv is None:
            return None
        S, M = memory.unbind(1)
        return MixerState(conv[..., 1:].transpose(1, 2), MemoryState(S, M))  # the cache holds one step more than a tail

    def _write(self, cache: Any, state: MixerState) -> None:
        if cache.is_recording_past(self.layer_idx):
            raise ValueError(
                "cache_params must not record past steps: a recurrent memory cannot undo assisted generation"
            )
        size = state.conv.shape[1] + 1
        cache.update_conv_state(state.conv.transpose(1, 2), self.layer_idx, conv_kernel_size=size)
        cache.update_recurrent_state(torch.stack([state.memory.S, state.memory.M], dim=1), self.layer_idx)


class MuonMamba(TransformersCall, Mamba):
    """`Mamba` as a transformers layer."""


class MuonMamba2(TransformersCall, Mamba2):
    """`Mamba2` as a transformers layer."""


class MuonGatedDeltaNet(TransformersCall, GatedDeltaNet):
    """`GatedDeltaNet` as a transformers layer."""


LAYERS: dict[type[Mixer], type[Mixer]] = {Mamba: MuonMamba, Mamba2: MuonMamba2, GatedDeltaNet: MuonGatedDeltaNet}


def _as_layer(mixer: Mixer, original: Any) -> Mixer:
    """Give the mixer the call and the parameter names of transformers."""
    mixer.__class__ = LAYERS[type(mixer)]
    mixer.layer_idx, mixer.layer_type = original.layer_idx, original.layer_type
    mixer.register_state_dict_post_hook(_write_their_names)
    mixer.register_load_state_dict_pre_hook(_read_their_names)
    return mixer


def _write_their_names(mixer: Mixer, weights: dict[str, Tensor], prefix: str, metadata: Any) -> None:
    own = {name: weights.pop(prefix + name) for name, _ in mixer.named_parameters()}
    learned = {name: own.pop(name) for name in tuple(own) if is_learned_momentum(name)}
    theirs = {**to_theirs(mixer, own, "transformers"), **learned}
    weights.update({prefix + name: tensor for name, tensor in theirs.items()})


def _read_their_names(mixer: Mixer, weights: dict[str, Tensor], prefix: str, *_: Any) -> None:
    names = [name for name in weights if name.startswith(prefix)]
    theirs = {name.removeprefix(prefix): weights.pop(name) for name in names}
    learned = {name: theirs.pop(name) for name in tuple(theirs) if is_learned_momentum(name)}
    try:
        ours = {**to_ours(mixer, theirs, "transformers"), **learned}
    except ValueError:  # an incomplete state dict: torch reports what is missing
        ours = {**theirs, **learned}
    weights.update({prefix + name: tensor for name, tensor in ours.items()})
