"""The kernel for a decoding step of a whole Mamba mixer: equal to `mix`, and used only where it applies."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from muonssm import Muon
from muonssm.layers import Mamba
from muonssm.layers.modules import RMSNorm
from muonssm.layers.sequences import Sequences
from muonssm.ops import cpu_library

from .variants import assert_close, assert_same_state, inputs

SIZES = [
    pytest.param(256, {"d_state": 16}, id="several threads"),
    pytest.param(33, {"d_state": 5, "dt_rank": 3}, id="odd sizes"),
    pytest.param(24, {"d_state": 16, "conv_size": 1}, id="no convolution"),
    pytest.param(17, {"d_state": 9, "conv_size": 2, "expand": 1}, id="no expansion"),
]
MUONS = [Muon.off(), Muon(), Muon(gamma=0.9, normalization="frobenius"), Muon(ns_steps=5, tau_position="outside")]
NATIVE = pytest.mark.skipif(cpu_library.unavailable() is not None, reason="the C++ kernels are not available")


def build(d_model: int = 33, **dims) -> Mamba:
    torch.manual_seed(0)
    return Mamba(d_model, **dims).eval()


@NATIVE
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("muon", [*MUONS[:2], *(pytest.param(m, marks=pytest.mark.full) for m in MUONS[2:])], ids=str)
@pytest.mark.parametrize(("d_model", "dims"), SIZES)
def test_kernel_equals_mix(d_model, dims, muon, batch):
    mixer, x = build(d_model, muon=muon, **dims), inputs(batch, 12, d_model)
    with torch.no_grad():
        _, state = mixer(x[:, :4])
        for t in range(4, 12):
            token = x[:, t : t + 1]
            step = mixer.step(token, state)
            assert step is not None
            y, next_state = mixer.mix(token, state, Sequences())
            assert_close(step[0], y, what=f"y of step {t}")
            assert_same_state(step[1], next_state)
            state = step[1]


@NATIVE
def test_a_step_with_a_norm_is_a_residual_block():
    mixer, x, norm = build(), inputs(2, 6, 33), RMSNorm(33, eps=1e-3)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-1, 2, 33))
        _, state = mixer(norm(x[:, :5]))
        residual, next_state = mixer.step(x[:, 5:], state, norm=norm)
        y, expected = mixer.mix(norm(x[:, 5:]), state, Sequences())
        assert_close(residual, x[:, 5:] + y, what="x + mixer(norm(x))")
        assert_same_state(next_state, expected)
        norm.register_forward_hook(lambda *_: None)
        assert mixer.step(x[:, 5:], state, norm=norm) is None


@NATIVE
def test_what_is_no_decoding_step_has_no_kernel():
    mixer, x = build(), inputs(1, 6, 33)
    with torch.no_grad():
        _, state = mixer(x[:, :5])
        assert mixer.step(x[:, 5:], state) is not None
        assert mixer.step(x[:, 5:], None) is None
        assert mixer.step(x[:, 4:], state) is None
        assert mixer.step(x[:, 5:], state, mask=torch.ones(1, 1)) is None
        assert mixer.step(x[:, 5:], state, cu_seqlens=torch.tensor([0, 1])) is None


@NATIVE
def test_a_step_does_not_change_its_input_state():
    mixer, x = build(), inputs(1, 5, 33)
    with torch.no_grad():
        _, state = mixer(x[:, :4])
        before = state.map(torch.clone)
        mixer(x[:, 4:], state)
    assert_same_state(state, before)


class Adapted(nn.Linear):
    """A linear layer with an adapter, which its weight does not show."""

    def forward(self, x):
        return super().forward(x) + 1


def adapted(mixer: Mamba) -> None:
    layer = Adapted(mixer.x_proj.in_features, mixer.x_proj.out_features, bias=False)
    layer.load_state_dict(mixer.x_proj.state_dict())
    mixer.x_proj = layer


def hooked(mixer: Mamba) -> None:
    mixer.out_proj.register_forward_hook(lambda module, given, out: out * 2)


def replaced(mixer: Mamba) -> None:
    original = mixer.out_proj.forward
    mixer.out_proj.forward = lambda x: original(x) - 1  # as accelerate does


def transposed(mixer: Mamba) -> None:
    mixer.in_proj.weight.data = mixer.in_proj.weight.data.t().contiguous().t()


CHANGES = {
    "adapter": (adapted, {}),
    "hook": (hooked, {}),
    "replaced forward": (replaced, {}),
    "layout": (transposed, {}),
    "bias": (None, {"bias": True}),
    "learned momentum": (None, {"momentum": "per_step"}),
    "float64": (Mamba.double, {}),
    "implementation": (lambda mixer: setattr(mixer, "impl", "reference"), {}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_mixers_that_the_kernel_cannot_compute_use_mix(change):
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


def test_gradients_and_autocast_use_mix():
    mixer, x = build(), inputs(1, 6, 33)
    y, state = mixer(x[:, :5])
    assert mixer.step(x[:, 5:], state) is None
    y, _ = mixer(x[:, 5:], state)
    y.sum().backward()
    assert mixer.in_proj.weight.grad is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert mixer.step(x[:, 5:], state.detach()) is None


def test_a_state_of_another_mixer_is_an_error():
    mixer, x = build(), inputs(1, 6, 33)
    with torch.no_grad():
        _, state = mixer(x[:, :5])
        _, other = build(d_state=4)(x[:, :5])
        with pytest.raises(ValueError, match="state"):
            mixer(x[:, 5:], state._replace(memory=other.memory))
