"""Streaming: one step at a time gives the same outputs as the whole sequence, from a state that never grows.

Run: python examples/3_streaming.py
"""

import torch

from muonssm import build_mixer
from muonssm.layers import BACKBONES

torch.manual_seed(0)
x = torch.randn(1, 256, 64)  # [batch, steps, width]
print(f"{'backbone':<16}{'largest difference':>20}{'state after 1 step':>22}{'after 256 steps':>18}")
for name in BACKBONES:
    mixer = build_mixer(name, 64).eval()
    with torch.no_grad():
        whole, _ = mixer(x)
        outputs, sizes, state = [], [], None
        for t in range(x.shape[1]):
            y, state = mixer(x[:, t : t + 1], state)
            outputs.append(y)
            sizes.append(sum(t.nbytes for t in (state.conv, state.memory.S, state.memory.M)))
    difference = (torch.cat(outputs, dim=1) - whole).abs().max() / whole.abs().max()
    print(f"{name:<16}{difference.item():>20.1e}{sizes[0]:>16,} bytes{sizes[-1]:>12,} bytes")
