"""Variants of a recipe that studies train side by side: what they are called, and what differs.

plain           no momentum, no normalisation
double          plain with keys of twice the size
momentum        momentum alone: M_t = gamma M_{t-1} + tau beta_t v_t k_t^T
frobenius       the write over its norm
muon            the recipe's own: one Newton-Schulz step, unless it says otherwise
five            five Newton-Schulz steps
g0.9-t0.6       gamma 0.9 and tau 0.6, with tau outside of the normalisation (inside it cancels)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.run_folder import RunFolder, as_json
from muonssm.ops import Muon

GAMMAS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99)  # the paper's grid
TAUS = (0.4, 0.5, 0.6, 0.8, 1.0, 1.2)
RECOMMENDED = {(gamma, tau) for gamma in (0.8, 0.9, 0.95, 0.99) for tau in (0.6, 0.8, 1.0)}  # the paper's range
VARIANTS: dict[str, Callable[[Recipe], Recipe]] = {
    "plain": lambda recipe: _with(recipe, Muon.off()),
    "double": lambda recipe: _double(_with(recipe, Muon.off())),
    "momentum": lambda recipe: _with(recipe, replace(own_muon(recipe), normalization=None)),
    "frobenius": lambda recipe: _with(recipe, replace(own_muon(recipe), normalization="frobenius")),
    "muon": lambda recipe: replace(recipe, task=recipe.task.with_muon(own_muon(recipe))),
    "five": lambda recipe: _with(recipe, replace(own_muon(recipe), normalization="newton_schulz", ns_steps=5)),
}


def own_muon(recipe: Recipe) -> Muon:
    """The recipe's, or the defaults where it is plain."""
    muon: Muon = recipe.task.muon  # type: ignore[attr-defined]
    return Muon() if muon == Muon.off() else muon


def grid_name(gamma: float, tau: float) -> str:
    """The name of a point of the grid."""
    return f"g{gamma:g}-t{tau:g}"


def variant(recipe: Recipe, name: str, seed: int) -> Recipe:
    """The recipe of one run of a study."""
    if name in VARIANTS:
        found = VARIANTS[name](recipe)
    else:
        gamma, tau = (float(part[1:]) for part in name.split("-"))
        found = _with(recipe, replace(own_muon(recipe), gamma=gamma, tau=tau, tau_position="outside"))
    return replace(found, training=replace(found.training, seed=recipe.training.seed + seed))


def jobs(recipe: Recipe, names: Sequence[str], seeds: int, run: Path, place: Path) -> dict[tuple[str, int], Path]:
    """The folder of every variant and seed; runs of a comparison in the folder `run` serve where they are the same."""
    return {
        (name, seed): _place(variant(recipe, name, seed), name, seed, run, place)
        for name in names
        for seed in range(seeds)
    }


def _place(recipe: Recipe, name: str, seed: int, run: Path, place: Path) -> Path:
    there = RunFolder(run / f"{name}-seed{seed}-fold0")
    if there.is_finished and there.read("recipe.json") == as_json(recipe.to_dict()):
        return there.path
    return place / f"{name}-seed{seed}"


def small(recipe: Recipe, metadata: Mapping[str, Any]) -> Recipe:
    """The same small enough to be trained dozens of times: half the rate, a narrow network, ten epochs.

    Only for activity recognition; of other tasks the recipe as it is. The sizes are those of `watch-small`.
    """
    if recipe.task_name != "activity":
        return recipe
    pattern = Recipe.load("watch-small")
    content, wanted = recipe.to_dict(), pattern.to_dict()
    content["training"] = wanted["training"]
    content["model"] |= {key: min(content["model"][key], wanted["model"][key]) for key in ("d_model", "d_state")}
    if content["data"]["length"] > wanted["data"]["length"]:
        halves = content["data"]["length"] // wanted["data"]["length"]
        content["data"] |= {"length": wanted["data"]["length"], "rate": metadata["rate"] / halves}
    return Recipe.from_dict(content)


def _with(recipe: Recipe, muon: Muon) -> Recipe:
    return replace(recipe, task=recipe.task.with_muon(muon))


def _double(recipe: Recipe) -> Recipe:
    model = recipe.task.model  # type: ignore[attr-defined]
    if not hasattr(model, "d_state"):
        raise ValueError(
            f"capacity doubles model.d_state, which a {recipe.task_name} recipe does not have; leave it out"
        )
    return replace(recipe, task=replace(recipe.task, model=replace(model, d_state=2 * model.d_state)))  # type: ignore[call-arg]
