"""What was measured after training, as sections: zero-shot tasks, needles, robustness, and pictures of what is seen."""

from __future__ import annotations

from typing import Any

from muonssm.lab.core.experiment import Subject
from muonssm.lab.language.paper import published_needle, published_zero_shot

from . import page, svg
from .page import Section

LANGUAGE, IMAGES = ("language",), ("vision", "detection", "segmentation")
ROBUSTNESS = {"imagenet-c": "corrupted images", "imagenet-r": "other renderings", "imagenet-a": "hard photographs"}


def sections(subject: Subject) -> list[Section]:
    """Those there is something to show in."""
    made = (_zero_shot(subject), _needle(subject), _robustness(subject), _seen(subject))
    return [section for section in made if section is not None]


def missing(subject: Subject) -> list[str]:
    """What such a run could have and does not, and how it comes by it."""
    run = subject.path if subject.alone else subject.path / subject.trained[-1]["folder"]
    wanted = [
        (LANGUAGE, "zero-shot.json", f"zero-shot scores: `muonssm eval {run} --tasks paper`"),
        (LANGUAGE, "needle.json", f"needles in haystacks: `muonssm needle {run}`"),
        (("vision",), "imagenet-c.json", f"robustness: `muonssm eval {run} --robustness imagenet-c --data DIR`"),
    ]
    found = [text for tasks, name, text in wanted if subject.task in tasks and not subject.holding(name)]
    if subject.task in IMAGES and _seen(subject) is None:
        found.append(f"what the model sees: `muonssm explain {subject.path}`")
    return found


def _backbone(subject: Subject) -> str:
    return subject.recipe.get("model", {}).get("backbone", "")


def _zero_shot(subject: Subject) -> Section | None:
    from muonssm.lab.language.zero_shot import cells, notes, number, rows
    from muonssm.lab.language.zero_shot import missing as absent

    found = subject.holding("zero-shot.json")
    if not found:
        return None
    table: dict[str, Any] = {}
    said, others = [], []
    for name, result in found.items():
        ours, more = rows(result, {}, name)
        table |= {f"{name}: {row}" if row == "standard error" else row: figures for row, figures in ours.items()}
        gaps = [absent(ours[name])] if ours else []
        said += [page.paragraph(f"{name}: {text}", "soft") for text in (*gaps, *notes(result)) if text]
        others += [[name, key, number(value, 4)] for key, value in more.items()]
    body = "Tasks of lm-eval without examples in the prompt; accuracies in percent, ppl is perplexity."
    text = page.paragraph(body, "soft")
    if table:
        paper = {f"paper, {kind}": row for kind, row in published_zero_shot(_backbone(subject)).items()}
        (tasks, units, *lines), theirs = cells(table), cells(paper)[2:]
        heads = [f"{task} {unit}".strip() for task, unit in zip(tasks, units, strict=True)]
        text += page.table(heads, lines, theirs)
    text += page.table(["", "other tasks", "score"], others) if others else ""
    return Section("zero-shot", "Zero-shot", text + "".join(said))


def _needle(subject: Subject) -> Section | None:
    found = subject.holding("needle.json")
    if not found:
        return None
    from muonssm.lab.language.needle_page import needle_figures

    text = "Share of answers that contain the value, by how long the prompt is and how deep in it the needle lies."
    body = [page.paragraph(text, "soft"), _needle_table(subject, found)]
    for name, result in found.items():
        body += [
            page.figures([page.figure(f"{name}, {caption}", picture) for caption, picture in needle_figures(result)])
        ]
    return Section("needle", "Needle in a haystack", "".join(body))


