"""`NativeDecoding`: the base class by which a causal language model decodes with one native call per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from muonssm.checks import check_bool
from muonssm.ops.decode_steps import MOST_ROWS

from .decoder import Decoder, why_not_here
from .model_parts import ModelParts
from .program import UnsupportedError
from .states import LayerAccess, why_not_cache


class NativeDecoding:
    """Adds `prepare_decoding` to a model; its `forward` calls `decode_natively` first.

    Subclasses say what the model consists of, `decoding_parts`, and where a cache has its states, `decoding_access`.
    """

    decoding_access: LayerAccess
    _decoder: Decoder | None = None

    def decoding_parts(self) -> ModelParts:
        """Return the parts of the model."""
        raise NotImplementedError

    def tokens_so_far(self, cache: Any) -> int:
        """Return the number of tokens in a cache, for models whose tokens have positions."""
        return 0

    def prepare_decoding(self, weights: str = "float32", drop: bool = False) -> Any:
        """Choose the weights that tokens are decoded with, and return the model.

        Args:
            weights: `"float32"`, the parameters themselves (the default of every model), `"bfloat16"` or `"int8"`
                (blocks of 32 with one scale; computed in float32). The last two are copies of the weights as they are
                now. Prompts are still read with the float32 weights.
            drop: give up the float32 weights of all packed matrices. The model then needs less memory than in float32.
                It can only decode: prompts are read natively too, 16 tokens at a time, and it cannot be trained, saved
                or moved.

        Raises ValueError with the reason if the model cannot decode natively.
        """
        model: Any = self
        if check_bool("drop", drop) and weights == "float32":
            raise ValueError("drop must be False with weights='float32', got True")
        if self._decoder is not None and self._decoder.dropped:
            raise ValueError("prepare_decoding must not be called again after drop=True")
        decoder = Decoder(weights)
        try:
            decoder.program(model, self.decoding_parts)
        except UnsupportedError as error:
            raise ValueError(f"weights must be those of a model that can decode natively; {error}") from error
        self._decoder = decoder
        if drop:
            decoder.drop(model)
        return self

    def why_not_native(self) -> str | None:
        """Return why this model decodes through torch; None if it decodes by one native call per token."""
        with torch.no_grad():
            model: Any = self
            reason = why_not_here(model)
            if reason is None:
                try:
                    self._get_decoder().program(model, self.decoding_parts)
                except UnsupportedError as error:
                    reason = str(error)
            return reason

    def decode_natively(
        self,
        ids: Tensor,
        cache: Any,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        keep: int = 0,
    ) -> Tensor | None:
        """Return the logits `[B, keep, vocabulary]` of tokens `[B, L]`; None if the call runs through torch.

        `keep` is the number of last tokens whose logits are wanted; 0 means all. The cache's states advance; counting
        its tokens is left to the caller.
        """
        model: Any = self
        decoder = self._get_decoder()
        B, L = ids.shape
        if not decoder.dropped and not (0 < B * L <= MOST_ROWS and _has_state(cache, self.decoding_access)):
            return None
        reason = why_not_here(model, ids, mask, positions) or why_not_cache(cache, L)
        reason = reason or _why_not_mask(mask, L) or ("there are more than 16 sequences" if B > MOST_ROWS else None)
        if reason is None:
            try:
                return self._run(decoder, ids, cache, mask, positions, L if keep == 0 else min(keep, L))
            except UnsupportedError as error:
                reason = str(error)
        if decoder.dropped:
            raise RuntimeError(f"the model dropped its float32 weights and can only decode natively, but {reason}")
        decoder.explain(reason)
        return None

    def _run(
        self, decoder: Decoder, ids: Tensor, cache: Any, mask: Tensor | None, positions: Tensor | None, keep: int
    ) -> Tensor:
        """Run as many tokens at a time as fit into a call."""
        (B, L), seen = ids.shape, self.tokens_so_far(cache)
        held = getattr(cache, "held", None)
        held = None if held is None else held()
        length, logits = MOST_ROWS // B, []
        for begin in range(0, L, length):
            end = min(L, begin + length)
            part_mask = None if mask is None else mask[:, : mask.shape[1] - (L - end)]
            part = decoder.run(
                self,  # type: ignore[arg-type]
                self.decoding_parts,
                ids[:, begin:end],
                cache,
                self.decoding_access,
                max(0, end - max(begin, L - keep)),
                part_mask,
                None if positions is None else positions[:, begin:end],
                seen + begin,
                held,
            )
            logits.append(part)
        return logits[0] if len(logits) == 1 else torch.cat(logits, dim=1)

    def _get_decoder(self) -> Decoder:
        if self._decoder is None:
            self._decoder = Decoder()
        return self._decoder


def _has_state(cache: Any, access: LayerAccess) -> bool:
    layers: Any = getattr(cache, "layers", ())
    return len(layers) > 0 and access.key(layers[0]) is not None


def _why_not_mask(mask: Tensor | None, length: int) -> str | None:
    if mask is not None and (mask.dim() != 2 or mask.size(1) < length):
        return "the attention mask is not [B, tokens]"
    return None
