"""`Result`: the sentences, tables, figures and numbers of one analysis, written as JSON and SVG files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from muonssm.lab.core.files import atomic
from muonssm.lab.core.run_folder import RunFolder
from muonssm.lab.report import figures


@dataclass
class Result:
    """One analysis of one experiment. Its attributes are the keys of the JSON file that the report reads.

    Attributes:
        name: the name for `--what`.
        title: the title on the page.
        paper: the paper's claim.
        found: the results here, one sentence each.
        tables: dicts with `caption`, `head`, `rows`, and `paper` for the paper's rows.
        figures: dicts with `caption` and `svg`.
        settings: sizes and seeds.
        data: all numbers.
    """

    name: str
    title: str
    paper: str
    found: list[str] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)
    figures: list[dict[str, str]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    def add_table(
        self, caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], paper: Sequence[Sequence[str]] = ()
    ) -> None:
        """Add a table."""
        cells = {"rows": [list(row) for row in rows], "paper": [list(row) for row in paper]}
        self.tables.append({"caption": caption, "head": list(head), **cells})

    def add_figure(self, caption: str, svg: str) -> None:
        """Add a figure."""
        self.figures.append({"caption": caption, "svg": svg})

    def write(self, folder: Path) -> list[Path]:
        """Write NAME.json, NAME-1.svg, NAME-2.svg and so on; return their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"{self.name}-*.svg"):
            old.unlink()
        paths = [folder / f"{self.name}-{i}.svg" for i in range(1, len(self.figures) + 1)]
        for path, figure in zip(paths, self.figures, strict=True):
            with atomic(path) as temporary:
                temporary.write_text(figures.standalone(figure["svg"]))
        RunFolder(folder).write(f"{self.name}.json", _without_arrays(asdict(self)))
        return [folder / f"{self.name}.json", *paths]


def _without_arrays(content: Any) -> Any:
    """The content with arrays as lists and keys as strings."""
    if isinstance(content, dict):
        return {str(key): _without_arrays(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_without_arrays(value) for value in content]
    return content.tolist() if isinstance(content, (np.ndarray, np.generic)) else content
