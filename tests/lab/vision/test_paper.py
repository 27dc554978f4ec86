"""The paper's scores for vision stand beside the data they are about, and no other."""

from __future__ import annotations

from muonssm.lab.core.recipe import Recipe
from muonssm.lab.vision.imagenet import synsets


def paper_scores(recipe, classes, *changes):
    return Recipe.load(recipe, changes).task.paper_scores({"classes": list(classes)})


def test_imagenet_has_the_papers_scores():
    scores = paper_scores("imagenet-tiny", synsets(), "data.root=somewhere", "model.backbone=longhorn")
    assert scores["muon"] == {"accuracy": 82.01, "top5": 95.90, "imagenet-r": 46.28, "imagenet-a": 25.27, "mce": 111.24}


def test_other_data_and_other_models_have_none():
    assert paper_scores("imagenet-tiny", ["a", "b"], "data.root=somewhere", "model.backbone=longhorn") == {}
    assert paper_scores("imagenet-tiny", synsets(), "data.root=somewhere", "model.size=micro") == {}
    assert paper_scores("vision-demo", ["0", "1"]) == {}
