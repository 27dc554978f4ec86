"""Whether the Triton kernels can be trusted on a device: they are compared with `chunked` before `auto` takes them.

The first call of a kind on a device, such as the paper's rule on bfloat16 with heads of 64, runs the kernels that it
will use on small inputs: outputs, last states, all gradients, and a decoding step. The finding is kept in a file of the
cache folder, for this device, driver, and these versions of Triton, torch and muonssm. After a difference or a compiler
error `auto` warns once and takes `chunked`. A call with `impl="triton"` is not checked.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
import warnings
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muonssm.version import __version__

from ..muon import Muon, normalization_of
from ..state import MemoryState
from ..tracing import assume_constant
from . import config, support
from .kinds import Kind

LENGTHS = (70, 5, 0, 21)  # of packed sequences: a full chunk, an unfilled one, none
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest relative RMS difference: both sides round, so these are a few times the tolerances of the tests."""


def key_of(kind: Kind) -> str:
    """Return a name for the file of findings."""
    parts = (str(value).removeprefix("torch.") for value in kind)
    return ", ".join(f"{name} {value}" for name, value in zip(kind._fields, parts, strict=True))


def title_of(kind: Kind) -> str:
    """Return the rule in a few words."""
    if kind.operator == "selective":
        return "LongHorn's gate" if kind.erases else "Mamba's gate"
    correction = ("in the momentum" if kind.residual else "in the memory") if kind.erases else "none"
    words = [f"correction {correction}"]
    words += ["no momentum"] * (not kind.momentum) + ["inject"] * kind.injects
    return ", ".join(words)


def rule_of(kind: Kind) -> Muon:
    """Return a rule that runs the same kernels."""
    return Muon(
        gamma=0.7 if kind.momentum else 0.0,
        correction="momentum" if kind.residual else "memory",
        beta_position="outside" if kind.beta_outside else "inside",
        **normalization_of(kind.steps),
    )


def spills(kind: Kind, architecture: str) -> str | None:
    """Return why `auto` leaves a call to `chunked` without a check: its kernels spill registers to slow memory."""
    if kind.operator != "memory" or support.is_amd(architecture) or architecture == support.INTERPRETER:
        return None
    advice = "impl='triton' runs them nevertheless"
    if kind.dtype == torch.float32:
        return f"on {architecture} the Triton kernels spill registers for float32; {advice}"
    if config.padded(max(kind.values, kind.keys)) >= config.LARGEST:
        return f"on {architecture} the Triton kernels spill registers for heads above {config.LARGEST // 2}; {advice}"
    return None


@assume_constant
def distrusted(device: torch.device, one_step: bool, *fields: Any) -> str | None:
    """Return why `auto` must not take the Triton kernels for a call, whose `Kind` has these fields; None if it can."""
    kind = Kind(*fields)
    # The kernel of a single step spills nothing.
    reason = None if one_step else spills(kind, support.architecture(device))
    return finding(kind, device) if reason is None else reason


def finding(kind: Kind, device: torch.device) -> str | None:
    """Return what the check of `kind` found wrong on `device`, now or earlier; None if nothing. Warn once if wrong."""
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    return _finding(kind, torch.device(device.type, index) if index is not None else device)


@functools.cache
def _finding(kind: Kind, device: torch.device) -> str | None:
    identity = device_identity(device)
    known, key = _read(_file(identity)), key_of(kind)
    if key in known:
        found = known[key]
    else:
        found = check(kind, device)
        _remember(_file(identity), identity, key, found)
    if found is not None:
        warnings.warn(
            f"the Triton kernels failed their check on {identity['device']} and impl='auto' takes 'chunked': {found} "
            f"({key}); `muonssm info --check` repeats it",
            stacklevel=2,
        )
    return found


def check(kind: Kind, device: torch.device) -> str | None:
    """Compare the kernels with `chunked` on small inputs; return what differs, or the compiler's error, or None."""
    try:
        random = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        with random, torch.inference_mode(False), torch.enable_grad():
            torch.manual_seed(0)
            inputs = _inputs(kind, device)
            found, wanted = (_results(kind, inputs, impl) for impl in ("triton", "chunked"))
    except Exception as error:  # whatever a compiler or driver raises, `chunked` still runs
        return f"{type(error).__name__}: {str(error).strip()[:300]}"
    tolerance = TOLERANCE[kind.dtype]
    off = {name: _difference(x, wanted[name]) for name, x in found.items()}
    wrong = [f"{name} by {value:.2g}" for name, value in off.items() if not value <= tolerance]
    return f"differs from 'chunked' in {', '.join(wrong)} (at most {tolerance:g})" if wrong else None


def _inputs(kind: Kind, device: torch.device) -> dict[str, Tensor]:
    """Draw inputs of the size of real ones, on the CPU, so that they are the same on every device."""
    L, N, d, m, dtype = sum(LENGTHS), len(LENGTHS), kind.values, kind.keys, kind.dtype
    if kind.operator == "memory":
        H = 2
        vectors = {name: torch.randn(1, L, H, size) * size**-0.5 for name, size in (("q", m), ("k", m), ("v", d))}
        gates = {"log_alpha": -0.3 * torch.rand(1, L, H), "beta": 0.1 + 0.8 * torch.rand(1, L, H)}
        gates |= {"inject": 0.2 + torch.rand(1, L, H)} if kind.injects else {}
        state: tuple[int, ...] = (N, H, d, m)
    else:
        H = 1
        vectors = {"x": torch.randn(1, L, d), "dt": 0.01 + 0.4 * torch.rand(1, L, d)}
        vectors |= {name: torch.randn(1, L, m) * m**-0.5 for name in ("B", "C")}
        gates = {} if kind.erases else {"A": -0.1 - torch.rand(d, m)}
        state = (N, d, m)
    wide = gates | {name: 0.1 * torch.randn(state) for name in ("S", "M")}
    wide |= {"gamma": 0.2 + 0.75 * torch.rand(1, L, H)} if kind.momentum else {}
    inputs = {name: x.to(device, dtype) for name, x in vectors.items()} | {
        name: x.to(device) for name, x in wide.items()
    }
    return {name: x.requires_grad_() for name, x in inputs.items()}


