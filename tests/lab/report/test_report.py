"""`muonssm report`: every task on one page without other files; missing evaluations and wrong input are named."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser

import pytest

from muonssm.cli import main
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.report import page as html
from muonssm.lab.report.analysis_sections import check_figure
from muonssm.lab.report.report import write_report

from .runs import (
    make_analysis,
    make_comparison,
    make_everything,
    make_language_run,
    make_run,
    make_vision_comparison,
)

VOID = {"meta", "img", "br"}


class Reader(HTMLParser):
    """The elements of a page with their attributes and parents, and its text; raises if tags do not match."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.text = [], [], ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes), tuple(self.open)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes), tuple(self.open)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if "style" not in self.open:
            self.text += text


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    runs = make_everything(root)
    path = write_report(runs, root / "page" / "all.html")
    return runs, path.read_text()


def test_the_page_needs_no_other_file(everything):
    runs, text = everything
    page = Reader(text)
    tags = [tag for tag, _, _ in page.elements]
    assert "script" not in tags
    assert not {"link", "iframe", "object", "embed"} & set(tags)
    assert not [key for _, attributes, _ in page.elements for key in attributes if key.startswith("on")]
    links = [a[key] for _, a, _ in page.elements for key in ("src", "href", "xlink:href") if key in a]
    assert links
    assert all(link.startswith(("data:image/", "#")) for link in links)
    assert "@import" not in text
    assert "url(" not in text
    ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)
    drawn = re.findall(r"<figure.*?</figure>", text, re.DOTALL)
    assert len(drawn) == tags.count("figure") > 20
    assert all("<svg" in figure or "<img" in figure for figure in drawn)
    assert all(a["role"] == "img" and a["aria-label"] for tag, a, _ in page.elements if tag == "svg")
    assert all(a["alt"] for tag, a, _ in page.elements if tag == "img")
    assert write_report(runs, runs[0].parent / "again.html").read_text() == text


def test_every_run_shows_its_results_and_names_missing_evaluations(everything):
    runs, text = everything
    page = Reader(text)
    watch, vision, language, _, detection = runs
    for expected in (
        "longhorn on MMAct, plain against Muon",  # the title, then the verdict on differences 1 and 1
        "Muon minus plain, accuracy: +1.00 percentage points, 95% interval [+1.00, +1.00] over 2 pairs",
        "paper, muon", "74.40", "The rank is <higher>.", "paper12.98", "It is 12.9 & more.",
        "<up>", "12,345", "made: 16 things", "muonssm",
        "analyses rank, gradients, memory, truncation, ablation, ns-steps, capacity, convergence, scaling: "
        f"muonssm analyze {watch}",
        f"There is no analysis yet: run muonssm analyze {vision}.",
        "36.60", "1 gap(s) in the data, the first: no folder snow.",
        "PIQA acc", "60.00", "63.81", "at most 100 samples", "pk, 2048", "45.0", "29.3",
        f"what the model sees: muonssm explain {detection}",
        "This is a single run.", "The paper has no scores for this data and model.",
    ):  # fmt: skip
        assert expected in page.text, expected
    assert f"muonssm explain {vision}" not in page.text
    assert f"eval {language}" not in page.text
    order = [
        re.search(f'id="r0-{name}"', text).start() for name in ("scores", "spectrum", "sensitivity", "own-idea", "run")
    ]
    assert order == sorted(order)
    row = re.search(r"<tr><td>longhorn on MMAct</td>(.*?)</tr>", text)[1]
    assert re.findall("<td>(.*?)</td>", row) == [
        "accuracy, %", "70.50 ± 0.71", "71.50 ± 0.71", "+1.00 [+1.00, +1.00]", "72.47", "74.40",
    ]  # fmt: skip
    assert re.search(r'<h2 id="r3">[^<]*, plain</h2>', text)  # the run of recall
    assert re.search(r'<h2 id="r4">[^<]*, with Muon</h2>', text)


