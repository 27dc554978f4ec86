"""Variants of a recipe that the studies train and compare. They differ in the memory rule alone.

plain           no momentum, no normalization
double          plain with a state of twice the size
momentum        momentum without normalization: M_t = gamma M_{t-1} + tau beta_t v_t k_t^T
frobenius       momentum, each write divided by its Frobenius norm
muon            the recipe's own memory rule: one Newton-Schulz step by default
five            five Newton-Schulz steps
g0.9-t0.6       gamma 0.9 and tau 0.6, with tau outside of the normalization (inside it cancels)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.run_folder import RunFolder, as_json
from muonssm.ops import Muon

GAMMAS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99)  # the paper's grid
TAUS = (0.4, 0.5, 0.6, 0.8, 1.0, 1.2)
RECOMMENDED = {(gamma, tau) for gamma in (0.8, 0.9, 0.95, 0.99) for tau in (0.6, 0.8, 1.0)}  # the paper's range
STUDY_VARIANTS: dict[str, Callable[[Recipe], Recipe]] = {
    "plain": lambda recipe: replace(recipe, task=recipe.task.plain()),
    "double": lambda recipe: replace(recipe, task=recipe.task.plain().with_double_state()),
    "momentum": lambda recipe: _with_muon(recipe, replace(muon_of(recipe), normalization=None)),
    "frobenius": lambda recipe: _with_muon(recipe, replace(muon_of(recipe), normalization="frobenius")),
    "muon": lambda recipe: _with_muon(recipe, muon_of(recipe)),
    "five": lambda recipe: _with_muon(recipe, replace(muon_of(recipe), normalization="newton_schulz", ns_steps=5)),
}


def muon_of(recipe: Recipe) -> Muon:
    """The memory rule of a recipe, or the default one if the recipe is plain."""
    muon: Muon = recipe.task.muon  # type: ignore[attr-defined]
    return Muon() if muon == Muon.off() else muon


def grid_name(gamma: float, tau: float) -> str:
    """The name of a variant of the sensitivity grid."""
    return f"g{gamma:g}-t{tau:g}"


def variant_recipe(recipe: Recipe, name: str, seed: int) -> Recipe:
    """The recipe of a variant; `seed` counts from the recipe's own seed."""
    if name in STUDY_VARIANTS:
        changed = STUDY_VARIANTS[name](recipe)
    else:
        gamma, tau = (float(setting[1:]) for setting in name.split("-"))
        changed = _with_muon(recipe, replace(muon_of(recipe), gamma=gamma, tau=tau, tau_position="outside"))
    return replace(changed, training=replace(changed.training, seed=recipe.training.seed + seed))


def _with_muon(recipe: Recipe, muon: Muon) -> Recipe:
    return replace(recipe, task=recipe.task.with_muon(muon))


def run_folders(
    recipe: Recipe, names: Sequence[str], seeds: int, comparison: Path, study: Path
) -> dict[tuple[str, int], Path]:
    """The run folder of every variant and seed: in `study`, or in `comparison` if it has the same run already."""
    return {
        (name, seed): _run_folder(variant_recipe(recipe, name, seed), name, seed, comparison, study)
        for name in names
        for seed in range(seeds)
    }


def _run_folder(recipe: Recipe, name: str, seed: int, comparison: Path, study: Path) -> Path:
    compared = RunFolder(comparison / f"{name}-seed{seed}-fold0")
    if compared.is_finished and compared.read("recipe.json") == as_json(recipe.to_dict()):
        return compared.path
    return study / f"{name}-seed{seed}"
