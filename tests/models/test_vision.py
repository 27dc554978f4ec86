"""MambaVision: sizes, maps, windows, backbones, the release's weights, saving."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from muonssm import Muon
from muonssm.layers import BACKBONES
from muonssm.models.vision import (
    MambaVision,
    VisionConfig,
    VisionFeatures,
    load_published,
    mambavision_micro,
    mambavision_tiny,
    vision_config,
)
from muonssm.models.vision.blocks import DropPath, Window
from muonssm.models.vision.classification import VisionClassifier
from muonssm.models.vision.mixer import MambaVisionMixer

FULL = pytest.mark.full
TINY = 31_794_248  # parameters, as published


def images(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def micro(backbone="mamba", muon=Muon(), seed=0, **changes):  # noqa: B008  a frozen value
    """Build a small network with larger weights than initially, so that its outputs depend on its mixers."""
    torch.manual_seed(seed)
    model = mambavision_micro(backbone, muon, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "A_log" not in name:
                parameter.mul_(5)
    return model.eval()


each_backbone = pytest.mark.parametrize("backbone", BACKBONES)
each_mixer = pytest.mark.parametrize(  # in the quick tier one backbone per class of mixer
    "backbone", [pytest.param(name, marks=() if name in ("mamba", "gated_deltanet") else FULL) for name in BACKBONES]
)
each_rule = pytest.mark.parametrize("muon", [Muon.off(), Muon()], ids=["plain", "muon"])


def published_shapes():
    """Derive names and shapes of MambaVision-T's checkpoint from the architecture."""
    shapes = {"head.weight": (1000, 640), "head.bias": (1000,)}

    def norm(name, size):
        shapes.update({f"{name}.{tensor}": (size,) for tensor in ("weight", "bias", "running_mean", "running_var")})
        shapes[f"{name}.num_batches_tracked"] = ()

    def linear(name, out, of, bias=True):
        shapes[f"{name}.weight"] = (out, of)
        shapes.update({f"{name}.bias": (out,)} if bias else {})

    for conv, bn, of, out in ((0, 1, 3, 32), (3, 4, 32, 80)):
        shapes[f"patch_embed.conv_down.{conv}.weight"] = (out, of, 3, 3)
        norm(f"patch_embed.conv_down.{bn}", out)
    norm("norm", 640)
    for level, (depth, d) in enumerate(zip((1, 3, 8, 4), (80, 160, 320, 640), strict=True)):
        if level < 3:
            shapes[f"levels.{level}.downsample.reduction.0.weight"] = (2 * d, d, 3, 3)
        for number in range(depth):
            block = f"levels.{level}.blocks.{number}"
            if level < 2:
                for i in (1, 2):
                    shapes |= {f"{block}.conv{i}.weight": (d, d, 3, 3), f"{block}.conv{i}.bias": (d,)}
                    norm(f"{block}.norm{i}", d)
                continue
            for i in (1, 2):
                shapes |= {f"{block}.norm{i}.weight": (d,), f"{block}.norm{i}.bias": (d,)}
            linear(f"{block}.mlp.fc1", 4 * d, d)
            linear(f"{block}.mlp.fc2", d, 4 * d)
            if number >= depth // 2:
                linear(f"{block}.mixer.qkv", 3 * d, d)
                linear(f"{block}.mixer.proj", d, d)
                continue
            h, rank = d // 2, math.ceil(d / 16)
            linear(f"{block}.mixer.in_proj", d, d, bias=False)
            linear(f"{block}.mixer.out_proj", d, d, bias=False)
            linear(f"{block}.mixer.x_proj", rank + 16, h, bias=False)
            linear(f"{block}.mixer.dt_proj", h, rank)
            shapes |= {f"{block}.mixer.A_log": (h, 8), f"{block}.mixer.D": (h,)}
            shapes |= {f"{block}.mixer.conv1d_{half}.weight": (h, 1, 3) for half in "xz"}
    return shapes