def _needle_table(subject: Subject, found: dict[str, Any]) -> str:
    scores = {
        name: {(cell["variant"], cell["length"]): cell["score"] for cell in result["cells"]}
        for name, result in found.items()
    }
    columns = sorted({key for row in scores.values() for key in row})
    theirs = {
        f"paper, {kind}": {(needle, length): s for needle, its in row.items() for length, s in its.items()}
        for kind, row in published_needle(_backbone(subject)).items()
    }

    def lines(rows: dict[str, Any]) -> list[list[str]]:
        return [[name, *(f"{row[key]:.1f}" if key in row else "-" for key in columns)] for name, row in rows.items()]

    names = ["found, %", *(f"{variant}, {length}" for variant, length in columns)]
    samples = "; ".join(f"{name}: {result['settings']['samples']} samples a cell" for name, result in found.items())
    compared = {name: row for name, row in theirs.items() if row.keys() & set(columns)}
    return page.table(names, lines(scores), lines(compared)) + page.paragraph(f"{samples}.", "soft")


def _robustness(subject: Subject) -> Section | None:
    parts = []
    for name, what in ROBUSTNESS.items():
        found = subject.holding(f"{name}.json")
        if found:
            parts.append(_corruptions(subject, found) if name == "imagenet-c" else _subset(subject, name, found))
            gaps = ((place, scores["missing"]) for place, scores in found.items())
            parts += [
                page.paragraph(f"{place}, {what}: {len(lost)} gap(s) in the data, the first: {lost[0]}.", "soft")
                for place, lost in gaps
                if lost
            ]
    return Section("robustness", "Robustness", "".join(parts)) if parts else None


def _corruptions(subject: Subject, found: dict[str, Any]) -> str:
    """CE of every corruption and their mean, and errors by severity."""
    names = list(dict.fromkeys(name for scores in found.values() for name in scores["ce"]))
    rows = [[name.replace("_", " "), *(_figure(scores["ce"].get(name)) for scores in found.values())] for name in names]
    rows.append(["mean (mCE)", *(_figure(scores["mce"]) for scores in found.values())])
    caption = "Corrupted images: CE, the error relative to AlexNet's on ImageNet-C, %; less is better"
    curves = {}
    for place, scores in found.items():
        severities = sorted({int(severity) for errors in scores["errors"].values() for severity in errors})
        whole = [errors for errors in scores["errors"].values() if len(errors) == len(severities)]
        curve = [(s, sum(errors[str(s)] for errors in whole) / len(whole)) for s in severities if whole]
        curves[place] = [curve]
    label = "error, mean over corruptions, %"
    shown = list(curves.items())[:8]  # as many as there are colours; the table has all
    picture = page.figure(label, svg.lines(dict(shown), "severity", label))
    theirs = ", ".join(f"{kind} {row['mce']:.2f}" for kind, row in subject.paper.items())
    beside = page.paragraph(f"The paper's mCE: {theirs}.", "soft") if theirs else ""
    return page.table(["", *found], rows, caption=caption) + beside + page.figures([picture])


def _subset(subject: Subject, name: str, found: dict[str, Any]) -> str:
    rows = [
        [place, _figure(scores["accuracy"]), _figure(scores["of_present"]), f"{scores['images']:,}"]
        for place, scores in found.items()
    ]
    heads = ["", "accuracy, %", "of the images that are there, %", "images"]
    paper = [[f"paper, {kind}", _figure(row[name]), "-", "-"] for kind, row in subject.paper.items()]
    return page.table(heads, rows, paper, ROBUSTNESS[name].capitalize())


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _seen(subject: Subject) -> Section | None:
    pictures = [
        (place, path)
        for place in subject.places()
        for path in sorted((place.folder.path / "explain").glob("*.png"))
        if subject.task in IMAGES
    ]
    if not pictures:
        return None
    text = {
        "vision": "Where the class that was found comes from: Grad-CAM, from blue (little) to red (much).",
        "detection": "Boxes and masks, the truth beside what was found.",
        "segmentation": "The class of every pixel, the truth beside what was found.",
    }[subject.task]
    shown = [page.photo(_caption(place.name, path.stem, subject.alone), path) for place, path in pictures]
    return Section("seen", "What the model sees", page.paragraph(text, "soft") + page.figures(shown))


def _caption(place: str, name: str, alone: bool) -> str:
    return name if alone or place == "comparison" else f"{place}: {name}"
