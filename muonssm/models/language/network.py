"""The language model: blocks of a mixer (or attention over a window) and a SwiGLU, on transformers' contracts.

h       = embed(input_ids)
h       = h + mixer(norm(h)),   h = h + swiglu(norm(h)), once per block
logits  = lm_head(norm(h))

input_ids       `[B, L]`
attention_mask  `[B, L]`, or `[B, cached + L]` with a cache; 0 at padding, which writes nothing
position_ids    `[B, L]`; without a mask and a cache, a document starts wherever they do not continue by 1
cu_seq_lens_q   `[N + 1]`, bounds of N documents packed into one row (B = 1), processed separately
h               `[B, L, hidden_size]`
logits          `[B, L, vocab_size]`
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import create_recurrent_attention_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralMLP, MistralRotaryEmbedding
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from muonssm.layers import Mixer, build_mixer
from muonssm.layers.modules import LogitsProjection, RMSNorm

from ..remote_code import RemoteModel
from .cache import MuonSSMCache, TokenCount, count_tokens, read_state, write_state
from .config import LINEAR, SLIDING, MuonSSMConfig
from .model_card import write_model_card
from .native import LanguageDecoding
from .training import can_fuse_loss, causal_lm_loss, feed_forward, matmul_dtype


def mixer_from_config(config: MuonSSMConfig) -> Mixer:
    """Build a mixer."""
    dims = {"momentum": config.momentum, **(config.mixer or {})}
    return build_mixer(config.backbone, config.hidden_size, config.build_muon(), **dims)


def check_mixer(config: MuonSSMConfig) -> None:
    """Raise an error if the mixer's arguments are wrong, without allocating its weights."""
    with torch.device("meta"):
        mixer_from_config(config)


def mixer_with_double_state(config: MuonSSMConfig) -> dict[str, Any]:
    """Return `config.mixer` with keys of twice the size, so that a memory has twice as many numbers.

    Heads, values and the width between the layers stay as they are. What grows with the keys: their projections, the
    queries', and the short convolution's filters where it runs over keys and queries.
    """
    with torch.device("meta"):
        mixer: Any = mixer_from_config(config)
    if hasattr(mixer, "head_k_dim"):  # the size of values follows that of keys unless it is given
        sizes = {"head_k_dim": 2 * mixer.head_k_dim, "head_v_dim": mixer.head_v_dim}
    else:
        sizes = {"d_state": 2 * mixer.d_state}
    return {**(config.mixer or {}), **sizes}


