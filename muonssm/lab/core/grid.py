"""A grid of comparisons: the same variants with several recipes and backbones, and what holds over all of them.

    grid = Grid.load("activity")               # muonssm/lab/TASK/studies/activity.toml, or any .toml file
    result = run_grid(grid, "runs/study-activity")

OUTPUT/RECIPE-BACKBONE/     one comparison, as `compare` writes it
OUTPUT/RECIPE-peers/        classifiers of other libraries on the same data, a folder per peer and seed
OUTPUT/grid.json            settings of the grid
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from muonssm.checks import check_int

from .compare import ComparedRun, Comparison, Interval, Spread, compare, run_peer
from .lock import locked
from .recipe import Recipe, check_name, read_toml
from .registry import study_files
from .run_folder import RunFolder
from .task import Metric
from .variants import PLAIN, check_variants

SETTINGS = "grid.json"


@dataclass(frozen=True)
class Grid:
    """What a grid trains.

    Attributes:
        name: of the file.
        title: the question, for the page.
        recipes, backbones: one comparison for every pair.
        variants: names in `VARIANTS`, plain among them.
        peers: classifiers of other libraries; each runs once per recipe and seed.
        seeds: of every comparison.
        analyses: names of analyses, to run on every comparison.
        changes: settings of every recipe, like "training.epochs=5"; a recipe or a backbone in front, like
            "mamba:training.epochs=5", limits one to it. The last change of a setting counts.
    """

    name: str
    title: str
    recipes: tuple[str, ...]
    backbones: tuple[str, ...]
    variants: tuple[str, ...]
    peers: tuple[str, ...] = ()
    seeds: int = 5
    analyses: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name("name", self.name)
        check_int("seeds", self.seeds, 1)
        for name in ("recipes", "backbones", "variants", "peers", "analyses", "changes"):
            object.__setattr__(self, name, _check_names(name, getattr(self, name)))
        if not isinstance(self.title, str):
            raise TypeError(f"title must be text, got {self.title!r}")
        if not (self.recipes and self.backbones):
            raise ValueError("recipes and backbones must have one name or more each, got none")
        if PLAIN not in check_variants(self.variants):
            raise ValueError(f"variants must have {PLAIN!r}, with which the others are compared, got {self.variants}")
        if len({folder_name(*cell) for cell in self.cells()}) < len(self.recipes) * len(self.backbones):
            raise ValueError(f"recipes must have different names, got {', '.join(self.recipes)}")
        for change in self.changes:
            name, possible = _limit(change), (*self.recipes, *self.backbones)
            if name and name not in possible:
                raise ValueError(
                    f"NAME in --set NAME:SECTION.KEY=VALUE must be one of {', '.join(possible)}, got {name!r}"
                )

    @classmethod
    def load(cls, name: str, changes: Sequence[str] = (), **replacements: Any) -> Grid:
        """Load a grid of the library by name, or any .toml file.

        Args:
            name: of a grid, or of a file.
            changes: follow those of the file.
            replacements: fields. The file's changes for recipes and backbones that these leave out are left out too.
        """
        path = Path(name) if name.endswith(".toml") else study_files().get(name)
        if path is None or not path.is_file():
            raise ValueError(f"STUDY must be a .toml file or one of {', '.join(sorted(study_files()))}, got {name!r}")
        content = {"name": path.stem, **read_toml(path, "STUDY")}
        try:
            unknown = sorted(set(content) - {f.name for f in fields(cls)})
            if unknown:
                raise ValueError(f"a key must be one of {', '.join(f.name for f in fields(cls))}, got {unknown[0]!r}")
            missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in content]
            if missing:
                raise ValueError(f"{missing[0]} must be given, got none")
            grid = cls(**content)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from error
        kept = replace(grid, **replacements, changes=())
        left_out = {*grid.recipes, *grid.backbones} - {*kept.recipes, *kept.backbones}
        return replace(kept, changes=(*(each for each in grid.changes if _limit(each) not in left_out), *changes))

    def cells(self) -> Iterator[tuple[str, str]]:
        """Yield recipe and backbone of every comparison."""
        return ((recipe, backbone) for recipe in self.recipes for backbone in self.backbones)

    def recipe(self, name: str, backbone: str) -> Recipe:
        """The recipe of one comparison."""
        shared = [change for change in self.changes if not _limit(change)]
        own = [
            change.partition(":")[2] for limit in (name, backbone) for change in self.changes if _limit(change) == limit
        ]
        return Recipe.load(name, [*shared, *own, f"model.backbone={backbone}"])


def _limit(change: str) -> str:
    """The recipe or backbone that a change is for, `NAME:SECTION.KEY=VALUE`; empty for a change of all."""
    key = change.partition("=")[0]
    return key.partition(":")[0] if ":" in key else ""


def _check_names(argument: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{argument} must be a list of names, got {value!r}")
    if len(set(value)) < len(value):
        raise ValueError(f"{argument} must be different, got {', '.join(value)}")
    return tuple(value)


@dataclass(frozen=True)
class GridResult:
    """All comparisons of a grid.

    Attributes:
        grid: what was trained.
        path: its folder.
        comparisons: by recipe and backbone.
        validation: mean headline score on the validation set, by recipe, backbone and variant; None if all diverged.
        peers: the runs of the peers by recipe.
    """

    grid: Grid
    path: Path
    comparisons: dict[tuple[str, str], Comparison]
    validation: dict[tuple[str, str, str], float | None]
    peers: dict[str, list[ComparedRun]] = field(default_factory=dict)

    @property
    def metric(self) -> Metric:
        """The headline metric."""
        return next(iter(self.comparisons.values())).metrics[0]

    @property
    def folders(self) -> list[Path]:
        """The folders of the comparisons."""
        return [self.path / folder_name(*cell) for cell in self.comparisons]

    @property
    def compared(self) -> list[str]:
        """The variants that are compared with plain."""
        return [name for name in self.grid.variants if name != PLAIN]

    def differences(self, variant: str, recipe: str | None = None) -> list[float]:
        """The variant minus plain, of every pair; of one recipe if it is given. Diverged pairs are left out."""
        cells = (result for (name, _), result in self.comparisons.items() if recipe in (None, name))
        return [each for result in cells for each in result.paired_differences(variant, self.metric.name)]

    def interval(self, variant: str, recipe: str | None = None) -> Interval:
        """Mean and 95% interval over all pairs, as if they were independent."""
        return Interval.of(self.differences(variant, recipe))

    def sign_test(self, variant: str) -> SignTest:
        """How often the variant was better than plain, over all pairs."""
        return SignTest.of(self.differences(variant), self.metric.higher_is_better)

    def peer(self, recipe: str, name: str) -> Spread:
        """Mean and deviation of a peer's headline score."""
        return Spread.of([run.score(self.metric.name) for run in self.peers[recipe] if run.variant == name])

    def chosen(self, recipe: str) -> tuple[str, str] | None:
        """Backbone and variant with the best mean validation score on the data of a recipe; None if all diverged."""
        sign = 1 if self.metric.higher_is_better else -1
        known = {key[1:]: value for key, value in self.validation.items() if key[0] == recipe}
        scores = {key: sign * value for key, value in known.items() if value is not None}
        return max(scores, key=lambda key: scores[key]) if scores else None


