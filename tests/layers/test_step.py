"""The kernel for one token through a whole Mamba mixer: equal to the parts in turn, and used where it applies alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from muonssm import Muon
from muonssm.layers import Mamba
from muonssm.layers.modules import RMSNorm
from muonssm.ops import cpu_library

from .cases import assert_close, assert_same_state, inputs

SIZES = [
    (256, {"d_state": 16}),  # enough work for several threads
    (33, {"d_state": 5, "dt_rank": 3}),
    (24, {"d_state": 16, "conv_size": 1}),
    (17, {"d_state": 9, "conv_size": 2, "expand": 1}),
]
MUONS = [Muon.off(), Muon(), Muon(gamma=0.9, normalization="frobenius"), Muon(ns_steps=5, tau_position="outside")]
NATIVE = pytest.mark.skipif(
    cpu_library.unavailable() is not None, reason="without the C++ kernels there is no such step"
)


def build(d_model: int = 33, **dims) -> Mamba:
    torch.manual_seed(0)
    return Mamba(d_model, **dims).eval()


@NATIVE
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("muon", MUONS, ids=str)
@pytest.mark.parametrize(("d_model", "dims"), SIZES)
def test_equals_the_parts_in_turn(d_model, dims, muon, batch):
    mixer, x = build(d_model, muon=muon, **dims), inputs(batch, 12, d_model)
    with torch.no_grad():
        _, state = mixer(x[:, :4])
        for t in range(4, 12):
            token = x[:, t : t + 1]
            found = mixer.step(token, state)
            assert found is not None
            y, following = mixer._run(token, state, None)
            assert_close(found[0], y, what=f"y of step {t}")
            assert_same_state(found[1], following)
            state = found[1]


@NATIVE
def test_with_a_norm_it_is_a_residual_block():
    mixer, x, norm = build(), inputs(2, 6, 33), RMSNorm(33, eps=1e-3)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-1, 2, 33))
        _, state = mixer(norm(x[:, :5]))
        found, following = mixer.step(x[:, 5:], state, norm)
        y, wanted = mixer._run(norm(x[:, 5:]), state, None)
    assert_close(found, x[:, 5:] + y, what="x + mixer(norm(x))")
    assert_same_state(following, wanted)


@NATIVE
def test_the_state_that_was_given_stays():
    mixer, x = build(), inputs(1, 5, 33)
    with torch.no_grad():
        _, state = mixer(x[:, :4])
        before = state.map(torch.clone)
        mixer(x[:, 4:], state)
    assert_same_state(state, before)


class Adapted(nn.Linear):
    """What an adapter puts in place of a linear layer: its weight is not all of it."""

    def forward(self, x):
        return super().forward(x) + 1


def adapted(mixer: Mamba) -> None:
    layer = Adapted(mixer.x_proj.in_features, mixer.x_proj.out_features, bias=False)
    layer.load_state_dict(mixer.x_proj.state_dict())
    mixer.x_proj = layer


def hooked(mixer: Mamba) -> None:
    mixer.out_proj.register_forward_hook(lambda module, given, out: out * 2)


def replaced(mixer: Mamba) -> None:
    usual = mixer.out_proj.forward
    mixer.out_proj.forward = lambda x: usual(x) - 1  # as accelerate does


def transposed(mixer: Mamba) -> None:
    mixer.in_proj.weight.data = mixer.in_proj.weight.data.t().contiguous().t()


CHANGES = {
    "adapter": (adapted, {}),
    "hook": (hooked, {}),
    "forward of its own": (replaced, {}),
    "layout": (transposed, {}),
    "bias": (None, {"bias": True}),
    "learned momentum": (None, {"momentum": "per_step"}),
    "float64": (Mamba.double, {}),
    "implementation": (lambda mixer: setattr(mixer, "impl", "reference"), {}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_mixers_go_by_their_parts(change):
    """What the kernel would not see is not left out."""
    apply, dims = CHANGES[change]
    mixer = build(**dims)
    if apply is not None:
        apply(mixer)
    x = inputs(2, 6, 33, dtype=mixer.D.dtype)
    with torch.no_grad():
        whole, _ = mixer(x)
        _, state = mixer(x[:, :5])
        assert mixer.step(x[:, 5:], state) is None
        assert_close(mixer(x[:, 5:], state)[0], whole[:, 5:], what=change)


def test_gradients_and_autocast_go_by_the_parts():
    mixer, x = build(), inputs(1, 6, 33)
    y, state = mixer(x[:, :5])
    assert mixer.step(x[:, 5:], state) is None
    y, _ = mixer(x[:, 5:], state)
    y.sum().backward()
    assert mixer.in_proj.weight.grad is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert mixer.step(x[:, 5:], state.detach()) is None


def test_a_state_that_does_not_fit_is_refused_as_ever():
    mixer, x = build(), inputs(1, 6, 33)
    with torch.no_grad():
        _, state = mixer(x[:, :5])
        _, other = build(d_state=4)(x[:, :5])
        with pytest.raises(ValueError, match="state"):
            mixer(x[:, 5:], state._replace(memory=other.memory))
