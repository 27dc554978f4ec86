"""Checkpoints: which are whole, and which are kept.

A checkpoint is whole if its files have the sizes and SHA-256 hashes in its manifest.json, which is written last.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

from .files import checksum, read_json, write_json

MANIFEST = "manifest.json"
STATE = "trainer_state.json"
NAME = re.compile(r"checkpoint-([0-9]+)")


def step_of(path: Path) -> int | None:
    """The step of a checkpoint folder; None for anything else."""
    found = NAME.fullmatch(path.name)
    return int(found[1]) if found and path.is_dir() else None


def all_checkpoints(folder: Path) -> list[Path]:
    """The checkpoint folders, newest first; other things beside them do not count."""
    found = [path for path in folder.iterdir() if step_of(path) is not None] if folder.is_dir() else []
    return sorted(found, key=lambda path: step_of(path) or 0, reverse=True)


def seal(checkpoint: Path) -> None:
    """Write the manifest."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST)
    entries = {str(path.relative_to(checkpoint)): [path.stat().st_size, checksum(path)] for path in files}
    write_json(checkpoint / MANIFEST, entries)


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint; None if it is whole."""
    if not checkpoint.is_dir():
        return "it is gone"
    if not (checkpoint / MANIFEST).is_file():
        return f"it has no {MANIFEST}: it was not written to the end"
    try:
        entries = read_json(checkpoint / MANIFEST, dict)
        for name, (size, digest) in entries.items():
            path = checkpoint / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size or checksum(path) != digest:
                return f"{name} is not as it was written"
    except (ValueError, TypeError, OSError) as error:
        return str(error)
    return None if STATE in entries else f"{STATE} is missing"


def newest_whole(folder: Path, remove: bool) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that is whole, with its trainer state; None to start anew.

    The checkpoint whose weights its run would keep must be whole too. A warning names each that is skipped; it is
    removed if `remove` is set, so that it does not count as the newest later.
    """
    for path in all_checkpoints(folder):
        problem = damage(path)
        if not problem:
            state, problem = _read_state(path)
        if not problem:
            return path, state
        if remove:
            print(f"warning: {path} is damaged and skipped: {problem}", file=sys.stderr)
            remove_checkpoint(path)
    return None


def _read_state(checkpoint: Path) -> tuple[dict[str, Any], str | None]:
    """The trainer state of a checkpoint, and what is wrong with it."""
    try:
        state = read_json(checkpoint / STATE, dict, finite=False)
    except ValueError as error:
        return {}, str(error)
    fields: dict[str, Any] = {
        "global_step": int,
        "epoch": (int, float),
        "log_history": list,
        "stateful_callbacks": dict,
    }
    for name, kind in fields.items():
        if not isinstance(state.get(name), kind):
            return {}, f"{STATE} is damaged: {name} is {state.get(name)!r:.100}"
    best = state.get("best_model_checkpoint")
    if best is not None and not isinstance(best, str):
        return {}, f"{STATE} is damaged: best_model_checkpoint is {best!r:.100}"
    if best and Path(best).name != checkpoint.name:
        reason = damage(checkpoint.parent / Path(best).name)
        return state, reason and f"it needs {Path(best).name}, and {reason}"
    return state, None


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, its manifest first, so that what a kill leaves of it does not look whole."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def rotate(folder: Path, best: str | None, limit: int) -> None:
    """Keep the newest checkpoint, the best, and others up to `limit`. Unlike transformers' it spares other folders."""
    newest_first = all_checkpoints(folder)
    protected = {newest_first[0].name, Path(best).name if best else ""}
    kept = len(newest_first)
    for path in reversed(newest_first):
        if kept > limit and path.name not in protected:
            remove_checkpoint(path)
            kept -= 1
