"""SwiGLU as one differentiable operation: y = (silu(x Wg^T) * (x Wu^T)) Wd^T.

x [..., D];  Wg, Wu [F, D];  Wd [D, F];  g = x Wg^T, u = x Wu^T [tokens, F]

Only g and u are kept for the backward pass, half of what autograd keeps: the product silu(g) u is computed again there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import cpu_library, launch
from ..dtypes import full_precision
from .support import has_kernel


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Compute y `[..., D]` from x and the weights `gate`, `up` `[F, D]` and `down` `[D, F]`; autocast applies."""
    if torch.is_autocast_enabled("cpu") and x.device.type == "cpu":
        dtype = torch.get_autocast_dtype("cpu")
        x, gate, up, down = (t.to(dtype) for t in (x, gate, up, down))
    if has_kernel(x) and x.dtype == gate.dtype == up.dtype == down.dtype:
        with full_precision(x.device):
            return _Swiglu.apply(x.reshape(-1, x.shape[-1]), gate, up, down).view(x.shape)
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def _arguments(g: Tensor, u: Tensor, y: Tensor) -> cpu_library.SwigluArguments:
    a = cpu_library.SwigluArguments(launch.INPUT_TYPES[g.dtype], torch.get_num_threads(), g.numel())
    a.g, a.u, a.y = g.data_ptr(), u.data_ptr(), y.data_ptr()
    return a


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        g, u = F.linear(x, gate), F.linear(x, up)
        product = launch.empty(g, g.shape)
        cpu_library.call("swiglu_forward", _arguments(g, u, product))
        ctx.save_for_backward(x, gate, up, down, g, u)
        return F.linear(product, down)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down, g, u = ctx.saved_tensors
        dy = dy.reshape(-1, dy.shape[-1])
        dproduct = dy @ down
        product, dg, du = (launch.empty(g, g.shape) for _ in range(3))
        a = _arguments(g, u, product)
        a.dy, a.dg, a.du = dproduct.data_ptr(), dg.data_ptr(), du.data_ptr()
        cpu_library.call("swiglu_backward", a)
        needs = ctx.needs_input_grad
        dx = (dg @ gate).addmm_(du, up) if needs[0] else None
        return dx, *(
            left.t() @ right if needed else None
            for left, right, needed in ((dg, x, needs[1]), (du, x, needs[2]), (dy, product, needs[3]))
        )
