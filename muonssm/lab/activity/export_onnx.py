"""Export a trained classifier to ONNX: whole windows, and one step with its state in and out.

    window.onnx     samples `[windows, length, channels]` -> logits, probabilities `[windows, classes]`
    step.onnx       sample `[windows, channels]` and the state -> logits and probabilities of each window so far, the
                    next state; not for a bidirectional model, which has no step
    model.json      classes, channels, sampling rate, how to cut windows, and the names and shapes of the state

Samples are in the units of the recordings: both programs standardize them. The state of a window that starts is zero:

    steps           `[windows, 1]`, how many samples were given
    sum             `[windows, d_model]`, the encoded samples, summed over time
    samples         `[windows, 2, channels]`, the last two samples, standardized
    conv_i          `[windows, K - 1, C]`, the last inputs of mixer i's short convolution
    S_i, M_i        `[windows, ...]`, memory and momentum of mixer i
"""

from __future__ import annotations

import contextlib
import io
import logging
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from muonssm.lab.core.files import naming, write_json
from muonssm.layers import MixerState
from muonssm.models.activity import ActivityClassifier, ActivityState
from muonssm.ops import MemoryState
from muonssm.version import __version__

from .config import ActivityConfig
from .dataset import read_recording
from .scan_operator import recurrences_as_scans, running
from .windows import make_windows, standardize, window_hop

OPSET = 18
TRACED = 97  # windows while tracing: no size of a model, so that none is taken for the number of windows
TOLERANCE = 1e-5  # of every output, relative to the largest value of its tensor if that is above 1
WINDOW, STEP, MODEL = "window.onnx", "step.onnx", "model.json"
RESULTS = ("logits", "probabilities")


class Trained(NamedTuple):
    """A finished run: the section `data` of its recipe, the metadata of its data, and the model."""

    config: ActivityConfig
    metadata: dict[str, Any]
    model: ActivityClassifier

    @property
    def can_step(self) -> bool:
        """Whether the model can process sample by sample."""
        return not self.model.sizes.bidirectional