def test_one_run_has_its_page_in_its_folder(tmp_path, capsys):
    run = make_run(tmp_path / "run", Recipe.load("watch"))
    assert main(["report", str(run)]) == 0
    assert str(run / "report.html") in capsys.readouterr().out
    page = Reader((run / "report.html").read_text())
    assert [tag for tag, _, _ in page.elements].count("h1") == 1
    assert "longhorn on watch, with Muon" in page.text
    assert "validation set" in page.text
    assert sorted(path.name for path in run.iterdir() if "report" in path.name) == ["report.html"]


def test_the_recipe_of_a_study_is_shown_by_its_differences(tmp_path):
    recipe = Recipe.load("watch")
    run = make_run(tmp_path / "run", recipe)
    shorter = Recipe.load("watch", ["training.epochs=3", "model.d_state=8"]).to_dict()
    make_analysis(run, "capacity", "Shorter", settings={"seeds": 2, "recipe": shorter})
    make_analysis(run, "ablation", "The same", settings={"seeds": 3, "recipe": recipe.to_dict()})
    page = Reader(write_report([run]).read_text())
    for seeds, shown in ((2, {"model.d_state": 8, "training.epochs": 3}), (3, "the recipe of the run")):
        assert json.dumps({"seeds": seeds, "recipe": shown}, indent=1) in page.text
    assert page.text.count('"d_model"') == 1


@pytest.mark.parametrize(
    ("recipe", "variant", "scores"),
    [
        ("coco-tiny", "plain", ["50.80", "69.50", "55.20", "44.10", "67.00", "47.90"]),
        ("ade20k-tiny", "muon", ["45.20", "-"]),  # the paper has no pixel accuracy
    ],
)
def test_the_papers_scores_stand_below_those_of_the_run(tmp_path, recipe, variant, scores):
    run = make_run(tmp_path / "run", Recipe.load(recipe, [f"data.root={tmp_path}"]))
    row = re.search(rf'<tr class="soft"><td>paper, {variant}</td>(.*?)</tr>', write_report([run]).read_text())[1]
    assert re.findall("<td>(.*?)</td>", row) == scores


def test_diverged_runs_are_reported(tmp_path):
    path = make_comparison(tmp_path / "both", Recipe.load("watch"), seeds=1)
    result = json.loads((path / "comparison.json").read_text())
    result["runs"][1]["scores"] |= dict.fromkeys(("accuracy", "precision", "recall", "f1", "loss"))
    (path / "comparison.json").write_text(json.dumps(result))
    text = write_report([path]).read_text()
    assert "1 of 1 runs of muon diverged" in text
    assert "Every pair has a run that diverged" in text
    assert "<td>diverged</td>" in text


def test_pieces_escape_their_text():
    for piece in (
        html.paragraph("<i> & `<b>`"),
        html.bullets(["<i>", "`<b>`"]),
        html.quote("<i>", "<b>"),
        html.table(["<i>"], [["<b>"]], [["<b>"]], "<i>"),
        html.figure("<i>", "<svg></svg>"),
        html.details("<i>", {"<b>": "</pre>"}),
        html.join("<i>", html.paragraph("<b>")),
    ):
        assert not re.search(r"<[ib]>|</pre>(?!</details>)", piece), piece
    assert html.paragraph("run `a` **now**") == "<p>run <code>a</code> <strong>now</strong></p>"
    page = html.render("<i>", [html.Article("<i>", "<i>", [html.Section("s", "<i>", "<i>")])], "<i>", footer="<i>")
    assert "<i>" not in page


