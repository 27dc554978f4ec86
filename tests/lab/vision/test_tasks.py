"""The three vision tasks without training: scorers, the paper's table, report sections, and invalid settings."""

from __future__ import annotations

import json
import pickle

import pytest
import torch

from muonssm.checks import is_number
from muonssm.lab.core.evaluate import score_split
from muonssm.lab.core.experiment import Experiment
from muonssm.lab.core.paper import read_table
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.run_folder import RunFolder
from muonssm.lab.report.report import write_report
from muonssm.lab.vision.classify import score_logits
from muonssm.lab.vision.corruptions import CORRUPTIONS
from muonssm.lab.vision.image_task import PAPER, ImageTask
from muonssm.lab.vision.imagenet import synsets
from tests.lab.report.runs import make_comparison, make_run

from . import pictures

CANVASES = "data.canvases={size = 64, min_height = 12, max_height = 24, training = 4, validation = 5, test = 7}"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUONSSM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


# ---- scorers


class Detector(torch.nn.Module):
    """Find every object, with boxes and masks a few pixels off, distinct scores and some wrong labels."""

    def forward(self, images, targets):
        return {"detections": [self.detect(target) for target in targets]}

    def detect(self, target):
        generator = torch.Generator().manual_seed(int(target["image_id"]))
        count = len(target["labels"])
        wrong = torch.rand(count, generator=generator) < 0.2
        return {
            "boxes": target["boxes"] + 3 * torch.rand(count, 4, generator=generator),
            "labels": torch.where(wrong, target["labels"] % 10 + 1, target["labels"]),
            "scores": torch.rand(count, generator=generator),
            "masks": target["masks"].roll(1, 2)[:, None].float(),
        }


class Perfect(torch.nn.Module):
    """Find every object exactly."""

    def forward(self, images, targets):
        return {"detections": [
            {**target, "scores": torch.ones(len(target["labels"])), "masks": target["masks"][:, None].float()}
            for target in targets
        ]}  # fmt: skip


