"""A study in stages: each variant is pre-trained, tuned and evaluated, one stage after the other.

    pipeline = Pipeline.load(Path("language.toml"))
    result = run_pipeline(pipeline, Path("runs/study-language"))

OUTPUT/BACKBONE-VARIANT-seed-S/STAGE/      a run of `pretrain` or `sft`, as `train` writes it; the stages `zero-shot`
                                           and `needle` evaluate the run before them and leave their result in it
OUTPUT/pipeline.json                       settings

With `resume`, finished stages are kept and an interrupted one continues: training from its last checkpoint, zero-shot
tasks from the last task, needles from the last cell.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from muonssm.checks import check_choice, check_int
from muonssm.lab.core.lock import locked
from muonssm.lab.core.recipe import Recipe, check_name, parse_value, read_toml
from muonssm.lab.core.run_folder import RunFolder
from muonssm.lab.core.trainer import train
from muonssm.lab.core.untrusted import UntrustedFileError, read_text
from muonssm.lab.core.variants import PLAIN, check_variants

from .lm_eval import PAPER, run_harness
from .needle import NeedleTest, run_needle
from .needle_page import write_heatmap
from .needle_prompts import check_room, default_essay
from .pretrained import load_pretrained
from .result_files import check_needle, check_zero_shot
from .zero_shot import PAPER_TASKS
from .zero_shot_data import find_files

SETTINGS = "pipeline.json"
PRETRAIN, SFT, ZERO_SHOT, NEEDLE = "pretrain", "sft", "zero-shot", "needle"
STAGES = (PRETRAIN, SFT, ZERO_SHOT, NEEDLE)


@dataclass(frozen=True)
class TrainingStage:
    """A recipe, and changes to it like "training.steps=5"."""

    recipe: str
    changes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, str):
            raise TypeError(f"recipe must be the name of a recipe or a .toml file, got {self.recipe!r}")
        if not isinstance(self.changes, (list, tuple)) or not all(isinstance(change, str) for change in self.changes):
            raise TypeError(f"changes must be a list of texts like 'training.steps=5', got {self.changes!r}")


@dataclass(frozen=True)
class ZeroShotStage:
    """The paper's zero-shot tasks.

    Attributes:
        data: folder with their data; empty for the hub. See `zero_shot_data`.
        batch_size, limit, max_length: as in `run_harness`; 0 is no limit.
    """

    data: str = ""
    batch_size: int = 8
    limit: int = 0
    max_length: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.data, str):
            raise TypeError(f"data must be a folder, got {self.data!r}")
        for name, least in (("batch_size", 1), ("limit", 0), ("max_length", 0)):
            check_int(name, getattr(self, name), least)


@dataclass(frozen=True)
class NeedleStage(NeedleTest):
    """A needle test; `essay` is a text file to hide needles in, empty for Python's reference."""

    essay: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.essay, str):
            raise TypeError(f"essay must be a text file, got {self.essay!r}")

    def read_essay(self) -> str | None:
        """The text of the essay; None for the default."""
        try:
            return read_text(self.essay) if self.essay else None
        except (UntrustedFileError, FileNotFoundError) as error:
            raise ValueError(f"needle.essay must be a UTF-8 text file, got {self.essay!r}: {error}") from error


class Cell(NamedTuple):
    """What one line of the pipeline trains."""

    backbone: str
    variant: str
    seed: int

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"{self.backbone}-{self.variant}-seed-{self.seed}"


