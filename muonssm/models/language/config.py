"""`MuonSSMConfig`: sizes and settings of a language model, under transformers' names."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from muonssm.checks import check_choice, check_int, check_number
from muonssm.layers import BACKBONES
from muonssm.layers.momentum import MOMENTUM_VARIANTS
from muonssm.ops import Muon

from ..muon_settings import muon_settings
from ..remote_code import RemoteCode

LINEAR, SLIDING = "linear_attention", "sliding_attention"  # transformers' names of layer types
LEAST_SIZES = {
    "vocab_size": 1,
    "hidden_size": 1,
    "intermediate_size": 0,
    "num_hidden_layers": 1,
    "ssm_every": 1,
    "sliding_window": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 1,
}


class MuonSSMConfig(RemoteCode, PreTrainedConfig):  # type: ignore[misc]
    """Configuration of `MuonSSMForCausalLM`; the defaults are the paper's 170M model.

    Attributes:
        vocab_size, hidden_size, num_hidden_layers: as everywhere in transformers.
        intermediate_size: width of the SwiGLU after each mixer; 0 leaves it out.
        backbone: a name in `muonssm.layers.BACKBONES`.
        muon: settings of `muonssm.Muon` as a dict, a `Muon`, `True` for its defaults or `False` for the plain backbone.
        momentum: `"fixed"`, `"per_head"` or `"per_step"`, as in the mixers.
        mixer: further arguments of the mixer's class, such as `{"num_heads": 9}`.
        ssm_every: layer i is a mixer if i % ssm_every is 0, else attention over a sliding window; 1 means mixers only.
        sliding_window, num_attention_heads, num_key_value_heads, head_dim, rope_parameters: of that attention.
        max_position_embeddings: training length. It is no limit: `generate` continues beyond it.
        dropout: after the embedding, each mixer and each SwiGLU.
    """

    model_type = "muonssm"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  transformers adds lists to it
    package_module = "muonssm.models.language"
    auto_classes = {  # noqa: RUF012
        "AutoConfig": "MuonSSMConfig",
        "AutoModel": "MuonSSMModel",
        "AutoModelForCausalLM": "MuonSSMForCausalLM",
        "AutoModelForSequenceClassification": "MuonSSMForSequenceClassification",
        "AutoModelForTokenClassification": "MuonSSMForTokenClassification",
    }

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
        layer_types = [LINEAR if i % self.ssm_every == 0 else SLIDING for i in range(self.num_hidden_layers)]
        if self.layer_types is None:
            self.layer_types = layer_types
        elif list(self.layer_types) != layer_types:
            every = self.ssm_every
            raise ValueError(f"layer_types must be {layer_types} with ssm_every = {every}, got {self.layer_types}")
        if SLIDING in layer_types and self.head_dim is None:  # transformers' rotary embeddings and caches read it
            self.head_dim = self._default_head_dim()
        super().__post_init__(**others)

    def _default_head_dim(self) -> int:
        heads = self.num_attention_heads
        if self.hidden_size % heads:
            raise ValueError(f"num_attention_heads must be a divisor of hidden_size = {self.hidden_size}, got {heads}")
        return self.hidden_size // heads

    def _check(self) -> None:
        check_choice("backbone", self.backbone, tuple(BACKBONES))
        check_choice("momentum", self.momentum, MOMENTUM_VARIANTS)
        for name, least in LEAST_SIZES.items():
            check_int(name, getattr(self, name), least)
        for name in ("dropout", "attention_dropout"):
            check_number(name, getattr(self, name), 0, 1, open_high=True)
        if self.mixer is not None and not isinstance(self.mixer, dict):
            raise TypeError(f"mixer must be None or a dict of arguments of the mixer's class, got {self.mixer!r}")

    @property
    def base_model_tp_plan(self) -> dict[str, str] | None:  # type: ignore[override]
        """Return how to split attention and SwiGLU across devices.

        Mixers, whose projections hold heads and gates side by side, are repeated on every device.
        """
        assert self.layer_types is not None
        columns = [f"mixer.{name}_proj" for name in "qkv"] if SLIDING in self.layer_types else []
        rows = ["mixer.o_proj"] if columns else []
        if self.intermediate_size:
            columns, rows = [*columns, "mlp.gate_proj", "mlp.up_proj"], [*rows, "mlp.down_proj"]
        plan = dict.fromkeys(columns, "colwise") | dict.fromkeys(rows, "rowwise")
        return {f"layers.*.{name}": style for name, style in plan.items()} or None

    @property
    def number_of_conv_states(self) -> int:
        """Return how many slots a mixer has in transformers' caches: S and M."""
        return 2

    def build_muon(self) -> Muon:
        """Return the settings `muon` as a value."""
        return Muon(**self.muon)