class _Windows(nn.Module):
    """Whole windows: samples to logits and probabilities."""

    def __init__(self, trained: Trained) -> None:
        super().__init__()
        self.model = trained.model
        self.register_buffer("mean", torch.tensor(trained.metadata["mean"]))
        self.register_buffer("std", torch.tensor(trained.metadata["std"]))

    def forward(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(standardize(samples, self.mean, self.std))["logits"]  # type: ignore[arg-type]
        return logits, logits.softmax(dim=1)


class _Step(_Windows):
    """One sample of each window: logits and probabilities of the window so far, and the next state."""

    def forward(self, sample: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:  # type: ignore[override]
        steps, total, samples, *mixers = state
        x = standardize(sample, self.mean, self.std)[:, None]  # type: ignore[arg-type]
        h, after = self.model.encode(x, ActivityState(samples, _mixer_states(mixers)))
        steps, total = steps + 1, total + h[:, 0]
        logits = self.model.head(total / steps)
        return logits, logits.softmax(dim=1), steps, total, *_flatten(after)


def _mixer_states(tensors: Sequence[Tensor]) -> tuple[MixerState, ...]:
    """Group conv, S and M of every mixer."""
    threes = zip(tensors[0::3], tensors[1::3], tensors[2::3], strict=True)
    return tuple(MixerState(conv, MemoryState(S, M)) for conv, S, M in threes)


def _flatten(state: ActivityState) -> list[Tensor]:
    """Samples, then conv, S and M of every mixer."""
    mixers = [(mixer.conv, mixer.memory.S, mixer.memory.M) for mixer in state.mixers if mixer is not None]
    return [state.samples, *(tensor for tensors in mixers for tensor in tensors)]


@torch.inference_mode()
def empty_state(trained: Trained, windows: int = 1) -> dict[str, Tensor]:
    """The state of windows that start: zeros, by name."""
    model = trained.model
    _, after = model.encode(torch.zeros(windows, 1, len(trained.metadata["channels"])))
    names = ["samples", *(f"{name}_{i}" for i in range(len(model.mixers)) for name in ("conv", "S", "M"))]
    state = {"steps": torch.zeros(windows, 1), "sum": torch.zeros(windows, model.sizes.d_model)}
    return state | {name: torch.zeros_like(x) for name, x in zip(names, _flatten(after), strict=True)}


def export_onnx(trained: Trained, folder: Path, recording: str | None = None) -> dict[str, float]:
    """Write the programs and model.json into a folder that exists; return the largest difference from torch of each.

    The programs are compared on two windows of noise with the statistics of the training data, or on all windows of a
    `recording`.
    """
    check_supported(trained)
    names = [name for name in (WINDOW, STEP) if name == WINDOW or trained.can_step]
    for name in names:
        (_write_window if name == WINDOW else _write_step)(trained, folder / name)
    write_json(folder / MODEL, describe(trained))
    differences = compare(trained, folder, _noise(trained) if recording is None else windows_of(trained, recording))
    for name, difference in differences.items():
        if not difference <= TOLERANCE:
            raise ValueError(f"{name} must equal torch to {TOLERANCE:g}, got a difference of {difference:.3g}")
    return differences


def windows_of(trained: Trained, recording: str) -> np.ndarray:
    """The windows `[n, length, channels]` of a file, in its units."""
    config, metadata = trained.config, trained.metadata
    samples = read_recording(recording, metadata["channels"], metadata["rate"], config.source)
    return make_windows(samples, config.mode, config.length, config.overlap)


def _noise(trained: Trained) -> np.ndarray:
    mean, std = (np.array(trained.metadata[name], dtype=np.float32) for name in ("mean", "std"))
    shape = (2, trained.config.length, len(mean))
    return mean + std * np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def check_supported(trained: Trained) -> None:
    """Refuse what cannot be exported."""
    rule = trained.model.mixers[0].muon
    if getattr(rule, "orthogonalize", None) is not None:
        raise ValueError(f"muon.orthogonalize must be None for an export, got {rule.orthogonalize!r}")  # type: ignore[union-attr]


def describe(trained: Trained) -> dict[str, Any]:
    """The content of model.json."""
    config, metadata = trained.config, trained.metadata
    state = {name: list(x.shape[1:]) for name, x in empty_state(trained).items()} if trained.can_step else None
    return {
        "muonssm": __version__,
        **{name: metadata[name] for name in ("classes", "channels", "rate", "mean", "std")},
        "mode": config.mode,
        "length": config.length,
        "hop": window_hop(config.length, config.overlap),
        "state": state,  # sizes of each tensor after the first axis, which counts windows
    }


def _write_window(trained: Trained, path: Path) -> None:
    samples = torch.zeros(TRACED, trained.config.length, len(trained.metadata["channels"]))
    names = {"input_names": ["samples"], "output_names": list(RESULTS)}
    with recurrences_as_scans(trained.model):
        _write(_Windows(trained), (samples,), ({0: "windows"},), names, path)


def _write_step(trained: Trained, path: Path) -> None:
    state = empty_state(trained, TRACED)
    sample = torch.zeros(TRACED, len(trained.metadata["channels"]))
    windows = {0: "windows"}
    names = {
        "input_names": ["sample", *state],
        "output_names": [*RESULTS, *(f"next_{name}" for name in state)],
    }
    with running(trained.model, "reference"):
        _write(_Step(trained), (sample, tuple(state.values())), (windows, (windows,) * len(state)), names, path)


def _write(module: nn.Module, inputs: Any, dynamic_shapes: Any, names: dict[str, Any], path: Path) -> None:
    """Trace a module, and write its program."""
    import onnxscript  # noqa: F401  the exporter needs it: an error here names the extra

    with torch.no_grad(), _quiet(), naming(path):
        program = torch.onnx.export(
            module.eval(),
            inputs,
            dynamo=True,
            dynamic_shapes=dynamic_shapes,
            opset_version=OPSET,
            verbose=False,
            **names,
        )
        assert program is not None
        program.save(path)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's remarks on itself from the terminal."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# ---- comparing with torch


def compare(trained: Trained, folder: Path, windows: np.ndarray) -> dict[str, float]:
    """The largest difference between torch and each program, on windows `[n, length, channels]` of samples.

    The step is compared at every sample: logits and probabilities of the window so far, and all of its state.
    """
    differences = {WINDOW: _compare_window(trained, folder / WINDOW, windows)}
    if trained.can_step:
        differences[STEP] = max(step_differences(trained, folder / STEP, windows))
    return differences


@torch.inference_mode()
def _compare_window(trained: Trained, path: Path, windows: np.ndarray) -> float:
    expected = _Windows(trained)(torch.from_numpy(windows))
    return _difference(_session(path)(samples=windows), expected)


@torch.inference_mode()
def step_differences(trained: Trained, path: Path, windows: np.ndarray) -> Iterator[float]:
    """Run torch and the program side by side, each with its own state; yield their difference at every step."""
    session, step = _session(path), _Step(trained)
    state = empty_state(trained, len(windows))
    names, in_torch = list(state), tuple(state.values())
    in_onnx = [x.numpy() for x in in_torch]
    for t in range(windows.shape[1]):
        sample = np.ascontiguousarray(windows[:, t])
        expected = step(torch.from_numpy(sample), in_torch)
        given = session(sample=sample, **dict(zip(names, in_onnx, strict=True)))
        in_torch, in_onnx = expected[len(RESULTS) :], given[len(RESULTS) :]
        yield _difference(given, expected)


def _session(path: Path) -> Callable[..., list[np.ndarray]]:
    """A program as a function of its inputs by name."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda **inputs: session.run(None, inputs)


def _difference(given: Sequence[np.ndarray], expected: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest value of a tensor where that is above 1; nan counts as inf."""
    pairs = zip(given, (x.numpy() for x in expected), strict=True)
    largest = max(float(np.abs(a - b).max() / max(1.0, np.abs(b).max())) for a, b in pairs)
    return largest if largest == largest else np.inf


# ---- the folder


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder; at the end it becomes `output`, which must be free: all of it is written or nothing."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output must be a free folder, got {str(output)!r}, which is not empty")
    temporary = output.with_name(f"{output.name}.{secrets.token_hex(4)}.part")
    with naming(output):
        temporary.mkdir(parents=True)
        try:
            yield temporary
            temporary.replace(output)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
