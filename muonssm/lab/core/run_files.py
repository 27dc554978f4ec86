"""What the JSON files of runs and comparisons must hold. An error says which field, what it must be and what it was.

The files can be damaged, edited by hand, or of another version; reports and analyses rely on these checks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from muonssm.checks import is_int, is_number

from .variants import PLAIN

LISTS = ("history.json", "timing.json")  # lists of rows; all others are objects


def check_content(name: str, content: Any) -> None:
    """Raise ValueError unless `content` can be that of the file `name` in the folder of a run."""
    if name in LISTS:
        _check_rows(content, ("step", "epoch") if name == "history.json" else ("step", "seconds"))
    elif name == "metrics.json":
        _check_metrics(content)
    elif name == "metadata.json":
        _check_metadata(content)


def check_comparison(content: Mapping[str, Any]) -> None:
    """Raise ValueError unless `content` can be that of comparison.json."""
    need("title", content.get("title"), str)
    need("recipe", content.get("recipe"), dict)
    for name in ("seeds", "folds"):
        require(is_int(content.get(name), 1), name, "an integer >= 1", content.get(name))
    against = content.get("against")
    require(against is None or isinstance(against, str), "against", "null or a string", against)
    metrics = check_list("metrics", content.get("metrics"))
    for i, metric in enumerate(metrics):
        need(f"metrics[{i}]", metric, dict)
        for name, kind in (("name", str), ("title", str), ("unit", str), ("higher_is_better", bool)):
            need(f"metrics[{i}].{name}", metric.get(name), kind)
    names = [metric["name"] for metric in metrics]
    runs = check_list("runs", content.get("runs"))
    for i, run in enumerate(runs):
        _check_compared_run(f"runs[{i}]", run, names)
    _check_pairs(runs, against)
    for variant, scores in need("paper", content.get("paper", {}), dict).items():
        for name, value in need(f"paper.{variant}", scores, dict).items():
            require(is_number(value), f"paper.{variant}.{name}", "a number", value)


def check_scores(place: str, scores: Any, metrics: list[str]) -> None:
    """Raise unless `scores` is an object that has a number, or null, for each of the metrics."""
    need(place, scores, dict)
    for name in metrics:
        require(name in scores, place, f"an object with {name}", scores)
        require_number_or_null(f"{place}.{name}", scores[name])
    require_number_or_null(f"{place}.loss", scores.get("loss"))
    if "confusion" in scores:
        _check_matrix(f"{place}.confusion", scores["confusion"])


def check_metrics(content: Mapping[str, Any], names: list[str]) -> None:
    """Raise unless the content of metrics.json has scores of all metrics, and of the first one on further test sets."""
    for split in ("validation", "test"):
        check_scores(split, content.get(split), names)
    for name, scores in content.get("extra_tests", {}).items():
        check_scores(name, scores, names[:1])


def _check_metrics(content: dict[str, Any]) -> None:
    for name in ("parameters", "epochs", "steps"):
        require_number_or_null(name, content.get(name))
    check_scores("test", content.get("test"), [])
    for name, scores in {"validation": content.get("validation", {}), **_extra_tests(content)}.items():
        check_scores(name, scores, [])
    require(isinstance(content.get("diverged", ""), str), "diverged", "a string", content.get("diverged"))


def _extra_tests(content: dict[str, Any], place: str = "") -> dict[str, Any]:
    extra = need(f"{place}extra_tests", content.get("extra_tests", {}), dict)
    return {f"{place}extra_tests.{name}": scores for name, scores in extra.items()}


def _check_metadata(content: dict[str, Any]) -> None:
    need("summary", content.get("summary"), str)
    classes = need("classes", content.get("classes", []), list)
    require(all(isinstance(name, str) for name in classes), "classes", "a list of names", classes)


def _check_rows(content: list[Any], required: tuple[str, ...]) -> None:
    for i, row in enumerate(content):
        for name, value in need(f"row {i}", row, dict).items():
            require_number_or_null(f"{name} of row {i}", value)
        for name in required:
            require(is_number(row.get(name)), f"{name} of row {i}", "a number", row.get(name))


def _check_matrix(place: str, matrix: Any) -> None:
    size = len(check_list(place, matrix))
    for row in matrix:
        fits = isinstance(row, list) and len(row) == size and all(is_int(count, 0) for count in row)
        require(fits, place, "a square matrix of counts", matrix)


def _check_compared_run(place: str, run: Any, metrics: list[str]) -> None:
    need(place, run, dict)
    for name in ("variant", "folder"):
        need(f"{place}.{name}", run.get(name), str)
    for name in ("seed", "fold"):
        require(is_int(run.get(name), 0), f"{place}.{name}", "an integer >= 0", run.get(name))
    check_scores(f"{place}.scores", run.get("scores"), metrics)
    for name, scores in _extra_tests(run, f"{place}.").items():
        check_scores(name, scores, metrics[:1])
    reason = run.get("why_diverged")
    require(reason is None or isinstance(reason, str), f"{place}.why_diverged", "null or a string", reason)


def _check_pairs(runs: list[dict[str, Any]], against: str | None) -> None:
    """Each variant must have the seeds and folds of plain once, and all but the peer the same test sets."""
    found = Counter((run["variant"], run["seed"], run["fold"]) for run in runs)
    variants = {variant for variant, _, _ in found}
    first = PLAIN if PLAIN in variants else runs[0]["variant"]
    wanted = Counter({(v, seed, fold): 1 for v in variants for (name, seed, fold) in found if name == first})
    require(found == wanted, "runs", "the same seeds and folds for each variant", sorted(found))
    tests = {tuple(sorted(run.get("extra_tests", {}))) for run in runs if run["variant"] != against}
    require(len(tests) <= 1, "extra_tests", "the same for each run", sorted(tests))


def check_list(place: str, value: Any) -> list[Any]:
    """Raise unless the value is a list with at least one item."""
    require(isinstance(value, list) and bool(value), place, "a list with at least one item", value)
    return value


def need(place: str, value: Any, kind: type) -> Any:
    """Return the value; raise unless it is a `kind`: dict, list, str or bool."""
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    require(isinstance(value, kind), place, names[kind], value)
    return value


def require_number_or_null(place: str, value: Any) -> None:
    """Raise unless the value is a number or null."""
    require(value is None or is_number(value), place, "a number or null", value)


def require(holds: bool, place: str, wanted: str, value: Any) -> None:
    """Raise "PLACE must be WANTED, got VALUE" unless it holds."""
    if not holds:
        raise ValueError(f"{place} must be {wanted}, got {value!r:.100}")
