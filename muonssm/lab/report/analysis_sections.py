"""The analyses of an experiment as sections: one per JSON file that `muonssm analyze` wrote into RUN/analysis.

name, title      the analysis
paper            the paper's statement
found            the result here, one sentence each
tables           caption, head, rows, and rows of the paper
figures          caption, svg
settings, data   how it was made, and its numbers
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from muonssm.lab.core.experiment import Experiment
from muonssm.lab.core.files import read_json

from . import page
from .page import Section


def sections(experiment: Experiment) -> list[Section]:
    """Return one section per analysis, in the order of the task's analyses; without any, the command to run."""
    files = _files(experiment)
    if not files:
        text = f"There is no analysis yet: run `muonssm analyze {experiment.path}`.{_analyses_of_runs(experiment)}"
        return [Section("analysis", "Analysis", page.paragraph(text, soft=True))]
    names = [*(name for name in experiment.task.analyses if name in files), *files]
    return [_section(files[name], experiment.comparison.recipe) for name in dict.fromkeys(names)]


def missing(experiment: Experiment) -> list[str]:
    """Return the analyses that were not run although others were, with the command to run them."""
    files = _files(experiment)
    names = [name for name in experiment.task.analyses if name not in files]
    return [f"analyses {', '.join(names)}: `muonssm analyze {experiment.path}`"] if files and names else []


def _files(experiment: Experiment) -> dict[str, Path]:
    return {path.stem: path for path in sorted(experiment.analysis_folder.glob("*.json"))}


def _analyses_of_runs(experiment: Experiment) -> str:
    """Point to the runs of a comparison that were analyzed on their own."""
    folders = [location.folder.path for location in experiment.locations()]
    runs = [str(path) for path in folders if path != experiment.path and (path / "analysis").is_dir()]
    return f" Single runs have their own analyses: `muonssm report {' '.join(runs)}`." if runs else ""


def _section(path: Path, recipe: dict[str, Any]) -> Section:
    analysis = read_json(path)
    if not isinstance(analysis, dict) or not isinstance(analysis.get("title"), str):
        raise ValueError(f"{path} must be an analysis that `muonssm analyze` wrote: it has no title")
    try:
        body = _body(path, analysis, recipe)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must be an analysis that `muonssm analyze` wrote: {error!r}") from error
    return Section(path.stem, analysis["title"], body)


def _body(path: Path, analysis: Mapping[str, Any], recipe: dict[str, Any]) -> Markup:
    drawn = [page.figure(each["caption"], check_figure(each["svg"], path)) for each in analysis.get("figures", [])]
    tables = [
        page.table(table["head"], table["rows"], table.get("paper", []), table.get("caption", ""))
        for table in analysis.get("tables", [])
    ]
    paper, settings = analysis.get("paper"), analysis.get("settings")
    return page.join(
        page.quote("The paper", paper) if paper else Markup(),
        page.bullets(analysis.get("found", [])),
        *tables,
        page.figures(drawn),
        page.details("Settings", _short_settings(settings, recipe)) if settings else Markup(),
        page.paragraph(f"All numbers: analysis/{path.name}", soft=True) if analysis.get("data") else Markup(),
    )


def _short_settings(settings: dict[str, Any], recipe: dict[str, Any]) -> dict[str, Any]:
    """Replace a whole recipe by its differences from the experiment's, which the page shows already."""
    if "recipe" not in settings:
        return settings
    return settings | {"recipe": differences(recipe, settings["recipe"]) or "the recipe of the run"}


def differences(base: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings of `other` that `base` lacks or has with another value, by dotted name."""
    changed: dict[str, Any] = {}
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            changed |= differences(base[key], value, f"{prefix}{key}.")
        elif key not in base or base[key] != value:
            changed[prefix + key] = value
    return changed


def check_figure(picture: str, path: Path) -> str:
    """Return the picture if it is well-formed SVG without scripts, event handlers or outside links; else raise."""
    try:
        tree = ElementTree.fromstring(picture)
    except ElementTree.ParseError as error:
        raise ValueError(f"{path} must have SVG figures: {error}") from error
    for element in tree.iter():
        tag = element.tag.rpartition("}")[2]
        links = [value for key, value in element.items() if key.rpartition("}")[2] in ("href", "src")]
        has_handler = any(key.lower().startswith("on") for key in element.attrib)
        links_outside = any(not link.startswith(("data:", "#")) for link in links)
        styles = [element.text or "" if tag == "style" else "", *element.attrib.values()]
        links_outside |= any(re.search(r"@import|url\((?!['\"]?#)", style, re.IGNORECASE) for style in styles)
        if tag in ("script", "foreignObject") or has_handler or links_outside:
            raise ValueError(f"{path} must have figures without scripts and outside links, got <{tag}>")
    return picture
