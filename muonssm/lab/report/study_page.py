"""The page and the table of a study: scores of all comparisons, what holds over all pairs, and links to their pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from markupsafe import Markup

from muonssm.checks import is_number
from muonssm.lab.core.compare import Comparison
from muonssm.lab.core.files import read_json, write_text
from muonssm.lab.core.grid import GridResult, folder_name
from muonssm.lab.core.run_folder import RunFolder
from muonssm.lab.core.task import Metric
from muonssm.lab.core.variants import PLAIN, display_name
from muonssm.version import __version__

from . import figures, page
from .page import Article, Section
from .report import write_report

PAIRS = (
    "Pairs have the same recipe, backbone and seed. They are counted as independent, but pairs of one recipe share "
    "the test set, and pairs of one seed the order of the batches: intervals over all pairs are somewhat too narrow."
)
LINKS = "Curves, confusion matrices, analyses and settings of each comparison are on its own page:"


def write_study(result: GridResult) -> Path:
    """Write the page of every comparison, then study.json and the study's report.html; return the path of the last."""
    for folder in result.folders:
        write_report([folder])
    RunFolder(result.path).write("study.json", to_dict(result))
    path = result.path / "report.html"
    text = page.render(
        result.grid.title, [Article(result.grid.title, "", _sections(result))], _answer(result), footer=_footer(result)
    )
    write_text(path, text)
    return path


def to_dict(result: GridResult) -> dict[str, Any]:
    """The study's numbers, as JSON."""
    grid, metric = result.grid, result.metric
    return {
        "study": asdict(grid),
        "metric": metric._asdict(),
        "scores": {folder_name(*cell): _spreads(each, metric) for cell, each in result.comparisons.items()},
        "peers": {name: {peer: asdict(result.peer(name, peer)) for peer in grid.peers} for name in result.peers},
        "differences": {variant: _differences(result, variant) for variant in result.compared},
        "chosen": {name: result.chosen(name) for name in grid.recipes},
    }


def _spreads(comparison: Comparison, metric: Metric) -> dict[str, Any]:
    return {variant: asdict(comparison.spread(variant, metric.name)) for variant in comparison.trained_variants}


def _differences(result: GridResult, variant: str) -> dict[str, Any]:
    """The differences of one variant from plain: over all pairs, by recipe, and of every comparison."""
    pooled = {"all": asdict(result.interval(variant)), "sign test": asdict(result.sign_test(variant))}
    by_recipe = {name: asdict(result.interval(variant, name)) for name in result.grid.recipes}
    by_cell = {
        folder_name(*cell): asdict(each.difference(variant, result.metric.name))
        for cell, each in result.comparisons.items()
    }
    return {**pooled, **by_recipe, **by_cell}


def conclusion(result: GridResult, variant: str) -> str:
    """Say in one sentence what the pairs show about a variant."""
    interval, signs, metric = result.interval(variant), result.sign_test(variant), result.metric
    if interval.mean is None or interval.low is None or interval.high is None:
        return f"{display_name(variant)}: too few pairs to conclude anything."
    sign = 1 if metric.higher_is_better else -1
    clear = sign if interval.low > 0 else -sign if interval.high < 0 else 0
    word = {1: "helps", -1: "hurts", 0: "makes no difference that these runs can show"}[clear]
    return f"**{display_name(variant)}** {word}: {metric.title} {interval} over {interval.pairs} pairs; {signs}."


def text_table(result: GridResult) -> str:
    """The scores and the differences as text."""
    blocks = [_aligned(score_rows(result)), _aligned(difference_rows(result)), _aligned(chosen_rows(result))]
    sentences = [conclusion(result, variant).replace("**", "") for variant in result.compared]
    return "\n\n".join([*blocks, "\n".join(sentences), limits(result)])


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def score_rows(result: GridResult) -> list[list[str]]:
    """Test scores, a row per backbone and variant and a column per recipe, as in the paper's table."""
    grid, metric = result.grid, result.metric
    rows = [[f"test {metric.heading}", *grid.recipes]]
    for backbone in grid.backbones:
        for variant in grid.variants:
            spreads = [result.comparisons[name, backbone].spread(variant, metric.name) for name in grid.recipes]
            rows.append([f"{backbone}, {variant}", *map(str, spreads)])
    rows += [[peer, *(str(result.peer(name, peer)) for name in grid.recipes)] for peer in grid.peers]
    return rows


def difference_rows(result: GridResult) -> list[list[str]]:
    """Differences from plain: per recipe and over all pairs, with the sign test."""
    rows = [["minus plain, 95% interval", *result.grid.recipes, "all pairs", "pairs"]]
    for variant in result.compared:
        cells = [str(result.interval(variant, name)) for name in (*result.grid.recipes, None)]
        rows.append([variant, *cells, str(result.sign_test(variant))])
    return rows