@dataclass(frozen=True)
class Pipeline:
    """A study in stages.

    Attributes:
        name: of the file.
        title: for the page.
        task: of the recipes.
        stages: some of `STAGES`, in the order in which they run, `pretrain` first; an evaluation scores the run before.
        backbones, variants, seeds: each combination runs all stages.
        pretrain, sft, zero_shot, needle: settings of the stages.
    """

    name: str
    title: str
    task: str
    stages: tuple[str, ...]
    backbones: tuple[str, ...]
    variants: tuple[str, ...]
    pretrain: TrainingStage
    sft: TrainingStage | None = None
    zero_shot: ZeroShotStage = field(default_factory=ZeroShotStage)
    needle: NeedleStage = field(default_factory=NeedleStage)
    seeds: int = 1

    sections: ClassVar[dict[str, Any]] = {
        PRETRAIN: TrainingStage, SFT: TrainingStage, ZERO_SHOT: ZeroShotStage, NEEDLE: NeedleStage
    }  # fmt: skip

    def __post_init__(self) -> None:
        check_name("name", self.name)
        check_int("seeds", self.seeds, 1)
        if not isinstance(self.title, str):
            raise TypeError(f"title must be text, got {self.title!r}")
        for name in ("stages", "backbones", "variants"):
            value = getattr(self, name)
            if not isinstance(value, (list, tuple)) or not value or len(set(map(str, value))) < len(value):
                raise ValueError(f"{name} must be a list of one or more different names, got {value!r}")
            object.__setattr__(self, name, tuple(value))
        check_variants(self.variants)
        for stage in self.stages:
            check_choice("stages", stage, STAGES)
        if self.stages[0] != PRETRAIN:
            raise ValueError(f"stages must begin with {PRETRAIN!r}, got {self.stages[0]!r}")
        if SFT in self.stages and self.sft is None:
            raise ValueError(f"{SFT} must have a recipe, as it is one of the stages, got none")

    @classmethod
    def load(cls, path: Path, changes: Sequence[str] = (), **replacements: Any) -> Pipeline:
        """Read a study; `changes` are those of `--set`, `replacements` are fields."""
        content = {"name": path.stem, **read_toml(path, "STUDY"), **replacements}
        for change in changes:
            _apply(content, change)
        try:
            return cls._build(content)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def _build(cls, content: dict[str, Any]) -> Pipeline:
        names = {f.name.replace("_", "-") if f.name == "zero_shot" else f.name for f in fields(cls)}
        built: dict[str, Any] = {}
        for key, value in content.items():
            if key not in names:
                raise ValueError(f"a key must be one of {', '.join(sorted(names))}, got {key!r}")
            built[key.replace("-", "_")] = _section(key, cls.sections[key], value) if key in cls.sections else value
        needed = (f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING)
        missing = [name for name in needed if name not in built]
        if missing:
            raise ValueError(f"{missing[0]} must be given, got none")
        return cls(**built)

    def cells(self) -> Iterator[Cell]:
        """Yield what is trained."""
        for backbone in self.backbones:
            for variant in self.variants:
                yield from (Cell(backbone, variant, seed) for seed in range(self.seeds))

    def recipe(self, stage: str, cell: Cell, start: Path | None) -> Recipe:
        """The recipe of a training stage for one cell; `start` is the run that it tunes."""
        settings = self.pretrain if stage == PRETRAIN else self.sft
        assert settings is not None
        own = [f"model.backbone={cell.backbone}"] + ([] if start is None else [f"model.start={start}"])
        recipe = Recipe.load(settings.recipe, [*settings.changes, *own])
        if recipe.task_name != self.task:
            raise ValueError(f"{stage}.recipe must be of the task {self.task!r}, got {settings.recipe!r}")
        # A tuned run has the size of its start; only the memory rule is still to choose.
        variant = PLAIN if start is not None and cell.variant == "doubled" else cell.variant
        return recipe.variant(variant, recipe.training.seed + cell.seed, 0)


def _apply(content: dict[str, Any], change: str) -> None:
    """Apply `STAGE:SECTION.KEY=VALUE`, a change to a stage's recipe, or `STAGE.KEY=VALUE`, one to the stage itself."""
    place, _, text = change.partition("=")
    stage, colon, _ = place.partition(":")
    stage, key = (stage, "") if colon else place.partition(".")[::2]
    sections = content.get(stage)
    if stage not in STAGES or not isinstance(sections, dict) or "=" not in change or not (colon or key):
        wanted = "STAGE.KEY=VALUE or STAGE:SECTION.KEY=VALUE with a STAGE of the study"
        raise ValueError(f"--set must be {wanted}, got {change!r}")
    if colon:
        own = sections.get("changes", [])
        if isinstance(own, list):  # anything else is refused where the section is built
            sections["changes"] = [*own, change.partition(":")[2]]
    else:
        sections[key] = parse_value(text.strip())


def _section(name: str, section: Any, values: Any) -> Any:
    if not isinstance(values, dict):
        raise ValueError(f"{name} must be a section with keys, got {values!r}")
    known = [f.name for f in fields(section)]
    for key in values:
        if key not in known:
            raise ValueError(f"a key of {name} must be one of {', '.join(known)}, got {key!r}")
    missing = [f.name for f in fields(section) if f.default is MISSING and f.name not in values]
    if missing:
        raise ValueError(f"{name}.{missing[0]} must be given, got none")
    try:
        return section(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}.{error}") from error