def published():
    """Draw a checkpoint with these names and shapes."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.rand(shape, generator=generator) if shape else torch.tensor(7)
        for name, shape in published_shapes().items()
    }


@each_rule
def test_tiny_has_the_published_number_of_parameters(muon):
    with torch.device("meta"):
        model = mambavision_tiny(muon=muon)
    assert sum(parameter.numel() for parameter in model.parameters()) == TINY
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == published_shapes()


@each_backbone
def test_micro_is_small(backbone):
    count = sum(parameter.numel() for parameter in mambavision_micro(backbone).parameters())
    assert 300_000 < count < 1_000_000


def test_mini_keeps_the_resolution_of_small_photographs():
    torch.manual_seed(0)
    model = MambaVision(vision_config("mini", num_classes=10, drop_path=0.1))
    assert sum(parameter.numel() for parameter in model.parameters()) == 2_315_050
    x = images(2, 3, 32, 32)
    assert [tuple(m.shape[1:]) for m in model.forward_features(x)] == [
        (32, 32, 32), (64, 16, 16), (128, 8, 8), (256, 4, 4),
    ]  # fmt: skip
    F.cross_entropy(model(x), torch.tensor([3, 9])).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    "size", [*(pytest.param(s, marks=FULL) for s in ((192, 192), (224, 224), (256, 320), (512, 512))), (100, 37)]
)
def test_tiny_takes_any_size(size):
    torch.manual_seed(0)
    model = mambavision_tiny(num_classes=7).eval()
    maps = []
    for level in model.levels:
        level.register_forward_hook(lambda _, __, output: maps.append(output))
    with torch.no_grad():
        assert model(images(1, 3, *size)).shape == (1, 7)
    for stage, (channels, stride) in enumerate(zip((80, 160, 320, 640), (4, 8, 16, 32), strict=True)):
        assert maps[stage].shape == (1, channels, *(-(-side // stride) for side in size))
        assert maps[stage].isfinite().all()


@pytest.mark.full
@each_rule
def test_tiny_forward_and_backward_at_224(muon):
    torch.manual_seed(0)
    model = mambavision_tiny(muon=muon)
    F.cross_entropy(model(images(2, 3, 224, 224)), torch.tensor([3, 999])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("muon", [pytest.param(Muon.off(), marks=FULL), Muon()], ids=["plain", "muon"])
@each_backbone
def test_micro_forward_and_backward(backbone, muon):
    torch.manual_seed(0)
    model = mambavision_micro(backbone, muon, drop_path=0.1)
    for x in (images(3, 1, 28, 28), images(2, 1, 33, 50)):
        model.zero_grad()
        F.cross_entropy(model(x), torch.tensor([3, 9, 0])[: len(x)]).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_micro_has_maps_for_small_and_large_images():
    model = micro()
    sides = {28: (14, 7, 4, 2), 32: (16, 8, 4, 2), 128: (64, 32, 16, 8)}
    for pixels, expected in sides.items():
        maps = model.forward_features(images(1, 1, pixels, pixels))
        assert tuple(tuple(m.shape[1:]) for m in maps) == tuple(
            (d, side, side) for d, side in zip((16, 32, 64, 128), expected, strict=True)
        )
    assert model.sizes.strides == (2, 4, 8, 16)


@each_backbone
def test_muon_changes_what_comes_out(backbone):
    x = images(2, 1, 32, 32)
    plain, muon = micro(backbone, Muon.off()), micro(backbone, Muon())
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), muon.parameters(), strict=True))
    assert not plain(x).isclose(muon(x), rtol=1e-3).all()


def reference_mixer(mixer, u):
    """Compute the release's plain mixer step by step."""
    h = u.shape[2] // 2
    x, z = mixer.in_proj(u).split(h, dim=2)

    def same(t, conv):
        padded = F.pad(t, (0, 0, 1, 1))
        taps = conv.weight[:, 0]
        return F.silu(sum(padded[:, j : j + t.shape[1]] * taps[:, j] for j in range(3)))

    x, z = same(x, mixer.conv1d_x), same(z, mixer.conv1d_z)
    rank = mixer.dt_proj.in_features
    dt, B, C = mixer.x_proj(x).split([rank, 8, 8], dim=2)
    dt = F.softplus(mixer.dt_proj(dt) + mixer.dt_proj.bias)  # the bias twice
    A, S, y = -mixer.A_log.exp(), x.new_zeros(len(u), h, 8), []
    for t in range(u.shape[1]):
        S = (dt[:, t, :, None] * A).exp() * S + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
        y.append((S * C[:, t, None]).sum(-1) + mixer.D * x[:, t])
    return mixer.out_proj(torch.cat([torch.stack(y, 1), z], dim=2))


def test_the_plain_mixer_equals_that_of_the_release():
    torch.manual_seed(0)
    mixer = MambaVisionMixer(32, VisionConfig(muon=Muon.off())).double()
    with torch.no_grad():
        mixer.dt_proj.bias.uniform_(-2, 1)
        mixer.D.uniform_(-1, 1)
    u = images(3, 49, 32).double()
    torch.testing.assert_close(mixer(u), reference_mixer(mixer, u))


def test_windows_partition_and_reverse():
    x = images(2, 5, 12, 8)
    window = Window.over(x, 4, fit=False)
    u = window.partition(x)
    assert u.shape == (2 * 3 * 2, 16, 5)
    assert torch.equal(u[1], x[0, :, :4, 4:].flatten(1).T)
    assert torch.equal(window.reverse(u), x)
    odd = x[:, :, :9, :7]
    padded = Window.over(odd, 4, fit=False)
    assert padded.counts == (3, 2)
    assert torch.equal(padded.partition(odd), window.partition(F.pad(odd, (0, 1, 0, 3))))
    assert torch.equal(padded.reverse(padded.partition(odd)), odd)
    small = Window.over(odd, 8, fit=True)
    assert (small.height, small.width, small.counts) == (8, 7, (2, 1))


