"""`Muon` in the settings of a model: as a recipe or a JSON file can keep it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from muonssm.ops import Muon


def as_muon(muon: Any) -> Muon:
    """The value that `muon` stands for: True is the defaults, False or None plain, a dict has the settings."""
    if muon is None or isinstance(muon, bool):
        muon = Muon() if muon else Muon.off()
    if isinstance(muon, dict):
        try:
            muon = Muon(**muon)
        except TypeError as error:
            raise ValueError(f"muon is {muon!r}; it may have the settings of muonssm.Muon ({error})") from error
    if not isinstance(muon, Muon):
        raise ValueError(f"muon is {muon!r}; it may be a dict of settings, True or False")
    if not isinstance(muon.gamma, (int, float)):
        raise ValueError("muon.gamma is a tensor; it may be a number (a learned one is momentum='per_head')")
    return muon


def muon_settings(muon: Any) -> dict[str, Any]:
    """The same as a dict."""
    return asdict(as_muon(muon))