# ---- running


class CellResult(NamedTuple):
    """The finished stages of a cell: runs by stage, and the evaluations; none after a run that diverged."""

    cell: Cell
    runs: dict[str, Path]
    evaluations: dict[str, dict[str, Any]]


class PipelineResult(NamedTuple):
    """All cells of a finished pipeline."""

    pipeline: Pipeline
    path: Path
    cells: list[CellResult]


def run_pipeline(pipeline: Pipeline, output: Path, resume: bool = False) -> PipelineResult:
    """Run every stage of every cell into folders below `output`; data and settings are checked before the first one."""
    folder = RunFolder(output)
    with locked(output):
        folder.clean()
        # Seeds and variants can be added to a finished study.
        settings = {**asdict(pipeline), "seeds": None, "variants": None, "backbones": None}
        folder.check(SETTINGS, settings, resume)
        check_data(pipeline)
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.write(SETTINGS, settings)
        cells = [_run_cell(pipeline, cell, output / cell.folder) for cell in pipeline.cells()]
        return PipelineResult(pipeline, output, cells)


def check_data(pipeline: Pipeline) -> None:
    """Raise if a recipe or a prepared folder does not fit, before hours of training."""
    first = next(pipeline.cells())
    recipes = [pipeline.recipe(PRETRAIN, cell, None) for cell in pipeline.cells()]
    tokenizer = recipes[0].task.data.open().load_tokenizer()  # type: ignore[attr-defined]
    if SFT in pipeline.stages:
        tuned = pipeline.recipe(SFT, first, Path("start")).task.data.open()  # type: ignore[attr-defined]
        if tuned.load_tokenizer().get_vocab() != tokenizer.get_vocab():
            source = recipes[0].task.data.source  # type: ignore[attr-defined]
            wanted = f"data with the tokenizer of {source!r} (muonssm prepare --tokenizer {source})"
            raise ValueError(f"{SFT}.recipe must have {wanted}, got {str(tuned.folder)!r} with another")
    if ZERO_SHOT in pipeline.stages and pipeline.zero_shot.data:
        find_files(Path(pipeline.zero_shot.data), [column.task for column in PAPER_TASKS])
    if NEEDLE in pipeline.stages:
        essay = pipeline.needle.read_essay() or default_essay()
        for config in pipeline.needle.cells():
            check_room(config, tokenizer, essay)


def _run_cell(pipeline: Pipeline, cell: Cell, folder: Path) -> CellResult:
    runs: dict[str, Path] = {}
    evaluations: dict[str, dict[str, Any]] = {}
    for stage in pipeline.stages:
        before = list(runs.values())
        if stage in (PRETRAIN, SFT):
            print(f"{cell.folder}: {stage}", file=sys.stderr)
            recipe = pipeline.recipe(stage, cell, before[-1] if before else None)
            metrics = train(recipe, folder / stage, resume=True)
            runs[stage] = folder / stage
            if "diverged" in metrics:
                print(f"{cell.folder}: {stage} diverged, later stages are left out", file=sys.stderr)
                break
        else:
            print(f"{cell.folder}: {stage} of {before[-1].name}", file=sys.stderr)
            evaluate = _zero_shot if stage == ZERO_SHOT else _needle
            evaluations[stage] = evaluate(pipeline, before[-1])
    return CellResult(cell, runs, evaluations)


def _zero_shot(pipeline: Pipeline, run: Path) -> dict[str, Any]:
    stage = pipeline.zero_shot
    save, earlier = RunFolder(run).record("zero-shot.json", True, check_zero_shot)
    settings: dict[str, Any] = {"limit": stage.limit or None, "max_length": stage.max_length or None}
    settings |= {"batch_size": stage.batch_size, "save": save, "earlier_result": earlier, "data": stage.data or None}
    return run_harness(*load_pretrained(run), [PAPER], **settings)


def _needle(pipeline: Pipeline, run: Path) -> dict[str, Any]:
    stage = pipeline.needle
    save, earlier = RunFolder(run).record("needle.json", True, check_needle)
    result = run_needle(*load_pretrained(run), stage, stage.read_essay(), earlier, save)
    write_heatmap(result, run / "needle.html")
    return result
