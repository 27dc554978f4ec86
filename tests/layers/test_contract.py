"""The call contract: whole = any split = one by one; padding and packing change nothing; beams reorder."""

from __future__ import annotations

import pytest
import torch

from muonssm.layers import MixerState

from .cases import D_MODEL, assert_close, assert_same_state, each_backbone, each_case, inputs

L = 70


@each_case
def test_splits_steps_padding_packing_and_beams_agree(case):
    mixer, x = case.build(), inputs(3, L, D_MODEL)
    whole, last = mixer(x)
    for cuts in ([64, 6], [1, 2, 67], [1] * L):
        state, parts = None, []
        for piece in x.split(cuts, dim=1):
            y, state = mixer(piece, state)
            parts.append(y)
        assert_close(torch.cat(parts, dim=1), whole, what=f"split {cuts[:3]}")
        assert_same_state(state, last)

    lengths = [L, 41, 2]
    alone = [mixer(x[i : i + 1, :n]) for i, n in enumerate(lengths)]
    for side in ("left", "right"):
        padded, mask = torch.full_like(x, 1e3), torch.zeros(3, L, dtype=torch.long)
        for i, n in enumerate(lengths):
            place = slice(L - n, L) if side == "left" else slice(0, n)
            padded[i, place], mask[i, place] = x[i, :n], 1
        y, state = mixer(padded, mask=mask)
        assert (y[mask == 0] == 0).all()
        for i, (one, its_state) in enumerate(alone):
            assert_close(y[i][mask[i] == 1], one[0], what=f"{side} padding")
            assert_same_state(state.reorder(torch.tensor([i])), its_state)

    packed = torch.cat([x[i, :n] for i, n in enumerate(lengths)])[None]
    y, state = mixer(packed, cu_seqlens=torch.tensor([0, *torch.tensor(lengths).cumsum(0)]))
    assert_close(y, torch.cat([one for one, _ in alone], dim=1), what="packed")
    more, _ = mixer(inputs(3, 5, D_MODEL, seed=2), state)
    for i, (_, its_state) in enumerate(alone):
        assert_same_state(state.reorder(torch.tensor([i])), its_state)
        assert_close(more[i : i + 1], mixer(inputs(3, 5, D_MODEL, seed=2)[i : i + 1], its_state)[0], what="continued")

    beams = torch.tensor([2, 0, 0, 1])
    next_x = inputs(4, 3, D_MODEL, seed=3)
    y, _ = mixer(next_x, last.reorder(beams))
    for i, beam in enumerate(beams):
        wanted, _ = mixer(torch.cat([x[beam], next_x[i]])[None])
        assert_close(y[i : i + 1], wanted[:, L:], what="beam")


@each_case
def test_gradients_flow_through_the_state(case):
    """The gradients of a split run are those of the whole, in x and every parameter."""
    mixer, weight = case.build(torch.float64), inputs(2, 20, D_MODEL, seed=4, dtype=torch.float64)
    x = inputs(2, 20, D_MODEL, dtype=torch.float64).requires_grad_()
    leaves = [x, *mixer.parameters()]
    whole = torch.autograd.grad((mixer(x)[0] * weight).sum(), leaves)
    state, total = None, x.new_zeros(())
    for piece, w in zip(x.split([3, 1, 16], dim=1), weight.split([3, 1, 16], dim=1), strict=True):
        y, state = mixer(piece, state)
        total = total + (y * w).sum()
    for found, wanted in zip(torch.autograd.grad(total, leaves), whole, strict=True):
        assert (found - wanted).norm() <= 1e-10 * (wanted.norm() + 1e-6)
    y, state = mixer(x[:, :8])
    y, _ = mixer(x[:, 8:], state.detach())
    (cut,) = torch.autograd.grad(y.sum(), x)
    assert (cut[:, :8] == 0).all()
    assert (cut[:, 8:] != 0).any()


@each_case
def test_bidirectional_sees_both_sides_and_keeps_sequences_apart(case):
    mixer, x = case.build(bidirectional=True), inputs(2, 33, D_MODEL)
    y, state = mixer(x)
    assert state is None
    turned, _ = mixer(x.flip(1))
    assert_close(turned.flip(1), y, what="reversed input")
    one_way = case.build()
    assert sum(p.numel() for p in mixer.parameters()) == sum(p.numel() for p in one_way.parameters())
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
    with pytest.raises(ValueError, match="state was given to a bidirectional mixer"):
        mixer(x, one_way(x)[1])


@each_backbone
def test_nothing_but_padding(case):
    mixer, x = case.build(), inputs(2, 6, D_MODEL)
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
def test_state_is_a_small_typed_object(case, tmp_path):
    mixer, x = case.build(), inputs(2, 9, D_MODEL).requires_grad_()
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


def test_bad_calls_say_what_is_wrong():
    from .cases import CASES

    mixer, x = CASES[0].build(), inputs(2, 6, D_MODEL)
    _, state = mixer(x)
    with pytest.raises(ValueError, match=r"x has shape \[2, 6, 23\]; it may be \[B, L, d_model\] with d_model = 24"):
        mixer(x[..., :-1])
    with pytest.raises(TypeError, match="state is of type tuple; it may be None or a MixerState"):
        mixer(x, tuple(state))
    with pytest.raises(ValueError, match="state has 2 sequences; it may have 1"):
        mixer(x[:1], state)
    with pytest.raises(ValueError, match=r"state.conv has shape \[2, 2, 48\]; of this mixer it may be \[2, 3, 48\]"):
        mixer(x, state._replace(conv=state.conv[:, 1:]))
    with pytest.raises(TypeError, match="x is of type list; it may be a tensor"):
        mixer([1.0])
    with pytest.raises(TypeError, match="bidirectional is 'no'; it may be True or False"):
        CASES[0].build(bidirectional="no")
    with pytest.raises(ValueError, match=r"mask has shape \[2, 5\]; it may be \[B, L\] = \[2, 6\]"):
        mixer(x, mask=torch.ones(2, 5))
    with pytest.raises(TypeError, match="mask is of type list"):
        mixer(x, mask=[[1] * 6] * 2)
    with pytest.raises(ValueError, match="mask and cu_seqlens were both given"):
        mixer(x[:1], mask=torch.ones(1, 6), cu_seqlens=torch.tensor([0, 6]))
    with pytest.raises(ValueError, match="cu_seqlens is"):
        mixer(x[:1], cu_seqlens=torch.tensor([0, 5]))
