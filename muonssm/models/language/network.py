"""The language model: blocks of a mixer (or attention over a window) and a SwiGLU, on transformers' contracts.

h       = embed(input_ids)
h       = h + mixer(norm(h)),   h = h + swiglu(norm(h)), once per block
logits  = lm_head(norm(h))

input_ids       `[B, L]`
attention_mask  `[B, L]`, or `[B, cached + L]` with a cache; 0 at padding, which writes nothing
cu_seq_lens_q   `[N + 1]`, bounds of N documents packed into one row (B = 1), processed separately
h               `[B, L, hidden_size]`
logits          `[B, L, vocab_size]`
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralMLP, MistralRotaryEmbedding
from transformers.utils.generic import can_return_tuple

from muonssm.layers import Mixer, build_mixer
from muonssm.layers.modules import RMSNorm

from .cache import MemoryLayer, MuonSSMCache, layer_of
from .config import LINEAR, SLIDING, MuonSSMConfig


def mixer_from_config(config: MuonSSMConfig) -> Mixer:
    """Build a mixer."""
    dims = {"momentum": config.momentum, **(config.mixer or {})}
    return build_mixer(config.backbone, config.hidden_size, config.build_muon(), **dims)


def check_mixer(config: MuonSSMConfig) -> None:
    """Raise an error if the mixer's arguments are wrong, without allocating its weights."""
    with torch.device("meta"):
        mixer_from_config(config)


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
        past_key_values: MuonSSMCache | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Compute h `[B, L, D]`; `mask` is `[B, L]` for a mixer, and transformers' own mask for attention."""
        if self.is_mixer:
            h = self._mix(h, mask, layer_of(past_key_values, self.index), cu_seqlens)
        else:
            y, _ = self.mixer(self.mixer_norm(h), rotary, mask, past_key_values)
            h = h + self.dropout(y)
        if self.mlp is None or self.mlp_norm is None:
            return h
        return h + self.dropout(self.mlp(self.mlp_norm(h)))

    def _mix(self, h: Tensor, mask: Tensor | None, layer: MemoryLayer | None, cu_seqlens: Tensor | None) -> Tensor:
        """Compute h + mixer(norm(h)), and write the mixer's state to the cache."""
        state = None if layer is None else layer.state
        step = None if self.training else self.mixer.step(h, state, mask, cu_seqlens, self.mixer_norm)  # type: ignore[operator]
        if step is None:
            y, state = self.mixer(self.mixer_norm(h), state, mask, cu_seqlens)
            h = h + self.dropout(y)
        else:
            h, state = step
        if layer is not None:
            layer.write(state)
        return h


class MuonSSMPreTrainedModel(PreTrainedModel):
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
    _supports_attention_backend = True

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

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: MuonSSMCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """Compute the hidden states after the last norm, and the cache if `use_cache`."""
        if (input_ids is None) == (inputs_embeds is None):
            got = "neither" if input_ids is None else "both"
            raise ValueError(f"input_ids or inputs_embeds must be given, and not both, got {got}")
        h = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and cu_seq_lens_q is None
        cache = MuonSSMCache(self.config) if use_cache and past_key_values is None else past_key_values
        if cu_seq_lens_q is not None and self.rotary_emb is not None:
            position_ids = self._document_positions(cu_seq_lens_q, position_ids, cache)
        masks = self._masks(h, attention_mask, position_ids, cache)
        rotary = None if self.rotary_emb is None else self.rotary_emb(h, self._positions(h, position_ids, cache))
        h, hidden_states = self.dropout(h), []
        for layer in self.layers:
            if output_hidden_states:
                hidden_states.append(h)
            mask = masks[layer.is_mixer]  # type: ignore[index]
            h = layer(h, mask=mask, rotary=rotary, past_key_values=cache, cu_seqlens=cu_seq_lens_q)
        h = self.norm(h)
        if cache is not None:
            cache.seen += h.shape[1]
        all_states = (*hidden_states, h) if output_hidden_states else None
        return BaseModelOutputWithPast(h, cache if use_cache else None, all_states)

    def _document_positions(self, bounds: Tensor, position_ids: Tensor | None, cache: MuonSSMCache | None) -> Tensor:
        """Return positions `[1, L]` that restart in each document, by which attention separates documents."""
        if cache is not None:
            raise ValueError("use_cache must be False for cu_seq_lens_q with attention layers, got a cache")
        if position_ids is not None:
            return position_ids
        steps = torch.arange(int(bounds[-1]), device=bounds.device)
        return (steps - bounds[:-1].repeat_interleave(bounds.diff()))[None]

    def _positions(self, h: Tensor, position_ids: Tensor | None, cache: MuonSSMCache | None) -> Tensor:
        if position_ids is not None:
            return position_ids
        start = 0 if cache is None else cache.seen
        return torch.arange(start, start + h.shape[1], device=h.device)[None]

    def _masks(self, h: Tensor, mask: Any, position_ids: Tensor | None, cache: MuonSSMCache | None) -> dict[bool, Any]:
        """Return the mask of mixers (True), `[B, L]` or None, and transformers' mask of attention (False)."""
        if isinstance(mask, dict):  # transformers made them already, by layer type
            return {True: mask.get(LINEAR), False: mask.get(SLIDING)}
        attention = None
        if self.rotary_emb is not None:
            attention = create_sliding_window_causal_mask(
                config=self.config,
                inputs_embeds=h,
                attention_mask=mask,
                past_key_values=cache,
                position_ids=position_ids,
            )
        mask = None if mask is None else mask[:, -h.shape[1] :]
        if mask is not None and not torch.compiler.is_compiling() and mask.all():
            mask = None
        return {True: mask, False: attention}


class MuonSSMForCausalLM(MuonSSMPreTrainedModel, GenerationMixin):
    """Compute the logits of the next token from tokens."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  transformers reads it so

    def __init__(self, config: MuonSSMConfig) -> None:
        super().__init__(config)
        self.model = MuonSSMModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: MuonSSMCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits, and the loss of `labels` (shifted here, as in transformers) or `shift_labels` (not)."""
        options = {name: others.pop(name) for name in ("cu_seq_lens_q", "output_hidden_states") if name in others}
        out = self.model(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, **options)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, kept])
        loss = None
        if labels is not None or others.get("shift_labels") is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **others)
        return CausalLMOutputWithPast(loss, logits, out.past_key_values, out.hidden_states)

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *arguments: Any
    ) -> None:
        """Use `MuonSSMCache`: transformers' DynamicCache cannot count tokens without attention layers."""
        given = model_kwargs.get("past_key_values")
        if given is None and generation_config.use_cache is not False:
            implementation = generation_config.cache_implementation
            if implementation is not None:
                raise ValueError(f"cache_implementation must be None, as the state never grows, got {implementation!r}")
            model_kwargs["past_key_values"] = MuonSSMCache(self.config)
            return
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *arguments)  # type: ignore[misc]
