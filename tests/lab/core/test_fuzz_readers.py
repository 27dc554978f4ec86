"""Damaged files of every kind, thrown at their readers.

A valid file is damaged: bytes are flipped, deleted and inserted, values in JSON are replaced. Each reader then gives
a usable result, lists the file as lost, or raises an error that names the file. The examples are the same in every run.
"""

from __future__ import annotations

import copy
import io
import json
import re
import struct
import tomllib
import warnings
import zlib

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from muonssm.lab.activity.config import ActivityConfig
from muonssm.lab.activity.dataset import load_activity, read_recording
from muonssm.lab.activity.recordings import DamagedFileError
from muonssm.lab.activity.sources import folder as folder_source
from muonssm.lab.activity.sources import uestc
from muonssm.lab.core.checkpoints import damage, newest_whole, seal
from muonssm.lab.core.compare import Comparison, table
from muonssm.lab.core.experiment import Experiment
from muonssm.lab.core.grid import Grid
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.registry import recipe_files, study_files
from muonssm.lab.core.run_folder import RunFolder
from muonssm.lab.language.pipeline import Pipeline
from muonssm.lab.language.shards import Blocks, open_tokens
from muonssm.lab.language.zero_shot_data import TASKS, read_rows
from muonssm.lab.report.report import render_report
from muonssm.lab.vision.ade20k import Ade20k
from muonssm.lab.vision.coco import CocoImages
from muonssm.lab.vision.image_files import DamagedImageError, read_image

from ..activity import trees
from ..language.test_shards import SHARDS
from ..language.test_shards import write as write_tokens
from ..language.zero_shot_rows import ROWS
from ..report import runs
from ..vision import pictures
from ..vision.test_coco import content as coco_content

TOKENS = [
    b"nan", b"-inf", b"1e400", b"1e38", b"9" * 400, b"\0", b'"', b"'", b"\n", b"\r", b",", b";", b"\t", b"-", b".",
    b"{", b"[", b"]" * 3, b"=", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"null", b"[" * 2000, b"x" * 5000,
    b"\\ud800",
]  # fmt: skip
BIG = "@1e400@"  # stands for a number that Python cannot write
WRONG = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 2**64, 10**30, 10**400, -(10**400), 0.0, -0.5, 1e-310, 1e38, 1e300,
    float("nan"), float("inf"), float("-inf"), BIG, "", "x", "none", "nan", "../../x", "/dev/zero", "\0", "\ud800",
    "a\nb", "<b>", "x" * 5000, [], [[]], [[[[1]]]], {}, {"a": {}}, [None], ["x", 3], {"size": [20, 30], "counts": "x"},
]  # fmt: skip


def fuzz(examples):
    """Settings of a test: the same examples in every run, without a limit on the time of one."""
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=quiet)


@st.composite
def damages(draw):
    """What happens to the bytes of a file: one to three changes, each a place (a share of it) and what is done."""
    place = st.floats(0, 1, exclude_max=True)
    change = st.one_of(
        st.tuples(st.just("flip"), place, st.integers(0, 7)),
        st.tuples(st.just("delete"), place, st.integers(1, 40)),
        st.tuples(st.just("insert"), place, st.sampled_from(TOKENS)),
        st.tuples(st.just("replace"), place, st.sampled_from(TOKENS)),
        st.tuples(st.just("set"), place, st.integers(0, 255)),
        st.tuples(st.just("cut"), place, st.none()),
    )
    return draw(st.lists(change, min_size=1, max_size=3))


def damaged(content, changes):
    for kind, share, value in changes:
        at = int(share * len(content))
        if kind == "flip" and content:
            content = content[:at] + bytes([content[at] ^ 1 << value]) + content[at + 1 :]
        elif kind == "set":
            content = content[:at] + bytes([value]) + content[at + 1 :]
        elif kind == "delete":
            content = content[:at] + content[at + value :]
        elif kind == "insert":
            content = content[:at] + value + content[at:]
        elif kind == "replace":
            content = content[:at] + value + content[at + len(value) :]
        elif kind == "cut":
            content = content[:at]
    return content


