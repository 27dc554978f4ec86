"""The argument structs of csrc/decode.h, which runs a token of a whole model: mirrors of csrc/decode_steps.h.

muonssm/layers/decoding builds programs of them. Knows nothing of tensors.
"""

from __future__ import annotations

import ctypes
import functools

from . import cpu_library
from .cpu_library import Write, plain_fields

MOST_ROWS = 16  # tokens of a call: sequences x tokens per sequence
TILE = 16  # rows of a tile of a bfloat16 or int8 matrix
BLOCK = 32  # columns that share a scale in an int8 matrix
MOST_MATRICES = 4  # of one projection
LONGEST_FILTER = cpu_library.LONGEST_FILTER

EMBED, PROJECT, CONVOLVE, REMEMBER, SCAN, ATTEND = range(6)
FLOAT32_ROWS, BFLOAT16_TILES, INT8_TILES = range(3)
NO_ACTIVATION, SOFTPLUS = range(2)
FIXED_GAMMA, HEAD_GAMMA, STEP_GAMMA = range(3)
DELTA, GATED_DELTA, MAMBA2, LONGHORN, MOMENTUM_DELTA = range(5)

_Int, _Real, _Pointer = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class Matrix(ctypes.Structure):
    """`Matrix` of csrc/decode_steps.h."""

    _fields_ = plain_fields("format rows", "", "data scales bias")


class EmbedStep(ctypes.Structure):
    """`EmbedStep` of csrc/decode_steps.h."""

    _fields_ = [
        *plain_fields("columns angles out_step rotary_step", "scaling"),
        ("table", Matrix),
        *plain_fields("", "", "frequencies out rotary"),
    ]


class ProjectStep(ctypes.Structure):
    """`ProjectStep` of csrc/decode_steps.h."""

    _fields_ = [
        *plain_fields(
            "columns count swiglu add activation last group x_step gate_step out_step", "eps", "x norm gate out"
        ),
        ("matrices", Matrix * MOST_MATRICES),
    ]


class ConvolveStep(ctypes.Structure):
    """`ConvolveStep` of csrc/decode_steps.h."""

    _fields_ = plain_fields(
        "channels K x_step out_step tail_sequence tail_step tail_channel", "", "x weight bias out tail"
    )


class MemoryStep(ctypes.Structure):
    """`MemoryStep` of csrc/decode_steps.h."""

    _fields_ = [
        *plain_fields(
            "heads key_heads d m rule unit residual gamma_kind skip_per_head "
            "q_step k_step v_step z_step p_step logits_step y_step S_step M_step "
            "a_column b_column m_column e_column gamma_column",
            "eta gamma q_scale e_scale least most",
        ),
        ("write", Write),
        *plain_fields(
            "", "", "q k v z p logits gate_bias dt_bias A_log gamma_bias skip D_log log_factor Mu_log mu_bias S M y"
        ),
    ]


class ScanStep(ctypes.Structure):
    """`ScanStep` of csrc/decode_steps.h."""

    _fields_ = [
        *plain_fields("D N gamma_kind gamma_column x_step dt_step B_step z_step p_step y_step S_step M_step", "gamma"),
        ("write", Write),
        *plain_fields("", "", "x dt B C z p A gamma_bias skip S M y"),
    ]


class AttendStep(ctypes.Structure):
    """`AttendStep` of csrc/decode_steps.h."""

    _fields_ = plain_fields(
        "heads key_heads size window past p_step rotary_step y_step cache_sequence cache_head mask_step",
        "scale",
        "p rotary keys values y mask",
    )


class DecodeStep(ctypes.Structure):
    """`DecodeStep` of csrc/decode_steps.h."""

    _fields_ = (("kind", _Int), ("arguments", _Pointer))


class DecodeArguments(ctypes.Structure):
    """`DecodeArguments` of csrc/decode_steps.h."""

    _fields_ = plain_fields(
        "threads sequences length keep vocabulary count scratch_step", "", "steps tokens positions live logits scratch"
    )


class ReadArguments(ctypes.Structure):
    """`ReadArguments` of csrc/decode_steps.h."""

    _fields_ = plain_fields("threads count", "", "data")


STRUCTS: tuple[type[ctypes.Structure], ...] = (
    Matrix,
    EmbedStep,
    ProjectStep,
    ConvolveStep,
    MemoryStep,
    ScanStep,
    AttendStep,
    DecodeStep,
    DecodeArguments,
    ReadArguments,
)
CONSTANTS = {"MOST_ROWS": MOST_ROWS, "TILE": TILE, "BLOCK": BLOCK}


@functools.cache
def load() -> ctypes.CDLL:
    """Load the library, and check that its structs are those of this file."""
    library = cpu_library.load()
    cpu_library.check_layout(library, STRUCTS, CONSTANTS)
    library.muonssm_decode.argtypes, library.muonssm_decode.restype = (ctypes.POINTER(DecodeArguments),), _Int
    library.muonssm_read_memory.argtypes, library.muonssm_read_memory.restype = (ctypes.POINTER(ReadArguments),), _Real
    return library