def test_padding_is_zeros_right_and_below_around_a_stage():
    stage = micro().levels[2]
    x = images(1, 64, 16, 8)
    stage.fit = False
    together = stage(x)
    for top in (0, 8):  # windows are independent, and a map that fills them needs no padding
        torch.testing.assert_close(stage(x[:, :, top : top + 8]), together[:, :, top : top + 8])
    small = x[:, :, :5, :6]
    torch.testing.assert_close(stage(small), stage(F.pad(small, (0, 2, 0, 3)))[:, :, :5, :6])


def test_drop_path_zeroes_rows_and_keeps_the_mean():
    torch.manual_seed(0)
    x = torch.ones(4000, 3, 2)
    y = DropPath(0.25)(x)
    assert set(y.flatten().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert (y == y[:, :1, :1]).all()
    assert y.mean().item() == pytest.approx(1, abs=0.05)
    assert DropPath(0.25).eval()(x) is x
    shares = [b.drop_path.share for level in mambavision_micro(drop_path=0.5).levels for b in level.blocks]
    assert shares == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])


@pytest.mark.full
def test_initial_weights():
    torch.manual_seed(0)
    model = mambavision_tiny()
    mixer = model.levels[3].blocks[0].mixer
    for linear in (model.head, mixer.in_proj, mixer.x_proj, mixer.dt_proj, model.levels[2].blocks[7].mlp.fc1):
        assert linear.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not mixer.dt_proj.bias.any()
    assert torch.equal(mixer.A_log[5], torch.arange(1, 9).float().log())
    assert torch.equal(mixer.D, torch.ones(320))