@st.composite
def mutations(draw):
    """What happens to values in JSON: one or two changes, each a place (a share of all values) and what is done."""
    place = st.floats(0, 1, exclude_max=True)
    change = st.one_of(
        st.tuples(st.just("replace"), place, st.sampled_from(WRONG)),
        st.tuples(st.just("delete"), place, st.none()),
        st.tuples(st.just("repeat"), place, st.none()),
        st.tuples(st.just("add"), place, st.sampled_from(WRONG)),
        st.tuples(st.just("wrap"), place, st.none()),
    )
    return draw(st.lists(change, min_size=1, max_size=2))


def places(content, path=()):
    """The keys that lead to every value."""
    items = enumerate(content) if isinstance(content, list) else content.items() if isinstance(content, dict) else ()
    return [path, *(place for key, value in list(items) for place in places(value, (*path, key)))]


def mutated(content, changes):
    holder = {"content": copy.deepcopy(content)}
    for kind, share, value in changes:
        found = [path for path in places(holder) if path]
        if not found:
            break
        path = found[int(share * len(found))]
        parent = holder
        for key in path[:-1]:
            parent = parent[key]
        key = path[-1]
        if kind == "replace":
            parent[key] = copy.deepcopy(value)
        elif kind == "wrap":
            parent[key] = [parent[key]]
        elif kind == "delete" and path != ("content",):
            del parent[key]
        elif kind == "repeat" and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[key]))
        elif kind == "add" and isinstance(parent[key], list):
            parent[key].append(copy.deepcopy(value))
        elif kind == "add" and isinstance(parent[key], dict):
            parent[key]["new"] = copy.deepcopy(value)
    return holder["content"]


def dump(path, content):
    path.write_text(json.dumps(content).replace(json.dumps(BIG), "1e400"))


