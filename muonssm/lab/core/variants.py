"""The named variants of a recipe that comparisons and studies train. They differ in the memory rule alone.

plain                   no momentum, no normalization
muon                    the recipe's own rule
RULE                    paper, momentum, gated or residual, with a fixed gamma
RULE-per-head           the same, gamma learned per head
RULE-per-step           the same, gamma learned per step and head
doubled                 plain with twice the state
unnormalized, ...       the recipe's own rule with another normalization, for studies

`VARIANTS` is the only table of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from muonssm.ops import Muon

if TYPE_CHECKING:
    from .task import Task

PLAIN = "plain"  # what every other variant is compared with
DEFAULT_VARIANTS = (PLAIN, "muon")
WITHOUT_MOMENTUM = (PLAIN, "doubled")
LEARNED = {"per-head": "per_head", "per-step": "per_step"}  # suffix, model.momentum


class Variant(NamedTuple):
    """What a variant is, in a line, and how it changes a task."""

    text: str
    change: Callable[[Any], Any]


def _own(task: Any) -> Any:
    """Return the task as it is, or with the paper's rule if it is plain."""
    return task.with_muon(Muon()) if task.muon == Muon.off() else task


def change_own_rule(task: Any, momentum: str | None = None, **changes: Any) -> Any:
    """Return a task with changes to its own rule; `momentum` None keeps whether its gamma is learned."""
    own = _own(task)
    return own.with_muon(replace(own.muon, **changes), momentum or own.model.momentum)


def _rule(muon: Muon, momentum: str = "fixed") -> Callable[[Any], Any]:
    return lambda task: task.with_muon(muon, momentum)


RULES: dict[str, tuple[str, Muon]] = {
    "paper": ("the paper's rule", Muon()),
    "momentum": ("momentum alone (gamma 0.5), no normalization", Muon(gamma=0.5, tau=1.0, normalization=None)),
    "gated": ("the paper's rule with the gates outside of the normalization", Muon.gated()),
    "residual": ("momentum on the error v - S k, no normalization", Muon.residual()),
}


def _rules() -> dict[str, Variant]:
    """Return each rule with a fixed gamma and with both learned ones."""
    found = {name: Variant(text, _rule(muon)) for name, (text, muon) in RULES.items()}
    for name, (_, muon) in RULES.items():
        for suffix, momentum in LEARNED.items():
            text = f"{name}, gamma learned {suffix.replace('-', ' ')}"
            found[f"{name}-{suffix}"] = Variant(text, _rule(muon, momentum))
    return found


VARIANTS: dict[str, Variant] = {
    PLAIN: Variant("the backbone alone: no momentum, no normalization", lambda task: task.plain()),
    "muon": Variant("the recipe's own rule (the paper's if the recipe is plain)", _own),
    **_rules(),
    "doubled": Variant("plain with twice the state", lambda task: task.plain().with_double_state()),
    "unnormalized": Variant("the recipe's rule without normalization", partial(change_own_rule, normalization=None)),
    "frobenius": Variant(
        "the recipe's rule with Frobenius normalization", partial(change_own_rule, normalization="frobenius")
    ),
    "five": Variant(
        "the recipe's rule with five Newton-Schulz steps",
        partial(change_own_rule, normalization="newton_schulz", ns_steps=5),
    ),
}


def variant_task(task: Task, name: str) -> Task:
    """Return a variant of a task; raise ValueError if it is not possible for the task's model."""
    return VARIANTS[name].change(task)


def check_variants(names: Sequence[str]) -> tuple[str, ...]:
    """Check names of variants and return them, plain first."""
    if not names:
        raise ValueError(f"--variants must be one or more of {', '.join(VARIANTS)}, got none")
    for name in names:
        if name not in VARIANTS:
            raise ValueError(f"--variants must be one or more of {', '.join(VARIANTS)}, got {name!r}")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"--variants must be different names, got {name!r} {names.count(name)} times")
    return tuple(sorted(names, key=lambda name: name != PLAIN))


def display_name(name: str) -> str:
    """Return a variant's name in a sentence or heading."""
    return "Muon" if name == "muon" else name
