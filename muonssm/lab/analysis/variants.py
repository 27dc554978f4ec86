"""Variants of a recipe that the studies train: those of `muonssm.lab.core.variants`, and a grid over gamma and tau.

g0.9-t0.6       the recipe's rule with gamma 0.9 and tau 0.6, tau outside of the normalization (inside it cancels)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.run_folder import RunFolder, as_json
from muonssm.lab.core.variants import VARIANTS, change_own_rule, variant_task

GAMMAS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99)  # the paper's grid
TAUS = (0.4, 0.5, 0.6, 0.8, 1.0, 1.2)
RECOMMENDED = {(gamma, tau) for gamma in (0.8, 0.9, 0.95, 0.99) for tau in (0.6, 0.8, 1.0)}  # the paper's range


def grid_name(gamma: float, tau: float) -> str:
    """The name of a variant of the sensitivity grid."""
    return f"g{gamma:g}-t{tau:g}"


def variant_recipe(recipe: Recipe, name: str, seed: int) -> Recipe:
    """The recipe of a variant; `seed` counts from the recipe's own seed."""
    if name in VARIANTS:
        task = variant_task(recipe.task, name)
    else:
        gamma, tau = (float(setting[1:]) for setting in name.split("-"))
        task = change_own_rule(recipe.task, "fixed", gamma=gamma, tau=tau, tau_position="outside")
    return replace(recipe, task=task, training=replace(recipe.training, seed=recipe.training.seed + seed))


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