def outcome(names, read, *arguments):
    """The result of a reader; None if it raised an error that names the file.

    A missing file can be a FileNotFoundError. Any other error, and a warning of an overflow, fails the test.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # numpy's, of numbers that overflow
            return read(*arguments)
    except (ValueError, FileNotFoundError) as error:
        message = str(error)
        assert any(name in message for name in names), f"{names} not in {message}"
        assert len(message) < 5000
        message.encode("utf-8", "backslashreplace")
        return None


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


# ---- recordings


RECORDINGS = [
    trees.table(trees.timed(trees.waves(12, 2)), "time,ax,ay").encode(),
    trees.table(trees.waves(12, 2)).encode(),
    b"timestamp;a;b\n2024-01-01T00:00:00.5Z;1;2\n2024-01-01T00:00:01Z;3;4\n2024-01-01T00:00:02Z;-3e5;4\n",
    b'time_ms,"a","b c"\n0,"1","2"\n10,1e3,2\n20,+1,.5\n',
]


@pytest.mark.parametrize("number", range(len(RECORDINGS)))
def test_recordings(place, number):
    path = place / "recording.csv"

    @fuzz(80)
    @given(damages(), st.sampled_from([None, 50.0, 0.01, 1e6]))
    def run(changes, rate):
        path.write_bytes(damaged(RECORDINGS[number], changes))
        samples = outcome([str(path)], read_recording, path, None, rate)
        if samples is not None:
            assert samples.dtype == np.float32
            assert len(samples) >= 2
            assert np.isfinite(samples).all()

    run()


def test_folders_of_recordings(place):
    root = place / "folder"
    rows = trees.folder(root, samples=20)
    trees.index(root, rows)
    names = sorted(path.name for path in root.glob("s*.csv"))
    contents = {name: (root / name).read_bytes() for name in names}
    config = ActivityConfig("folder", str(root), split="subject", length=8, max_lost=1.0)

    @fuzz(40)
    @given(st.lists(st.tuples(st.sampled_from(names), damages()), min_size=1, max_size=3, unique_by=lambda one: one[0]))
    def run(files):
        for name, changes in files:
            (root / name).write_bytes(damaged(contents[name], changes))
        try:
            data = outcome([str(root), "files", "split"], load_activity, config, False)
        finally:
            for name, _ in files:
                (root / name).write_bytes(contents[name])
        if data is None:
            return
        assert {name for name, _ in data.lost} <= {name for name, _ in files}
        assert len(data.recordings) + len(data.lost) == len(names)
        for windows in (data.train, data.validation, data.test):
            assert windows.x.isfinite().all()
            assert windows.y.min() >= 0
            assert windows.y.max() < len(data.classes)
        assert data.mean.isfinite().all()
        assert (data.std > 0).all()

    run()


def test_index_files(place):
    root = place / "index"
    rows = trees.folder(root, subjects=3, samples=4)
    trees.index(root, rows)
    content = (root / "index.csv").read_bytes()

    @fuzz(150)
    @given(damages())
    def run(changes):
        (root / "index.csv").write_bytes(damaged(content, changes))
        listing = outcome([str(root / "index.csv")], folder_source.find_recordings, root, None)
        if listing is not None:
            assert all(0 <= recording.label < len(listing.classes) for recording in listing.recordings)
            assert all("\n" not in name and "\0" not in name for name in listing.classes)

    run()


def test_label_lists(place):
    root = place / "uestc"
    trees.uestc(root)
    content = (root / "train.txt").read_bytes()

    @fuzz(80)
    @given(damages())
    def run(changes):
        (root / "train.txt").write_bytes(damaged(content, changes))
        listing = outcome([str(root)], uestc.find_recordings, root, None)
        if listing is not None:
            assert all(0 <= recording.label < len(listing.classes) for recording in listing.recordings)

    run()


@pytest.mark.parametrize("compressed", [True, False])
def test_matlab_files(place, compressed):
    folder = trees.utd_mhad(place / f"matlab-{compressed}", subjects=1, samples=4, compressed=compressed)
    path = folder / "a1_s1_t1_inertial.mat"
    content = path.read_bytes()

    @fuzz(150)
    @given(damages())
    def run(changes):
        path.write_bytes(damaged(content, changes))
        samples = outcome([str(path)], read_recording, path, None, 50.0, "utd-mhad")
        if samples is not None:
            assert samples.dtype == np.float32
            assert samples.shape[1] == 6
            assert np.isfinite(samples).all()

    run()


def test_labels_of_experiments(place):
    root = place / "uci"
    trees.uci_har(root)
    files = ["RawData/labels.txt", "RawData/gyro_exp01_user01.txt", "Train/subject_id_train.txt"]
    contents = {name: (root / name).read_bytes() for name in files}
    config = ActivityConfig("uci-har", str(root), length=8, max_lost=1.0)

    @fuzz(40)
    @given(st.sampled_from(files), damages())
    def run(name, changes):
        (root / name).write_bytes(damaged(contents[name], changes))
        data = outcome([str(root), "files", "split"], load_activity, config, False)
        (root / name).write_bytes(contents[name])
        if data is not None:
            assert data.train.x.isfinite().all()
            assert all(0 <= recording.label < 6 for recording in data.recordings)

    run()


# ---- recipes


@pytest.mark.parametrize("name", ["watch", "language-demo", "vision-demo", "recall"])
def test_recipe_files(place, name):
    path, content = place / "recipe.toml", recipe_files()[name].read_bytes()

    @fuzz(60)
    @given(damages())
    def run(changes):
        path.write_bytes(damaged(content, changes))
        recipe = outcome([str(path)], Recipe.load, str(path))
        if recipe is not None:
            assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict(), allow_nan=False))) == recipe

    run()


@pytest.mark.parametrize(
    "name", ["watch", "language-demo", "vision-demo", "recall", "detection-demo", "segmentation-demo"]
)
def test_recipes_of_other_values(name):
    content = Recipe.load(name).to_dict()
    fields = [name, "must be", "recipe", *(str(key) for path in places(content) for key in path)]

    @fuzz(120)
    @given(mutations())
    def run(changes):
        recipe = outcome(fields, Recipe.from_dict, mutated(content, changes))
        if recipe is not None:
            assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict(), allow_nan=False))) == recipe

    run()


@pytest.mark.parametrize("name", study_files())
def test_studies(place, name):
    """Grids and studies in stages."""
    path, content = place / "study.toml", study_files()[name].read_bytes()
    stages = "stages" in tomllib.loads(content.decode())

    def read():
        return Pipeline.load(path) if stages else Grid.load(str(path))

    @fuzz(100)
    @given(damages())
    def run(changes):
        path.write_bytes(damaged(content, changes))
        study = outcome([str(path)], read)
        if study is not None:
            assert study.variants
            assert study.name

    run()


@pytest.mark.parametrize("name", TASKS)
def test_rows_of_zero_shot_data(place, name):
    path = place / f"{name}.jsonl"

    @fuzz(40)
    @given(mutations(), damages())
    def run(changes, of_bytes):
        dump(path, mutated(ROWS[name], changes))
        for _ in range(2):
            rows = outcome([str(path)], lambda: list(read_rows(name, path)))
            for row in rows or []:
                assert row.keys() == TASKS[name].columns.keys()
                assert json.dumps(row, ensure_ascii=False).encode()
            path.write_bytes(damaged(json.dumps(ROWS[name]).encode(), of_bytes))

    run()


# ---- manifests


def read_tokens(folder, check):
    data = open_tokens(folder, check)
    blocks = Blocks(data.train, 4, keep_apart=True)
    items = [blocks[i] for i in range(len(blocks))]
    documents = [data.train.document(i) for i in range(data.train.documents)]
    return data, items, documents, data.train.sizes()


@pytest.mark.parametrize("check", [True, False])
def test_manifests_of_tokens(place, check):
    folder = place / f"tokens-{check}"
    manifest = write_tokens(folder, SHARDS)
    text = (folder / "tokens.json").read_bytes()
    total = sum(map(sum, SHARDS))

    def test(result):
        if result is not None:
            data, items, documents, sizes = result
            assert data.train.tokens <= total
            assert sum(len(tokens) for tokens, _ in documents) == data.train.tokens
            assert sizes[0].sum() == data.train.tokens
            assert all(item["input_ids"].max() < data.manifest["vocab_size"] for item in items)

    @fuzz(120)
    @given(mutations())
    def run_values(changes):
        dump(folder / "tokens.json", mutated(manifest, changes))
        test(outcome([str(folder)], read_tokens, folder, check))

    @fuzz(60)
    @given(damages())
    def run_bytes(changes):
        (folder / "tokens.json").write_bytes(damaged(text, changes))
        test(outcome([str(folder)], read_tokens, folder, check))

    run_values()
    run_bytes()


def test_listings_of_documents(place):
    folder = place / "listing"
    write_tokens(folder, SHARDS)
    path = folder / "train-00002.documents.npy"
    content = path.read_bytes()

    @fuzz(100)
    @given(damages())
    def run(changes):
        path.write_bytes(damaged(content, changes))
        result = outcome([str(path)], read_tokens, folder, False)
        if result is not None:
            data, _, documents, sizes = result
            assert sum(len(tokens) for tokens, _ in documents) == data.train.tokens
            assert (sizes[0] > 0).all()
            assert ((sizes[1] >= 0) & (sizes[1] <= sizes[0])).all()

    run()


def test_manifests_and_states_of_checkpoints(place):
    folder = place / "checkpoints" / "checkpoint-5"
    folder.mkdir(parents=True)
    (folder / "optimizer.pt").write_bytes(b"abc")
    state = {"best_model_checkpoint": str(folder), "best_metric": 1.5, "global_step": 5, "epoch": 1.0,
             "log_history": [{"loss": 1.0}], "stateful_callbacks": {}}  # fmt: skip
    dump(folder / "trainer_state.json", state)
    seal(folder)
    whole = (folder / "manifest.json").read_bytes()

    @fuzz(150)
    @given(st.one_of(damages(), mutations()))
    def run_manifest(changes):
        if changes[0][0] in ("flip", "set", "insert", "cut"):
            (folder / "manifest.json").write_bytes(damaged(whole, changes))
        else:
            content = json.loads(whole)
            dump(folder / "manifest.json", mutated(content, [c for c in changes if not isinstance(c[2], bytes)]))
        reason = damage(folder)
        found = newest_whole(folder.parent, remove=False)
        assert found is None if reason else found[0] == folder

    @fuzz(100)
    @given(mutations())
    def run_state(changes):
        dump(folder / "trainer_state.json", mutated(state, changes))
        seal(folder)
        found = newest_whole(folder.parent, remove=False)
        assert found is None or isinstance(found[1], dict)

    run_manifest()
    run_state()


# ---- runs


def page(path):
    experiment = Experiment.read(path)
    return experiment, table(experiment.comparison), render_report([experiment])


def shown_text(html):
    """What a page shows: without its style, scripts and the settings in them."""
    return re.sub(r"<(style|script)[^>]*>.*?</\1>|<[^>]*>", " ", html, flags=re.DOTALL)


@pytest.mark.parametrize("name", ["metrics.json", "history.json", "timing.json", "recipe.json", "metadata.json"])
@pytest.mark.parametrize("recipe", ["watch", "recall"])
def test_files_of_a_run(place, name, recipe):
    path = runs.make_run(place / f"run-{recipe}-{name}", Recipe.load(recipe))
    text = (path / name).read_bytes()

    def test(result):
        if result is not None:
            for shown in (result[1], shown_text(result[2])):
                assert not re.search(r"(?<![\w.-])[-+]?(nan|inf)(?![\w-])", shown)

    @fuzz(25)
    @given(mutations())
    def run_values(changes):
        dump(path / name, mutated(json.loads(text), changes))
        test(outcome([str(path)], page, path))

    @fuzz(10)
    @given(damages())
    def run_bytes(changes):
        (path / name).write_bytes(damaged(text, changes))
        test(outcome([str(path)], page, path))

    run_values()
    run_bytes()


def test_comparisons(place):
    path = runs.make_comparison(place / "comparison", Recipe.load("recall"))
    content = json.loads((path / "comparison.json").read_text())

    @fuzz(150)
    @given(mutations())
    def run(changes):
        dump(path / "comparison.json", mutated(content, changes))
        result = outcome([str(path)], lambda: (Experiment.read(path), table(Experiment.read(path).comparison)))
        if result is not None:
            assert not re.search(r"\b(nan|inf)\b", result[1])
            read = result[0].comparison
            assert Comparison.from_dict(read.to_dict()) == read

    @fuzz(25)
    @given(mutations())
    def run_page(changes):
        dump(path / "comparison.json", mutated(content, changes))
        outcome([str(path)], page, path)

    run()
    run_page()


@pytest.mark.parametrize(
    ("make", "folder", "name"),
    [
        (runs.make_language_run, ".", "zero-shot.json"),
        (runs.make_language_run, ".", "needle.json"),
        (runs.make_vision_comparison, "muon-seed0-fold0", "imagenet-c.json"),
    ],
)
def test_results_of_evaluations(place, make, folder, name):
    path = make(place / f"results-{name}")
    content = json.loads((path / folder / name).read_text())

    @fuzz(15)
    @given(mutations())
    def run(changes):
        dump(path / folder / name, mutated(content, changes))
        result = outcome([name], page, path)
        if result is not None:
            assert not re.search(r"(?<![\w.-])[-+]?(nan|inf)(?![\w-])", shown_text(result[2]))

    run()


@pytest.mark.parametrize("recipe", ["watch-small", "recall"])
def test_metadata_that_models_are_rebuilt_from(place, recipe):
    path = place / f"model-{recipe}"
    loaded = Recipe.load(recipe)
    metadata = {"vocab_size": 20, "classes": ["a", "b"], "channels": ["x", "y"], "mean": [0.0, 1.0], "std": [1.0, 1.0],
                "rate": 50.0, "summary": "made"}  # fmt: skip
    folder = RunFolder(path)
    folder.begin("recipe.json", loaded.to_dict())
    folder.write("metadata.json", metadata)
    folder.save_weights("model.safetensors", loaded.task.build_model(metadata).state_dict())
    assert folder.load_model()

    @fuzz(40)
    @given(mutations())
    def run(changes):
        dump(path / "metadata.json", mutated(metadata, changes))
        outcome([str(path)], folder.load_model)

    run()


def test_weights(place):
    path = place / "weights"
    model = torch.nn.Linear(3, 2)
    folder = RunFolder(path)
    path.mkdir()
    folder.save_weights("model.safetensors", model.state_dict())
    content = (path / "model.safetensors").read_bytes()

    @fuzz(100)
    @given(damages())
    def run(changes):
        (path / "model.safetensors").write_bytes(damaged(content, changes))
        outcome([str(path)], folder.load_weights, model, path / "model.safetensors")

    run()


# ---- COCO


def read_coco(path, images):
    data = CocoImages(path, images)
    return data, [data[i] for i in range(len(data))]


def test_coco_annotations(place):
    path, images = place / "coco.json", place / "coco"
    pictures.save(images / "a.png", pictures.picture(20, 30))
    pictures.save(images / "b.png", pictures.picture(10, 10))
    pictures.save(images / "c.png", pictures.picture(20, 30, seed=1))
    text = json.dumps(coco_content()).encode()

    def test(result):
        if result is None:
            return
        data, items = result
        for image, target in items:
            assert image.shape[0] == 3
            assert target["boxes"].isfinite().all()
            assert (target["boxes"][:, 2:] > target["boxes"][:, :2]).all()
            assert (target["boxes"] >= 0).all()
            assert target["area"].isfinite().all()
            assert ((target["labels"] >= 1) & (target["labels"] <= len(data.classes))).all()
            assert target["masks"].shape[1:] == image.shape[1:]
            assert (target["masks"] <= 1).all()

    @fuzz(250)
    @given(mutations())
    def run_values(changes):
        dump(path, mutated(coco_content(), changes))
        test(outcome([str(path), str(images)], read_coco, path, images))

    @fuzz(100)
    @given(damages())
    def run_bytes(changes):
        path.write_bytes(damaged(text, changes))
        test(outcome([str(path), str(images)], read_coco, path, images))

    run_values()
    run_bytes()


@fuzz(200)
@given(st.text(st.characters(min_codepoint=40, max_codepoint=120), max_size=12), st.lists(st.integers(-5, 700)))
@example("0`b0", [0, 600])
def test_coco_masks(text, counts):
    """Any mask that is accepted fills its size."""
    from pycocotools import mask as coding

    from muonssm.lab.vision.coco_checks import _why_not_a_mask

    for value in (text, counts):
        if _why_not_a_mask({"size": [20, 30], "counts": value}, 20, 30) is None:
            rle = {"size": [20, 30], "counts": value.encode()} if isinstance(value, str) else None
            rle = rle or coding.frPyObjects({"size": [20, 30], "counts": value}, 20, 30)
            assert set(np.unique(coding.decode(rle))) <= {0, 1}


# ---- images


def encoded(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


GRAY16 = Image.fromarray(np.arange(0, 65536, 600, dtype=np.uint16)[:100].reshape(10, 10))
FLOATS = Image.fromarray(np.linspace(0, 1, 100, dtype=np.float32).reshape(10, 10))
IMAGES = {
    "rgb.png": encoded(pictures.picture(), "PNG"),
    "palette.png": encoded(pictures.picture().convert("P"), "PNG"),
    "gray16.png": encoded(GRAY16, "PNG"),
    "rgb.jpg": encoded(pictures.picture(16, 16), "JPEG"),
    "cmyk.jpg": encoded(pictures.picture(16, 16).convert("CMYK"), "JPEG"),
    "rgb.tif": encoded(pictures.picture(), "TIFF"),
    "lzw.tif": encoded(pictures.picture(), "TIFF", compression="tiff_lzw"),
    "float.tif": encoded(FLOATS, "TIFF"),
    "gray16.tif": encoded(GRAY16, "TIFF"),
    "rgb.bmp": encoded(pictures.picture(), "BMP"),
    "rgb.ppm": encoded(pictures.picture(), "PPM"),
    "rgb.webp": encoded(pictures.picture(), "WEBP"),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images(place, name, monkeypatch):
    path = place / name
    monkeypatch.setattr("muonssm.lab.vision.image_files.MAX_PIXELS", 1_000_000)  # larger ones only take time
    path.write_bytes(IMAGES[name])
    assert read_image(path).shape[0] == 3

    @fuzz(120)
    @given(damages(), st.sampled_from([1, 3]))
    def run(changes, channels):
        path.write_bytes(damaged(IMAGES[name], changes))
        image = outcome([str(path)], read_image, path, channels)
        if image is not None:
            assert image.dtype == torch.uint8
            assert image.shape[0] == channels
            assert image.shape[1:].numel() > 0

    run()


def png_of_size(width, height):
    """A small PNG whose header has another size, with the right checksum."""
    content = IMAGES["rgb.png"]
    header = struct.pack(">II", width, height) + content[24:29]
    return content[:16] + header + struct.pack(">I", zlib.crc32(b"IHDR" + header)) + content[33:]


@pytest.mark.parametrize("size", [(2**31 - 1, 2**31 - 1), (100_000, 100_000), (2**32 - 1, 1), (0, 5), (20_000, 20_000)])
@pytest.mark.parametrize("kind", ["png", "bmp", "ppm"])
def test_images_with_huge_headers(place, size, kind):
    path = place / f"huge.{kind}"
    width, height = size
    bmp = IMAGES["rgb.bmp"]
    contents = {
        "png": png_of_size(width, height),
        "bmp": bmp[:18] + struct.pack("<II", width, height) + bmp[26:],
        "ppm": b"P6 %d %d 255\n" % size + b"\0" * 100,
    }
    path.write_bytes(contents[kind])
    with pytest.raises(DamagedImageError, match=rf"huge\.{kind} (must have 1 to|cannot be read)"):
        read_image(path)


def test_label_images(place, monkeypatch):
    root = place / "ade"
    monkeypatch.setattr("muonssm.lab.vision.image_files.MAX_PIXELS", 1_000_000)
    pictures.save(root / "images" / "training" / "a.png", pictures.picture(10, 10))
    labels = Image.fromarray((np.arange(100) % 4).astype(np.uint8).reshape(10, 10))
    path = pictures.save(root / "annotations" / "training" / "a.png", labels)
    content, data = path.read_bytes(), Ade20k(root, "training", classes=3)

    @fuzz(80)
    @given(damages())
    def run(changes):
        path.write_bytes(damaged(content, changes))
        result = outcome([str(path)], data.__getitem__, 0)
        if result is not None:
            wanted = set(range(3)) | {255}
            assert set(result[1].unique().tolist()) <= wanted

    run()


def test_a_damaged_recording_is_a_value_error():
    """What readers of recordings raise is a ValueError, as this file takes for granted."""
    assert issubclass(DamagedFileError, ValueError)
