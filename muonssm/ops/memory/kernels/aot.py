"""Every kernel with the types and constants of a real launch, for `ops/triton/aot.py` to compile without a GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from ...triton import config, support
from ...triton.aot import Variant
from .bwd_gates import gates
from .bwd_keys import keys
from .bwd_writes import scores, values
from .fwd_output import output
from .fwd_prepare import measure, solve
from .fwd_states import backward_states, forward_states
from .step import step

KERNELS = {
    "memory_measure": measure,
    "memory_solve": solve,
    "memory_states": forward_states,
    "memory_output": output,
    "memory_backward_states": backward_states,
    "memory_values": values,
    "memory_scores": scores,
    "memory_keys": keys,
    "memory_gates": gates,
    "memory_step": step,
}
_WIDE = "log_alpha beta gamma inject vectors S0 M0 S_end M_end dS_end dM_end dS0 dM0 dlog_alpha dbeta dgamma dinject"
_TYPES = dict.fromkeys(_WIDE.split(), "*fp32") | {"chunks": "*i32", "first_chunk": "*i32"}
_TYPES |= dict.fromkeys(("H", "gamma_step", "gamma_head"), "i32")
_TYPES |= dict.fromkeys(("eta", "inside", "outside", "delta"), "fp32")


_INPUTS = frozenset({"q", "k", "v", "y", "dy", "dq", "dk", "dv"})  # in the dtype of the inputs; scratch is in OPERAND
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def variants(
    architecture: str,
    size: int,
    *,
    residual: bool = False,
    inject: bool = False,
    beta_outside: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Variant]:
    """Return the kernels of training and decoding on `dtype`, with momentum, correction, states and gamma's gradient.

    `memory_solve` is the variant of the backward pass, which does more. `residual`, `inject` and `beta_outside` select
    other rules than the paper's.
    """
    precision, operand = support.dot_precision(dtype, architecture), support.operand_dtype(dtype, architecture)
    result = {}
    for name, kernel in KERNELS.items():
        cut = config.launch(name, size, architecture)
        known: dict[str, Any] = {"m": size, "d": size, "MP": size, "DP": size}
        known |= {"BD": min(cut.BD, size), "BM": min(cut.BM, size), "STEPS": 1}
        known |= dict.fromkeys(("MOMENTUM", "ERASE", "BACKWARD", "DGAMMA", "STATE", "ENDS"), True)
        known |= {"RESIDUAL": residual, "INJECT": inject, "BETA_OUTSIDE": beta_outside}
        known |= {"OPERAND": tl.bfloat16 if operand == torch.bfloat16 else tl.float32, "PRECISION": precision}
        constants = {argument: known[argument] for argument in kernel.arg_names if argument in known}
        types = {
            argument: _TYPES.get(argument) or f"*{_NAMES[dtype if argument in _INPUTS else operand]}"
            for argument in kernel.arg_names
            if argument not in constants
        }
        result[name] = Variant(kernel, types, constants, cut)
    return result
