"""Scorers: the same scores from one process and from shares of several."""

from __future__ import annotations

import pytest
import torch

from muonssm.lab.core.evaluate import score_split
from muonssm.lab.core.scorer import IGNORED, LossScorer, PredictionScorer


def mean_loss(loss):
    return {"loss": loss}


def test_the_mean_loss_weighs_batches_by_their_labels():
    """Losses 1 over 3 labels and 5 over 1 label: (3 * 1 + 5) / 4 = 2, not 3."""
    scorer = LossScorer(mean_loss)
    scorer.add({"labels": torch.tensor([[1, 2, 3, IGNORED]])}, {"loss": torch.tensor(1.0)})
    scorer.add({"labels": torch.tensor([[IGNORED, IGNORED, IGNORED, 4]])}, {"loss": torch.tensor(5.0)})
    assert scorer.result() == {"loss": 2.0}


def test_shares_of_two_processes_give_the_whole_mean():
    shares = [LossScorer(mean_loss), LossScorer(mean_loss)]
    for scorer, loss, labels in zip(shares, (1.0, 5.0), ([1, 2, 3], [4]), strict=True):
        scorer.add({"labels": torch.tensor(labels)}, {"loss": torch.tensor(loss)})
    shares[0].replace([scorer.collected() for scorer in shares])
    assert shares[0].result() == {"loss": 2.0}


def accuracy(predictions, labels):
    return {"accuracy": float((predictions.argmax(1) == labels).mean()), "items": len(labels)}


def test_predictions_are_scored_together():
    logits, labels = torch.randn(10, 3), torch.randint(3, (10,))
    whole, shares = PredictionScorer(accuracy), [PredictionScorer(accuracy), PredictionScorer(accuracy)]
    whole.add({"labels": labels}, {"logits": logits})
    for i in range(0, 10, 2):
        shares[i // 2 % 2].add({"labels": labels[i : i + 2]}, {"logits": logits[i : i + 2].bfloat16().float()})
    shares[1].replace([scorer.collected() for scorer in shares])
    assert shares[1].result()["items"] == 10
    assert shares[1].result()["accuracy"] == pytest.approx(whole.result()["accuracy"])


def test_predictions_can_be_another_output():
    scorer = PredictionScorer(lambda predictions, labels: {"right": int((predictions == labels).sum())}, "predictions")
    scorer.add({"labels": torch.tensor([[1, 2]])}, {"predictions": torch.tensor([[1, 3]])})
    assert scorer.result() == {"right": 1}


@pytest.mark.parametrize("draws", [True, False])
def test_a_validation_draws_from_torchs_generator_only_if_the_task_says_so(draws):
    class Tiny:
        eval_draws_random = draws

        def scorer(self, split):
            return PredictionScorer(accuracy)

        def collate(self, items, training):
            x, labels = (torch.stack(column) for column in zip(*items, strict=True))
            return {"x": x, "labels": labels}

    class Model(torch.nn.Module):
        def forward(self, x, labels):
            return {"logits": x}

    split = torch.utils.data.TensorDataset(torch.randn(5, 3), torch.randint(3, (5,)))
    before = torch.get_rng_state()
    assert score_split(Tiny(), Model(), split, batch_size=2)["items"] == 5
    assert torch.equal(before, torch.get_rng_state()) == (not draws)
