"""`Decoder`: runs tokens of a model by its program, or says why the call runs through torch."""

from __future__ import annotations

import ctypes
import logging
import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from muonssm.ops import cpu_library, decode_steps
from muonssm.ops.tracing import is_transformed_eagerly

from .blocks import build_program
from .model_parts import ModelParts
from .program import Program, UnsupportedError, aligned
from .states import BoundMixer, BoundWindow, LayerAccess
from .weights import PackedMatrix, check_weights

log = logging.getLogger(__name__)


class Decoder:
    """Decoding of one model.

    Attributes:
        weights: the format of the matrices: "float32", "bfloat16" or "int8".
        dropped: whether the float32 weights were given up.
        reason: why the model has no program; None if it has one or was not tried.
    """

    def __init__(self, weights: str = "float32") -> None:
        self.weights = check_weights(weights)
        self.dropped = False
        self.reason: str | None = None
        self.packed: dict[int, PackedMatrix] = {}
        self._program: Program | None = None
        self._lock = threading.RLock()
        self._logged: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> Decoder:
        if self.dropped:
            raise TypeError("a model must keep its float32 weights to be copied, got one that dropped them")
        return Decoder(self.weights)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.dropped:
            raise TypeError("a model must keep its float32 weights to be pickled, got one that dropped them")
        return Decoder, (self.weights,)

    def program(self, model: nn.Module, parts: Callable[[], ModelParts]) -> Program:
        """Return the model's program; build it again if the model changed. Raise UnsupportedError without one."""
        if self._program is None or not self._program.is_current():
            if not self.dropped:
                self.packed.clear()
            self._program = None
            try:
                self._bind(build_program(model, parts(), self.weights, self.packed))
            except UnsupportedError as error:
                self.reason = str(error)
                raise
            self.reason = None
        assert self._program is not None
        return self._program

    def _bind(self, program: Program) -> None:
        self._program = program
        self._mixers = [BoundMixer(slot) for slot in program.mixers]
        self._windows = [BoundWindow(slot) for slot in program.windows]
        self._scratch, self._scratch_for = torch.empty(0), (0, 0, 0)
        self._arguments = decode_steps.DecodeArguments(
            vocabulary=program.vocabulary, count=len(program.steps), steps=ctypes.addressof(program.table)
        )

    def run(
        self,
        model: nn.Module,
        parts: Callable[[], ModelParts],
        ids: Tensor,
        cache: Any,
        access: LayerAccess,
        keep: int = 1,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        seen: int = 0,
        held: Callable[[Any], bool] | None = None,
    ) -> Tensor:
        """Return the logits `[B, keep, vocabulary]` of the last `keep` tokens, and advance the cache.

        Args:
            model, parts: the model, and a function that returns its parts when a program has to be built.
            ids: int64 `[B, L]`, B L <= 16.
            cache: transformers' cache, whose layers hold the states.
            access: how to get at the state of a mixer's layer.
            keep: number of logits per sequence.
            mask: `[B, seen + L]` or longer, 0 at padding.
            positions: `[B, L]` or `[1, L]`, for rotary embeddings; by default from `seen` on.
            seen: number of tokens in the cache.
            held: whether a snapshot holds the state of a layer, which must then be copied before it changes.
        """
        with self._lock:  # programs have one set of buffers
            program = self.program(model, parts)
            return self._run(program, ids, cache, access, keep, mask, positions, seen, held)

    def _run(
        self,
        program: Program,
        ids: Tensor,
        cache: Any,
        access: LayerAccess,
        keep: int,
        mask: Tensor | None,
        positions: Tensor | None,
        seen: int,
        held: Callable[[Any], bool] | None,
    ) -> Tensor:
        B, L = ids.shape
        a = self._arguments
        for mixer in self._mixers:
            layer = cache.layers[mixer.slot.layer]
            mixer.bind(layer, access, B, held is not None and held(layer))
        past = [window.bind(cache.layers[window.slot.layer], B, L) for window in self._windows]
        kept_alive = [ids := ids.to(torch.int64).contiguous()]
        a.live = None
        if mask is not None and not mask[:, -L:].all():
            kept_alive.append(live := (mask[:, -L:] != 0).to(torch.uint8).contiguous())
            a.live = live.data_ptr()
        if past:
            kept_alive += self._window_inputs(B, L, past, mask, positions, seen)
        threads = torch.get_num_threads()
        self._reserve(program, threads, B * L, max(past, default=0))
        logits = torch.empty(B, keep, program.vocabulary_out)
        a.threads, a.sequences, a.length, a.keep, a.tokens = threads, B, L, keep, ids.data_ptr()
        a.logits = logits.data_ptr()
        if decode_steps.load().muonssm_decode(ctypes.byref(a)):
            raise IndexError(f"input_ids must be in 0 to {program.vocabulary - 1}, got {ids.min()} to {ids.max()}")
        for window in self._windows:
            window.advance(cache.layers[window.slot.layer], L)
        return logits

    def _window_inputs(
        self, B: int, L: int, past: list[int], mask: Tensor | None, positions: Tensor | None, seen: int
    ) -> list[Tensor]:
        """Set the positions of the tokens, and the mask of each attention layer's keys."""
        if positions is None:
            positions = torch.arange(seen, seen + L)[None]
        positions = positions.to(torch.int64).expand(B, L).contiguous()
        self._arguments.positions = positions.data_ptr()
        alive = [positions]
        for window, tokens in zip(self._windows, past, strict=True):
            step = window.slot.attend
            step.mask = None
            if mask is None:
                continue
            part = mask[:, -(tokens + L) :]
            if part.shape[1] < tokens + L:
                raise UnsupportedError(f"the attention mask has {mask.shape[1]} columns for {tokens + L} keys")
            if not part.all():
                alive.append(seen_keys := (part != 0).to(torch.uint8).contiguous())
                step.mask, step.mask_step = seen_keys.data_ptr(), seen_keys.shape[1]
        return alive

    def _reserve(self, program: Program, threads: int, rows: int, past: int) -> None:
        """Have scratch memory for so many threads, rows and keys."""
        sizes = (threads, rows, past)
        if all(have >= need for have, need in zip(self._scratch_for, sizes, strict=True)):
            return
        threads, rows, past = (max(pair) for pair in zip(self._scratch_for, sizes, strict=True))
        self._scratch_for = (threads, rows, past + 256 if past else 0)
        step = rows * program.scratch + self._scratch_for[2] + 256
        step = math.ceil(step / 16) * 16 + 64  # threads do not share a cache line
        self._scratch = aligned(threads * step)
        self._arguments.scratch, self._arguments.scratch_step = self._scratch.data_ptr(), step

    def drop(self, model: nn.Module) -> None:
        """Give up the float32 numbers of every packed matrix; its parameter keeps the shape, and NaN."""
        self.dropped = True
        for parameter in model.parameters():
            if id(parameter) in self.packed:
                parameter.requires_grad_(False)
                parameter.data = torch.full((1,), math.nan).expand(parameter.shape)
        model.register_state_dict_pre_hook(_refuse_state_dict)
        self._program = None  # its addresses are gone

    def bytes(self) -> int:
        """Return the size of what decoding needs besides the parameters: packed weights, buffers, scratch memory."""
        return 0 if self._program is None else self._program.bytes() + 4 * self._scratch.numel()

    def explain(self, reason: str) -> None:
        """Log once why calls run through torch."""
        if reason not in self._logged:
            self._logged.add(reason)
            log.info("decoding runs through torch: %s", reason)


def _refuse_state_dict(*_: Any) -> None:
    raise RuntimeError("the model dropped its float32 weights, so it cannot be saved or copied; load it again")


def why_not_here(model: nn.Module, *tensors: Tensor | None) -> str | None:
    """Return why no call of this model can run natively at this place; None if it can."""
    if model.training or torch.is_grad_enabled():
        return "the model is in training mode or gradients are recorded"
    if torch.compiler.is_compiling() or is_transformed_eagerly() or torch._C._get_tracing_state():
        return "the call is compiled, exported or transformed"
    if any(t is not None and (type(t) is not Tensor or not t.is_cpu) for t in tensors):
        return "the inputs are not plain tensors on a CPU"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "there are global hooks"
    return cpu_library.unavailable()
