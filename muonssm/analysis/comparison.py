"""report.html of a comparison: the table, curves and confusion matrices, in one page without outside files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..files import atomic
from ..training.compare import KINDS, Interval, cell, metrics_of
from ..training.folder import RunFolder
from . import svg

STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5b6575; --line: #d9dee6; --page: #ffffff; --card: #f6f7f9;
  --c0: #8a94a6; --c1: #c2410c; --right: #15803d; --wrong: #b91c1c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #9aa4b5; --line: #323a48; --page: #14181f;
  --card: #1c222c; --c0: #8f9bb0; --c1: #fb923c; --right: #4ade80; --wrong: #f87171; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1020px; padding: 28px 18px 60px; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.55rem; margin: 0 0 4px; } h2 { font-size: 1.12rem; margin: 34px 0 8px; }
p { margin: 6px 0; max-width: 46rem; } .soft { color: var(--soft); }
.row { display: flex; flex-wrap: wrap; gap: 16px; } .row > figure { flex: 1 1 380px; }
.row.three > figure { flex: 1 1 280px; }
figure { margin: 0; padding: 14px; background: var(--card); border-radius: 10px; min-width: 0; }
figcaption { font-weight: 600; margin-bottom: 6px; } .wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } th, td { padding: 5px 14px 5px 0;
  text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 600; }
svg { width: 100%; height: auto; display: block; } svg text { font-size: 11px; fill: var(--soft); }
.grid { stroke: var(--line); stroke-width: 1; } .curve { fill: none; stroke-width: 1.8; } .c0 { stroke: var(--c0); }
.c1 { stroke: var(--c1); } .right { fill: var(--right); stroke: var(--line); } .wrong { fill: var(--wrong);
  stroke: var(--line); } svg text.count { fill: var(--ink); } svg text.on { fill: var(--page); font-weight: 600; }
.key { display: inline-block; width: 22px; height: 3px; border-radius: 2px; vertical-align: middle;
  margin: 0 6px 0 14px; }
details { margin-top: 10px; } pre { overflow-x: auto; background: var(--card); padding: 12px; border-radius: 10px;
  font-size: 12.5px; }
@media print { body { max-width: none; } figure { break-inside: avoid; border: 1px solid var(--line); } }
"""

FAIRNESS = (
    "Both sides of a pair start from the same weights where shapes agree, see the same batches in the same order, and "
    "may train for the same number of steps. "
)
KEPT = {
    "best": "The weights of the best validation are kept, and the test part is scored once with them.",
    "last": "The weights of the last step are kept; nothing is chosen by the part they are scored on.",
}


def write_report(output: str | Path) -> Path:
    """The page of the comparison in the folder `output`, beside its comparison.json."""
    folder = RunFolder(output)
    result = folder.read("comparison.json")
    path = folder.path / "report.html"
    with atomic(path) as part:
        part.write_text(page(folder.path, result))
    return path


def page(place: Path, result: dict[str, Any]) -> str:
    """The HTML."""
    recipe, trials = result["settings"]["recipe"], result["trials"]
    facts = RunFolder(place / trials[0]["folder"]).read("facts.json")
    title = f"{result['title']}, plain against Muon"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{_setup(result)}</p>',
        f"<h2>Scores on the test part</h2><p>{_verdict(result)}</p>{_table(result)}",
        _curves(place, result),
        _matrices(trials, facts["classes"]) if "confusion" in trials[0]["scores"] else "",
        "<h2>What was run</h2>",
        f"<p>{FAIRNESS}{KEPT[recipe['training']['keep']]}</p>",
        f"<details><summary>Data</summary><pre>{escape(facts['summary'])}</pre></details>",
        f"<details><summary>Settings</summary><pre>{escape(json.dumps(recipe, indent=1))}</pre></details>",
        f"<details><summary>Versions</summary><pre>{escape(_versions(place, trials))}</pre></details>",
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return (
        f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head><body>{"".join(body)}</body></html>\n'
    )


def _setup(result: dict[str, Any]) -> str:
    settings = result["settings"]
    training = settings["recipe"]["training"]
    budget = f"{training['steps']} steps" if training["steps"] else f"at most {training['epochs']} epochs"
    return escape(
        f"{settings['seeds']} seed(s), {settings['folds']} fold(s), {budget} with batches of "
        f"{training['batch_size']}; recipe {settings['recipe']['name']}"
    )


