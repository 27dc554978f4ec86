"""`PerRun`: one measured value for every trained run of an experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from muonssm.lab.core.compare import ComparedRun
from muonssm.lab.core.experiment import Experiment

Value = TypeVar("Value")
Other = TypeVar("Other")
RunKey = tuple[str, int, int]  # variant, seed, fold


class PerRun(Generic[Value]):
    """Values by variant, seed and fold."""

    def __init__(self, values: Mapping[RunKey, Value]) -> None:
        self._values = dict(values)

    @classmethod
    def measure(cls, experiment: Experiment, function: Callable[[ComparedRun], Value]) -> PerRun[Value]:
        """Apply a function to every trained run."""
        return cls({(run.variant, run.seed, run.fold): function(run) for run in experiment.trained_runs})

    @property
    def first(self) -> Value:
        """The value of the first run."""
        return next(iter(self._values.values()))

    @property
    def all(self) -> list[Value]:
        """The values of all runs."""
        return list(self._values.values())

    @property
    def variants(self) -> list[str]:
        """The variants that have a run."""
        return list(dict.fromkeys(name for name, _, _ in self._values))

    def of(self, variant: str) -> list[Value]:
        """The values of a variant's runs."""
        return list(self.by_pair(variant).values())

    def by_pair(self, variant: str) -> dict[tuple[int, int], Value]:
        """The values of a variant by seed and fold, to be paired with those of another variant."""
        return {(seed, fold): value for (name, seed, fold), value in self._values.items() if name == variant}

    def map(self, function: Callable[[Value], Other]) -> PerRun[Other]:
        """Apply a function to every value."""
        return PerRun({key: function(value) for key, value in self._values.items()})

    def to_dict(self) -> dict[str, Any]:
        """Values that are NamedTuples as dicts, by the name of their run."""
        return {f"{v}-seed{seed}-fold{fold}": x._asdict() for (v, seed, fold), x in self._values.items()}  # type: ignore[attr-defined]
