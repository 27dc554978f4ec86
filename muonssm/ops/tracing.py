"""Questions about what torch does around a call: compilation, torch.func, forward-mode differentiation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def is_transformed() -> bool:
    """Return whether torch.func or forward-mode differentiation surrounds this call."""
    return not torch.compiler.is_compiling() and is_transformed_eagerly()


def is_transformed_eagerly() -> bool:
    """Return the same for a call that is known not to be compiled."""
    return torch.autograd.forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def assume_constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function whose result a compiler may evaluate once.

    Does what `torch.compiler.assume_constant_result` does, without importing the whole compiler (over a second).
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