class Segmenter(torch.nn.Module):
    """Random logits at half the size, the same for the same image."""

    def forward(self, images, labels):
        height, width = (side // 2 for side in labels.shape[-2:])
        generators = [torch.Generator().manual_seed(int(image.abs().sum() * 100)) for image in images]
        return {"logits": torch.stack([torch.rand(10, height, width, generator=g) for g in generators])}


@pytest.mark.parametrize(
    ("name", "model", "score"), [("detection-demo", Detector(), "box_ap50"), ("segmentation-demo", Segmenter(), "miou")]
)
def test_scores_do_not_depend_on_how_batches_are_shared(name, model, score, cache):
    """One scorer with all batches, two with every other batch joined by `replace`, and `score_split` agree."""
    task = Recipe.load(name, [CANVASES]).task
    split = task.load_data().test
    batches = [task.collate([split[i] for i in pair], training=False) for pair in ((0, 1), (2, 3), (4, 5), (6,))]
    scorers = [task.scorer(split) for _ in range(3)]
    for number, batch in enumerate(batches):
        outputs = model(**batch)
        for scorer in (scorers[0], scorers[1 + number % 2]):
            scorer.add(batch, outputs)
    whole = scorers[0].result()
    assert 0 < whole[score] < 100
    shares = [pickle.loads(pickle.dumps(scorer.collected())) for scorer in scorers[1:]]
    joined = task.scorer(split)
    joined.replace(shares)
    assert joined.result() == whole
    assert scorers[1].result() != whole
    state = torch.get_rng_state()
    assert score_split(task, model, split, batch_size=2) == whole
    assert torch.get_rng_state().equal(state)  # so that validation does not change how training continues


def test_accuracies_loss_and_confusion_of_logits():
    logits = torch.eye(6)[[0, 1, 2, 3]] + torch.tensor([0.0, 0, 0, 0, 0, -1.0])
    scores = score_logits(logits.numpy(), torch.tensor([0, 1, 0, 5]).numpy())
    assert scores["accuracy"] == 50
    assert scores["top5"] == 75  # class 5 has the lowest logit
    assert scores["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 0, 5]))))
    assert [(i, j) for i in range(6) for j in range(6) if scores["confusion"][i][j]] == [(0, 0), (0, 2), (1, 1), (5, 3)]
    assert "confusion" not in score_logits(torch.rand(4, 51).numpy(), torch.zeros(4, dtype=torch.int64).numpy())


# ---- the paper's table


def scores_of(recipe, *changes, classes=("a", "b")):
    return Recipe.load(recipe, ["data.root=somewhere", *changes]).task.paper_scores({"classes": list(classes)})


def test_the_papers_imagenet_scores_are_recognized_by_the_classes():
    scores = scores_of("imagenet-tiny", "model.backbone=longhorn", classes=synsets())
    assert scores["muon"] == {
        "accuracy": 82.01, "top5": 95.90, "imagenet-r": 46.28, "imagenet-a": 25.27, "mce": 111.24,
    }  # fmt: skip
    assert scores_of("imagenet-tiny") == {}
    assert scores_of("imagenet-tiny", "model.size=micro", classes=synsets()) == {}
    assert scores_of("imagenet-tiny", "model.backbone=mamba2", classes=synsets()) == {}


def test_the_papers_scores_on_coco_and_ade20k():
    boxes = {"box_ap": 50.8, "box_ap50": 69.5, "box_ap75": 55.2}
    masks = {"mask_ap": 44.1, "mask_ap50": 67.0, "mask_ap75": 47.9}
    assert scores_of("coco-tiny")["plain"] == {**boxes, **masks}
    assert scores_of("ade20k-tiny", "model.backbone=gated_deltanet") == {
        "plain": {"miou": 41.2},
        "muon": {"miou": 41.8},
    }
    assert Recipe.load("detection-demo").task.paper_scores({}) == {}
    assert Recipe.load("segmentation-demo").task.paper_scores({}) == {}


def test_the_papers_table_is_complete():
    """Three backbones, plain and with Muon, in three tables; the sums catch a changed digit."""
    tables = read_table(PAPER)
    assert {name: len(rows) for name, rows in tables.items()} == {"imagenet": 6, "coco": 6, "ade20k": 6}
    sums = {name: sum(v for row in rows for v in row.values() if is_number(v)) for name, rows in tables.items()}
    assert sums == pytest.approx({"imagenet": 2125.99, "coco": 2000.4, "ade20k": 262.0})


# ---- the report


def test_report_sections_and_missing_evaluations_of_a_classifier(tmp_path):
    path = make_comparison(tmp_path / "run", Recipe.load("vision-demo"), seeds=1)
    experiment = Experiment.read(path)
    assert experiment.task.report_sections(experiment) == []
    robustness, explain = experiment.task.missing_evaluations(experiment)
    assert f"muonssm eval {path / 'muon-seed0-fold0'} --robustness imagenet-c" in robustness
    assert f"muonssm explain {path}" in explain
    folder = RunFolder(path / "muon-seed0-fold0")
    errors = {"fog": {str(s): 10.0 * s for s in range(1, 6)}}
    folder.write("imagenet-c.json", {"errors": errors, "ce": {"fog": 36.6}, "mce": None, "missing": ["no folder snow"]})
    subset = {"accuracy": None, "accuracy_on_present": 12.5, "images": 1234, "missing": ["n2 is missing or empty"]}
    folder.write("imagenet-r.json", subset)
    pictures.save(path / "explain" / "test-00000.png")
    pictures.save(folder.path / "explain" / "own.png")
    sections = experiment.task.report_sections(experiment)
    assert [section.title for section in sections] == ["Robustness", "What the model sees"]
    scores, shown = (section.body for section in sections)
    for text in ("36.60", "fog", "no folder snow", "12.50", "1,234", "Other renderings"):
        assert text in scores
    assert "muon: own" in shown
    assert "Grad-CAM" in shown
    assert experiment.task.missing_evaluations(experiment) == []


@pytest.mark.parametrize("name", ["detection-demo", "segmentation-demo"])
def test_report_sections_and_missing_evaluations_of_other_tasks(name, tmp_path):
    path = make_run(tmp_path / "run", Recipe.load(name))
    experiment = Experiment.read(path)
    assert [text.partition(":")[0] for text in experiment.task.missing_evaluations(experiment)] == [
        "what the model sees"
    ]
    pictures.save(path / "explain" / "a.png")
    (section,) = experiment.task.report_sections(experiment)
    assert experiment.task.picture_text in section.body
    assert experiment.task.missing_evaluations(experiment) == []
    assert "What the model sees" in write_report([path]).read_text()


def test_the_papers_robustness_scores_stand_beside_ours(tmp_path):
    recipe = Recipe.load("imagenet-tiny", [f"data.root={tmp_path}"])
    path = make_run(tmp_path / "run", recipe)
    folder = RunFolder(path)
    folder.write("metadata.json", {"classes": list(synsets()), "summary": "images"})
    errors = {corruption: dict.fromkeys("12345", 80.0) for corruption in CORRUPTIONS}
    ce = dict.fromkeys(CORRUPTIONS, 99.0)
    folder.write("imagenet-c.json", {"errors": errors, "ce": ce, "mce": 99.0, "missing": []})
    folder.write("imagenet-a.json", {"accuracy": 21.0, "accuracy_on_present": 21.0, "images": 7500, "missing": []})
    experiment = Experiment.read(path)
    (section,) = experiment.task.report_sections(experiment)
    assert "mCE: plain 112.84, muon 112.52" in section.body
    assert "relative to that of AlexNet on ImageNet-C" in section.body
    assert "20.57" in section.body  # ImageNet-A, plain
    assert "42.35" not in section.body  # ImageNet-R was not evaluated


# ---- a few images of COCO


@pytest.fixture
def few(tmp_path):
    """Three images in COCO's layout, one without objects and one with a crowd; no val2017; ids with gaps."""
    square = {"category_id": 90, "bbox": [4, 2, 6, 4], "area": 24, "segmentation": [[4, 2, 10, 2, 10, 6, 4, 6]]}
    crowd = {
        "category_id": 7,
        "bbox": [0, 0, 8, 8],
        "iscrowd": 1,
        "segmentation": {"size": [8, 16], "counts": [0, 128]},
    }
    content = {
        "images": [{"id": i, "file_name": f"{i}.png", "height": 8, "width": 16} for i in (9, 3, 12)],
        "categories": [{"id": 90, "name": "dog"}, {"id": 7, "name": "cat"}],
        "annotations": [
            {"id": 1, "image_id": 3, **square}, {"id": 5, "image_id": 12, **square}, {"id": 6, "image_id": 12, **crowd},
        ],
    }  # fmt: skip
    for image in content["images"]:
        pictures.save(tmp_path / "train2017" / image["file_name"], pictures.picture(8, 16, seed=image["id"]))
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "instances_train2017.json").write_text(json.dumps(content))
    return tmp_path


def test_a_detector_can_be_scored_on_its_training_images(few):
    """All images are scored, and those with objects trained on; there is no test set."""
    task = Recipe.load("coco128", [f"data.root={few}"]).task
    data = task.load_data()
    assert (data.train.image_ids, data.validation.image_ids, data.test) == ([3, 12], [3, 9, 12], None)
    assert (data.train.classes, data.train.category_ids) == (("cat", "dog"), (7, 90))
    assert data.train[1][1]["labels"].tolist() == [2]
    assert "left out 1 crowds and 0 boxes without area; validated on the training images" in data.metadata["summary"]
    scores = score_split(task, Perfect(), data.validation, batch_size=2)
    assert scores["box_ap50"] == scores["mask_ap50"] == pytest.approx(100)
    with pytest.raises(FileNotFoundError, match=r"instances_val2017.json must be an annotation file"):
        Recipe.load("coco128", [f"data.root={few}", "data.validation=val2017"]).task.load_data()
    (few / "train2017" / "9.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"9.png must exist, as image 9"):
        task.load_data()


# ---- items and settings


@pytest.mark.parametrize(
    ("name", "changes"), [("vision-demo", []), ("detection-demo", [CANVASES]), ("segmentation-demo", [CANVASES])]
)
def test_items_to_explain_are_bytes_with_their_target(name, changes, cache):
    task = Recipe.load(name, changes).task
    assert isinstance(task, ImageTask)
    split = task.load_data().test
    image, target = task.labeled_image(split, 3)
    assert image.dtype == torch.uint8
    if name == "vision-demo":
        expected, label = split.images[3]
        assert image.equal(expected)
        assert target == label
    elif name == "detection-demo":
        assert (image.float() / 255).equal(split[3][0])
        assert target["boxes"].equal(split[3][1]["boxes"])
    else:
        assert (image.float() / 255).equal(split[3][0])
        assert target.equal(split[3][1])


@pytest.mark.parametrize(
    ("name", "change", "setting"),
    [
        ("vision-demo", "augment.jitter=0.5", "augment.jitter must be 0 or empty with size 0"),
        ("vision-demo", "augment.pad=-1", "augment.pad must be"),
        ("imagenet-tiny", "augment.pad=4", "augment.pad must be 0 with size 224, got 4"),
        ("vision-demo", "data.memory=1", "data.memory must be"),
        ("vision-demo", "augment.smoothing=0.1", "augment.smoothing must be 0 without mixup"),
        ("vision-demo", "augment.min_area=0", "augment.min_area must be"),
        ("vision-demo", "augment.rotation=x", "augment.rotation must be"),
        ("vision-demo", "augment.interpolation=nearest", "augment.interpolation must be"),
        ("vision-demo", "model.size=huge", "size must be"),
        ("vision-demo", "training.optimizer=sgd", "training.optimizer must be"),
        ("vision-demo", "training.ema=2", "training.ema must be"),
        ("detection-demo", "data.source=coco", "data.root must be"),
        ("detection-demo", "data.validation=train2017", "data.validation must be 'val2017' with source 'canvases'"),
        ("coco128", "data.validation=test2017", "data.validation must be one of"),
        ("detection-demo", "heads.pyramid=0", "heads.pyramid must be"),
        ("detection-demo", "data.canvases={sides = 3}", "data.canvases must have settings of CanvasConfig"),
        ("detection-demo", "data.canvases={size = 3}", "canvases.size must be"),
        ("segmentation-demo", "data.classes=150", "data.classes must be"),
        ("segmentation-demo", "data.scales=[2, 1]", "data.scales must be"),
        ("segmentation-demo", "decoder.hidden=x", "decoder.hidden must be"),
        ("segmentation-demo", "decoder.balance=2", "decoder.balance must be"),
    ],
)
def test_invalid_settings_are_named(name, change, setting):
    with pytest.raises(ValueError, match=setting):
        Recipe.load(name, [change])
