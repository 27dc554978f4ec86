"""`Muon` as a model's configuration stores it: a dict of settings, True or False, so that JSON and TOML can hold it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from muonssm.ops import Muon


def as_muon(muon: Any) -> Muon:
    """Convert `muon` to a `Muon`: True is the defaults, False or None is plain, a dict has the settings."""
    if muon is None or isinstance(muon, bool):
        muon = Muon() if muon else Muon.off()
    if isinstance(muon, dict):
        try:
            muon = Muon(**muon)
        except TypeError as error:
            raise ValueError(f"muon must be a dict of settings of muonssm.Muon, got {muon!r} ({error})") from error
    if not isinstance(muon, Muon):
        raise TypeError(f"muon must be a dict of settings, True or False, got {muon!r}")
    if not isinstance(muon.gamma, (int, float)):
        raise TypeError("muon.gamma must be a number, got a tensor; use momentum='per_head' to learn it")
    return muon


def muon_settings(muon: Any) -> dict[str, Any]:
    """Convert `muon`, as `as_muon` takes it, to a dict of settings."""
    return asdict(as_muon(muon))
