"""The call contract: whole = split = stepwise sequences; padding and packing change nothing; beams reorder."""

from __future__ import annotations

import pytest
import torch

from muonssm.layers import MixerState

from .variants import (
    D_MODEL,
    VARIANTS,
    assert_close,
    assert_same_state,
    each_backbone,
    each_variant,
    each_variant_slow,
    inputs,
)

L = 70
LENGTHS = [L, 41, 2]


@each_variant_slow
def test_split_and_stepwise_sequences_equal_the_whole(variant):
    mixer, x = variant.build(), inputs(3, L, D_MODEL)
    whole, last = mixer(x)
    for cuts in ([64, 6], [1, 2, 67], [1] * L):
        state, outputs = None, []
        for piece in x.split(cuts, dim=1):
            y, state = mixer(piece, state)
            outputs.append(y)
        assert_close(torch.cat(outputs, dim=1), whole, what=f"split {cuts[:3]}")
        assert_same_state(state, last)


@each_variant
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_sequence_equals_the_sequence_alone(variant, side):
    mixer, x = variant.build(), inputs(3, L, D_MODEL)
    padded, mask = torch.full_like(x, 1e3), torch.zeros(3, L, dtype=torch.long)
    for i, n in enumerate(LENGTHS):
        steps = slice(L - n, L) if side == "left" else slice(0, n)
        padded[i, steps], mask[i, steps] = x[i, :n], 1
    y, state = mixer(padded, mask=mask)
    assert (y[mask == 0] == 0).all()
    for i, n in enumerate(LENGTHS):
        alone, state_alone = mixer(x[i : i + 1, :n])
        assert_close(y[i][mask[i] == 1], alone[0], what=f"{side} padding")
        assert_same_state(state.reorder(torch.tensor([i])), state_alone)


@each_variant
def test_packed_sequences_equal_each_alone(variant):
    mixer, x = variant.build(), inputs(3, L, D_MODEL)
    each_alone = [mixer(x[i : i + 1, :n]) for i, n in enumerate(LENGTHS)]
    packed = torch.cat([x[i, :n] for i, n in enumerate(LENGTHS)])[None]
    y, state = mixer(packed, cu_seqlens=torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)]))
    assert_close(y, torch.cat([alone for alone, _ in each_alone], dim=1), what="packed")
    next_x = inputs(3, 5, D_MODEL, seed=2)
    continued, _ = mixer(next_x, state)
    for i, (_, state_alone) in enumerate(each_alone):
        assert_same_state(state.reorder(torch.tensor([i])), state_alone)
        assert_close(continued[i : i + 1], mixer(next_x[i : i + 1], state_alone)[0], what="continued")


@each_variant
def test_reordered_states_continue_their_beams(variant):
    mixer, x = variant.build(), inputs(3, L, D_MODEL)
    _, last = mixer(x)
    beams = torch.tensor([2, 0, 0, 1])
    next_x = inputs(4, 3, D_MODEL, seed=3)
    y, _ = mixer(next_x, last.reorder(beams))
    for i, beam in enumerate(beams):
        expected, _ = mixer(torch.cat([x[beam], next_x[i]])[None])
        assert_close(y[i : i + 1], expected[:, L:], what="beam")


@each_variant
def test_gradients_flow_through_the_state(variant):
    """A split run has the gradients of the whole run, in x and every parameter."""
    mixer, weight = variant.build(torch.float64), inputs(2, 20, D_MODEL, seed=4, dtype=torch.float64)
    x = inputs(2, 20, D_MODEL, dtype=torch.float64).requires_grad_()
    leaves = [x, *mixer.parameters()]
    whole = torch.autograd.grad((mixer(x)[0] * weight).sum(), leaves)
    state, total = None, x.new_zeros(())
    for piece, w in zip(x.split([3, 1, 16], dim=1), weight.split([3, 1, 16], dim=1), strict=True):
        y, state = mixer(piece, state)
        total = total + (y * w).sum()
    for actual, expected in zip(torch.autograd.grad(total, leaves), whole, strict=True):
        assert (actual - expected).norm() <= 1e-10 * (expected.norm() + 1e-6)
    y, state = mixer(x[:, :8])
    y, _ = mixer(x[:, 8:], state.detach())
    (cut,) = torch.autograd.grad(y.sum(), x)
    assert (cut[:, :8] == 0).all()
    assert (cut[:, 8:] != 0).any()


