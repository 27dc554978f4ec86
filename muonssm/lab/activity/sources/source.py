"""`Source`: the interface of a data set. `Listing`: the recordings that a source finds in a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..recordings import Channels, LostFile, Recording, Signal

SplitNames = list[str | None]  # per recording: "train", "validation" or "test"; None if the split does not use it


@dataclass
class Listing:
    """The recordings of a data set before any of them is read.

    Attributes:
        recordings: without a `split`, in an order that depends only on their names.
        classes: class names; `Recording.label` is an index into them.
        read: read the samples of a recording. Raises `DamagedFileError` or `OSError` if it cannot be used.
        lost: files that are not recordings, each with the reason.
        published_splits: the split of every recording, for each split that is published with the data.
        subject_groups: groups of subjects for the split `"subject"`, if the source fixes them.
    """

    recordings: list[Recording]
    classes: tuple[str, ...]
    read: Callable[[Recording], Signal]
    lost: list[LostFile] = field(default_factory=list)
    published_splits: dict[str, SplitNames] = field(default_factory=dict)
    subject_groups: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Source:
    """A data set with its layout on disk. Its name in recipes (`data.source`) is its key in `SOURCES`.

    Attributes:
        splits: the values that `data.split` can have, the default first.
        find_recordings: list the recordings in a folder; the second argument is `data.channels`.
        read_file: read one file of this layout; used by `muonssm predict` and `muonssm stream`.
        channels: names of all channels; None if each file names its own.
        rate: the published sampling rate in Hz; None if it is not published.
        embedded: whether the data comes with a Python package, so that `data.root` must be None.
    """

    splits: tuple[str, ...]
    find_recordings: Callable[[Path, Channels | None], Listing]
    read_file: Callable[[Path, Channels | None], Signal]
    channels: Channels | None = None
    rate: float | None = None
    embedded: bool = False
