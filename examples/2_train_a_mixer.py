"""A mixer inside your own torch model, trained on a toy task: associative recall.

A sequence lists pairs of a key and a value and ends with one of the keys; the model has to name its value.
Run: python examples/2_train_a_mixer.py
"""

import torch
from torch import Tensor, nn

from muonssm import Muon, build_mixer

KEYS, VALUES, PAIRS, BATCH, STEPS = 16, 16, 6, 64, 120


class Model(nn.Module):
    """Embedding, two residual blocks around a mixer, and a linear head over the last position."""

    def __init__(self, d_model: int, muon: Muon) -> None:
        super().__init__()
        self.embedding = nn.Embedding(KEYS + VALUES, d_model)
        self.norms = nn.ModuleList([nn.RMSNorm(d_model) for _ in range(2)])
        self.mixers = nn.ModuleList([build_mixer("deltanet", d_model, muon=muon, num_heads=2) for _ in range(2)])
        self.head = nn.Linear(d_model, VALUES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            y, _ = mixer(norm(x))  # the second result is the state, to continue the sequence
            x = x + y
        return self.head(x[:, -1])


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random sequences `[BATCH, 2 * PAIRS + 1]`: key, value, key, value, ..., the key that is asked for."""
    keys = torch.rand(BATCH, KEYS, generator=generator).argsort(dim=1)[:, :PAIRS]
    values = torch.randint(VALUES, (BATCH, PAIRS), generator=generator)
    asked = torch.randint(PAIRS, (BATCH, 1), generator=generator)
    pairs = torch.stack([keys, KEYS + values], dim=2).flatten(1)
    return torch.cat([pairs, keys.gather(1, asked)], dim=1), values.gather(1, asked).squeeze(1)


def accuracy(model: Model) -> float:
    """Share of right answers over new sequences, in percent."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        right = [
            (model(tokens).argmax(-1) == labels).float().mean()
            for tokens, labels in (batch(generator) for _ in range(10))
        ]
    return 100 * torch.stack(right).mean().item()


for name, muon in (("plain", Muon.off()), ("muon", Muon(gamma=0.9))):
    torch.manual_seed(0)
    model = Model(64, muon)
    before = accuracy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        tokens, labels = batch(generator)
        loss = nn.functional.cross_entropy(model(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    after = accuracy(model)
    print(f"{name:<6} accuracy before {before:5.1f}%, after {STEPS} steps {after:5.1f}% (chance {100 / VALUES:.1f}%)")
