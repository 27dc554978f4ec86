"""Statistics of batch norms, anew: by hand, without a trace in the random numbers, and in a run."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from muonssm.lab.core.batch_norms import batch_norms, draw_batches, isolated_random_state, recompute_statistics
from muonssm.lab.core.config import TrainingConfig
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.run_folder import RunFolder
from muonssm.lab.core.trainer import train


class Small(nn.Module):
    """Doubles what it is given, drops half of it while it trains, and normalises."""

    def __init__(self):
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(3, momentum=0.3)

    def forward(self, images):
        return self.norm(self.drop(2 * images))


def test_statistics_are_the_mean_over_batches_with_dropout_at_rest():
    model, batches = Small().train(), torch.arange(24.0).view(2, 4, 3) ** 2
    model.norm.running_mean.fill_(7)
    recompute_statistics(model, ({"images": batch} for batch in batches))
    doubled = 2 * batches
    torch.testing.assert_close(model.norm.running_mean, doubled.mean(1).mean(0))
    torch.testing.assert_close(model.norm.running_var, doubled.var(1, unbiased=True).mean(0))
    assert model.norm.momentum == 0.3
    assert not any(module.training for module in model.modules())


def test_a_batch_that_fails_leaves_the_momentum():
    model = Small()
    with pytest.raises(ValueError, match="more than 1 value"):
        recompute_statistics(model, [{"images": torch.ones(1, 3)}])
    assert model.norm.momentum == 0.3


def test_random_numbers_go_on_as_if_none_were_drawn():
    def numbers():
        return random.random(), np.random.random(), torch.rand(()).item()

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    undisturbed = [numbers() for _ in range(2)]
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    first = numbers()
    with isolated_random_state(5):
        inside = numbers()
    with isolated_random_state(5):
        assert numbers() == inside
    assert [first, numbers()] == undisturbed
    assert inside not in undisturbed


def test_items_are_drawn_once_in_even_parts():
    parts = draw_batches(50, 33, 16)
    assert [len(part) for part in parts] == [11, 11, 11]
    assert len({number for part in parts for number in part} & set(range(50))) == 33
    assert sorted(draw_batches(5, 100, 16)[0]) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("ema", [0.0, 0.9])
@pytest.mark.parametrize("keep", ["best", "last"])
def test_a_run_keeps_the_statistics_of_the_weights_it_keeps(changes, tmp_path, ema, keep):
    """Also where the last step is none of every second, which are validated."""
    rhythm = ["training.steps=5", "training.evaluate_every=2", f"training.keep={keep}", f"training.ema={ema}"]
    more = ["training.statistics=40", *rhythm]
    recipe = Recipe.load("folder", [*changes, *more])
    train(recipe, tmp_path / "run")
    _, _, model = RunFolder(tmp_path / "run").load_model()
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    data = recipe.task.load_data()
    with isolated_random_state(recipe.training.seed):
        parts = draw_batches(len(data.train), 40, 4 * recipe.training.batch_size)
        recompute_statistics(
            model, (recipe.task.collate([data.train[i] for i in part], training=True) for part in parts)
        )
    assert batch_norms(model)
    torch.testing.assert_close(model.state_dict(), kept)


def test_bad_statistics_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"statistics must be .*, got -1"):
        TrainingConfig(statistics=-1)
    with pytest.raises(ValueError, match=r"training.statistics must be 0 .*, got 8"):
        train(Recipe.load("recall", ["training.statistics=8"]), tmp_path / "run")
