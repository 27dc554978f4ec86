"""The operator: write pairs of keys and values into a memory, then ask for each value by its key.

Muon gives every write the same size, so one huge value does not drown the others. Run: python examples/1_operator.py
"""

import torch
import torch.nn.functional as F

from muonssm import Muon, muon_memory

PAIRS, KEY_SIZE, VALUE_SIZE = 12, 32, 16


def recall(values: torch.Tensor, keys: torch.Tensor, muon: Muon) -> tuple[float, float]:
    """Write all pairs, ask for all of them; return the mean cosine similarity and the condition number of S."""
    steps = 2 * PAIRS  # first the writes, then the questions
    k = torch.cat([keys, torch.zeros_like(keys)]).view(1, steps, 1, KEY_SIZE)
    q = torch.cat([torch.zeros_like(keys), keys]).view(1, steps, 1, KEY_SIZE)
    v = torch.cat([values, torch.zeros_like(values)]).view(1, steps, 1, VALUE_SIZE)
    log_alpha = torch.zeros(1, steps, 1)  # alpha = 1: forget nothing
    beta = torch.ones(1, steps, 1)
    y, state = muon_memory(q, k, v, log_alpha, beta, eta=0.0, muon=muon)
    found = y[0, PAIRS:, 0]
    singular_values = torch.linalg.svdvals(state.S[0, 0].double())
    rank = min(PAIRS, VALUE_SIZE)
    return F.cosine_similarity(found, values).mean().item(), (singular_values[0] / singular_values[rank - 1]).item()


torch.manual_seed(0)
keys = F.normalize(torch.randn(PAIRS, KEY_SIZE), dim=-1)
values = torch.randn(PAIRS, VALUE_SIZE)
outlier = values.clone()
outlier[3] *= 100  # one value is a hundred times as large as the others

print(f"{'':<28}{'recall (cosine)':>16}{'condition of S':>16}")
for name, v in (("values of one size", values), ("one value 100x larger", outlier)):
    for variant, muon in (("plain", Muon.off()), ("muon", Muon(gamma=0.9))):
        similarity, condition = recall(v, keys, muon)
        print(f"{name + ', ' + variant:<28}{similarity:>16.3f}{condition:>16.1f}")
