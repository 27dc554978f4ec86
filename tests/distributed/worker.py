"""What the processes of a group do in the tests: each compares its piece with one process's result on whole sequences.

A function returns the number of comparisons, and raises AssertionError if one fails.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from muonssm.distributed import context_parallel, cost
from muonssm.ops import MemoryState, Muon
from muonssm.ops.causal_conv import causal_convolution
from tests.layers.variants import D_MODEL, DIMS, RULES, Variant
from tests.ops.cases import FAMILY, MUONS, TOLERANCE, Case, call, difference, make_inputs, weights

CONSTANT = ("A", "S", "M")  # inputs without an axis of time; a gamma per head is the fourth
SHARES = (0.5, 0.25, 0.15, 0.1)  # of the loss of the final states, by process


def main(arguments: list[str]) -> None:
    functions, rank, size, store = arguments[0].split(), int(arguments[1]), int(arguments[2]), arguments[3]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    print(json.dumps({function: globals()[function]() for function in functions}))
    dist.destroy_process_group()


def cuts(length: int, size: int, kind: str) -> list[int]:
    """Bounds of the processes' pieces: even, ragged with pieces of one and two steps, or with an empty piece."""
    if kind == "even":
        return [length * i // size for i in range(size + 1)]
    if kind == "first empty":
        return [0, *cuts(length, size - 1, "even")]
    if kind == "last empty":
        return [*cuts(length, size - 1, "even"), length]
    half = length // 2
    inner = {"empty": [length // 3, length // 3, length - 5], "ragged": [half - 1, half, half + 2]}[kind]
    return [0, *inner[: size - 1], length]


def piece_of(name: str, x: Tensor, bounds: Sequence[int], rank: int) -> Tensor:
    """The piece of an input of this process; whole where it has no time."""
    if name in CONSTANT or (name == "gamma" and x.ndim == 1):
        return x
    return x[:, bounds[rank] : bounds[rank + 1]]


def loss_of(y: Tensor, y_weights: Tensor, states: Sequence[Tensor], share: float) -> Tensor:
    loss = (y.double() * y_weights).sum()
    return loss + share * sum((x.double() * weights(x)).sum() for x in states)


def differences(
    found: dict[str, Tensor], whole: dict[str, Tensor], bounds: Sequence[int], gradients: Sequence[str]
) -> dict[str, float]:
    """By how much this process's results differ from its piece of one process's, relative to the whole."""
    rank, result = dist.get_rank(), {}
    for name, x in found.items():
        plain = name[1:] if name in gradients else name
        wanted = whole[name] if name.endswith("_end") else piece_of(plain, whole[name], bounds, rank)
        x = x.double().contiguous()
        if name in gradients and wanted.shape == whole[name].shape and (plain in CONSTANT or x.ndim == 1):
            dist.all_reduce(x)  # each process has a part of the gradient of what they share
        assert x.shape == wanted.shape, (name, x.shape, wanted.shape)
        error = (x - wanted).square().sum().sqrt() / whole[name].square().sum().sqrt().clamp(min=1e-6)
        result[name] = error.item()
    return result


def compare(case: Case, kind: str, dtype: torch.dtype, impl: str = "auto", states: str = "last") -> None:
    """Compare outputs, states and all gradients of one call."""
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = make_inputs(case, dtype)
    wide = {name: x.double().requires_grad_() for name, x in inputs.items()}
    y, end = call(case, wide, impl if impl == "auto" else "reference")
    y_weights = weights(y)
    shared = end if states == "last" else ()
    loss = loss_of(y, y_weights, shared, 1.0)
    whole = {"y": y, "S_end": end.S, "M_end": end.M}
    by_inputs = torch.autograd.grad(loss, list(wide.values()), allow_unused=True, materialize_grads=True)
    whole |= {f"d{name}": g for name, g in zip(wide, by_inputs, strict=True)}
    whole = {name: x.detach().double() for name, x in whole.items()}

    bounds = cuts(y.shape[1], size, kind)
    leaves = {name: piece_of(name, x, bounds, rank).clone().requires_grad_() for name, x in inputs.items()}
    share = SHARES[rank] / sum(SHARES[:size])
    with context_parallel(states=states):
        y, end = call(case, leaves, impl)
    loss = loss_of(y, piece_of("y", y_weights, bounds, rank), end if states == "last" else (), share)
    found = {"y": y, "S_end": end.S, "M_end": end.M} if states == "last" else {"y": y}
    by_inputs = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    gradients = [f"d{name}" for name in leaves]
    found |= dict(zip(gradients, by_inputs, strict=True))
    found = {name: x.detach() for name, x in found.items()}
    off = {n: e for n, e in differences(found, whole, bounds, gradients).items() if not e <= TOLERANCE[dtype]}
    assert not off, f"process {rank} of {size}, {case}, {kind}, {dtype}, {impl}: {off}"


PACKED = (30, 0, 5, 61, 0, 1, 22)


def rules() -> int:
    """Every rule of both operators, as a batch and packed, in float64 and float32."""
    count = 0
    for number, (name, muon) in enumerate({**MUONS, **FAMILY}.items()):
        cases = [
            Case(eta=1.0, muon=muon, gamma="step"),
            Case(eta=0.0, muon=muon, gamma="float"),
            Case(eta=1.0, muon=muon, gamma="head", packed=True, lengths=PACKED, inject=number % 2 == 0),
            Case(eta=0.0, muon=muon, gamma="step", packed=True, lengths=PACKED, inject=number % 2 == 1),
        ]
        if name in MUONS:
            cases += [
                Case("selective", muon=muon, gamma="float"),
                Case("longhorn", muon=muon, gamma="step", packed=True, lengths=PACKED),
            ]
        for case in cases:
            for dtype in (torch.float64, torch.float32):
                kind = ("even", "ragged", "ragged" if case.packed else "empty")[count % 3]
                compare(replace(case, initial_state=count % 4 < 3), kind, dtype)
                count += 1
    return count


def empty_pieces() -> int:
    """A first or a last process without a step."""
    cases = [
        Case(muon=Muon(), inject=True, lengths=(9, 9)),
        Case(muon=Muon.residual(), inject=True, lengths=(9, 9)),
        Case(eta=0.0, muon=Muon.residual(), lengths=(9, 9)),
        Case("selective", lengths=(9, 9)),
        Case("longhorn", lengths=(9, 9), initial_state=False),
    ]
    for kind in ("first empty", "last empty"):
        for case in cases:
            compare(case, kind, torch.float64)
    return 2 * len(cases)


def implementations() -> int:
    """The other implementations, pieces that send nothing of their last states, and half precision."""
    count = 0
    for impl in ("reference", "chunked", "scan"):
        for operator in ("memory", "selective"):
            compare(Case(operator), "ragged", torch.float64, impl)
            compare(Case(operator, packed=True, lengths=PACKED), "even", torch.float64, impl, "own")
            count += 2
    with torch.autocast("cpu", torch.bfloat16):  # which the recurrence ignores
        compare(Case(), "ragged", torch.float32)
        compare(Case(eta=0.0), "even", torch.float32)
    count += 2
    for dtype in (torch.bfloat16, torch.float16):
        compare(Case(), "ragged", dtype)
        compare(Case("selective", initial_state=False), "even", dtype)
        count += 2
    return count


def convolutions() -> int:
    """The short convolution, with pieces shorter than its filter, packed and not, with inputs from before."""
    rank, size, count = dist.get_rank(), dist.get_world_size(), 0
    calls = [("even", 4, False), ("ragged", 1, False), ("empty", 3, False), ("ragged", 5, True), ("even", 2, True)]
    calls += [("first empty", 4, False), ("last empty", 3, False)]
    for number, (kind, taps, packed) in enumerate(calls):
        channels = 6
        torch.manual_seed(number)
        n = len(PACKED) if packed else 2
        L = sum(PACKED) if packed else 13
        bounds = torch.tensor([0, *PACKED]).cumsum(0) if packed else None
        inputs = {
            "x": torch.randn(1 if packed else 2, L, channels, dtype=torch.float64),
            "M": torch.randn(n, taps - 1, channels, dtype=torch.float64),  # the tail, which has no time either
            "S": torch.randn(channels, 1, taps, dtype=torch.float64),
            "A": torch.randn(channels, dtype=torch.float64),
        }

        def convolve(x: Tensor, M: Tensor, S: Tensor, A: Tensor, bounds: Tensor | None = bounds) -> tuple[Tensor, ...]:
            return causal_convolution(x, S, A, tail=M, cu_seqlens=bounds)

        wide = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        y, end = convolve(**wide)
        y_weights = weights(y)
        by_inputs = torch.autograd.grad(loss_of(y, y_weights, [end], 1.0), list(wide.values()))
        whole = {"y": y.detach(), "M_end": end.detach()}
        whole |= {f"d{name}": g for name, g in zip(wide, by_inputs, strict=True)}
        pieces = cuts(L, size, kind)
        leaves = {name: piece_of(name, x, pieces, rank).clone().requires_grad_() for name, x in inputs.items()}
        with context_parallel():
            y, end = convolve(**leaves)
        share = SHARES[rank] / sum(SHARES[:size])
        loss = loss_of(y, piece_of("y", y_weights, pieces, rank), [end], share)
        by_inputs = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        found = {"y": y.detach(), "M_end": end.detach()}
        found |= {f"d{name}": g for name, g in zip(leaves, by_inputs, strict=True)}
        if taps == 1:  # there is no tail
            found, whole = ({n: x for n, x in some.items() if x.numel()} for some in (found, whole))
        off = differences(found, whole, pieces, [f"d{name}" for name in leaves])
        assert max(off.values()) < 1e-12, f"process {rank} of {size}, {taps} taps, {kind}: {off}"
        count += 1
    return count


def mixers() -> int:
    """Every backbone, plain and with Muon: outputs, states and gradients of the weights; then a second half."""
    rank, size, count = dist.get_rank(), dist.get_world_size(), 0
    for name, (backbone, dims) in DIMS.items():
        for rule in ("plain", "muon per step") if backbone != "momentum_deltanet" else ("muon",):
            muon, more = RULES[rule]
            mixer = Variant(name, backbone, {**dims, **more}, muon).build(torch.float64)
            x = torch.randn(2, 23, D_MODEL, dtype=torch.float64)
            y_weights = weights(x)
            parameters = list(mixer.parameters())
            y, state = mixer(x[:, :14])
            later, _ = mixer(x[:, 14:], state)
            whole = torch.cat([y, later], dim=1)
            wanted = torch.autograd.grad(
                (whole * y_weights).sum(), parameters, allow_unused=True, materialize_grads=True
            )
            pieces, state, loss = [], None, torch.zeros((), dtype=torch.float64)
            with context_parallel():
                for half in (slice(0, 14), slice(14, 23)):
                    bounds = cuts(half.stop - half.start, size, "ragged" if count % 2 else "even")
                    own = slice(half.start + bounds[rank], half.start + bounds[rank + 1])
                    y, state = mixer(x[:, own], state)
                    loss = loss + (y * y_weights[:, own]).sum()
                    pieces.append(difference(y, whole[:, own]))
            assert max(pieces) < 1e-10, f"{name}, {rule}: {pieces}"
            found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            for (each, _), g, w in zip(mixer.named_parameters(), found, wanted, strict=True):
                dist.all_reduce(g)
                assert difference(g, w) < 1e-9, f"{name}, {rule}, {each}: {difference(g, w)}"
            count += 1
    return count


def sent(case: Case, states: str, learns: bool = True) -> int:
    """Bytes that all processes together send for a call, and for its gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = make_inputs(case, torch.float32)
    bounds = cuts(sum(case.lengths) if case.packed else case.lengths[0], size, "even")
    leaves = {n: piece_of(n, x, bounds, rank).clone().requires_grad_(learns) for n, x in inputs.items()}
    with context_parallel(states=states) as context:
        y, _ = call(case, leaves, "auto")
    if learns:
        y.sum().backward()
    total = torch.tensor(context.bytes_sent)
    dist.all_reduce(total)
    return int(total)


def traffic() -> int:
    """The bytes sent are those of `cost.py`, and the same for every length."""
    size, count = dist.get_world_size(), 0
    heads, d, m, batch, number = 3, 12, 10, 2, 4
    for operator, eta in (("memory", 1.0), ("memory", 0.0), ("selective", 0.0)):
        for muon in (Muon(), Muon.off(), Muon.residual(gamma=0.0)):
            residual = muon.correction == "momentum" and operator == "memory" and eta != 0
            cases = [
                Case(operator, (L,) * batch, eta=eta, muon=muon, gamma="float", heads=heads, d=d, m=m) for L in (20, 90)
            ]
            for states in ("last", "own"):
                for learns in (False, True):
                    first, second = (sent(case, states, learns) for case in cases)
                    memory = cost.Memory(
                        heads=heads if operator == "memory" else 1, values=d, keys=m,
                        momentum=muon.gamma != 0 or residual,
                        form="diagonal" if operator == "selective" else "matrix" if eta else "scalar",
                    )  # fmt: skip
                    wanted = cost.memory_bytes(memory, size, batch, number, last=states == "last", backward=learns)
                    wanted += cost.agreement_bytes(1, size)
                    assert first == second == wanted, (operator, eta, muon, states, learns, first, second, wanted)
                    count += 1
    return count


def errors() -> int:
    """What cannot be split says so, on every process."""
    mixer = Variant("x", "deltanet", {"num_heads": 2}, Muon()).build()
    both = Variant("x", "deltanet", {"num_heads": 2}, Muon()).build(bidirectional=True)
    x = torch.randn(1, 4, D_MODEL)
    inputs = [make_inputs(Case(lengths=(4,)), torch.float32)[name] for name in ("q", "k", "v", "log_alpha", "beta")]
    rank = dist.get_rank()
    size = dist.get_world_size()
    later = rank > 0
    bounds = torch.tensor([0, 3, 4 * size])
    state, wide = MemoryState(*torch.zeros(2, 1, 2, 7, 6)), torch.zeros(1, 4, 6)
    wrong = [
        ("bidirectional must be", lambda: both(x)),
        ("mask must be", lambda: mixer(x, mask=torch.ones(1, 4))),
        ("cu_seqlens must", lambda: mixer(x, cu_seqlens=torch.tensor([0, 4]))),
        ("cu_seqlens must be an int", lambda: call_memory(inputs, cu_seqlens=[0, 4 * size])),
        (
            "cu_seqlens must be the same",
            lambda: call_memory(inputs, cu_seqlens=bounds + later * torch.tensor([0, 1, 0])),
        ),
        ("orthogonalize must be", lambda: call_memory(inputs, muon=Muon(orthogonalize="read"))),
        ("at least one step", lambda: mixer(x[:, : 4 * later], cu_seqlens=torch.tensor([0, 4 * (size - 1)]))),
        ("q must be a tensor", lambda: call_memory([None, *inputs[1:]])),
        ("muon.gamma must", lambda: call_memory(inputs, muon=Muon(gamma=torch.rand(1, 4 * size, 2)))),
        ("state.S must have shape", lambda: call_memory(inputs, cu_seqlens=bounds, state=state)),
        ("state.S must have shape", lambda: call_memory(inputs, state=state)),
        ("tail must have shape", lambda: causal_convolution(x, torch.zeros(D_MODEL, 1, 3), tail=x[:, :1])),
        # What differs between processes: the number of heads or channels, the rule, the dtype, who learns, the packing.
        ("same on every process", lambda: call_memory([t[:, :, : 2 - later] for t in inputs])),
        ("same on every process", lambda: call_memory(inputs, muon=Muon() if later else Muon.off())),
        ("same on every process", lambda: call_memory([t.double() if later else t for t in inputs])),
        ("same on every process", lambda: call_memory([t.clone().requires_grad_(later) for t in inputs])),
        ("same on every process", lambda: call_memory(inputs, cu_seqlens=bounds if later else None)),
        ("same on every process", lambda: causal_convolution(wide[:, :, later:], torch.zeros(6 - later, 1, 3))),
    ]
    for message, function in wrong:
        with context_parallel(), pytest.raises((TypeError, ValueError), match=message):
            function()
    with pytest.raises(ValueError, match="states must be"), context_parallel(states="first"):
        pass
    first = dist.new_group([0])
    for group, message in ((first, "group must contain"), ([0, 1], "group must be a torch.distributed.ProcessGroup")):
        if group is not first or later:
            with pytest.raises((TypeError, ValueError), match=message), context_parallel(group):  # type: ignore[arg-type]
                pass
    return len(wrong)


def odd_calls() -> int:
    """Gradients of a state or tail alone or of gradients, states of other dtypes, bounds changed in place, nesting."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alone, _ = dist.new_subgroups(1)
    inputs = make_inputs(Case(lengths=(12,), gamma="float"))
    state = {name: inputs.pop(name).requires_grad_() for name in ("S", "M")}
    tensors = [inputs[name] for name in ("q", "k", "v", "log_alpha", "beta")]
    x, weight = inputs["v"].flatten(2), torch.randn(14, 1, 5, generator=torch.Generator().manual_seed(0)).double()
    tail = torch.ones(1, 4, 14, dtype=torch.float64, requires_grad=True)
    pieces = slice(*cuts(12, size, "ragged")[rank : rank + 2])
    for name, starts, function in (
        ("state", [*state.values()], lambda own: call_memory([t[:, own] for t in tensors], state=MemoryState(**state))),
        ("tail", [tail], lambda own: causal_convolution(x[:, own], weight, tail=tail)),
    ):
        y = function(slice(0, 12))[0]
        y_weights = weights(y)
        wanted = torch.autograd.grad((y * y_weights).sum(), starts)
        with context_parallel():
            y = function(pieces)[0]
        found = torch.autograd.grad((y * y_weights[:, pieces]).sum(), starts, allow_unused=True, materialize_grads=True)
        for g, w in zip(found, wanted, strict=True):
            assert difference(g, w) < 1e-10 if rank == 0 else not g.any(), (name, rank)

    own = slice(*cuts(12, size, "even")[rank : rank + 2])
    narrow, start = [t[:, own].float() for t in tensors], torch.ones(2, 2, 2, 7, 5)
    with context_parallel():  # a state of another dtype than the inputs
        results = [
            call_memory(narrow, cu_seqlens=torch.tensor([0, 7, 12]), state=MemoryState(*start.to(dtype)))
            for dtype in (torch.float32, torch.float64, torch.bfloat16)
        ]
    for y, end in results[1:]:
        assert torch.equal(y, results[0][0])
        assert torch.equal(end.S, results[0][1].S)

    bounds = torch.tensor([0, 3, 12])
    tensors = [t[:, pieces] for t in tensors]
    with context_parallel() as outer:
        call_memory(tensors, cu_seqlens=bounds)
        bounds[1] = 7
        y = call_memory(tensors, cu_seqlens=bounds)[0]
        assert torch.equal(y, call_memory(tensors, cu_seqlens=bounds.clone())[0])
        sent = outer.bytes_sent
        with context_parallel(alone) as inner:
            apart = call_memory(tensors)[0]
        assert inner.bytes_sent == 0
        assert outer.bytes_sent == sent
    assert torch.equal(apart, call_memory(tensors)[0])

    v, x = (t.clone().requires_grad_() for t in (tensors[2], x[:, pieces]))
    with context_parallel():
        once = [(v, call_memory([*tensors[:2], v, *tensors[3:]])[0]), (x, causal_convolution(x, weight)[0])]
    for leaf, y in once:
        with pytest.raises(ValueError, match="create_graph must be False"):
            torch.autograd.grad(y.square().sum(), leaf, create_graph=True)
    return 2 + 2 + 2 + 2


def call_memory(inputs: Sequence[Any], **settings: Any) -> tuple[Tensor, MemoryState]:
    from muonssm import muon_memory

    return muon_memory(*inputs, **settings)


class Count(TorchDispatchMode):
    """Counts the bytes that this process sends, of every collective that torch runs, as `Exchange` does."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            size, name = dist.get_world_size(), function.overloadpacket.__name__
            tensors = args[1:2] if "base" in name or name == "allgather_" else args[:1]
            tensors = tensors if isinstance(tensors[0], torch.Tensor) else tensors[0]
            total = sum(x.numel() * x.itemsize for x in tensors)
            share = {"allreduce_": 2 * (size - 1) / size, "_allgather_base_": size - 1, "send": 1, "recv_": 0}
            share["_reduce_scatter_base_"] = (size - 1) / size
            if name == "allgather_":  # of a group, to each of its other processes
                share[name] = len(args[0][0]) - 1
            self.sent += total * share[name]
        return function(*args, **(kwargs or {}))


def training() -> int:
    """A training step of a language model sends what the cost model predicts, to the byte."""
    from muonssm.lab.core.torchvision_cpu import prepare_torchvision

    prepare_torchvision()
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from muonssm.models.language import MuonSSMConfig, MuonSSMForCausalLM

    spec = importlib.util.spec_from_file_location("scale", Path(__file__).parents[2] / "benchmarks" / "scale.py")
    assert spec is not None
    assert spec.loader is not None
    scale = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scale)
    size, count, batch, length = dist.get_world_size(), 0, 2, 12
    config = MuonSSMConfig(
        backbone="gated_deltanet", vocab_size=51, hidden_size=18, intermediate_size=22, num_hidden_layers=2,
        num_attention_heads=1, mixer={"num_heads": 3, "head_k_dim": 5},
    )  # fmt: skip
    for sharded in (False, True):
        for context in [each for each in (1, 2, 4) if size % each == 0]:
            torch.manual_seed(0)
            plain = MuonSSMForCausalLM(config)
            described = scale.describe(plain)
            if sharded:
                for block in plain.model.layers:
                    fully_shard(block)
                fully_shard(plain)
            model = plain if sharded else DistributedDataParallel(plain)
            group, _ = dist.new_subgroups(context)
            tokens = torch.randint(0, 51, (batch, length // context))
            counter = Count()
            with counter, context_parallel(group, states="own") if context > 1 else nullcontext() as split:
                loss = model(input_ids=tokens, shift_labels=tokens, labels=tokens).loss
                loss.backward()
            total = torch.tensor([counter.sent, split.bytes_sent if split else 0.0])
            dist.all_reduce(total)
            weights = cost.fsdp_bytes(described.blocks, described.root, size)
            weights = weights if sharded else cost.ddp_bytes(described.parameters, size)
            memory = cost.memory_bytes(described.memory, context, batch)
            layer = memory + cost.convolution_bytes(described.channels, described.taps, context, batch)
            agreed = cost.agreement_bytes(2, context)  # the memory's call and the convolution's
            exchanged = (len(described.blocks) * layer + agreed) * size // context
            assert total.tolist() == [weights + exchanged, exchanged], (sharded, context, total, weights, exchanged)
            count += 1
    return count
