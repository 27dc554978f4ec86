"""What training on several processes costs, in closed form; docs/scale.md has the tables.

Bytes sent are those of all processes together. For context parallelism:

    k   numbers of a state row: 2 m for [S M], m without momentum; 2 or 1 in the forms "scalar" and "diagonal"
    Z   numbers of a state, C of a map Z -> Z A + C
    A   numbers of its matrix
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .exchange import neighbors, reaches_the_first, rounds

FORMS = ("matrix", "scalar", "diagonal")


@dataclass(frozen=True)
class Memory:
    """The memory of one layer.

    Attributes:
        heads, values, keys: H, d and m; for the selective scan 1, channels D and states N.
        momentum: whether M carries anything from step to step: gamma is not the number 0, or the rule is residual.
        form: `"matrix"` with a correction (eta 1), `"scalar"` without (Mamba-2), `"diagonal"` for the selective scan.
    """

    heads: int
    values: int
    keys: int
    momentum: bool = True
    form: str = "matrix"

    @property
    def state(self) -> int:
        """Numbers of S and M, or of S."""
        return self.heads * self.values * self.keys * (1 + self.momentum)

    @property
    def matrix(self) -> int:
        """Numbers of A."""
        k = 1 + self.momentum
        if self.form == "scalar":
            return self.heads * k * k
        if self.form == "diagonal":
            return self.values * self.keys * k * k
        return self.heads * (self.keys * k) ** 2


def messages(size: int) -> tuple[int, int]:
    """Return how many maps all processes send in one prefix: with their A, and without."""
    with_A = without = 0
    for distance in rounds(size):
        for position in range(size):
            if neighbors(position, distance, size)[0] is not None:
                without += reaches_the_first(position, distance)
                with_A += not reaches_the_first(position, distance)
    return with_A, without


def memory_bytes(
    memory: Memory, size: int, batch: int, itemsize: int = 4, last: bool = False, backward: bool = True
) -> int:
    """Return what `size` processes send for one call of an operator and, with `backward`, its gradients.

    It does not depend on the length of the sequences. `last` is for `states="last"`, which returns the last states on
    every process: both S and M then travel once more, and their gradients back.
    """
    with_A, without = messages(size)
    prefix = with_A * (memory.state + memory.matrix) + without * memory.state
    shared = (size - 1) * 2 * memory.heads * memory.values * memory.keys if last else 0
    return (1 + backward) * batch * itemsize * (prefix + shared)


def convolution_bytes(channels: int, taps: int, size: int, batch: int, itemsize: int = 4, backward: bool = True) -> int:
    """Return the same for one short convolution, with `states="own"`."""
    return (1 + backward) * batch * itemsize * (size - 1) * (taps - 1) * channels


def agreement_bytes(calls: int, size: int) -> int:
    """Return what `size` processes send to check that they make the same calls.

    Args:
        calls: different calls inside one `context_parallel`; further ones that are alike are not compared again.
    """
    return calls * size * (size - 1) * 8


def ddp_bytes(parameters: int, size: int, itemsize: int = 4) -> int:
    """Return what `size` processes send for one step of DDP: a ring's sum of all gradients."""
    return 2 * (size - 1) * parameters * itemsize


def fsdp_bytes(
    blocks: Sequence[Sequence[Sequence[int]]], root: Sequence[Sequence[int]], size: int, micro_batches: int = 1
) -> int:
    """Return what `size` processes send for one step of FSDP2 in float32.

    A parameter is cut along its first axis into equal shards, the last ones filled up. In every micro-batch a block is
    gathered for the forward pass and again for the backward pass, the rest (`root`) once. After the last one gradients
    are summed into shards. In a ring every process sends (size - 1) / size of what is gathered or summed.

    Args:
        blocks: shapes of the parameters of each block, root: of the others.
    """
    inside, outside = sum(_filled(block, size) for block in blocks), _filled(root, size)
    gathered = micro_batches * (2 * inside + outside)
    return (size - 1) * 4 * (gathered + inside + outside)


