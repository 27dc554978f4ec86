"""Block sizes and launch options of every kernel, by architecture and head size. Nothing is tuned at run time.

A launch depends on the kernel, the architecture and the head sizes, not on lengths or batch sizes: new lengths compile
nothing new. The registers, shared memory and occupancy behind the table are in docs/design/gpu.md. A test checks that
no kernel spills.
"""

from __future__ import annotations

from typing import NamedTuple

CHUNK = 64  # steps of a chunk of `muon_memory`
LARGEST = 256  # key dimension (memory), states per channel (selective)


class Launch(NamedTuple):
    """Launch options of one kernel. `BD`: value columns, or channels, of a program or of one loop iteration. `BM`: key
    columns of one loop iteration. `warps`, `stages`: Triton's num_warps and num_stages."""

    BD: int
    BM: int
    warps: int
    stages: int = 1
    steps: int = 1  # selective scan: time steps whose inputs are loaded together (and whose states are held, backward)


# kernel: architecture: largest head size: launch. "any" is for architectures without a row of their own.
# Tiles of C x C numbers take most registers: eight warps on NVIDIA, four on AMD, whose threads have 512 registers each.
# Smaller BD and BM hold less at once. Two stages load the next chunk's tiles during the products of the current one, if
# shared memory allows.
TABLE: dict[str, dict[str, dict[int, Launch]]] = {
    "memory_measure": {"any": {256: Launch(64, 64, 4)}},
    "memory_solve": {
        "any": {256: Launch(32, 32, 8)},
        "sm_90": {128: Launch(32, 32, 8), 256: Launch(64, 64, 8)},
        "sm_100": {256: Launch(64, 64, 8)},
        "gfx942": {256: Launch(64, 64, 4)},
    },
    "memory_states": {
        "any": {64: Launch(32, 0, 4), 128: Launch(32, 0, 8), 256: Launch(16, 0, 8)},
        "sm_90": {128: Launch(32, 0, 4, 2), 256: Launch(16, 0, 4)},
        "sm_100": {128: Launch(32, 0, 4, 2), 256: Launch(16, 0, 4)},
        "gfx942": {128: Launch(32, 0, 4), 256: Launch(16, 0, 4)},
    },
    "memory_output": {"any": {256: Launch(64, 64, 8)}, "gfx942": {256: Launch(64, 64, 4)}},
    "memory_backward_states": {
        "any": {64: Launch(32, 0, 4), 128: Launch(32, 0, 8), 256: Launch(16, 0, 8)},
        "sm_90": {128: Launch(32, 0, 4, 2), 256: Launch(16, 0, 4)},
        "sm_100": {128: Launch(32, 0, 4, 2), 256: Launch(16, 0, 4)},
        "gfx942": {128: Launch(32, 0, 4), 256: Launch(16, 0, 4)},
    },
    "memory_values": {
        "any": {256: Launch(32, 32, 8)},
        "sm_90": {256: Launch(64, 64, 8)},
        "sm_100": {256: Launch(64, 64, 8)},
        "gfx942": {256: Launch(64, 64, 4)},
    },
    "memory_scores": {
        "any": {64: Launch(32, 32, 8), 256: Launch(32, 32, 8, 2)},
        "sm_90": {256: Launch(64, 64, 8)},
        "sm_100": {256: Launch(64, 64, 8)},
        "gfx942": {256: Launch(64, 64, 4)},
    },
    "memory_keys": {
        "any": {256: Launch(32, 32, 8)},
        "sm_90": {64: Launch(64, 64, 8), 256: Launch(32, 32, 8)},
        "sm_100": {64: Launch(64, 64, 8), 256: Launch(32, 32, 8)},
        "gfx942": {256: Launch(64, 64, 4)},
    },
    "memory_gates": {"any": {256: Launch(32, 32, 8)}, "gfx942": {256: Launch(64, 64, 4)}},
    "memory_step": {"any": {64: Launch(16, 0, 2), 256: Launch(16, 0, 4)}},
}

# The selective scan, by states per channel. One warp per program: sums over channels then need no shared memory. A tile
# has 256 numbers each of S and M, eight per lane: twice as many spill in some kernels, and need longer inputs to fill a
# device.
_TILES = {N: Launch(256 // N, 0, 1, steps=4) for N in (16, 32, 64, 128, 256)}
_TWO_STEPS = {N: tile._replace(steps=2) for N, tile in _TILES.items()}
_FOUR_STEPS_BELOW_128 = _TILES | {N: _TWO_STEPS[N] for N in (128, 256)}
TABLE |= {
    "selective_forward": {"any": _TILES},
    "selective_pieces": {"any": _TILES},
    # Hold the states of as many steps as there are registers for.
    "selective_backward": {
        "any": _TWO_STEPS,
        "sm_90": _FOUR_STEPS_BELOW_128,
        "sm_100": _FOUR_STEPS_BELOW_128,
        "gfx942": _TILES,
    },
}
TABLE |= {
    "selective_step": {"any": {16: Launch(64, 0, 4), 64: Launch(16, 0, 4), 256: Launch(4, 0, 4)}},
    "selective_rows": {"any": {256: Launch(1024, 0, 4)}},
}

SEGMENT = 64  # steps between two checkpoints of the selective scan

# The selective scan in pieces: programs that fill a device with eight warps per multiprocessor, and the shortest piece.
FILLED: dict[str, int] = {"any": 1024, "gfx942": 2432, "interpreter": 1}
SHORTEST_PIECE = 256


def launch(kernel: str, size: int, architecture: str) -> Launch:
    """Return the launch of a kernel for a head size (the larger of key and value dimension, or the states)."""
    by_size = TABLE[kernel].get(architecture, TABLE[kernel]["any"])
    largest = max(by_size)
    return by_size[min((s for s in by_size if s >= size), default=largest)]


def padded(size: int) -> int:
    """Round up to a power of two, at least 16: the smallest tile of the matrix units."""
    return max(16, 1 << (size - 1).bit_length())
