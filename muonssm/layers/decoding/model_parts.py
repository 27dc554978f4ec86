"""`ModelParts`: the modules of a language model, as `blocks.build_program` takes them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class BlockParts:
    """h = h + mixer(norm(h)), then h = h + mlp(mlp_norm(h)) if there is an MLP.

    Attributes:
        mixer: a `Mixer`, or attention with the projections of transformers' `MistralAttention`.
        mlp: gate_proj, up_proj and down_proj, as in transformers' `MistralMLP`.
    """

    norm: nn.Module
    mixer: nn.Module
    mlp_norm: nn.Module | None = None
    mlp: nn.Module | None = None


@dataclass(frozen=True)
class ModelParts:
    """A language model: embedding, blocks, norm, head; for attention the rotary embedding and the window."""

    embedding: nn.Module
    blocks: list[BlockParts]
    norm: nn.Module
    head: nn.Module
    rotary: nn.Module | None = None
    window: int = 0
