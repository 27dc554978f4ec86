"""Export a trained classifier as a web page: the folder works from any static host, and from a file without a server.

    index.html              the page; style.css its look
    recording.js            a CSV file to windows, as `muonssm predict` makes them
    classifier.js           the programs of `export_onnx`, run by onnxruntime-web
    motion.js               a phone's motion events to samples at the model's rate, and to windows
    page.js                 what the page shows
    model.js                the settings and the programs
    runtime.js              onnxruntime-web's program, compressed
    ort.wasm.min.js         onnxruntime-web's interface

A browser that opened a file reads no other file: no `fetch`, no module, no worker. So the programs are in scripts, as
base64, and onnxruntime-web runs in one thread.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from muonssm.lab.core.files import naming
from muonssm.lab.report.colors import DARK, LIGHT, css_variables
from muonssm.version import __version__

from . import onnxruntime_web
from .export_onnx import STEP, WINDOW, Trained, describe, export_onnx

TEMPLATES = Path(__file__).parent / "templates"
COPIED = ("recording.js", "classifier.js", "motion.js", "page.js")
DEGREE = 0.017453292519943295  # in radians
GRAVITY = 9.80665  # in m/s^2
# How channels of phones and watches are named, and what a phone's motion events call it. First match wins.
SIGNALS = (
    (re.compile(r"(gyr\w*|rot\w*|ang\w*|w|g)[ ._-]?([xyz])", re.IGNORECASE), "rotation"),
    (re.compile(r"grav\w*[ ._-]?([xyz])", re.IGNORECASE), "gravity"),
    (re.compile(r"(user\w*|lin\w*|body\w*)[ ._-]?([xyz])", re.IGNORECASE), "acceleration"),
    (re.compile(r"(total\w*|acc\w*|a)[ ._-]?([xyz])", re.IGNORECASE), "accelerationIncludingGravity"),
)


def export_web(
    trained: Trained, folder: Path, files: onnxruntime_web.Files, title: str, recording: str | None = None
) -> dict[str, float]:
    """Write the page into a folder that exists; return the largest difference of each program from torch.

    `files` are those of `onnxruntime_web`; `recording` is what to compare on, see `export_onnx`.
    """
    with tempfile.TemporaryDirectory() as temporary:
        differences = export_onnx(trained, Path(temporary), recording)
        programs = {name: (Path(temporary) / name).read_bytes() for name in differences}
    settings = {**describe(trained), "title": title, "motion": motion_signals(trained.metadata)}
    binaries = {"window": programs[WINDOW], "step": programs.get(STEP)}
    encoded = {name: None if content is None else _base64(content) for name, content in binaries.items()}
    compressed = {
        "glue": _base64(files[onnxruntime_web.GLUE]),
        "program": _base64(gzip.compress(files[onnxruntime_web.PROGRAM], mtime=0)),
    }
    with naming(folder):
        for name in COPIED:
            (folder / name).write_bytes((TEMPLATES / name).read_bytes())
        (folder / onnxruntime_web.SCRIPT).write_bytes(files[onnxruntime_web.SCRIPT])
        (folder / "model.js").write_text(_script("SETTINGS", settings) + _script("PROGRAMS", encoded), encoding="utf-8")
        (folder / "runtime.js").write_text(_script("RUNTIME", compressed), encoding="utf-8")
        for name, text in _render(settings).items():
            (folder / name).write_text(text, encoding="utf-8")
    return differences


def motion_signals(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """Guess for each channel which part of a motion event it is, and its unit; the page lets one change both.

    A motion event has accelerations in m/s^2 and rotation in degrees per second. Training data in g is recognized by
    the size of its accelerations; rotation is taken to be in radians per second.
    """
    names = metadata["channels"]
    found = [_signal(name) for name in names]
    size = _acceleration_size(found, metadata["mean"], metadata["std"])
    scale = {None: 0.0, "rotation": DEGREE}
    of_acceleration = 1 / GRAVITY if size < GRAVITY / 3 else 1.0
    return [
        {"channel": name, "signal": None, "scale": 1.0}
        if kind is None
        else {"channel": name, "signal": f"{kind}.{axis}", "scale": scale.get(kind, of_acceleration)}
        for name, (kind, axis) in zip(names, found, strict=True)
    ]


def _signal(name: str) -> tuple[str | None, str]:
    for pattern, kind in SIGNALS:
        match = pattern.fullmatch(name)
        if match:
            return kind, match.groups()[-1].lower()
    return None, ""


def _acceleration_size(found: Sequence[tuple[str | None, str]], mean: Sequence[float], std: Sequence[float]) -> float:
    """The root mean square of the acceleration with gravity, or of gravity, over its axes; 9.8 if there is none."""
    for wanted in ("accelerationIncludingGravity", "gravity"):
        squares = [m * m + s * s for (kind, _), m, s in zip(found, mean, std, strict=True) if kind == wanted]
        if squares:
            return float(sum(squares) ** 0.5)
    return GRAVITY


def _render(settings: dict[str, Any]) -> dict[str, str]:
    """The page and its style."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    page = environment.get_template("index.html.j2").render(
        settings=settings, runtime=f"{onnxruntime_web.PACKAGE} {onnxruntime_web.VERSION}", version=__version__
    )
    style = environment.get_template("style.css.j2").render(light=css_variables(LIGHT), dark=css_variables(DARK))
    return {"index.html": page, "style.css": style}


def _script(name: str, content: Any) -> str:
    """A script that defines one constant; JSON in ASCII is JavaScript."""
    return f"const {name} = {json.dumps(content, indent=1, allow_nan=False)};\n"


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
