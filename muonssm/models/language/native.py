"""How `MuonSSMForCausalLM` decodes by one native call per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from muonssm.layers.decoding.model_parts import BlockParts, ModelParts
from muonssm.layers.decoding.native import NativeDecoding
from muonssm.layers.decoding.states import MixerAccess

from .cache import MuonSSMCache, TokenCount

ORDINARY = ("cu_seq_lens_q", "output_hidden_states", "output_attentions", "shift_labels")


class LanguageDecoding(NativeDecoding):
    """`NativeDecoding` for `MuonSSMForCausalLM`."""

    decoding_access = MixerAccess()

    def decoding_parts(self) -> ModelParts:
        """Return the parts of the model."""
        model: Any = self
        inner = model.model
        blocks = [BlockParts(block.mixer_norm, block.mixer, block.mlp_norm, block.mlp) for block in inner.layers]
        window = model.config.sliding_window
        return ModelParts(inner.embed_tokens, blocks, inner.norm, model.lm_head, inner.rotary_emb, window)

    def tokens_so_far(self, cache: Any) -> int:
        """Return the number of tokens in a cache, for models whose tokens have positions."""
        model: Any = self
        return 0 if model.model.rotary_emb is None else cache.get_seq_length()

    def decode(
        self,
        ids: Tensor | None,
        mask: Any,
        positions: Tensor | None,
        cache: Any,
        use_cache: bool | None,
        keep: int | Tensor,
        others: dict[str, Any],
    ) -> CausalLMOutputWithPast | None:
        """Return the output of `forward` for tokens that continue a cache; None if the call runs through torch."""
        if torch.compiler.is_compiling():
            return None
        model: Any = self
        dropped = self._decoder is not None and self._decoder.dropped
        if ids is None or ids.ndim != 2 or not isinstance(keep, int) or _asks_for_more(others):
            return self._ordinary(dropped, "the call has arguments that native decoding does not take")
        if model.config.output_hidden_states or model.config.output_attentions:
            return self._ordinary(dropped, "hidden states or attentions are asked for")
        if dropped and cache is None:
            cache = MuonSSMCache(model.config)
        elif not dropped and (cache is None or use_cache is False):
            return None
        logits = self.decode_natively(ids, cache, mask, positions, keep)
        if logits is None:
            return None
        if isinstance(cache, TokenCount):
            cache.seen += ids.shape[1]
        return CausalLMOutputWithPast(None, logits, None if use_cache is False else cache)  # type: ignore[arg-type]

    def _ordinary(self, dropped: bool, reason: str) -> CausalLMOutputWithPast | None:
        """Return None, so that the call runs through torch; raise if the model cannot."""
        if dropped:
            raise RuntimeError(f"the model dropped its float32 weights and can only decode natively, but {reason}")
        return None


def _asks_for_more(others: dict[str, Any]) -> bool:
    """Whether a call has arguments that only the torch path serves; tensors count whatever their values."""
    return any(others.get(name) is not None and others[name] is not False for name in ORDINARY)