def test_folders_that_are_no_finished_runs_are_named(tmp_path, capsys):
    run = make_run(tmp_path / "run", Recipe.load("watch"))
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty")]) == 2
    error = capsys.readouterr().err
    assert f"RUN must be the folder of a finished run or comparison, got '{tmp_path / 'empty'}'" in error
    with pytest.raises(ValueError, match=r"RUN must be .*nowhere"):
        write_report([run, tmp_path / "nowhere"], tmp_path / "page.html")
    (run / "metrics.json").unlink()
    with pytest.raises(ValueError, match=r"RUN must be .*not finished"):
        write_report([run])
    with pytest.raises(ValueError, match=r"--output must be .*page\.txt"):
        write_report([run], tmp_path / "page.txt")
    with pytest.raises(ValueError, match="runs must have"):
        write_report([])
    assert not list(tmp_path.rglob("*.html*"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is damaged"),
        ("[]", "must be an analysis"),
        ('{"title": "x", "tables": [{"rows": []}]}', "must be an analysis"),
        ('{"title": "x", "figures": [{"caption": "c", "svg": "<svg>"}]}', "must have SVG figures"),
    ],
)
def test_a_wrong_analysis_file_is_named(tmp_path, content, message):
    run = make_run(tmp_path / "run", Recipe.load("watch"))
    make_analysis(run, "spectrum", "Singular values")
    write_report([run])
    before = (run / "report.html").read_text()
    (run / "analysis" / "rank.json").write_text(content)
    with pytest.raises(ValueError, match=rf"rank\.json {message}"):
        write_report([run])
    assert (run / "report.html").read_text() == before


WRONG_RESULTS = [
    ("zero-shot.json", {}, "settings must be an object"),
    ("zero-shot.json", {"settings": {"limit": None, "max_length": 8}, "tasks": {"piqa": {}}}, "tasks.piqa.metrics"),
    ("zero-shot.json", {"settings": {"limit": "x", "max_length": 8}, "tasks": {}}, "settings.limit must be a number"),
    ("needle.json", {}, "settings must be an object"),
    ("needle.json", {"settings": {"samples": 1, "answer_tokens": 1, "seed": 0}, "cells": [5]}, "must be an object"),
    ("needle.json", {"settings": {"samples": -1}, "cells": []}, "settings.samples must be an integer >= 0"),
]


@pytest.mark.parametrize(("name", "content", "message"), WRONG_RESULTS)
def test_wrong_results_of_a_language_run_are_named(tmp_path, name, content, message):
    run = make_language_run(tmp_path / "run")
    write_report([run])
    (run / name).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"{name} is damaged: .*{message}"):
        write_report([run])


def test_wrong_results_and_pictures_of_a_vision_run_are_named(tmp_path):
    path = make_vision_comparison(tmp_path / "vision")
    scores = path / "muon-seed0-fold0" / "imagenet-c.json"
    before = scores.read_text()
    scores.write_text("{}")
    with pytest.raises(ValueError, match=r"imagenet-c\.json is damaged: errors must be an object"):
        write_report([path])
    scores.write_text(before)
    (path / "explain" / "x.png").write_bytes(b"GIF89a")
    with pytest.raises(ValueError, match=r"x\.png must be a PNG file"):
        write_report([path])
    (path / "explain" / "x.png").unlink()
    os.mkfifo(path / "explain" / "x.png")
    with pytest.raises(ValueError, match=r"x\.png must be a regular file, got a pipe"):
        write_report([path])


def test_counts_can_be_missing_and_names_of_files_need_no_utf8(tmp_path):
    run = make_run(tmp_path / "run", Recipe.load("watch"))
    metrics, metadata = (json.loads((run / name).read_text()) for name in ("metrics.json", "metadata.json"))
    (run / "metrics.json").write_text(json.dumps({**metrics, "parameters": None, "steps": None}))
    (run / "metadata.json").write_text(json.dumps({**metadata, "summary": "lost: caf\udce9.csv"}))
    assert r"lost: caf\udce9.csv" in write_report([run]).read_text()


def test_a_page_cannot_use_the_network(tmp_path):
    text = write_report([make_run(tmp_path / "run", Recipe.load("watch"))]).read_text()
    policy = """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:;"""
    assert text.index(policy) < text.index("<style>")


@pytest.mark.parametrize(
    "inner",
    ["<script>1</script>", '<a href="https://example.org"/>', '<rect onclick="1"/>', '<image href="file:///a.png"/>',
     "<style>@import 'https://example.org';</style>", '<rect style="fill: URL(https://example.org/#a)"/>'],
)  # fmt: skip
def test_figures_with_scripts_or_outside_links_are_refused(tmp_path, inner):
    assert check_figure('<svg><image href="data:image/png;base64,"/></svg>', tmp_path)
    with pytest.raises(ValueError, match="must have figures without scripts"):
        check_figure(f"<svg>{inner}</svg>", tmp_path)