def _verdict(result: dict[str, Any]) -> str:
    metric = metrics_of(result)[0]
    interval = Interval(**result["differences"]["muon"][metric.name])
    if interval.mean is None:
        return "No pair of runs is without one that diverged: there is nothing to compare."
    unit = " percentage points" if metric.unit == "%" else f" ({'more' if metric.higher else 'less'} is better)"
    text = f"Muon minus plain, {metric.title}: <strong>{interval.mean:+.2f}</strong>{unit}"
    if interval.low is None or interval.high is None:
        return f"{text}, from one pair of runs: too few to tell it from chance (more: <code>--seeds</code>)."
    clear = interval.low > 0 or interval.high < 0
    word = "does not contain zero" if clear else "contains zero: no clear difference"
    return (
        f"{text}, 95% interval [{interval.low:+.2f}, {interval.high:+.2f}] over {interval.pairs} pairs, which {word}."
    )


def _table(result: dict[str, Any]) -> str:
    rows, metrics = [], metrics_of(result)
    for kind, scores in result["kinds"].items():
        cells = "".join(f"<td>{cell(scores[metric.name])}</td>" for metric in metrics)
        rows.append(f"<tr><td>{escape(kind)}</td>{cells}</tr>")
    for kind, scores in result["paper"].items():
        cells = "".join(f"<td>{scores[metric.name]:.2f}</td>" for metric in metrics)
        rows.append(f'<tr class="soft"><td>paper, {escape(kind)}</td>{cells}</tr>')
    for part, row in result["more"].items():
        rows += [f"<tr><td>{escape(f'{kind}, {part}')}</td><td>{cell(score)}</td></tr>" for kind, score in row.items()]
    heads = "".join(f"<th>{metric.title}{', %' if metric.unit else ''}</th>" for metric in metrics)
    return f'<div class="wide"><table><tr><th></th>{heads}</tr>{"".join(rows)}</table></div>'


def _curves(place: Path, result: dict[str, Any]) -> str:
    figures, metric = [], metrics_of(result)[0]
    along = "step" if result["settings"]["recipe"]["training"]["evaluate_every"] else "epoch"
    titles = {
        "loss": "training loss",
        "validation_loss": "validation loss",
        f"validation_{metric.name}": f"validation {metric.title}" + (", %" if metric.unit else ""),
    }
    for key, label in titles.items():
        curves: dict[str, list] = {kind: [] for kind in KINDS}
        for trial in result["trials"]:
            if trial["kind"] in curves:
                history = RunFolder(place / trial["folder"]).read("history.json")
                curves[trial["kind"]].append([(row[along], row[key]) for row in history if key in row])
        figures.append(f"<figure><figcaption>{label}</figcaption>{svg.lines(curves, along, label)}</figure>")
    keys = "".join(f'<span class="key" style="background:var(--c{i})"></span>{kind}' for i, kind in enumerate(KINDS))
    return f'<h2>Learning curves <span class="soft">{keys}</span></h2><div class="row three">{"".join(figures)}</div>'


def _matrices(trials: Sequence[dict[str, Any]], classes: Sequence[str]) -> str:
    figures = []
    for kind in dict.fromkeys(trial["kind"] for trial in trials):
        matrices = [trial["scores"]["confusion"] for trial in trials if trial["kind"] == kind]
        total = [[sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*matrices, strict=True)]
        picture = svg.confusion(total, classes)
        figures.append(f'<figure><figcaption>{escape(kind)}</figcaption><div class="wide">{picture}</div></figure>')
    text = "Windows of the test part by true class (rows) and found class (columns), all runs of a kind together."
    return f'<h2>Confusion</h2><p class="soft">{text}</p><div class="row">{"".join(figures)}</div>'


def _versions(place: Path, trials: Sequence[dict[str, Any]]) -> str:
    first = next(trial for trial in trials if trial["kind"] in KINDS)
    return json.dumps(RunFolder(place / first["folder"]).read("versions.json"), indent=1)
