"""`ActivityConfig`: the section `data` of an activity recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from muonssm.checks import check_choice, check_int, check_number

from .recordings import Channels
from .sources import SOURCES
from .windows import MODES

MAX_LENGTH = 1_000_000  # samples of a window


@dataclass(frozen=True)
class ActivityConfig:
    """Which recordings to load, and how to make windows of them.

    Attributes:
        source: a key of `SOURCES`: `"watch"` (embedded), `"motionsense"`, `"utd-mhad"`, `"uci-har"`, `"uci-hapt"`,
            `"MuWiGes"`, `"UESTC-MMEA-CL"`, `"MMAct"` or `"folder"`.
        root: folder with the data; None for `"watch"`.
        length: samples per window.
        overlap: fraction of a window that it shares with the next one, in [0, 1).
        mode: `"windows"` cuts recordings into windows (a shorter recording is resampled to one window); `"clips"`
            resamples each recording to one window.
        rate: sampling rate in Hz that all recordings are resampled to. None: the published rate, or else the median
            over the training recordings; with `"clips"`, each recording keeps its own rate.
        split: `"subject"`, `"kfold"` (over subjects, or over recordings if there are no subjects), `"given"` (comes
            with the data), or one that the source names: `"cross-subject"`, `"cross-scene"`, `"cross-session"` for
            MMAct, `"cross-subject"` for UTD-MHAD, `"trial"` for MotionSense. None: the default of the source.
        fold: which group is the test set, from 0; the next group is the validation set. For a published split without a
            validation set: which group of the training set becomes the validation set.
        folds: number of groups, 3 or more.
        seed: seed of the shuffle before recordings are dealt into groups.
        max_lost: largest fraction of unusable files; loading stops above it.
        channels: names of the channels to use, in this order; None uses all (for MMAct all but orientation).
    """

    source: str = "watch"
    root: str | Path | None = None
    length: int = 512
    overlap: float = 0.5
    mode: str = "windows"
    rate: float | None = None
    split: str | None = None
    fold: int = 0
    folds: int = 5
    seed: int = 0
    max_lost: float = 0.01
    channels: Channels | None = None

    def __post_init__(self) -> None:
        source = SOURCES[check_choice("source", self.source, tuple(SOURCES))]
        if (self.root is None) != source.embedded:
            wanted = "None, because the data is embedded," if source.embedded else "the folder with the data"
            raise ValueError(f"root must be {wanted} for source {self.source!r}, got {self.root!r}")
        object.__setattr__(self, "root", None if self.root is None else str(Path(self.root).resolve()))
        object.__setattr__(self, "split", source.splits[0] if self.split is None else self.split)
        check_choice("split", self.split, source.splits)
        check_choice("mode", self.mode, MODES)
        self._check_numbers()
        self._check_channels(source.channels)

    def _check_numbers(self) -> None:
        for name, least in (("length", 2), ("folds", 3), ("fold", 0), ("seed", 0)):
            check_int(name, getattr(self, name), least)
        if self.length > MAX_LENGTH:
            raise ValueError(f"length must be {MAX_LENGTH} or less ({__name__}.MAX_LENGTH), got {self.length}")
        if self.fold >= self.folds:
            raise ValueError(f"fold must be less than folds ({self.folds}), got {self.fold}")
        if check_number("overlap", self.overlap, 0, 1) == 1:
            raise ValueError(f"overlap must be less than 1, got {self.overlap}")
        check_number("max_lost", self.max_lost, 0, 1)
        if self.rate is not None:
            check_number("rate", self.rate, 0, open_low=True)

    def _check_channels(self, known: Channels | None) -> None:
        if self.channels is None:
            return
        names = self.channels
        if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"channels must be None or a tuple of names, got {names!r}")
        object.__setattr__(self, "channels", tuple(names))
        if not names or len(set(names)) < len(names):
            raise ValueError(f"channels must be one or more different names, got {names!r}")
        unknown = [name for name in names if known is not None and name not in known]
        if unknown:
            wanted = ", ".join(known or ())
            raise ValueError(f"channels must be among {wanted} for source {self.source!r}, got {unknown[0]!r}")
