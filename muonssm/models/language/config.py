"""`MuonSSMConfig`: sizes and settings of a language model, in transformers' spelling."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from muonssm.checks import is_int, is_number
from muonssm.layers import BACKBONES
from muonssm.ops import Muon

from ..muon_settings import muon_settings

LINEAR, SLIDING = "linear_attention", "sliding_attention"


class MuonSSMConfig(PreTrainedConfig):
    """Everything `MuonSSMForCausalLM` is built from; the defaults are the paper's 170M model.

    Attributes:
        vocab_size, hidden_size, num_hidden_layers: as everywhere in transformers.
        intermediate_size: width of the SwiGLU after each mixer; 0 leaves it out.
        backbone: a name in `muonssm.layers.BACKBONES`.
        muon: settings of `muonssm.Muon` as a dict; `True` for its defaults, `False` for the plain backbone. A `Muon`
            is taken too.
        momentum: `"fixed"`, `"per_head"` or `"per_step"`, as in the mixers.
        mixer: further arguments of the mixer's class, such as `{"num_heads": 9}`.
        ssm_every: layer i is a mixer if i % ssm_every is 0, else attention over a sliding window; 1 is mixers alone.
        sliding_window, num_attention_heads, num_key_value_heads, head_dim, rope_parameters: of that attention.
        max_position_embeddings: the length the model is trained for. Nothing ends there; `generate` may go on.
        dropout: after the embedding and after each mixer and SwiGLU.
    """

    model_type = "muonssm"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  transformers adds lists to it

    vocab_size: int = 32000
    hidden_size: int = 672
    intermediate_size: int = 6144
    num_hidden_layers: int = 10
    backbone: str = "gated_deltanet"
    muon: Any = True
    momentum: str = "fixed"
    mixer: dict[str, Any] | None = None
    ssm_every: int = 1
    sliding_window: int = 2048
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope_parameters: dict[str, Any] | None = None
    attention_dropout: float = 0.0
    max_position_embeddings: int = 4096
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    dropout: float = 0.0
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    layer_types: list[str] | None = None

    def __post_init__(self, **others: Any) -> None:
        self._check()
        self.muon = muon_settings(self.muon)
        self.mixer = dict(self.mixer or {})
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        kinds = [LINEAR if i % self.ssm_every == 0 else SLIDING for i in range(self.num_hidden_layers)]
        if self.layer_types is None:
            self.layer_types = kinds
        elif list(self.layer_types) != kinds:
            raise ValueError(f"layer_types is {self.layer_types}; with ssm_every = {self.ssm_every} it may be {kinds}")
        if SLIDING in kinds and self.head_dim is None and self.hidden_size % self.num_attention_heads:
            heads = self.num_attention_heads
            raise ValueError(f"num_attention_heads is {heads}; it may be a divisor of hidden_size = {self.hidden_size}")
        super().__post_init__(**others)

    def _check(self) -> None:
        if self.backbone not in BACKBONES:
            raise ValueError(f"backbone is {self.backbone!r}; it may be one of {tuple(BACKBONES)}")
        least = {"intermediate_size": 0}
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "ssm_every", "sliding_window")
        for name in (*names, "num_attention_heads", "max_position_embeddings"):
            value, low = getattr(self, name), least.get(name, 1)
            if not is_int(value, low):
                raise ValueError(f"{name} is {value!r}; it may be an integer >= {low}")
        for name in ("dropout", "attention_dropout"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < 1:
                raise ValueError(f"{name} is {value!r}; it may be in [0, 1)")
        if self.mixer is not None and not isinstance(self.mixer, dict):
            raise ValueError(f"mixer is {self.mixer!r}; it may be a dict of arguments of the mixer's class")

    def build_muon(self) -> Muon:
        """The settings as a value."""
        return Muon(**self.muon)
