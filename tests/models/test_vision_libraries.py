"""MambaVision inside timm and transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import timm.data
import torch
import transformers

import muonssm.models.vision.timm_registry  # noqa: F401  registers the models
from muonssm import Muon
from muonssm.models.vision import load_published, mambavision_micro, vision_config
from muonssm.models.vision.transformers_model import MambaVisionBackbone, MambaVisionBackboneConfig


def test_the_network_needs_torch_alone():
    code = (
        "import sys, torch; before = set(sys.modules); import muonssm.models.vision; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names) - {'muonssm', 'torch'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def micro(**changes):
    torch.manual_seed(0)
    return timm.create_model("muonssm_mambavision_micro", **changes)


def test_timm_lists_the_models():
    assert timm.list_models("muonssm_*") == ["muonssm_mambavision_micro", "muonssm_mambavision_tiny"]
    with torch.device("meta"):
        tiny = timm.create_model("muonssm_mambavision_tiny", drop_path_rate=0.3)
    assert sum(p.numel() for p in tiny.parameters()) == 31_794_248
    assert tiny.sizes.muon == Muon()
    assert tiny.sizes.drop_path == 0.3
    config = timm.data.resolve_model_data_config(tiny)
    assert (config["input_size"], config["interpolation"]) == ((3, 224, 224), "bicubic")


def test_timm_model_equals_our_network():
    model = micro(backbone="longhorn", muon=False).eval()
    ours = mambavision_micro("longhorn", Muon.off()).eval()
    load_published(ours, model.state_dict())
    x = torch.randn(2, 1, 28, 28)
    assert torch.equal(model(x), ours(x))
    assert torch.equal(model.forward_head(model.forward_features(x)), ours(x))
    assert model.forward_head(model.forward_features(x), pre_logits=True).shape == (2, 128)


def test_timm_features_only():
    model = micro(features_only=True, in_chans=3, out_indices=(1, 3)).eval()
    assert model.feature_info.channels() == [32, 128]
    assert model.feature_info.reduction() == [4, 16]
    x = torch.randn(1, 3, 40, 56)
    maps = model(x)
    expected = model.model.stages(x)
    assert all(torch.equal(m, w) for m, w in zip(maps, (expected[1], expected[3]), strict=True))


def test_timm_new_classifier():
    model = micro(num_classes=3)
    assert model.get_classifier().weight.shape == (3, 128)
    model.reset_classifier(0)
    assert model(torch.randn(2, 1, 28, 28)).shape == (2, 128)


def test_timm_layer_groups_and_optimizer():
    from timm.optim import create_optimizer_v2, param_groups_layer_decay

    model = micro()
    groups = param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.5)
    assert len({group["lr_scale"] for group in groups}) > 4
    optimizer = create_optimizer_v2(model, opt="lamb", lr=5e-3, weight_decay=0.05)
    undecayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] == 0 for p in group["params"]}
    assert all(id(p) in undecayed for name, p in model.named_parameters() if name in model.no_weight_decay())


def test_wrong_arguments_of_timm_models_are_named():
    with pytest.raises(TypeError, match="depth"):
        micro(depth=3)
    with pytest.raises(ValueError, match=r"global_pool must .*got 'max'"):
        micro(global_pool="max")
    with pytest.raises(ValueError, match=r"pretrained must .*got True"):
        micro(pretrained=True)
    with pytest.raises(TypeError, match=r"muon must .*got 'yes'"):
        micro(muon="yes")


def backbone_config(**changes):
    return MambaVisionBackboneConfig.of(vision_config("micro", in_channels=3), **changes)


def test_backbone_of_transformers(tmp_path):
    config = backbone_config(out_features=["stage2", "stage4"])
    model = transformers.AutoBackbone.from_config(config).eval()
    assert isinstance(model, MambaVisionBackbone)
    assert model.channels == [32, 128]
    x = torch.randn(2, 3, 40, 24)
    maps = model(x).feature_maps
    assert [tuple(m.shape) for m in maps] == [(2, 32, 10, 6), (2, 128, 3, 2)]
    assert model(x, output_hidden_states=True).hidden_states is not None
    assert len(model(x, return_dict=False)[0]) == 2
    model.save_pretrained(tmp_path)
    loaded = MambaVisionBackbone.from_pretrained(tmp_path).eval()
    assert loaded.out_features == ["stage2", "stage4"]
    assert loaded.config.build() == config.build()
    assert all(torch.equal(a, b) for a, b in zip(loaded(x).feature_maps, maps, strict=True))


def test_weights_missing_in_a_checkpoint_have_initial_values(tmp_path):
    transformers.AutoBackbone.from_config(backbone_config()).save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path, momentum="per_head")
    loaded = MambaVisionBackbone.from_pretrained(tmp_path, config=config)
    gamma = loaded.features.network.levels[2].blocks[0].mixer.momentum(None).gamma
    torch.testing.assert_close(gamma.detach(), torch.tensor([0.9]))


@pytest.mark.parametrize("backbone", [pytest.param("mamba", marks=pytest.mark.full), "gated_deltanet"])
def test_upernet(backbone, tmp_path):
    torch.manual_seed(0)
    inner = MambaVisionBackboneConfig.of(vision_config("micro", backbone, in_channels=3))
    config = transformers.UperNetConfig(
        backbone_config=inner, hidden_size=16, auxiliary_channels=8, auxiliary_in_channels=64, num_labels=4
    )
    model = transformers.UperNetForSemanticSegmentation(config)
    A_log = [p for name, p in model.named_parameters() if name.endswith("mixer.A_log")]
    assert all(torch.equal(p[0], torch.arange(1, 9).float().log()) for p in A_log)
    x, labels = torch.randn(2, 3, 64, 48), torch.randint(4, (2, 64, 48))
    out = model(x, labels=labels)
    assert out.logits.shape == (2, 4, 64, 48)
    out.loss.backward()
    assert all(p.grad is not None for p in model.backbone.parameters())
    model.eval().save_pretrained(tmp_path)
    loaded = transformers.UperNetForSemanticSegmentation.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(x).logits, model(x).logits)


def test_wrong_settings_are_named():
    with pytest.raises(ValueError, match=r"depths must be 4 .*got"):
        MambaVisionBackboneConfig(depths=[1])
    with pytest.raises(ValueError, match="out_features must be a subset"):
        backbone_config(out_features=["stage9"])
