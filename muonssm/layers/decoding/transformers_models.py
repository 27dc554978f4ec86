"""transformers' Mamba and Mamba-2 models with upcycled mixers, decoding by one native call per token.

`upcycle` gives a model the class of the same name from this file, so that saved configurations do not change.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.mamba2 import modeling_mamba2 as mamba2

from .model_parts import BlockParts, ModelParts
from .native import NativeDecoding
from .states import StackedAccess

ORDINARY = ("inputs_embeds", "labels", "output_hidden_states", "cu_seq_lens_q")


class _UpcycledDecoding(NativeDecoding):
    """`forward` of a model that consists of an embedding, blocks of norm and mixer, a norm and a head."""

    decoding_access = StackedAccess()
    output_class: Any

    def decoding_parts(self) -> ModelParts:
        """Return the parts of the model."""
        model: Any = self
        inner = model.backbone
        blocks = [BlockParts(block.norm, block.mixer) for block in inner.layers]
        return ModelParts(inner.embeddings, blocks, inner.norm_f, model.lm_head)

    def decode(self, options: dict[str, Any]) -> Any:
        """Return the output of `forward` for tokens that continue a cache; None if the call runs through torch."""
        ids, mask, cache = (options.get(name) for name in ("input_ids", "attention_mask", "cache_params"))
        if torch.compiler.is_compiling():
            return None
        model: Any = self
        dropped = self._decoder is not None and self._decoder.dropped
        keep = options.get("logits_to_keep", 0)
        asks = [name for name in ORDINARY if options.get(name) is not None and options[name] is not False]
        if ids is None or ids.ndim != 2 or not isinstance(keep, int) or asks or model.config.output_hidden_states:
            if dropped:
                raise RuntimeError(f"a model without its float32 weights takes input_ids alone, got {asks or keep!r}")
            return None
        use_cache = options.get("use_cache")
        if cache is None and dropped:
            from transformers import DynamicCache

            cache = DynamicCache(config=model.config)
        if cache is None or (use_cache is False and not dropped):
            return None
        mask = mask if isinstance(mask, Tensor) else None
        logits = self.decode_natively(ids, cache, mask, None, keep)
        if logits is None:
            return None
        out = self.output_class(logits=logits, cache_params=None if use_cache is False else cache)
        return_dict = options.get("return_dict")
        return out if return_dict or (return_dict is None and model.config.return_dict) else out.to_tuple()


def _native_first(ordinary: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `forward` that decodes natively where it can, with the signature of the ordinary one."""
    signature = inspect.signature(ordinary)

    @functools.wraps(ordinary)
    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        if arguments:
            options = dict(signature.bind(self, *arguments, **options).arguments)
            options = {**options, **options.pop("kwargs", {})}
            del options["self"]
        out = self.decode(options)
        return ordinary(self, **options) if out is None else out

    return forward


class MambaForCausalLM(_UpcycledDecoding, mamba.MambaForCausalLM):
    """transformers' `MambaForCausalLM`."""

    output_class = mamba.MambaCausalLMOutput
    forward = _native_first(mamba.MambaForCausalLM.forward)


class Mamba2ForCausalLM(_UpcycledDecoding, mamba2.Mamba2ForCausalLM):
    """transformers' `Mamba2ForCausalLM`."""

    output_class = mamba2.Mamba2CausalLMOutput
    forward = _native_first(mamba2.Mamba2ForCausalLM.forward)


CLASSES = {mamba.MambaForCausalLM: MambaForCausalLM, mamba2.Mamba2ForCausalLM: Mamba2ForCausalLM}


def use_native_decoding(model: Any) -> None:
    """Give a causal language model its class from this file, if there is one."""
    if type(model) in CLASSES:
        model.__class__ = CLASSES[type(model)]
