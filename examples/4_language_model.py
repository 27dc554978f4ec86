"""A tiny language model: train it on one sentence, character by character, then generate with transformers.

Needs the extra `language`. Run: python examples/4_language_model.py
"""

import torch

from muonssm.lab.core.torchvision_cpu import prepare_torchvision

prepare_torchvision()  # for a torchvision that was built for CUDA beside a CPU build of torch; see docs/guide/vision.md

from muonssm.models.language import MuonSSMConfig, MuonSSMForCausalLM  # noqa: E402

TEXT = "the memory keeps what it reads, and reads what it keeps. "
STEPS = 60

letters = sorted(set(TEXT))
ids = torch.tensor([[letters.index(letter) for letter in TEXT * 3]])

torch.manual_seed(0)
config = MuonSSMConfig(
    vocab_size=len(letters),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    backbone="gated_deltanet",
    mixer={"num_heads": 2},
    muon={"gamma": 0.9},  # False is the plain backbone
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
model = MuonSSMForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for step in range(STEPS + 1):
    loss = model(ids, labels=ids).loss
    if step % 20 == 0:
        print(f"step {step:>3}  loss {loss.item():.3f}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

prompt = ids[:, :10]
out = model.eval().generate(prompt, max_new_tokens=len(TEXT) - 10, do_sample=False)
print(f"prompt     {''.join(letters[i] for i in prompt[0])!r}")
print(f"generated  {''.join(letters[i] for i in out[0])!r}")