def _filled(shapes: Sequence[Sequence[int]], size: int) -> int:
    """Return the numbers of the shards of all processes together."""
    return sum(-(-shape[0] // size) * size * math.prod(shape[1:]) for shape in shapes)


@dataclass(frozen=True)
class Machine:
    """Published figures of a GPU and its connections, per second.

    Attributes:
        flops: of dense bfloat16 products; bandwidth: bytes of its memory; memory: bytes.
        inside: bytes that a GPU sends to others of its node of eight, outside: to other nodes.
        used: fraction of `flops` that training reaches; an assumption.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    inside: float
    outside: float
    used: float = 0.4
    node: int = 8


H100 = Machine("H100 SXM", 989e12, 3.35e12, 80e9, 450e9, 50e9)
A100 = Machine("A100 SXM", 312e12, 2.0e12, 80e9, 300e9, 25e9)


@dataclass(frozen=True)
class Network:
    """What the cost of training a language model depends on.

    Attributes:
        blocks, root: shapes of the parameters, as for `fsdp_bytes`.
        memory: of each layer; channels, taps: of its convolution.
        hidden, vocabulary: widths of the residual stream and of the logits.
        saved: numbers per token that a block keeps for its backward pass.
    """

    blocks: tuple[tuple[tuple[int, ...], ...], ...]
    root: tuple[tuple[int, ...], ...]
    memory: Memory
    channels: int
    taps: int
    hidden: int
    vocabulary: int
    saved: int

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(math.prod(shape) for group in (*self.blocks, self.root) for shape in group)

    def recurrence_flops(self, extra_passes: float = 0.0) -> float:
        """Flops of the memories of all layers per token, forward and backward, by the count in docs/design/gpu.md."""
        kilo_flops = {"forward": 418.0, "backward": 1081.0}  # m = d = 128; proportional to d, and to m from 64 on
        one = (1 + extra_passes) * kilo_flops["forward"] + kilo_flops["backward"]
        return 1e3 * one * self.memory.heads * self.memory.values * self.memory.keys / 128**2 * len(self.blocks)

    @property
    def extra_passes(self) -> float:
        """Forward passes of the memory that context parallelism adds: values and unit states instead of values."""
        units = self.memory.keys * (1 + self.memory.momentum)
        return (self.memory.values + units) / self.memory.values


@dataclass(frozen=True)
class Plan:
    """How a batch is divided.

    Attributes:
        gpus: in all; context: those that share a sequence; sharded: FSDP2 instead of DDP.
        length, sequences: tokens per sequence, sequences per step.
        at_once: sequences, or pieces of them, in a micro-batch of a GPU.
    """

    gpus: int
    context: int
    sharded: bool
    length: int
    sequences: int
    at_once: int = 1

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a GPU in a step."""
        return max(1, -(-self.sequences * self.context // (self.gpus * self.at_once)))

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.length * self.sequences


@dataclass(frozen=True)
class Cost:
    """What a plan costs.

    Attributes:
        memory: bytes of a GPU.
        sent: bytes that a GPU sends in a step: for weights and gradients, and for context parallelism.
        compute, exchange, wait: seconds of a step: products; weights and gradients, which overlap with products;
            context parallelism, which does not.
    """

    memory: float
    sent: tuple[float, float]
    compute: float
    exchange: float
    wait: float

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return max(self.compute, self.exchange) + self.wait

    @property
    def efficiency(self) -> float:
        """Fraction of the step that is spent in products."""
        return self.compute / self.step


LATENCY = 20e-6  # seconds of one small message between GPUs; an assumption
CHECKPOINTED = 4 / 3  # flops with recomputed activations, over those without


def cost(network: Network, plan: Plan, machine: Machine = H100) -> Cost:
    """Return what a step costs; activations are recomputed, block by block (`training.checkpointing`)."""
    parameters, layers, P = network.parameters, len(network.blocks), plan.gpus
    rows = plan.sequences * plan.context / P  # sequences of a GPU, a piece of each
    tokens = rows * plan.length / plan.context
    extra = network.extra_passes if plan.context > 1 else 0.0
    flops = CHECKPOINTED * tokens * (6 * parameters + network.recurrence_flops(extra))
    # Weights, gradients and two moments of Adam in float32. FSDP2 has a share of them, a whole block twice, and until
    # the last micro-batch the sum of all gradients.
    block = max(sum(math.prod(shape) for shape in group) for group in network.blocks)
    unsharded = 4 * parameters if plan.micro_batches > 1 and P > 1 else 0
    weights = 16 * parameters / P + 2 * 4 * block + unsharded if plan.sharded else 16 * parameters
    logits = 10 * network.vocabulary  # bfloat16, then float32 and its gradient
    kept = plan.at_once * plan.length / plan.context
    activations = kept * (4 * network.hidden * layers + 2 * network.saved + logits)
    if plan.sharded:
        whole = fsdp_bytes(network.blocks, network.root, P, plan.micro_batches)
    else:
        whole = ddp_bytes(parameters, P)
    for_weights = whole / P
    # Forward, forward again as activations are recomputed, and backward.
    recurrence = memory_bytes(network.memory, plan.context, 1, backward=False)
    filters = convolution_bytes(network.channels, network.taps, plan.context, 1, 2, backward=False)
    for_context = 3 * rows * layers * (recurrence + filters) / plan.context
    link = machine.inside if machine.node >= P else machine.outside
    near = machine.inside if plan.context <= machine.node else machine.outside
    messages_ = 3 * layers * (len(rounds(plan.context)) + 1) * plan.micro_batches * LATENCY if plan.context > 1 else 0.0
    return Cost(
        memory=weights + activations,
        sent=(for_weights, for_context),
        compute=flops / (machine.flops * machine.used),
        exchange=for_weights / link,
        wait=for_context / near + messages_,
    )
