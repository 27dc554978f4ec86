"""Every kernel with the types and constants of a real launch, for `ops/triton/aot.py` to compile without a GPU."""

from __future__ import annotations

from typing import Any

from ...triton import config
from ...triton.aot import Variant
from .bwd_scan import Gradients, backward, scratch_tiles
from .common import Inputs, Span, States, Tile
from .fwd_pieces import Summary, carry, summarize
from .fwd_scan import forward
from .step import step
from .write_scale import Norms, Rows, Shape, Write, finish, write_scales

_WIDE, _COUNT = "*fp32", "i32"
_STATES = States(_WIDE, _WIDE)
_SPAN = Span("*i64", _COUNT, _COUNT, _COUNT)._asdict()
_WRITE = Write(1, 0.6, 1.0, 1e-6)


def variants(
    architecture: str, N: int, narrow: str = "*bf16", D: int = 2048, longhorn: bool = False
) -> dict[str, Variant]:
    """Return the kernels of training and decoding with gamma, momentum and initial states, by name."""
    inputs = Inputs(*(narrow,) * 4, None if longhorn else _WIDE, _WIDE, _WIDE)
    parts = Gradients(*(_WIDE,) * 6, None if longhorn else _WIDE)
    launches = {
        name: config.launch(f"selective_{name}", N, architecture)
        for name in ("forward", "backward", "pieces", "step", "rows")
    }
    tiles = {
        name: Tile(D, N, cut.BD, max(4, N), config.SEGMENT, cut.steps, 1, 1, True) for name, cut in launches.items()
    }
    shape = Shape(
        D, N, launches["rows"].BD, max(4, N), -(-D // launches["backward"].BD), launches["rows"].BD // max(4, N)
    )
    rows, norms = {"SHAPE": shape, "WRITE": _WRITE}, Norms(_WIDE, _WIDE, _WIDE)
    summary = Summary(*(_WIDE,) * 5)
    ends = {"start": _STATES, "end": _STATES, "saved": _STATES, **_SPAN}
    slots = scratch_tiles(config.SEGMENT, tiles["backward"].UNROLL)

    def variant(kernel: Any, name: str, types: dict[str, Any], **constants: Any) -> Variant:
        return Variant(kernel, types, constants, launches[name])

    across = {"outer": _STATES, "summary": summary, "inner": _STATES, "pieces": _COUNT}
    sums = {"inputs": inputs, "summary": summary, **_SPAN}
    back = {"inputs": inputs, "dy": narrow, **ends, "scratch": _STATES, "out": parts}
    return {
        "write_scales": variant(write_scales, "rows", {"x": narrow, "dt": narrow, "B": narrow, "norms": norms}, **rows),
        "forward": variant(forward, "forward", {"inputs": inputs, "y": narrow, **ends}, TILE=tiles["forward"]),
        "backward": variant(backward, "backward", back, TILE=tiles["backward"], SLOTS=slots),
        "finish": variant(
            finish,
            "rows",
            {"inputs": inputs, "norms": norms, "parts": parts, "out": Rows(*(narrow,) * 4, _WIDE)},
            **rows,
        ),
        "summarize": variant(summarize, "pieces", {**sums, "dy": None}, TILE=tiles["pieces"]),
        "summarize_back": variant(summarize, "pieces", {**sums, "dy": narrow}, TILE=tiles["pieces"]),
        "carry": variant(carry, "pieces", across, TILE=tiles["pieces"], REVERSE=False),
        "carry_back": variant(carry, "pieces", across, TILE=tiles["pieces"], REVERSE=True),
        "step": variant(
            step,
            "step",
            {"inputs": inputs._replace(scale=None), "before": _STATES, "y": narrow, "after": _STATES},
            TILE=tiles["step"],
            **rows,
        ),
    }