def _results(kind: Kind, inputs: dict[str, Tensor], impl: str) -> dict[str, Tensor]:
    """Return y, the last states and the gradients of a weighted sum of all three; then those of a decoding step."""
    y, end = _call(kind, inputs, impl, torch.tensor([0, *LENGTHS]).cumsum(0))
    loss = sum((x.float() * _weights(x)).sum() for x in (y, *end))
    gradients = torch.autograd.grad(loss, list(inputs.values()))  # type: ignore[arg-type]
    result = {"y": y, "S": end.S, "M": end.M}
    result |= {f"the gradient of {name}": g for name, g in zip(inputs, gradients, strict=True)}
    whole = ("S", "M", "A")
    step = {name: x if name in whole else x[:, : len(LENGTHS)].transpose(0, 1) for name, x in inputs.items()}
    with torch.no_grad():
        y, end = _call(kind, step, impl, None)
    result |= {"y of a single step": y, "S of a single step": end.S, "M of a single step": end.M}
    return {name: x.detach().float().cpu() for name, x in result.items()}


def _call(kind: Kind, inputs: dict[str, Tensor], impl: str, bounds: Tensor | None) -> tuple[Tensor, MemoryState]:
    from ..memory import muon_memory
    from ..selective import muon_selective_scan

    muon = replace(rule_of(kind), gamma=inputs["gamma"]) if kind.momentum else rule_of(kind)
    common: dict[str, Any] = {"muon": muon, "state": MemoryState(inputs["S"], inputs["M"]), "cu_seqlens": bounds}
    if kind.operator == "memory":
        tensors = (inputs[name] for name in ("q", "k", "v", "log_alpha", "beta"))
        return muon_memory(*tensors, eta=float(kind.erases), inject=inputs.get("inject"), impl=impl, **common)
    x, dt, A, B, C = (inputs.get(name) for name in ("x", "dt", "A", "B", "C"))
    return muon_selective_scan(x, dt, A, B, C, impl=impl, **common)  # type: ignore[arg-type]


def _weights(x: Tensor) -> Tensor:
    return torch.linspace(-1, 1, x.numel(), device=x.device).cos().view(x.shape)


def _difference(found: Tensor, wanted: Tensor) -> float:
    """Return the relative RMS difference; the gradient of a beta that cancels is nothing but rounding."""
    scale = wanted.square().mean().sqrt().item()
    return (found - wanted).square().mean().sqrt().item() / max(scale, 1e-3)


def device_identity(device: torch.device) -> dict[str, str]:
    """Return everything that a finding depends on, besides the kind of call."""
    versions = {"torch": torch.__version__, "triton": metadata.version("triton"), "muonssm": __version__}
    if device.type != "cuda":
        return {"device": f"{device.type}, interpreted", "driver": "none", **versions}
    properties = torch.cuda.get_device_properties(device)
    driver = torch.version.hip or torch.version.cuda or "unknown"
    with contextlib.suppress(Exception):  # not part of torch's public functions
        driver = f"{driver}, driver {torch._C._cuda_getDriverVersion()}"  # type: ignore[attr-defined]
    return {"device": f"{properties.name} ({support.architecture(device)})", "driver": driver, **versions}


def cache_folder() -> Path:
    """Return the folder of findings: MUONSSM_CACHE, else `muonssm` in XDG_CACHE_HOME or ~/.cache."""
    given = os.environ.get("MUONSSM_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "muonssm"


def _file(identity: dict[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / f"gpu-check-{digest}.json"


def _read(path: Path) -> dict[str, str | None]:
    """Return the findings of a file; a missing or damaged one has none."""
    try:
        findings = json.loads(path.read_text(encoding="utf-8"))["findings"]
        if all(isinstance(key, str) and (value is None or isinstance(value, str)) for key, value in findings.items()):
            return dict(findings)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return {}


def _remember(path: Path, identity: dict[str, str], key: str, found: str | None) -> None:
    """Add a finding to the file, atomically; where nothing can be written, the next process checks again."""
    content = {"identity": identity, "findings": {**_read(path), key: found}}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8") as part:
            json.dump(content, part, indent=1)
        os.replace(part.name, path)


def table(device: torch.device) -> list[tuple[Kind, str | None]]:
    """Check the usual kinds of calls anew on `device`; return what was found, in order."""
    real = device.type == "cuda"  # the interpreter computes bfloat16 incorrectly, and takes a second per case
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if real else (torch.float32, torch.float16)
    sizes = (64, 128) if real else (16,)
    kinds = [
        kind
        for dtype in dtypes
        for size in sizes
        for kind in (
            Kind("memory", dtype, size, size, erases=True),
            Kind("memory", dtype, size, size),
            Kind("memory", dtype, size, size, erases=True, residual=True, injects=True, steps=-1),
            Kind("memory", dtype, size, size, erases=True, momentum=False, steps=-1),
        )
    ]
    kinds += [Kind("selective", dtype, 64, 16, erases=longhorn) for dtype in dtypes for longhorn in (False, True)]
    identity = device_identity(device)
    rows = []
    for kind in kinds:
        found = check(kind, device)
        _remember(_file(identity), identity, key_of(kind), found)
        rows.append((kind, found))
    _finding.cache_clear()
    return rows
