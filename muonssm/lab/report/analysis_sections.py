"""The analyses of a run, as sections: what `muonssm analyze` left in RUN/analysis, a JSON file each.

name, title      what it is called
paper            what the paper says of it
found            what came out here, a sentence each
tables           caption, head, rows, and rows of the paper
figures          caption, svg
settings, data   how it was done, and its numbers
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from muonssm.lab.core.experiment import Subject, read_json

from . import page
from .page import Section

ORDER = (
    "spectrum", "rank", "gradients", "memory", "truncation", "ablation", "ns-steps", "capacity", "sensitivity",
    "convergence", "scaling",
)  # fmt: skip


def sections(subject: Subject) -> list[Section]:
    """One for each analysis, those of ORDER first; one that says so where there is none."""
    files = {path.stem: path for path in sorted((subject.path / "analysis").glob("*.json"))}
    if not files:
        text = f"No analysis yet: `muonssm analyze {subject.path}`." + _elsewhere(subject)
        return [Section("analysis", "Analysis", page.paragraph(text, "soft"))]
    names = [*(name for name in ORDER if name in files), *(name for name in files if name not in ORDER)]
    return [_section(files[name], subject.recipe) for name in names]


def missing(subject: Subject) -> list[str]:
    """Those that were not made, where others were."""
    there = {path.stem for path in (subject.path / "analysis").glob("*.json")}
    absent = [name for name in ORDER if name not in there]
    return [f"analyses: {', '.join(absent)} (`muonssm analyze {subject.path}`)"] if there and absent else []


def _elsewhere(subject: Subject) -> str:
    others = [str(place.folder.path) for place in subject.places() if (place.folder.path / "analysis").is_dir()]
    others = [path for path in others if path != str(subject.path)]
    return f" Single runs have theirs on their own pages: `muonssm report {' '.join(others)}`." if others else ""


def _section(path: Path, recipe: dict[str, Any]) -> Section:
    finding = read_json(path)
    if not isinstance(finding, dict) or not isinstance(finding.get("title"), str):
        raise ValueError(f"{path} has no title; it may be an analysis that `muonssm analyze` wrote")
    try:
        parts = [
            f"<blockquote><strong>The paper:</strong> {_inline(finding['paper'])}</blockquote>"
            if finding.get("paper")
            else "",
            _found(finding.get("found", [])),
            *(_table(table) for table in finding.get("tables", [])),
            page.figures(
                [page.figure(each["caption"], checked(each["svg"], path)) for each in finding.get("figures", [])]
            ),
            page.details("How it was done", _settings(finding["settings"], recipe)) if finding.get("settings") else "",
            page.paragraph(f"All numbers: analysis/{path.name}", "soft") if finding.get("data") else "",
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no analysis that `muonssm analyze` wrote: {error!r}") from error
    return Section(path.stem, finding["title"], "".join(parts))


def _settings(settings: dict[str, Any], recipe: dict[str, Any]) -> dict[str, Any]:
    """Settings whose recipe is said by what differs from the run's own, which is on the page already."""
    if "recipe" not in settings:
        return settings
    return settings | {"recipe": changes(recipe, settings["recipe"]) or "that of the run"}


def changes(one: dict[str, Any], other: dict[str, Any], within: str = "") -> dict[str, Any]:
    """What another recipe has that one has not, or has otherwise, by dotted names."""
    found: dict[str, Any] = {}
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(one.get(key), dict):
            found |= changes(one[key], value, f"{within}{key}.")
        elif key not in one or one[key] != value:
            found[within + key] = value
    return found


def _inline(text: str) -> str:
    return page.paragraph(text).removeprefix("<p>").removesuffix("</p>")


def _found(sentences: list[str]) -> str:
    if len(sentences) < 2:
        return "".join(page.paragraph(sentence) for sentence in sentences)
    return f"<ul>{''.join(f'<li>{_inline(sentence)}</li>' for sentence in sentences)}</ul>"


def _table(table: dict[str, Any]) -> str:
    return page.table(table["head"], table["rows"], table.get("paper", []), table.get("caption", ""))


def checked(picture: str, path: Path) -> str:
    """A picture that is one: well-formed, without scripts, without anything from outside."""
    try:
        tree = ElementTree.fromstring(picture)
    except ElementTree.ParseError as error:
        raise ValueError(f"{path} has a figure that is no SVG: {error}") from error
    for element in tree.iter():
        tag = element.tag.rpartition("}")[2]
        links = [value for key, value in element.items() if key.rpartition("}")[2] in ("href", "src")]
        active = any(key.lower().startswith("on") for key in element.attrib)
        if tag in ("script", "foreignObject") or active or any(not link.startswith(("data:", "#")) for link in links):
            raise ValueError(f"{path} has a figure with <{tag}> that acts or points outside; it may be a still picture")
    return picture
