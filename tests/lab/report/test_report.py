"""`muonssm report`: every task on one page that stands alone, what is missing is said, what is wrong is named."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from muonssm.cli import main
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.report.analysis_sections import checked
from muonssm.lab.report.report import write_report
from muonssm.lab.vision.imagenet import synsets
from muonssm.lab.vision.paper import published_vision

from .runs import make_analysis, make_comparison, make_everything, make_run

VOID = {"meta", "img", "br"}


class Reader(HTMLParser):
    """Elements with their attributes, what they lie in, and the text of the page; raises where tags do not match."""

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


def test_the_page_stands_alone(everything):
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
    pictures = re.findall(r"<figure.*?</figure>", text, re.DOTALL)
    assert len(pictures) == tags.count("figure") > 20
    assert all("<svg" in picture or "<img" in picture for picture in pictures)
    drawn = [a for tag, a, inside in page.elements if tag == "svg"]
    assert all(a["role"] == "img" and a["aria-label"] for a in drawn)
    assert all(a["alt"] for tag, a, _ in page.elements if tag == "img")
    assert write_report(runs, runs[0].parent / "again.html").read_text() == text


def test_every_run_shows_what_it_has_and_says_what_it_has_not(everything):
    runs, text = everything
    page = Reader(text)
    _, vision, language, _, detection = runs
    for said in (
        "longhorn on MMAct, plain against Muon",  # the title, then the verdict on differences 1 and 1
        "Muon minus plain, accuracy: +1.00 percentage points, 95% interval [+1.00, +1.00] over 2 pairs",
        "paper, muon", "74.40", "The rank is <higher>.", "paper12.98", "It is 12.9 & more.",
        "<up>", "12,345", "made: 16 things", "muonssm",
        "analyses: rank, gradients, memory, truncation, ablation, ns-steps, capacity, convergence, scaling",
        f"No analysis yet: muonssm analyze {vision}", "36.60", "1 gap(s) in the data, the first: no folder snow.",
        "PIQA acc", "60.00", "63.81", "of at most 100 samples", "pk, 2048", "45.0", "29.3",
        f"what the model sees: muonssm explain {detection}",
        "One run: nothing is compared here", "The paper has no such scores for this data and model.",
    ):  # fmt: skip
        assert said in page.text, said
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
    assert capsys.readouterr().out == f"the page is {run / 'report.html'}\n"
    page = Reader((run / "report.html").read_text())
    assert [tag for tag, _, _ in page.elements].count("h1") == 1
    assert "longhorn on watch, with Muon" in page.text
    assert "validation part" in page.text
    assert sorted(path.name for path in run.iterdir() if "report" in path.name) == ["report.html"]


def test_the_recipe_of_a_study_is_said_by_what_differs(tmp_path):
    recipe = Recipe.load("watch")
    run = make_run(tmp_path / "run", recipe)
    shorter = Recipe.load("watch", ["training.epochs=3", "model.d_state=8"]).to_dict()
    make_analysis(run, "capacity", "Shorter", settings={"seeds": 2, "recipe": shorter})
    make_analysis(run, "ablation", "The same", settings={"seeds": 3, "recipe": recipe.to_dict()})
    page = Reader(write_report([run]).read_text())
    for seeds, said in ((2, {"model.d_state": 8, "training.epochs": 3}), (3, "that of the run")):
        assert json.dumps({"seeds": seeds, "recipe": said}, indent=1) in page.text
    assert page.text.count('"d_model"') == 1


def test_the_papers_figures_for_vision_stand_beside_its_data_only(tmp_path):
    imagenet = Recipe.load("imagenet-tiny", [f"data.root={tmp_path}", "model.backbone=longhorn"]).to_dict()
    figures = published_vision(imagenet, synsets())
    assert figures["muon"] == {
        "accuracy": 82.01,
        "top5": 95.90,
        "imagenet-r": 46.28,
        "imagenet-a": 25.27,
        "mce": 111.24,
    }
    assert published_vision(imagenet, ["a", "b"]) == {}
    assert published_vision({**imagenet, "model": {"size": "micro", "backbone": "mamba"}}, synsets()) == {}
    assert published_vision(Recipe.load("vision-demo").to_dict(), ["0", "1"]) == {}
    run = make_run(tmp_path / "run", Recipe.load("coco-tiny", [f"data.root={tmp_path}"]))
    text = write_report([run]).read_text()
    row = re.search(r'<tr class="soft"><td>paper, plain</td>(.*?)</tr>', text)[1]
    assert re.findall("<td>(.*?)</td>", row) == ["50.80", "69.50", "55.20", "44.10", "67.00", "47.90"]
    run = make_run(tmp_path / "pixels", Recipe.load("ade20k-tiny", [f"data.root={tmp_path}"]))
    row = re.search(r'<tr class="soft"><td>paper, muon</td>(.*?)</tr>', write_report([run]).read_text())[1]
    assert re.findall("<td>(.*?)</td>", row) == ["45.20", "-"]


def test_a_run_that_diverged_is_told(tmp_path):
    path = make_comparison(tmp_path / "both", Recipe.load("watch"), seeds=1)
    result = json.loads((path / "comparison.json").read_text())
    result["kinds"]["muon"] = {name: {"mean": None, "deviation": None} for name in result["kinds"]["muon"]}
    empty = {"mean": None, "low": None, "high": None, "pairs": 0}
    result["differences"]["muon"] = dict.fromkeys(result["differences"]["muon"], empty)
    result["trials"][1]["scores"] |= dict.fromkeys(("accuracy", "precision", "recall", "f1", "loss"))
    (path / "comparison.json").write_text(json.dumps(result))
    text = write_report([path]).read_text()
    assert "1 of 1 runs of muon diverged: their loss is not a number" in text
    assert "there is nothing to compare" in text
    assert "<td>diverged</td>" in text


def test_folders_that_are_no_finished_runs_are_named(tmp_path, capsys):
    run = make_run(tmp_path / "run", Recipe.load("watch"))
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty")]) == 2
    said = capsys.readouterr().err
    assert f"RUN is '{tmp_path / 'empty'}', which has neither metrics.json nor comparison.json; it may be" in said
    with pytest.raises(ValueError, match="which is no folder"):
        write_report([run, tmp_path / "nowhere"], tmp_path / "page.html")
    (run / "metrics.json").unlink()
    with pytest.raises(ValueError, match="a run that is not over"):
        write_report([run])
    with pytest.raises(ValueError, match=r"--output is '.*page\.txt'; it may be a file that ends in \.html"):
        write_report([run], tmp_path / "page.txt")
    assert not list(tmp_path.rglob("*.html*"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "has no title"),
        ('{"title": "x", "tables": [{"rows": []}]}', "is no analysis"),
        ('{"title": "x", "figures": [{"caption": "c", "svg": "<svg>"}]}', "has a figure that is no SVG"),
    ],
)
def test_an_analysis_that_is_none_is_named(tmp_path, content, message):
    run = make_run(tmp_path / "run", Recipe.load("watch"))
    make_analysis(run, "spectrum", "Singular values")
    write_report([run])
    before = (run / "report.html").read_text()
    (run / "analysis" / "rank.json").write_text(content)
    with pytest.raises(ValueError, match=rf"rank\.json {message}"):
        write_report([run])
    assert (run / "report.html").read_text() == before


@pytest.mark.parametrize(
    "inner",
    ["<script>1</script>", '<a href="https://example.org"/>', '<rect onclick="1"/>', '<image href="file:///a.png"/>'],
)
def test_pictures_that_act_or_point_outside_are_refused(tmp_path, inner):
    assert checked('<svg><image href="data:image/png;base64,"/></svg>', tmp_path)
    with pytest.raises(ValueError, match="that acts or points outside"):
        checked(f"<svg>{inner}</svg>", tmp_path)
