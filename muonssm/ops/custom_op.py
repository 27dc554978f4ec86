"""`custom_op`: register an operator with torch, in every torch that pyproject.toml allows."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from typing import Any

import torch


def custom_op(name: str, function: Callable[..., Any]) -> torch.library.CustomOpDef:
    """Register a function without side effects as the operator `name`; its schema follows from its annotations.

    torch 2.5 reads `typing.List[Tensor]` but not `list[Tensor]`, and so on; newer ones read both.
    """
    hints = typing.get_type_hints(function)
    function.__annotations__ = {argument: _old_spelling(hint) for argument, hint in hints.items()}
    return torch.library.custom_op(name, function, mutates_args=())


def offer_decompositions() -> None:
    """Let exporters see `decompositions`, and only them; called whenever an operator is traced.

    torch keeps one table of decompositions for every tracer, and Inductor refuses operators with an entry where the
    environment variable CI is set.
    """
    from . import decompositions

    is_exporting = getattr(torch.compiler, "is_exporting", torch.onnx.is_in_onnx_export)  # torch 2.5 has the second
    decompositions.offer(is_exporting() or torch.onnx.is_in_onnx_export())


def _old_spelling(hint: Any) -> Any:
    """`list[X]`, `tuple[X, Y]` and `X | None` as `typing.List[X]`, `typing.Tuple[X, Y]` and `typing.Optional[X]`."""
    arguments = tuple(_old_spelling(argument) for argument in typing.get_args(hint))
    if isinstance(hint, types.UnionType):
        return typing.Union[arguments]  # noqa: UP007
    generic: Any = {list: typing.List, tuple: typing.Tuple}.get(typing.get_origin(hint))  # noqa: UP006
    return hint if generic is None else generic[arguments]
