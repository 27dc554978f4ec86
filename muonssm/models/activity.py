"""Activity recognition: a window of sensor samples to the logits of its classes (the paper's appendix B.4).

    h = dropout(relu(batch_norm(conv(x))));   h = h + mixer(norm(h)), twice;   logits = head(mean_t dropout(norm(h)))

    x       `[B, L, channels]`, standardised
    logits  `[B, classes]`

Departs from the paper: its convolution's padding is not said; here it is causal, so that the model can stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muonssm.checks import is_int
from muonssm.layers import BACKBONES, MixerState, build_mixer
from muonssm.layers.longhorn import FORMS
from muonssm.layers.momentum import MOMENTUM_VARIANTS
from muonssm.ops import Muon

KERNEL = 3  # samples that the front end sees at once


@dataclass(frozen=True)
class ActivityModelConfig:
    """Sizes of `ActivityClassifier`; the defaults are the paper's.

    Attributes:
        backbone: a name in `muonssm.layers.BACKBONES`.
        d_model: width between the layers.
        d_state: size of keys; for Mamba and LongHorn's diagonal form, states a channel.
        expand: width of values and channels, in `d_model`.
        layers: mixers.
        dropout: after the front end and before the head.
        momentum: `"fixed"`, `"per_head"` or `"per_step"`.
        bidirectional: whether each step sees both sides; such a model cannot stream.
        form: LongHorn's, `"matrix"` or `"diagonal"`.
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
        if self.backbone not in BACKBONES:
            raise ValueError(f"backbone is {self.backbone!r}; it may be one of {tuple(BACKBONES)}")
        for name in ("d_model", "d_state", "expand", "layers"):
            value = getattr(self, name)
            if not is_int(value, 1):
                raise ValueError(f"{name} is {value!r}; it may be an integer >= 1")
        for name, may in (("momentum", MOMENTUM_VARIANTS), ("form", FORMS), ("bidirectional", (True, False))):
            if getattr(self, name) not in may:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it may be one of {may}")
        if isinstance(self.dropout, (bool, str)) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout!r}; it may be in [0, 1)")

    def dims(self) -> dict[str, Any]:
        """The arguments of the mixer. Every backbone gets keys of `d_state` and `expand * d_model` values in all."""
        heads = max(1, self.d_model // self.d_state)
        delta: dict[str, Any] = {"num_heads": heads, "head_k_dim": self.d_state}
        shell: dict[str, Any] = {"d_state": self.d_state, "expand": self.expand}
        own: dict[str, dict[str, Any]] = {
            "mamba": shell,
            "mamba2": shell,
            "longhorn": {**shell, "form": self.form},
            "deltanet": {**delta, "head_v_dim": self.expand * self.d_model // heads},
            "gated_deltanet": {**delta, "head_v_dim": self.expand * self.d_model // heads},
        }
        return {**own[self.backbone], "momentum": self.momentum, "bidirectional": self.bidirectional}


class ActivityState(NamedTuple):
    """What a window that is not over yet hands on: the last samples, and a state for every mixer."""

    samples: Tensor
    mixers: tuple[MixerState | None, ...]

    def map(self, function: Callable[[Tensor], Tensor]) -> ActivityState:
        """The same with `function` of every tensor."""
        mixers = tuple(None if state is None else state.map(function) for state in self.mixers)
        return ActivityState(function(self.samples), mixers)


class ActivityClassifier(nn.Module):
    """The network; `forward` is what a trainer calls, `encode` goes on from a state."""

    def __init__(self, config: ActivityModelConfig, muon: Muon, channels: int, classes: int) -> None:
        super().__init__()
        self.sizes = config
        d_model = config.d_model
        self.conv = nn.Conv1d(channels, d_model, KERNEL)
        self.batch_norm = nn.BatchNorm1d(d_model)
        self.norms = nn.ModuleList(nn.RMSNorm(d_model, eps=1e-5) for _ in range(config.layers))
        mixers = (build_mixer(config.backbone, d_model, muon, **config.dims()) for _ in range(config.layers))
        self.mixers = nn.ModuleList(mixers)
        self.norm = nn.RMSNorm(d_model, eps=1e-5)
        self.head = nn.Linear(d_model, classes)
        self.dropout = nn.Dropout(config.dropout)
        self._initialise()

    def _initialise(self) -> None:
        """Linear layers N(0, 0.02), output projections over sqrt(2 layers); Mamba's step sizes keep their own."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and not name.endswith("dt_proj"):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            if name.endswith("out_proj"):
                with torch.no_grad():
                    module.weight /= (2 * self.sizes.layers) ** 0.5

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """The logits, and with `labels` `[B]` their cross-entropy as `loss`."""
        h, _ = self.encode(x)
        logits = self.head(h.mean(dim=1))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}

    def encode(self, x: Tensor, state: ActivityState | None = None) -> tuple[Tensor, ActivityState]:
        """What is averaged over time `[B, L, d_model]`, for a window or a part that continues one."""
        before = x.new_zeros(x.shape[0], KERNEL - 1, x.shape[2]) if state is None else state.samples
        samples = torch.cat([before, x], dim=1)
        h = self.dropout(F.relu(self.batch_norm(self.conv(samples.mT)))).mT
        given = (None,) * len(self.mixers) if state is None else state.mixers
        states = []
        for norm, mixer, its_state in zip(self.norms, self.mixers, given, strict=True):
            y, its_state = mixer(norm(h), its_state)
            h = h + y
            states.append(its_state)
        return self.dropout(self.norm(h)), ActivityState(samples[:, x.shape[1] :], tuple(states))
