"""Activity recognition: a window of sensor samples to the logits of its classes (appendix B.4 of the paper).

    h       = dropout(relu(batch_norm(conv(x))))
    h       = h + mixer(norm(h)), once per layer
    logits  = head(mean_t dropout(norm(h)))

    x       `[B, L, channels]`, standardized
    h       `[B, L, d_model]`
    logits  `[B, classes]`

Departs from the paper: it does not say how its convolution pads; here it is causal, so that the model can stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muonssm.checks import check_bool, check_choice, check_int, check_number
from muonssm.layers import BACKBONES, MixerState, build_mixer
from muonssm.layers.longhorn import FORMS
from muonssm.layers.momentum import MOMENTUM_VARIANTS
from muonssm.ops import Muon

KERNEL = 3  # filter length of the first convolution


@dataclass(frozen=True)
class ActivityModelConfig:
    """Sizes of `ActivityClassifier`; the defaults are the paper's.

    Attributes:
        backbone: a name in `muonssm.layers.BACKBONES`.
        d_model: width between the layers.
        d_state: size of keys; for Mamba and LongHorn's diagonal form, states per channel.
        expand: width of values and channels, in `d_model`.
        layers: number of mixers.
        dropout: after the first convolution and before the head.
        momentum: `"fixed"`, `"per_head"` or `"per_step"`.
        bidirectional: whether each step sees both sides; such a model cannot stream.
        form: LongHorn's form, `"matrix"` or `"diagonal"`.
    """

    backbone: str = "longhorn"
    d_model: int = 128
    d_state: int = 64
    expand: int = 2
    layers: int = 2
    dropout: float = 0.1
    momentum: str = "fixed"
    bidirectional: bool = False
    form: str = "matrix"

    def __post_init__(self) -> None:
        check_choice("backbone", self.backbone, tuple(BACKBONES))
        for name in ("d_model", "d_state", "expand", "layers"):
            check_int(name, getattr(self, name), 1)
        check_choice("momentum", self.momentum, MOMENTUM_VARIANTS)
        check_choice("form", self.form, FORMS)
        check_bool("bidirectional", self.bidirectional)
        check_number("dropout", self.dropout, 0, 1, open_high=True)

    def mixer_dims(self) -> dict[str, Any]:
        """Return the mixer's arguments: every backbone has keys of `d_state` and `expand * d_model` values in all."""
        heads = max(1, self.d_model // self.d_state)
        head_v_dim = self.expand * self.d_model // heads
        delta: dict[str, Any] = {"num_heads": heads, "head_k_dim": self.d_state, "head_v_dim": head_v_dim}
        mamba: dict[str, Any] = {"d_state": self.d_state, "expand": self.expand}
        dims: dict[str, dict[str, Any]] = {
            "mamba": mamba,
            "mamba2": mamba,
            "longhorn": {**mamba, "form": self.form},
            "deltanet": delta,
            "gated_deltanet": delta,
            "momentum_deltanet": delta,
        }
        return {**dims[self.backbone], "momentum": self.momentum, "bidirectional": self.bidirectional}


class ActivityState(NamedTuple):
    """What continues an unfinished window: the last samples, and the state of every mixer."""

    samples: Tensor
    mixers: tuple[MixerState | None, ...]

    def map(self, function: Callable[[Tensor], Tensor]) -> ActivityState:
        """Apply `function` to every tensor."""
        mixers = tuple(None if state is None else state.map(function) for state in self.mixers)
        return ActivityState(function(self.samples), mixers)


class ActivityClassifier(nn.Module):
    """The network; trainers call `forward`, streams call `encode` with a state."""

    _no_split_modules: ClassVar[list[str]] = [mixer.__name__ for mixer in BACKBONES.values()]

    def __init__(self, config: ActivityModelConfig, muon: Muon, channels: int, classes: int) -> None:
        super().__init__()
        self.sizes = config
        d_model = config.d_model
        self.conv = nn.Conv1d(channels, d_model, KERNEL)
        self.batch_norm = nn.BatchNorm1d(d_model)
        self.norms = nn.ModuleList(nn.RMSNorm(d_model, eps=1e-5) for _ in range(config.layers))
        mixers = (build_mixer(config.backbone, d_model, muon, **config.mixer_dims()) for _ in range(config.layers))
        self.mixers = nn.ModuleList(mixers)
        self.norm = nn.RMSNorm(d_model, eps=1e-5)
        self.head = nn.Linear(d_model, classes)
        self.dropout = nn.Dropout(config.dropout)
        self._initialize()

    def _initialize(self) -> None:
        """Draw linear layers from N(0, 0.02), output projections over sqrt(2 layers); keep Mamba's step sizes."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and not name.endswith("dt_proj"):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            if name.endswith("out_proj"):
                with torch.no_grad():
                    module.weight /= (2 * self.sizes.layers) ** 0.5

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return the logits, and with `labels` `[B]` their cross-entropy as `loss`."""
        h, _ = self.encode(x)
        logits = self.head(h.mean(dim=1))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}

    def encode(self, x: Tensor, state: ActivityState | None = None) -> tuple[Tensor, ActivityState]:
        """Encode a window, or the continuation of one, to `[B, L, d_model]`, which `forward` averages over time."""
        before = x.new_zeros(x.shape[0], KERNEL - 1, x.shape[2]) if state is None else state.samples
        samples = torch.cat([before, x], dim=1)
        h = self.dropout(F.relu(self.batch_norm(self.conv(samples.mT)))).mT
        mixer_states = (None,) * len(self.mixers) if state is None else state.mixers
        new_states = []
        for norm, mixer, mixer_state in zip(self.norms, self.mixers, mixer_states, strict=True):
            y, new_state = mixer(norm(h), mixer_state)
            h = h + y
            new_states.append(new_state)
        return self.dropout(self.norm(h)), ActivityState(samples[:, x.shape[1] :], tuple(new_states))