@each_variant
def test_bidirectional_sees_both_sides_and_separates_sequences(variant):
    mixer, x = variant.build(bidirectional=True), inputs(2, 33, D_MODEL)
    y, state = mixer(x)
    assert state is None
    reversed_y, _ = mixer(x.flip(1))
    assert_close(reversed_y.flip(1), y, what="reversed input")
    causal = variant.build()
    assert sum(p.numel() for p in mixer.parameters()) == sum(p.numel() for p in causal.parameters())
    changed = x.clone()
    changed[:, -1] += 1
    assert (mixer(changed)[0][:, 0] != y[:, 0]).any()
    mask = torch.ones(2, 33)
    mask[1, 20:] = 0
    padded, _ = mixer(x, mask=mask)
    assert_close(padded[:1], y[:1], what="row without padding")
    assert_close(padded[1:, :20], mixer(x[1:, :20])[0], what="padded row")
    packed, _ = mixer(torch.cat([x[0], x[1, :20]])[None], cu_seqlens=torch.tensor([0, 33, 53]))
    assert_close(packed[:, 33:], padded[1:, :20], what="packed")
    with pytest.raises(ValueError, match="state"):
        mixer(x, causal(x)[1])


@each_backbone
def test_padding_alone_changes_no_state(variant):
    mixer, x = variant.build(), inputs(2, 6, D_MODEL)
    _, before = mixer(x)
    y, after = mixer(x, before, mask=torch.zeros(2, 6))
    assert (y == 0).all()
    assert_same_state(after, before, 0)
    y, after = mixer(x, before, mask=torch.tensor([[1] * 6, [0] * 6]))
    assert_same_state(after.reorder(torch.tensor([1])), before.reorder(torch.tensor([1])), 0)
    y, state = mixer(x[:, :0])
    assert y.shape == (2, 0, D_MODEL)
    assert (state.memory.S == 0).all()


@each_backbone
def test_state_is_a_small_typed_object(variant, tmp_path):
    mixer, x = variant.build(), inputs(2, 9, D_MODEL).requires_grad_()
    _, state = mixer(x)
    assert isinstance(state, MixerState)
    assert state.memory.S.requires_grad
    assert not state.detach().memory.S.requires_grad
    assert state.to(torch.float64).conv.dtype == torch.float64
    assert mixer(x[:, :1], state.to("cpu"))[0].shape == (2, 1, D_MODEL)
    torch.save(state.detach(), tmp_path / "state.pt")
    assert_same_state(torch.load(tmp_path / "state.pt"), state, 0)
    _, later = mixer(inputs(2, 200, D_MODEL), state)
    assert [t.shape for t in (later.conv, *later.memory)] == [t.shape for t in (state.conv, *state.memory)]


def test_wrong_calls_name_the_argument():
    mixer, x = VARIANTS[0].build(), inputs(2, 6, D_MODEL)
    _, state = mixer(x)
    with pytest.raises(ValueError, match=r"x must .*24\], got \[2, 6, 23\]"):
        mixer(x[..., :-1])
    with pytest.raises(TypeError, match=r"state must .*tuple"):
        mixer(x, tuple(state))
    with pytest.raises(ValueError, match=r"state must .*1, got 2"):
        mixer(x[:1], state)
    with pytest.raises(ValueError, match=r"state\.conv must .*\[2, 3, 48\], got \[2, 2, 48\]"):
        mixer(x, state._replace(conv=state.conv[:, 1:]))
    with pytest.raises(TypeError, match=r"x must .*list"):
        mixer([1.0])
    with pytest.raises(TypeError, match="bidirectional must"):
        VARIANTS[0].build(bidirectional="no")
    with pytest.raises(ValueError, match=r"mask must .*\[2, 6\], got \[2, 5\]"):
        mixer(x, mask=torch.ones(2, 5))
    with pytest.raises(TypeError, match=r"mask must .*list"):
        mixer(x, mask=[[1] * 6] * 2)
    with pytest.raises(ValueError, match=r"mask must .*cu_seqlens"):
        mixer(x[:1], mask=torch.ones(1, 6), cu_seqlens=torch.tensor([0, 6]))
    with pytest.raises(ValueError, match="cu_seqlens"):
        mixer(x[:1], cu_seqlens=torch.tensor([0, 5]))


@each_variant
def test_other_layouts_are_refused_by_name(variant):
    mixer, x = variant.build(), inputs(2, 5, D_MODEL)
    for other in (x.to_sparse(), x.to_mkldnn(), torch.nested.nested_tensor(list(x))):
        with pytest.raises(TypeError, match=r"^x must be a dense tensor"):
            mixer(other)
