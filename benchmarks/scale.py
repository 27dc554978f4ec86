"""Print the tables of docs/scale.md: what training models of 1B and 7B parameters costs on 1 to 1,024 GPUs.

    python benchmarks/scale.py

Needs no GPU: the figures come from `muonssm.distributed.cost`. A test compares the page with this output.
"""

from __future__ import annotations

from muonssm.lab.core.torchvision_cpu import prepare_torchvision

prepare_torchvision()

from dataclasses import replace  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402

from muonssm.distributed.cost import H100, Memory, Network, Plan, cost  # noqa: E402
from muonssm.models.language import MuonSSMConfig, MuonSSMForCausalLM  # noqa: E402

SIZES = {
    "1B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 18, "mixer": {"num_heads": 12}},
    "7B": {"hidden_size": 4096, "intermediate_size": 11264, "num_hidden_layers": 30, "mixer": {"num_heads": 24}},
}
STEPS = {4096: 512, 262144: 8}  # length: sequences; 2,097,152 tokens per step
GPUS = (1, 8, 64, 512, 1024)
FULL = 0.8  # of a GPU's memory


def network(name: str) -> Network:
    """Read the shapes of a Gated DeltaNet language model off a model without memory."""
    config = MuonSSMConfig(backbone="gated_deltanet", vocab_size=32000, num_attention_heads=1, **SIZES[name])
    with torch.device("meta"):
        model = MuonSSMForCausalLM(config)
    return describe(model)


def describe(model: MuonSSMForCausalLM) -> Network:
    """Describe a model of Gated DeltaNet layers."""
    blocks = [tuple(tuple(p.shape) for p in block.parameters()) for block in model.model.layers]
    inside = {id(p) for block in model.model.layers for p in block.parameters()}
    root = tuple(tuple(p.shape) for p in model.parameters() if id(p) not in inside)
    first = model.model.layers[0]
    mixer, linears = first.mixer, [m for m in first.modules() if isinstance(m, nn.Linear)]
    memory = Memory(mixer.num_value_heads, mixer.head_v_dim, mixer.head_k_dim)
    channels, _, taps = mixer.conv1d.weight.shape
    # Inputs and outputs of the linear layers, and the convolution's; the memory keeps its inputs alone.
    saved = sum(m.in_features + m.out_features for m in linears) + 2 * channels
    return Network(
        tuple(blocks), root, memory, channels, taps, model.config.hidden_size, model.config.vocab_size, saved
    )


def plans(described: Network, gpus: int, length: int) -> list[Plan]:
    """Return DDP and FSDP2, with as few GPUs per sequence as fit its activations, and micro-batches as large as fit."""
    result = []
    for sharded in (False, True) if gpus > 1 else (False,):
        plan = Plan(gpus, max(1, gpus // STEPS[length]), sharded, length, STEPS[length])
        wider = plan
        while cost(described, wider).memory > H100.memory and wider.context < gpus:
            wider = replace(wider, context=2 * wider.context)
        plan = wider if cost(described, wider).memory <= H100.memory else plan
        while plan.micro_batches > 1:
            larger = replace(plan, at_once=2 * plan.at_once)
            if cost(described, larger).memory > FULL * H100.memory:
                break
            plan = larger
        result.append(plan)
    return result


def days(seconds: float) -> str:
    return f"{seconds / 86400:,.1f}" if seconds < 864000 else f"{seconds / 86400:,.0f}"


def row(described: Network, plan: Plan) -> list[str]:
    """Return the cells of one plan."""
    found = cost(described, plan)
    fits = found.memory <= H100.memory
    title = f"{'FSDP2' if plan.sharded else 'DDP' if plan.gpus > 1 else 'alone'}, context {plan.context}"
    memory = f"{found.memory / 1e9:.0f}" + ("" if fits else ", too much")
    if not fits:
        return [f"{plan.gpus:,}", title, memory, *["-"] * 6]
    times = [days(found.step * tokens / plan.tokens) for tokens in (1e10, 1e11, 1e12)]
    sent = f"{found.sent[0] / 1e9:.1f} + {found.sent[1] / 1e9:.2f}"
    return [f"{plan.gpus:,}", title, memory, sent, f"{found.step:.2f}", f"{found.efficiency:.0%}", *times]


def main() -> None:
    for name in SIZES:
        described = network(name)
        for length, sequences in STEPS.items():
            size = f"{described.parameters:,} parameters, {len(described.blocks)} layers"
            print(f"**{name}** ({size}), {sequences} sequences of {length:,}:\n")
            print("| GPUs | plan | memory, GB | sent a step, GB | step, s | busy | 10B, days | 100B, days | 1T, days |")
            print("|---|---|---|---|---|---|---|---|---|")
            for gpus in GPUS:
                for plan in plans(described, gpus, length):
                    print("| " + " | ".join(row(described, plan)) + " |")
            print()


if __name__ == "__main__":
    main()