@each_mixer
def test_evaluation_is_deterministic_and_independent_per_image(backbone):
    model = micro(backbone, drop_path=0.3)
    x = images(3, 1, 40, 28)
    expected = model(x)
    assert torch.equal(model(x), expected)
    torch.testing.assert_close(model(x[1:2]), expected[1:2], atol=1e-4, rtol=1e-4)
    channels_last = model(x.expand(3, 1, 40, 28).contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(channels_last, expected, atol=1e-4, rtol=1e-4)
    wide = torch.cat([x, x], dim=3)
    torch.testing.assert_close(model(wide[:, :, :, 28:]), expected, atol=1e-4, rtol=1e-4)  # a view with gaps


@each_mixer
def test_saved_and_loaded(backbone, tmp_path):
    momentum = "fixed" if backbone == "momentum_deltanet" else "per_head"  # its gamma is a gate of its own
    model, x = micro(backbone, momentum=momentum), images(2, 1, 28, 28)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = micro(backbone, momentum=momentum, seed=1)
    assert not torch.equal(other(x), model(x))
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert torch.equal(other(x), model(x))


@each_mixer
def test_bfloat16_and_autocast_are_close(backbone):
    model, x = micro(backbone), images(4, 1, 28, 28)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        close = model(x)
    assert (close - expected).norm() < 0.1 * expected.norm()
    half = model.to(torch.bfloat16)(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert (half - expected).norm() < 0.2 * expected.norm()


@pytest.mark.parametrize(
    "momentum", [pytest.param("fixed", marks=FULL), pytest.param("per_head", marks=FULL), "per_step"]
)
@pytest.mark.parametrize("nested", [pytest.param(False, marks=FULL), True], ids=["state dict", "checkpoint"])
def test_published_weights_load(nested, momentum):
    weights = published()
    model = mambavision_tiny(momentum=momentum)
    state_dict = {f"model.{name}": w for name, w in weights.items()}
    assert load_published(model, {"state_dict": state_dict, "epoch": 300} if nested else state_dict) is model
    own = model.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in weights.items())
    gamma = model.levels[2].blocks[0].mixer.momentum
    assert momentum == "fixed" or torch.sigmoid(gamma.bias).item() == pytest.approx(0.9)


def test_published_weights_with_other_classes():
    weights = published()
    model = mambavision_tiny(num_classes=5)
    head = model.head.weight.detach().clone()
    with pytest.raises(ValueError, match=r"head.weight must .*\[5, 640\], got \[1000, 640\].*head='keep'"):
        load_published(model, weights)
    load_published(model, weights, head="keep")
    assert torch.equal(model.head.weight, head)
    assert torch.equal(model.norm.weight, weights["norm.weight"])
    features = VisionFeatures(vision_config("tiny"))
    load_published(features.network, weights, head="keep")
    assert torch.equal(features.network.levels[1].blocks[2].conv1.weight, weights["levels.1.blocks.2.conv1.weight"])


def test_weights_that_do_not_fit_are_not_loaded():
    weights = published()
    model = mambavision_tiny()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lacking = {name: w for name, w in weights.items() if name != "levels.2.blocks.3.mixer.A_log"}
    with pytest.raises(ValueError, match=r"missing: levels.2.blocks.3.mixer.A_log; unknown: none"):
        load_published(model, lacking)
    with pytest.raises(ValueError, match=r"missing: none; unknown: levels.2.blocks.0.gamma_1"):
        load_published(model, {**weights, "levels.2.blocks.0.gamma_1": torch.ones(320)})
    with pytest.raises(ValueError, match=r"D must .*\[160\], got \[3\]"):
        load_published(model, {**weights, "levels.2.blocks.0.mixer.D": torch.ones(3)})
    with pytest.raises(ValueError, match=r"weights must .*missing: .*unknown: "):
        load_published(mambavision_micro("longhorn"), weights)
    with pytest.raises(TypeError, match="weights must be a state dict"):
        load_published(model, {"epoch": 3})
    with pytest.raises(ValueError, match=r"head must .*got 'drop'"):
        load_published(model, weights, head="drop")
    with pytest.raises(TypeError, match=r"model must .*Linear"):
        load_published(torch.nn.Linear(2, 2), weights)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_features_are_normalized_maps_of_the_given_stages():
    torch.manual_seed(0)
    features = VisionFeatures(vision_config("micro", in_channels=1), stages=(1, 3))
    maps = features(images(2, 1, 64, 48))
    assert [tuple(m.shape) for m in maps] == [(2, 32, 16, 12), (2, 128, 4, 3)]
    assert (features.channels, features.strides) == ((32, 128), (4, 16))
    for m in maps:
        torch.testing.assert_close(m.mean(1), torch.zeros_like(m[:, 0]), atol=1e-5, rtol=0)
    sum(m.square().sum() for m in maps).backward()
    assert all(parameter.grad is not None for parameter in features.parameters())
    with pytest.raises(ValueError, match=r"stages must .*got \(4,\)"):
        VisionFeatures(vision_config("micro"), stages=[4])


def test_parameters_without_weight_decay():
    names = mambavision_micro().no_weight_decay()
    block = "levels.2.blocks.0.mixer"
    assert names == {f"levels.{i}.blocks.0.mixer.{name}" for i in (2, 3) for name in ("A_log", "D", "dt_proj.bias")}
    assert f"{block}.layer.dt_bias" in mambavision_micro("mamba2").no_weight_decay()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"backbone": "resnet"}, ValueError, "backbone must .*got 'resnet'"),
        ({"depths": (1, 2)}, ValueError, r"depths must be 4 .*got \(1, 2\)"),
        ({"dims": (8, 8, 0, 8)}, ValueError, r"dims\[2\] must .*got 0"),
        ({"dims": (8, 8, 33, 64)}, ValueError, r"dims\[2\] must .*got 33"),
        ({"heads": (7, 16)}, ValueError, r"heads must .*dims\[2\] = 320, got 7"),
        ({"windows": 7}, TypeError, "windows must be 2 .*got 7"),
        ({"drop_path": 1.0}, ValueError, r"drop_path must .*\[0, 1\), got 1.0"),
        ({"num_classes": -1}, ValueError, "num_classes must .*got -1"),
        ({"d_state": True}, TypeError, "d_state must .*got True"),
        ({"fit_windows": 1}, TypeError, "fit_windows must .*got 1"),
        ({"momentum": "learned"}, ValueError, "momentum must .*got 'learned'"),
        ({"muon": True}, TypeError, "muon must .*got True"),
    ],
)
def test_wrong_settings_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        replace(VisionConfig(), **changes)


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match=r"muon must .*got True"):
        mambavision_tiny(muon=True)
    with pytest.raises(ValueError, match=r"size must .*got 'huge'"):
        vision_config("huge")
    with pytest.raises(TypeError, match=r"config must .*got dict"):
        MambaVision({})
    model = micro()
    with pytest.raises(ValueError, match=r"x must .*\[B, 1, .*got \[2, 3, 8, 8\]"):
        model(torch.zeros(2, 3, 8, 8))
    with pytest.raises(ValueError, match=r"x must .*> 0, got"):
        model(torch.zeros(2, 1, 0, 8))
    with pytest.raises(TypeError, match=r"x must .*got list"):
        model([1])


def test_fsdp_wraps_the_blocks():
    model = VisionClassifier(vision_config("micro", in_channels=1))
    wrapped = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    assert wrapped == [block for level in model.network.levels for block in level.blocks]