@dataclass(frozen=True)
class SignTest:
    """How many pairs a variant wins, loses and draws against plain, and the two-sided probability of that by chance."""

    wins: int
    losses: int
    ties: int
    probability: float

    @classmethod
    def of(cls, differences: Sequence[float], higher_is_better: bool) -> SignTest:
        """From one difference per pair; ties are left out of the test."""
        from scipy.stats import binomtest

        above, below = (sum(sign * each > 0 for each in differences) for sign in (1, -1))
        wins, losses = (above, below) if higher_is_better else (below, above)
        probability = float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
        return cls(wins, losses, len(differences) - wins - losses, probability)

    def __str__(self) -> str:
        return f"{self.wins} better, {self.losses} worse, {self.ties} equal (p = {self.probability:.2g})"


def folder_name(recipe: str, backbone: str) -> str:
    """The folder of one comparison; a recipe that is a file has its name without folder and ending."""
    return f"{Path(recipe).stem if recipe.endswith('.toml') else recipe}-{backbone}"


def run_grid(grid: Grid, output: str | Path, resume: bool = False, workers: int | None = None) -> GridResult:
    """Train every comparison of a grid into folders below `output`.

    Args:
        grid: what to train.
        output: a folder.
        resume: continue an earlier call; finished runs are kept. Seeds, peers and analyses can be added.
        workers: the number of processes; one per core by default.
    """
    recipes = {cell: grid.recipe(*cell) for cell in grid.cells()}  # all are checked before the first one is trained
    for peer in grid.peers:
        for (name, _), recipe in recipes.items():
            if peer not in recipe.task.peers:
                raise ValueError(f"peers must be among {', '.join(recipe.task.peers)} for {name}, got {peer!r}")
    folder = RunFolder(output)
    with locked(output):
        folder.clean()
        settings = {**asdict(grid), "seeds": None, "peers": None, "analyses": None, "variants": None}
        folder.check(SETTINGS, settings, resume)
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.write(SETTINGS, settings)
        comparisons, peers = {}, {}
        for (name, backbone), recipe in recipes.items():
            place = folder.path / folder_name(name, backbone)
            result = compare(recipe, place, grid.seeds, resume=True, variants=grid.variants, workers=workers)
            comparisons[name, backbone] = result
            if grid.peers and name not in peers:
                peers[name] = _run_peers(grid, recipe, RunFolder(folder.path / folder_name(name, "peers")))
        return GridResult(grid, folder.path, comparisons, _validation(folder.path, comparisons), peers)


def _run_peers(grid: Grid, recipe: Recipe, folder: RunFolder) -> list[ComparedRun]:
    data = recipe.task.load_data()
    return [run_peer(recipe, peer, seed, 0, data, folder) for peer in grid.peers for seed in range(grid.seeds)]


def _validation(path: Path, comparisons: dict[tuple[str, str], Comparison]) -> dict[tuple[str, str, str], float | None]:
    """The mean validation score of every variant of every comparison."""
    found: dict[tuple[str, str, str], float | None] = {}
    for cell, result in comparisons.items():
        for variant in result.trained_variants:
            runs = [run for run in result.runs_of(variant) if not run.diverged]
            folders = [RunFolder(path / folder_name(*cell) / run.folder) for run in runs]
            headline = result.metrics[0].name
            scores = [folder.read_metrics(result.metrics)["validation"][headline] for folder in folders]
            found[(*cell, variant)] = Spread.of(scores).mean
    return found
