"""The network: blocks of a mixer (or attention over a window) and a SwiGLU, on transformers' contracts.

h = embed(ids);   in each block h += mixer(norm(h)), h += swiglu(norm(h));   logits = head(norm(h))

input_ids       `[B, L]`
attention_mask  `[B, L]` or, with a cache, `[B, what was read + L]`; 0 at padding, which writes nothing
cu_seq_lens_q   `[N + 1]`, bounds of N documents packed into one row (B = 1), kept apart
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


def mixer_of(config: MuonSSMConfig) -> Mixer:
    """A mixer as the configuration says."""
    dims = {"momentum": config.momentum, **(config.mixer or {})}
    return build_mixer(config.backbone, config.hidden_size, config.build_muon(), **dims)


def check_mixer(config: MuonSSMConfig) -> None:
    """Raises what is wrong with the mixer's arguments, without the cost of its weights."""
    with torch.device("meta"):
        mixer_of(config)


class Block(GradientCheckpointingLayer):
    """One layer."""

    def __init__(self, config: MuonSSMConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.is_mixer = config.layer_types[index] == LINEAR  # type: ignore[index]
        self.mixer_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer: nn.Module = mixer_of(config) if self.is_mixer else MistralAttention(config, index)  # type: ignore[arg-type]
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
        """h `[B, L, D]`; `mask` is `[B, L]` for a mixer, and transformers' own for attention."""
        if self.is_mixer:
            h = self._mix(h, mask, layer_of(past_key_values, self.index), cu_seqlens)
        else:
            y, _ = self.mixer(self.mixer_norm(h), rotary, mask, past_key_values)
            h = h + self.dropout(y)
        if self.mlp is None or self.mlp_norm is None:
            return h
        return h + self.dropout(self.mlp(self.mlp_norm(h)))

    def _mix(self, h: Tensor, mask: Tensor | None, layer: MemoryLayer | None, cu_seqlens: Tensor | None) -> Tensor:
        """h + mixer(norm(h)), in one go for a single token where that is possible."""
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
    """What transformers asks of a model besides computing."""

    config: MuonSSMConfig
    config_class = MuonSSMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012  transformers wants a list
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _is_stateful = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """As for transformers' own models: `_init_weights` looks at each parameter's flag itself."""
        super()._initialize_weights(module, is_custom_code=False)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Embedding N(0, 0.02); linear layers and mixers as they start, but for what `_residual` scales."""
        if isinstance(module, Mixer):
            fresh = mixer_of(self.config).state_dict()
            for name, parameter in module.named_parameters():
                init.copy_(parameter, fresh[name])
            self._residual(module.out_proj)  # type: ignore[arg-type]
        elif isinstance(module, nn.Linear):
            init.kaiming_uniform_(module.weight, a=math.sqrt(5))
        elif isinstance(module, MistralAttention):
            self._residual(module.o_proj)
        elif isinstance(module, MistralMLP):
            self._residual(module.down_proj)
        else:
            super()._init_weights(module)

    def _residual(self, projection: nn.Linear) -> None:
        """What is added to the residual stream, over sqrt(2 layers)."""
        if not getattr(projection.weight, "_is_hf_initialized", False):
            projection.weight /= math.sqrt(2 * self.config.num_hidden_layers)


class MuonSSMModel(MuonSSMPreTrainedModel):
    """Tokens to hidden states."""

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
        """The hidden states after the last norm, and the cache if asked for."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids and inputs_embeds: exactly one of them may be given")
        h = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and cu_seq_lens_q is None
        cache = MuonSSMCache(self.config) if use_cache and past_key_values is None else past_key_values
        if cu_seq_lens_q is not None and self.rotary_emb is not None:
            position_ids = self._apart(cu_seq_lens_q, position_ids, cache)
        masks = self._masks(h, attention_mask, position_ids, cache)
        rotary = None if self.rotary_emb is None else self.rotary_emb(h, self._positions(h, position_ids, cache))
        h, seen = self.dropout(h), []
        for layer in self.layers:
            if output_hidden_states:
                seen.append(h)
            mask = masks[layer.is_mixer]  # type: ignore[index]
            h = layer(h, mask=mask, rotary=rotary, past_key_values=cache, cu_seqlens=cu_seq_lens_q)
        h = self.norm(h)
        if cache is not None:
            cache.seen += h.shape[1]
        states = (*seen, h) if output_hidden_states else None
        return BaseModelOutputWithPast(h, cache if use_cache else None, states)

    def _apart(self, bounds: Tensor, position_ids: Tensor | None, cache: MuonSSMCache | None) -> Tensor:
        """Positions `[1, L]` that begin anew in each document: attention knows documents by them, without a cache."""
        if cache is not None:
            raise ValueError("cu_seq_lens_q is given with a cache; with attention layers use_cache may be False")
        if position_ids is not None:
            return position_ids
        steps = torch.arange(int(bounds[-1]), device=bounds.device)
        return (steps - bounds[:-1].repeat_interleave(bounds.diff()))[None]

    def _positions(self, h: Tensor, position_ids: Tensor | None, cache: MuonSSMCache | None) -> Tensor:
        if position_ids is not None:
            return position_ids
        start = 0 if cache is None else cache.seen
        return torch.arange(start, start + h.shape[1], device=h.device)[None]

    def _masks(self, h: Tensor, given: Any, position_ids: Tensor | None, cache: MuonSSMCache | None) -> dict[bool, Any]:
        """One mask for mixers, `[B, L]` or None, and one for attention, as transformers makes it."""
        if isinstance(given, dict):  # transformers may have made them already, by kind of layer
            return {True: given.get(LINEAR), False: given.get(SLIDING)}
        attention = None
        if self.rotary_emb is not None:
            attention = create_sliding_window_causal_mask(
                config=self.config,
                inputs_embeds=h,
                attention_mask=given,
                past_key_values=cache,
                position_ids=position_ids,
            )
        own = None if given is None else given[:, -h.shape[1] :]
        if own is not None and not torch.compiler.is_compiling() and own.all():
            own = None
        return {True: own, False: attention}


class MuonSSMForCausalLM(MuonSSMPreTrainedModel, GenerationMixin):
    """Tokens to the logits of the next one."""

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
        """Logits, and a loss with `labels` (shifted here, as everywhere in transformers) or `shift_labels` (not)."""
        told = {name: others.pop(name) for name in ("cu_seq_lens_q", "output_hidden_states") if name in others}
        out = self.model(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, **told)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, kept])
        loss = None
        if labels is not None or others.get("shift_labels") is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **others)
        return CausalLMOutputWithPast(loss, logits, out.past_key_values, out.hidden_states)

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *arguments: Any
    ) -> None:
        """Ours in place of transformers' DynamicCache, which cannot count tokens without attention layers."""
        given = model_kwargs.get("past_key_values")
        if given is None and generation_config.use_cache is not False:
            implementation = generation_config.cache_implementation
            if implementation is not None:
                raise ValueError(f"cache_implementation is {implementation!r}; it may be None: the state never grows")
            model_kwargs["past_key_values"] = MuonSSMCache(self.config)
            return
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *arguments)  # type: ignore[misc]