def cell_rows(result: GridResult) -> list[list[str]]:
    """Differences from plain of every comparison."""
    rows = [["minus plain, 95% interval", *result.compared]]
    for cell, comparison in result.comparisons.items():
        rows.append([", ".join(cell), *(str(comparison.difference(v, result.metric.name)) for v in result.compared)])
    return rows


def chosen_rows(result: GridResult) -> list[list[str]]:
    """The model with the best validation score on each recipe's data, and its test score beside the peers'."""
    metric, peers = result.metric, result.grid.peers
    rows = [["chosen on validation data", "backbone, variant", "validation", "test", *peers]]
    for name in result.grid.recipes:
        chosen = result.chosen(name)
        if chosen is None:
            rows.append([name, "every run diverged", "-", "-", *(str(result.peer(name, p)) for p in peers)])
            continue
        backbone, variant = chosen
        validation = result.validation[name, backbone, variant]
        test = result.comparisons[name, backbone].spread(variant, metric.name)
        rows.append(
            [
                name,
                f"{backbone}, {variant}",
                metric.format(validation),
                str(test),
                *(str(result.peer(name, p)) for p in peers),
            ]
        )
    return rows


def limits(result: GridResult) -> str:
    """Say in one sentence what the study can show and what it cannot."""
    grid, metric = result.grid, result.metric
    intervals = [result.interval(variant) for variant in result.compared]
    widths = [(each.high - each.low) / 2 for each in intervals if each.high is not None and each.low is not None]
    if not widths:
        return "One pair of runs cannot tell a difference from chance."
    unit = "points" if metric.unit == "%" else "units"
    counts = ((grid.seeds, "seed"), (len(grid.recipes), "data set"), (len(grid.backbones), "backbone"))
    seeds, data, backbones = (page.counted(*count) for count in counts)
    return (
        f"{seeds} on {data} with {backbones} can show differences in {metric.title} of about {max(widths):.1f} "
        f"{unit} or more; they cannot show smaller ones, nor say what holds for other data and larger models."
    )


def _answer(result: GridResult) -> Markup:
    conclusions = [conclusion(result, variant) for variant in result.compared]
    return page.join(page.paragraph(limits(result)), page.bullets(conclusions))


def _sections(result: GridResult) -> list[Section]:
    grid = result.grid
    scores = page.join(_table(score_rows(result)), page.figures(list(_score_figures(result))))
    differences = page.join(
        page.paragraph(PAIRS, soft=True), _table(difference_rows(result)), _table(cell_rows(result))
    )
    links = [Markup('<a href="{0}/report.html">{0}</a>').format(folder.name) for folder in result.folders]
    return [
        Section("scores", "Scores on the test sets", scores),
        Section("differences", f"Differences from {PLAIN}", differences),
        Section("chosen", "Chosen on validation data", _table(chosen_rows(result))),
        *_analysis_sections(result),
        Section("comparisons", "Comparisons", page.join(page.paragraph(LINKS), page.bullets(links))),
        Section("setup", "Setup", page.details("Settings", asdict(grid))),
    ]


def _table(rows: list[list[str]]) -> Markup:
    return page.table(rows[0], rows[1:])


def _score_figures(result: GridResult) -> Iterator[Markup]:
    metric, grid = result.metric, result.grid
    for name in grid.recipes:
        spreads = {
            f"{backbone}, {variant}": result.comparisons[name, backbone].spread(variant, metric.name)
            for backbone in grid.backbones
            for variant in grid.variants
        }
        groups = {label: (spread.mean, spread.deviation) for label, spread in spreads.items()}
        yield page.figure(f"{name}: mean and standard deviation", figures.bars(groups, metric.heading))


def _analysis_sections(result: GridResult) -> Iterator[Section]:
    """One table per analysis: its intervals, a row per comparison."""
    for name in result.grid.analyses:
        paths = {folder.name: folder / "analysis" / f"{name}.json" for folder in result.folders}
        found = {place: _data(path) for place, path in paths.items() if path.is_file()}
        keys = list(dict.fromkeys(key for data in found.values() for key, value in data.items() if _is_interval(value)))
        if keys:
            rows = [[place, *(_interval(data.get(key)) for key in keys)] for place, data in found.items()]
            yield Section(name, f"Analysis: {name}", page.table(["", *keys], rows))


def _data(path: Path) -> dict[str, Any]:
    """The numbers of an analysis."""
    data = read_json(path, dict).get("data")
    if not isinstance(data, dict):
        raise ValueError(f"{path} is damaged: data must be an object, got {data!r:.100}")
    return data


def _is_interval(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) != {"mean", "low", "high", "pairs"}:
        return False
    return all(number is None or is_number(number) for number in value.values())


def _interval(value: Any) -> str:
    if not _is_interval(value) or value["mean"] is None:
        return "-"
    bounds = "" if value["low"] is None or value["high"] is None else f" [{value['low']:.3g}, {value['high']:.3g}]"
    return f"{value['mean']:.3g}{bounds}"


def _footer(result: GridResult) -> str:
    return f"Made by muonssm {__version__} from `{result.path}`."
