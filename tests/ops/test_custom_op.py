"""Operators are registered with annotations that the oldest allowed torch can read."""

from __future__ import annotations

import typing

import torch
from torch import Tensor

from muonssm.ops.custom_op import custom_op


def scaled(tensors: list[Tensor], bias: Tensor | None, factor: float) -> tuple[Tensor, Tensor]:
    total = torch.stack(tensors).sum(0) * factor
    return total, total.clone() if bias is None else total + bias


def test_annotations_are_spelled_as_torch_2_5_reads_them():
    operator = custom_op("muonssm_test::scaled", scaled)
    assert scaled.__annotations__["tensors"] == typing.List[Tensor]  # noqa: UP006
    assert scaled.__annotations__["bias"] == typing.Optional[Tensor]  # noqa: UP045
    assert scaled.__annotations__["return"] == typing.Tuple[Tensor, Tensor]  # noqa: UP006
    schema = str(torch.ops.muonssm_test.scaled.default._schema)
    assert schema == "muonssm_test::scaled(Tensor[] tensors, Tensor? bias, float factor) -> (Tensor, Tensor)"
    assert operator([torch.ones(2), torch.ones(2)], None, 0.5)[0].tolist() == [1.0, 1.0]