class Block(GradientCheckpointingLayer):
    """One layer: a mixer or attention, and a SwiGLU."""

    def __init__(self, config: MuonSSMConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.is_mixer = config.layer_types[index] == LINEAR  # type: ignore[index]
        self.mixer_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer: nn.Module = mixer_from_config(config) if self.is_mixer else MistralAttention(config, index)  # type: ignore[arg-type]
        self.dropout = nn.Dropout(config.dropout)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if config.intermediate_size else None
        self.mlp = MistralMLP(config) if config.intermediate_size else None

    def forward(
        self,
        h: Tensor,
        mask: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        past_key_values: Cache | None = None,
        cu_seqlens: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Compute h `[B, L, D]`; `mask` is `[B, L]` for a mixer, and transformers' own mask for attention.

        The others, such as flash attention's bounds, are for attention.
        """
        if self.is_mixer:
            h = self._mix(h, mask, past_key_values, cu_seqlens)
        else:
            y, _ = self.mixer(self.mixer_norm(h), rotary, mask, past_key_values, **others)
            h = h + self.dropout(y)
        if self.mlp is None or self.mlp_norm is None:
            return h
        return h + self.dropout(feed_forward(self.mlp, self.mlp_norm(h, dtype=matmul_dtype(h))))

    def _mix(self, h: Tensor, mask: Tensor | None, cache: Cache | None, cu_seqlens: Tensor | None) -> Tensor:
        """Compute h + mixer(norm(h)), and write the mixer's state to the cache."""
        if cu_seqlens is not None and h.shape[0] > 1:  # the documents of all rows in one row
            return self._mix(h.flatten(0, 1)[None], mask, cache, cu_seqlens).view(h.shape)
        state = read_state(cache, self.index)
        step = None if self.training else self.mixer.step(h, state, mask, cu_seqlens, self.mixer_norm)  # type: ignore[operator]
        if step is None:
            y, state = self.mixer(self.mixer_norm(h, dtype=matmul_dtype(h)), state, mask, cu_seqlens)
            h = h + self.dropout(y)
        else:
            h, state = step
        if cache is not None:
            write_state(cache, self.index, state)
        return h


class MuonSSMPreTrainedModel(RemoteModel, PreTrainedModel):
    """Settings and initial weights, as transformers asks for them."""

    config: MuonSSMConfig
    config_class = MuonSSMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012  transformers reads a list
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _is_stateful = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": Block, "attentions": MistralAttention}  # noqa: RUF012

    def save_pretrained(self, save_directory: str | os.PathLike[str], *arguments: Any, **options: Any) -> None:
        """Save as transformers does; a model that was loaded from a trained run also gets a model card, README.md."""
        if options.get("is_main_process", True) and not os.path.isfile(save_directory):
            os.makedirs(save_directory, exist_ok=True)
            write_model_card(self.name_or_path or "", self.config, str(save_directory))
        super().save_pretrained(save_directory, *arguments, **options)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """Treat the model like transformers' own: `_init_weights` checks each parameter's flag itself."""
        super()._initialize_weights(module, is_custom_code=False)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the embedding from N(0, 0.02), other weights as their modules do; scale residual projections."""
        if isinstance(module, Mixer):
            fresh = mixer_from_config(self.config).state_dict()
            for name, parameter in module.named_parameters():
                init.copy_(parameter, fresh[name])
            self._scale_residual(module.out_proj)  # type: ignore[arg-type]
        elif isinstance(module, nn.Linear):
            init.kaiming_uniform_(module.weight, a=math.sqrt(5))
        elif isinstance(module, MistralAttention):
            self._scale_residual(module.o_proj)
        elif isinstance(module, MistralMLP):
            self._scale_residual(module.down_proj)
        else:
            super()._init_weights(module)

    def _scale_residual(self, projection: nn.Linear) -> None:
        """Divide a projection into the residual stream by sqrt(2 layers)."""
        if not getattr(projection.weight, "_is_hf_initialized", False):
            projection.weight /= math.sqrt(2 * self.config.num_hidden_layers)


class MuonSSMModel(MuonSSMPreTrainedModel):
    """Compute hidden states from tokens."""

    def __init__(self, config: MuonSSMConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        hybrid = SLIDING in config.layer_types  # type: ignore[operator]
        self.rotary_emb = MistralRotaryEmbedding(config) if hybrid else None  # type: ignore[arg-type]
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast:
        """Compute the hidden states after the last norm, and the cache if `use_cache`."""
        if (input_ids is None) == (inputs_embeds is None):
            got = "neither" if input_ids is None else "both"
            raise ValueError(f"input_ids or inputs_embeds must be given, and not both, got {got}")
        h = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(past_key_values, use_cache, cu_seq_lens_q is not None)
        bounds, position_ids = self._documents(h, attention_mask, position_ids, cache, cu_seq_lens_q)
        if self.rotary_emb is not None and position_ids is None:
            position_ids = self._positions(h, cache)
        masks = self._masks(h, attention_mask, position_ids, cache)
        rotary = None if self.rotary_emb is None else self.rotary_emb(h, position_ids)
        if cu_seq_lens_q is not None:
            others["cu_seq_lens_q"] = cu_seq_lens_q
        h = self.dropout(h)
        for layer in self.layers:
            mask = masks[layer.is_mixer]  # type: ignore[index]
            h = layer(h, mask=mask, rotary=rotary, past_key_values=cache, cu_seqlens=bounds, **others)
        h = self.norm(h)
        if isinstance(cache, TokenCount):
            cache.advance(h.shape[1])
        return BaseModelOutputWithPast(h, None if use_cache is False else cache)

    def _cache(self, given: Cache | None, use_cache: bool | None, packed: bool) -> Cache | None:
        """Return the cache to use: none with gradient checkpointing, whose second pass would write it again."""
        if self.gradient_checkpointing and self.training:
            return None
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and not packed
        return MuonSSMCache(self.config) if use_cache and given is None else given

    def _documents(
        self, h: Tensor, mask: Any, position_ids: Tensor | None, cache: Cache | None, bounds: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the bounds `[N + 1]` of packed documents, if there are any, and the positions `[B, L]`."""
        if bounds is None:
            if position_ids is None or mask is not None or cache is not None:
                return None, position_ids
            return document_bounds(position_ids.expand(h.shape[0], -1)), position_ids
        if self.rotary_emb is None:
            return bounds, position_ids
        if cache is not None:
            raise ValueError("use_cache must be False for cu_seq_lens_q with attention layers, got a cache")
        if position_ids is None:  # restart in each document, by which attention separates documents
            steps = torch.arange(h.shape[1], device=bounds.device, dtype=bounds.dtype)
            starts = bounds[torch.bucketize(steps, bounds[1:], right=True)]  # wrong bounds are for the mixers to report
            position_ids = (steps - starts).long()[None]
        return bounds, position_ids

    def _positions(self, h: Tensor, cache: Cache | None) -> Tensor:
        start = 0 if cache is None else cache.get_seq_length()
        return (torch.arange(h.shape[1], device=h.device) + start)[None]

    def _masks(self, h: Tensor, mask: Any, position_ids: Tensor | None, cache: Cache | None) -> dict[bool, Any]:
        """Return the mask of mixers (True), `[B, L]` or None, and transformers' mask of attention (False)."""
        if isinstance(mask, dict):  # transformers made them already, by layer type
            return {True: mask.get(LINEAR), False: mask.get(SLIDING)}
        given = {"config": self.config, "inputs_embeds": h, "attention_mask": mask, "past_key_values": cache}
        masks: dict[bool, Any] = {True: create_recurrent_attention_mask(**given), False: None}
        if self.rotary_emb is not None:
            masks[False] = create_sliding_window_causal_mask(**given, position_ids=position_ids)
        return masks


def document_bounds(position_ids: Tensor) -> Tensor | None:
    """Return the bounds `[N + 1]` of documents in flattened rows; None if every row is one document.

    A document starts with every row, and wherever `position_ids` `[B, L]` do not continue by 1.
    """
    starts = position_ids.diff(dim=1, prepend=position_ids[:, :1] - 2) != 1
    if not torch.compiler.is_compiling() and int(starts.sum()) == len(starts):
        return None
    return F.pad(starts.flatten().nonzero().squeeze(1), (0, 1), value=starts.numel())


class MuonSSMForCausalLM(LanguageDecoding, MuonSSMPreTrainedModel, GenerationMixin):
    """Compute the logits of the next token from tokens."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  transformers reads it so
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012

    def __init__(self, config: MuonSSMConfig) -> None:
        super().__init__(config)
        self.model = MuonSSMModel(config)
        self.lm_head = LogitsProjection(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits, and the loss of `labels` (shifted here, as in transformers) or `shift_labels` (not).

        `return_logits=False` computes the loss without the logits of all tokens, which are then None. That is the
        default during training with labels: the logits would take most of a step's memory.
        """
        if labels is None and inputs_embeds is None:  # a token of every sequence takes one native call where it can
            decoded = self.decode(
                input_ids, attention_mask, position_ids, past_key_values, use_cache, logits_to_keep, others
            )
            if decoded is not None:
                return decoded
        out = self.model(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, **others)
        has_labels = labels is not None or others.get("shift_labels") is not None
        wanted = not (self.training and has_labels) if return_logits is None else return_logits
        whole = isinstance(logits_to_keep, int) and logits_to_keep == 0
        h, loss, logits = out.last_hidden_state, None, None
        if has_labels and whole and not wanted and can_fuse_loss(h, self.lm_head, self.loss_function):
            loss = causal_lm_loss(h, self.lm_head, labels, **others)
        else:
            logits = self.lm_head(slice_logits_to_keep(h, logits_to_keep))
            if has_labels:
                loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **others)
        return CausalLMOutputWithPast(loss, logits, out.past_key_values, out.hidden_states, out.attentions)  # type: ignore[arg-type]

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *arguments: Any
    ) -> None:
        """Make a `MuonSSMCache` by default, and any cache count tokens, as `generate` asks for their number."""
        implementation = generation_config.cache_implementation
        if implementation == "quantized":
            raise ValueError(
                "cache_implementation must be 'dynamic', 'static' or 'offloaded', got 'quantized': every step rewrites "
                "the whole memory, so rounding errors would add up, and its size does not grow"
            )
        default = implementation in (None, "dynamic", "offloaded") and not generation_config.is_assistant
        if model_kwargs.get("past_key_values") is None and default and generation_config.use_cache is not False:
            offloading = implementation == "offloaded" and self.device.type != "cpu"
            model_kwargs["past_key_values"] = MuonSSMCache(self.config, offloading)
            return
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *arguments)  # type: ignore[misc]
        count_tokens(model_kwargs.get("past_key_values"), self.device)


class MuonSSMForSequenceClassification(GenericForSequenceClassification, MuonSSMPreTrainedModel):
    """Classify a text by the hidden state of its last token."""


class MuonSSMForTokenClassification(GenericForTokenClassification, MuonSSMPreTrainedModel):
    """Classify every token."""
