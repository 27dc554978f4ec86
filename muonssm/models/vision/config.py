"""`VisionConfig`: sizes and settings of a MambaVision network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from muonssm.checks import is_int, is_number
from muonssm.layers import BACKBONES
from muonssm.layers.momentum import MOMENTUM_VARIANTS
from muonssm.ops import Muon

STAGES = 4
WINDOWED = (2, 3)  # the stages of mixers and attention; those before them are convolutions


@dataclass(frozen=True)
class VisionConfig:
    """Everything `MambaVision` is built from; the defaults are the tiny size.

    Attributes:
        backbone: a name in `muonssm.layers.BACKBONES`, for the SSM in the mixers.
        muon: momentum and normalisation of that SSM; `Muon.off()` is the plain backbone.
        num_classes: of the head; 0 leaves it out, and `forward` gives the pooled features.
        in_channels: of the images.
        depths: blocks of each of the four stages. In the last two the first half (rounded up) are mixers, the rest
            attention.
        dims: channels of each stage.
        stem: channels between the two convolutions of the stem.
        stem_strides: of these two; the stages have the strides s, 2s, 4s and 8s with s their product.
        windows: sides of the square windows of the last two stages, in positions of their maps.
        fit_windows: whether a window that is wider than the map shrinks to it; the release pads the map instead.
        heads: of attention in the last two stages.
        mlp_ratio: width of the MLPs, in channels of their stage.
        drop_path: share of residual branches left out in training, growing from 0 in the first block to this.
        d_state: states a channel; for Mamba-2 and LongHorn the size of keys.
        d_conv: taps of the mixers' convolutions.
        memory_heads: heads of the delta rules' memories.
        momentum: `"fixed"`, `"per_head"` or `"per_step"`, as in the mixers.
    """

    backbone: str = "mamba"
    muon: Muon = Muon()  # noqa: RUF009  a frozen value
    num_classes: int = 1000
    in_channels: int = 3
    depths: tuple[int, ...] = (1, 3, 8, 4)
    dims: tuple[int, ...] = (80, 160, 320, 640)
    stem: int = 32
    stem_strides: tuple[int, int] = (2, 2)
    windows: tuple[int, int] = (14, 7)
    fit_windows: bool = False
    heads: tuple[int, int] = (8, 16)
    mlp_ratio: int = 4
    drop_path: float = 0.2
    d_state: int = 8
    d_conv: int = 3
    memory_heads: int = 4
    momentum: str = "fixed"

    def __post_init__(self) -> None:
        for name, may in (
            ("backbone", tuple(BACKBONES)),
            ("momentum", MOMENTUM_VARIANTS),
            ("fit_windows", (True, False)),
        ):
            if getattr(self, name) not in may:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it may be one of {may}")
        if not isinstance(self.muon, Muon):
            raise TypeError(f"muon is of type {type(self.muon).__name__}; it may be a Muon (Muon.off() is plain)")
        for name in ("in_channels", "stem", "mlp_ratio", "d_state", "d_conv", "memory_heads"):
            _check_count(name, getattr(self, name), 1)
        _check_count("num_classes", self.num_classes, 0)
        for name, length in (("depths", STAGES), ("dims", STAGES), ("stem_strides", 2), ("windows", 2), ("heads", 2)):
            object.__setattr__(self, name, _counts(name, getattr(self, name), length))
        share = self.drop_path
        if not is_number(share) or not 0 <= share < 1:
            raise ValueError(f"drop_path is {share!r}; it may be in [0, 1)")
        self._check_widths()

    def _check_widths(self) -> None:
        for stage, heads in zip(WINDOWED, self.heads, strict=True):
            dim = self.dims[stage]
            if dim % 2:
                raise ValueError(f"dims[{stage}] is {dim}; it may be even, for a mixer cuts its channels in two")
            if dim % heads:
                raise ValueError(f"heads has {heads}; it may be a divisor of dims[{stage}] = {dim}")

    @property
    def strides(self) -> tuple[int, ...]:
        """Pixels of the image between two positions of each stage's map."""
        first = self.stem_strides[0] * self.stem_strides[1]
        return tuple(first * 2**stage for stage in range(STAGES))

    def mixers(self, stage: int) -> int:
        """How many blocks of a stage have a mixer; the attention blocks follow them."""
        return (self.depths[stage] + 1) // 2 if stage in WINDOWED else 0

    def ssm_dims(self) -> dict[str, Any]:
        """Arguments of the layer that stands in for the SSM of Mamba.

        The mixer has convolved its input already, so that layer's own filters have one tap.
        """
        shell: dict[str, Any] = {"d_state": self.d_state, "expand": 1}
        own = {"mamba2": shell, "longhorn": shell}.get(self.backbone, {"num_heads": self.memory_heads})
        return {**own, "conv_size": 1, "momentum": self.momentum}


def _check_count(name: str, value: Any, least: int) -> None:
    if not is_int(value, least):
        raise ValueError(f"{name} is {value!r}; it may be an integer >= {least}")


def _counts(name: str, values: Any, length: int) -> tuple[int, ...]:
    """As a tuple, which a recipe or JSON gives as a list."""
    if not isinstance(values, (tuple, list)) or len(values) != length:
        raise ValueError(f"{name} is {values!r}; it may be {length} integers >= 1")
    for value in values:
        _check_count(f"{name}, {tuple(values)}, has a part that", value, 1)
    return tuple(values)
