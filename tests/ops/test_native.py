"""The C++ kernels: the library's interface, threads, memory, compilation, decoding, other instruction sets."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from muonssm.lab.bench.measure import peak_bytes
from muonssm.ops import MemoryState, Muon, cpu_library, decoding, launch, muon_memory, muon_selective_scan
from muonssm.ops.memory.chunked import chunk_states
from muonssm.ops.memory.native import memory_native
from muonssm.ops.selective.chunked import selective_chunked
from muonssm.ops.selective.native import selective_native

from .cases import (
    OPERATORS,
    TOLERANCE,
    Case,
    all_combinations,
    assert_close,
    call,
    difference,
    expected,
    first_is_quick,
    make_inputs,
    results,
)


def test_the_kernels_are_built_here():
    """Tests need a compiler: without the kernels most tests below would be void."""
    assert cpu_library.unavailable() is None
    assert cpu_library.isa() in ("portable", "avx2", "avx512")


@pytest.mark.parametrize("struct", cpu_library.STRUCTS, ids=lambda struct: struct.__name__)
def test_a_struct_of_another_size_is_an_error_that_names_it(struct, monkeypatch):
    """As if a field had been added to Python's struct, and the library not been rebuilt."""
    longer = type(struct.__name__, (struct,), {"_fields_": (("added", ctypes.c_int64),)})
    monkeypatch.setattr(cpu_library, "STRUCTS", (longer,))
    with pytest.raises(OSError, match=f"struct {struct.__name__} .*, got {ctypes.sizeof(struct)}; rebuild"):
        cpu_library.load.__wrapped__()


def test_an_old_library_is_an_error(monkeypatch):
    monkeypatch.setattr(cpu_library, "ABI", cpu_library.ABI + 1)
    with pytest.raises(OSError, match=r"ABI number .*rebuild"):
        cpu_library.load.__wrapped__()
    monkeypatch.undo()
    monkeypatch.setitem(cpu_library.CONSTANTS, "SEGMENT", 128)
    with pytest.raises(OSError, match=r"SEGMENT .*rebuild"):
        cpu_library.load.__wrapped__()


def test_every_argument_struct_of_a_kernel_is_checked():
    assert set(cpu_library.FUNCTIONS.values()) <= set(cpu_library.STRUCTS)
    assert cpu_library.Write in cpu_library.STRUCTS


def assert_same_bits(case, inputs, threads):
    """Results and gradients must be the same in every run, with these numbers of threads."""
    before, found = torch.get_num_threads(), []
    for count in threads:
        torch.set_num_threads(count)
        found.append(results(case, inputs, "native"))
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(found[0][name], other[name]) for name in other)


@all_combinations(operator=OPERATORS, packed=[False, True])
def test_gradients_do_not_depend_on_the_number_of_threads_or_the_run(operator, packed):
    case = Case(operator=operator, lengths=(70, 70, 70, 70), packed=packed, d=150, heads=3)
    inputs = make_inputs(case, torch.float32)
    assert_same_bits(case, inputs, (1, 2, 3, 2))


@all_combinations(operator=OPERATORS, eta=[0.0, 1.0], gamma=["float", "step"])
def test_threads_that_share_the_rows_of_a_head_give_the_same_bits(operator, eta, gamma):
    """One head of one sequence: rows or channels are divided, over several windows of segments."""
    case = Case(operator=operator, lengths=(1100,), d=72, heads=1, eta=eta, gamma=gamma)
    inputs = make_inputs(case, torch.float32)
    assert_same_bits(case, inputs, (1, 2, 4, 5))


@first_is_quick("operator", OPERATORS)
def test_extra_memory_of_a_training_step(operator):
    """It needs at most twice the inputs plus a state per 64 steps, in addition to the output and the gradients."""
    case = Case(operator=operator, lengths=(2048,), heads=4, d=64, m=64, gamma="float", initial_state=False)
    inputs = {name: x.requires_grad_() for name, x in make_inputs(case, torch.float32).items()}
    size = sum(x.numel() * 4 for x in inputs.values())
    outputs = size + inputs["v" if operator == "memory" else "x"].numel() * 4
    states = 2 * (case.heads if operator == "memory" else 1) * 64 * 64 * 4 * (2048 // 64 + 1)
    peak = peak_bytes(lambda: call(case, inputs, "native")[0].sum().backward())
    assert peak <= outputs + 2 * size + states


@first_is_quick("operator", OPERATORS)
def test_compiles_as_one_graph_and_serves_new_lengths(operator):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    names = list(make_inputs(Case(operator=operator, initial_state=False)))
    case = Case(operator=operator, initial_state=False)

    @torch.compile(backend=counter, fullgraph=True)
    def compiled(*tensors):
        return call(case, dict(zip(names, tensors, strict=True)), "native")

    for L in (100, 128, 65, 192, 33, 1000):
        one = replace(case, lengths=(L, L))
        inputs = [x.requires_grad_() for x in make_inputs(one).values()]
        y, state = compiled(*inputs)
        gradients = torch.autograd.grad(y.square().sum() + state.S.sum(), inputs)
        wanted, end = call(one, dict(zip(names, inputs, strict=True)), "native")
        by_eager = torch.autograd.grad(wanted.square().sum() + end.S.sum(), inputs)
        for found, other in zip((y, *state, *gradients), (wanted, *end, *by_eager), strict=True):
            torch.testing.assert_close(found, other)
    assert counter.frame_count <= 2


@first_is_quick("operator", OPERATORS)
def test_exports_with_a_dynamic_length(operator):
    case = Case(operator=operator, gamma="float", initial_state=False, lengths=(70, 70))
    inputs = make_inputs(case, torch.float32)
    names = list(inputs)

    class Layer(torch.nn.Module):
        def forward(self, *tensors):
            y, state = call(case, dict(zip(names, tensors, strict=True)), "native")
            return y, state.S, state.M

    length = torch.export.Dim("length", min=2, max=4096)
    shapes = tuple({} if name == "A" else {1: length} for name in names)
    program = torch.export.export(Layer(), tuple(inputs.values()), dynamic_shapes=(shapes,))
    other = make_inputs(replace(case, lengths=(201, 201)), torch.float32)
    y, S, M = program.module()(*other.values())
    wanted, end = call(case, other, "native")
    torch.testing.assert_close((y, S, M), (wanted, *end))


def permuted(x: torch.Tensor) -> torch.Tensor:
    """Return the same values in another memory layout."""
    return x.transpose(-1, 1).contiguous().transpose(-1, 1)


CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")


@pytest.mark.full
def test_operators_pass_opcheck():
    """Schemas, fakes and autograd registrations agree with the operators, also for permuted inputs."""
    i = {name: x.requires_grad_() for name, x in make_inputs(Case(lengths=(70, 70))).items()}
    offsets, write = torch.tensor([0, 70, 140]), launch.write_numbers(Muon())
    inputs = [i[name] for name in ("q", "k", "v", "log_alpha", "beta", "gamma")]
    inject = torch.rand(i["beta"].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for residual, gates in ((False, inputs), (True, [*inputs, inject.requires_grad_()])):
        arguments = (gates, i["S"], i["M"], offsets, 1.0, residual, True, write, True, False)
        torch.library.opcheck(memory_native, arguments, test_utils=CHECKS)
    selective = Case(operator="selective", lengths=(70, 70), d=64)  # a whole group of channels
    s = {name: x.requires_grad_() for name, x in make_inputs(selective).items()}
    inputs = [s[name] for name in ("x", "dt", "B", "C", "gamma")]
    torch.library.opcheck(
        selective_native, (inputs, s["A"], s["S"], s["M"], offsets, True, write, True, False), test_utils=CHECKS
    )
    steps = [permuted(s[name].detach()).requires_grad_() for name in ("x", "dt")]
    rest = (s["A"], s["B"], s["C"], s["gamma"], torch.ones(2, 70, 1, dtype=torch.float64))
    torch.library.opcheck(selective_chunked, (*steps, *rest, permuted(s["S"]), s["M"]), test_utils=CHECKS)
    generator = torch.Generator().manual_seed(0)
    shapes = (
        [(2, 3, 4, 5)] * 2 + [(6, 2, 3, 1, 1)] * 3 + [(6, 2, 3, 4, 5)] * 2 + [(6, 2, 3, 8, 4)] + [(6, 2, 3, 8, 5)] * 4
    )
    S, M, A, g, Gam, *others = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    *paper, KM = (permuted(x) for x in others)
    for last in (None, KM):  # the correction in S, or in M too
        torch.library.opcheck(chunk_states, (permuted(S), M, [A, g, Gam], *paper, last), test_utils=CHECKS)


@all_combinations(
    shape=[{"d": 8, "m": 16}, {"d": 7, "m": 5}, {"d": 1, "m": 1}],
    dtype=[torch.float32, torch.float64, torch.bfloat16, torch.float16],
)
def test_a_decoding_step_is_a_sequence_of_one(shape, dtype):
    case = Case(lengths=(1, 1), gamma="float", **shape)
    i = make_inputs(case, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    gates = [i[name].to(wide) for name in ("log_alpha", "beta")]
    y, state = muon_memory(i["q"], i["k"], i["v"], *gates, state=MemoryState(i["S"], i["M"]))  # takes the shortcut
    wanted = expected(case, dtype)
    found = {"y": y, "S_end": state.S, "M_end": state.M}
    assert y.dtype == dtype
    assert_close(found, {name: wanted[name] for name in found}, TOLERANCE[dtype])


def test_a_decoding_step_goes_straight_to_its_kernel(monkeypatch):
    """A step like an earlier one needs neither validation nor dispatch."""
    i = make_inputs(Case(lengths=(1, 1), gamma="float"), torch.float32)
    step, state = [i[name] for name in ("q", "k", "v", "log_alpha", "beta")], MemoryState(i["S"], i["M"])
    wanted, _ = muon_memory(*step, state=state)

    def fail(*arguments):
        raise AssertionError("a decoding step took the long way")

    monkeypatch.setattr("muonssm.ops.memory._validate", fail)
    y, _ = muon_memory(*step, state=state)
    assert torch.equal(y, wanted)
    with pytest.raises(AssertionError, match="long way"):
        muon_memory(*(x[:, [0, 0]] for x in step), state=state)


def test_a_decoding_step_is_still_checked_and_differentiated():
    i = make_inputs(Case(lengths=(1, 1), gamma="float"), torch.float32)
    state = MemoryState(i["S"], i["M"])
    step = [i["q"], i["k"], i["v"], i["log_alpha"], i["beta"]]
    with pytest.raises(ValueError, match="log_alpha must be"):
        muon_memory(*step[:3], torch.ones_like(step[3]), step[4], state=state)
    with pytest.raises(ValueError, match=r"state\.M must have"):
        muon_memory(*step, state=MemoryState(i["S"], i["M"].mT.contiguous()))
    with pytest.raises(ValueError, match="v must be on cpu"):
        muon_memory(*step[:2], step[2].to("meta"), *step[3:], state=state)
    with pytest.raises(TypeError, match="state must be"):
        muon_memory(*step, state=torch.zeros(3, 2, 7, 5))
    with pytest.raises(ValueError, match="v must have shape"):
        muon_memory(*step[:2], step[2][..., 0].contiguous(), *step[3:], state=state)
    for eta, error in (([1.0], TypeError), (True, TypeError), (float("nan"), ValueError)):
        with pytest.raises(error, match="eta must be"):
            muon_memory(*step, eta=eta, state=state)
    step[2].requires_grad_()
    y, _ = muon_memory(*step, state=state)
    assert torch.autograd.grad(y.sum(), step[2])[0].abs().sum() > 0


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("lengths", [(0, 1), (1, 0, 0), (1,)], ids=str)
def test_one_packed_step_beside_empty_sequences_is_no_decoding_step(operator, lengths):
    """L is 1, but the single-step kernel would read and write a step for every sequence."""
    case = Case(operator=operator, gamma="float", lengths=lengths, packed=True)
    found = results(case, make_inputs(case), "native", gradients=False)
    wanted = expected(case, torch.float64)
    assert_close(found, {name: wanted[name] for name in found}, TOLERANCE[torch.float64])


def test_a_compiled_decoding_step_with_a_log_alpha_above_zero_is_computed():
    """Compiled calls do not check values; the single-step kernel refuses such a gate, and the general one serves."""
    case = Case(lengths=(1,), gamma="float")
    inputs = {name: x.abs() if name == "log_alpha" else x for name, x in make_inputs(case).items()}
    wanted, end = torch.compile(lambda **i: call(case, i, "reference"), backend="eager")(**inputs)
    y, state = torch.compile(lambda **i: call(case, i, "native"), backend="eager")(**inputs)
    torch.testing.assert_close((y, *state), (wanted, *end))


def test_what_counts_as_a_decoding_step():
    x, weight = torch.zeros(2, 1, 3), torch.nn.Parameter(torch.zeros(3))
    assert decoding.is_one_step(1, packed=False)
    assert not decoding.is_one_step(0, packed=False)
    assert not decoding.is_one_step(1, packed=True)
    assert not decoding.is_decoding_step(1, packed=False, recorded=True)
    assert decoding.is_direct_step((x,))
    assert not decoding.is_direct_step((x, weight))
    with torch.no_grad():
        assert decoding.is_direct_step((x, weight))
    assert not decoding.is_direct_step((x,), packed=True)
    assert not decoding.is_direct_step((x[:, [0, 0]],))
    assert not decoding.is_direct_step((x[0, 0],))
    assert not decoding.is_direct_step((x, [1.0]))
    assert not decoding.is_direct_step((x, x.to("meta")))
    with torch.autograd.forward_ad.dual_level():
        assert not decoding.is_direct_step((x,))


def scalar_loss(operator: str, impl: str):
    case = Case(operator=operator, lengths=(20,), gamma="float", initial_state=False)
    i = make_inputs(case)
    name = "v" if operator == "memory" else "x"
    return lambda x: call(case, {**i, name: x}, impl)[0].square().sum(), i[name]


@pytest.mark.parametrize("operator", ["memory", "selective"])
def test_torch_func_and_forward_mode_are_served_or_refused(operator):
    """`auto` takes an implementation of torch's own operations; the others raise instead of dropping tangents."""
    loss, x = scalar_loss(operator, "auto")
    gradient = torch.autograd.grad(loss(x.requires_grad_()), x)[0]
    x = x.detach()
    torch.testing.assert_close(torch.func.grad(loss)(x), gradient)
    direction = torch.ones_like(x)
    value, tangent = torch.func.jvp(loss, (x,), (direction,))
    torch.testing.assert_close(tangent, (gradient * direction).sum())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, direction)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(loss(dual)).tangent, tangent)
    torch.testing.assert_close(torch.func.vmap(loss)(torch.stack((x, 2 * x)))[0], value)
    for impl in ("native", "chunked"):
        refused, _ = scalar_loss(operator, impl)
        with pytest.raises(ValueError, match=f"impl='{impl}' .*torch.func"):
            torch.func.jvp(refused, (x,), (direction,))


@pytest.mark.full
def test_portable_kernels_agree():
    """MUONSSM_ISA selects the code for machines without AVX2, in a separate process."""
    code = (
        "from tests.ops.cases import *\n"
        "from muonssm.ops import cpu_library\n"
        "assert cpu_library.isa() == 'portable'\n"
        "for operator in OPERATORS:\n"
        "    for dtype in (torch.float64, torch.float32):\n"
        "        case = Case(operator=operator, lengths=(65, 3, 0, 17), packed=True)\n"
        "        found = results(case, make_inputs(case, dtype), 'native')\n"
        "        assert_close(found, expected(case, dtype), TOLERANCE[dtype])\n"
        "print('agree')\n"
    )
    environment = {**os.environ, "MUONSSM_ISA": "portable"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "agree", done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gates_of_the_selective_scan_are_exact_exponentials(dtype):
    """One step from S = 1 shows the vectorized exp: accurate to a few units in the last place, zero on underflow."""
    x = -torch.cat((torch.linspace(0, 100, 4001), torch.logspace(-8, 4, 200))).to(dtype)
    D = len(x)
    zero, one = torch.zeros(1, 1, D, dtype=dtype), torch.ones(1, 1, 1, dtype=dtype)
    state = MemoryState(torch.ones(1, D, 1, dtype=dtype), torch.zeros(1, D, 1, dtype=dtype))
    _, end = muon_selective_scan(zero, zero + 1, x[:, None], one, one, muon=Muon.off(), state=state, impl="native")
    wanted = x.double().exp()
    normal = wanted > torch.finfo(dtype).tiny * 2
    error = (end.S[0, :, 0].double() / wanted - 1)[normal].abs().max().item()
    assert error < 4 * torch.finfo(dtype).eps
    assert not end.S[0, wanted < torch.finfo(dtype).tiny / 2, 0].any()


def test_half_precision_is_rounded_as_torch_rounds_it():
    """Send every float16 and bfloat16 through a memory that returns its value: one column and a plain write."""
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
        every = every[every.isfinite()]
        v = every.reshape(1, 1, 1, -1)
        one = torch.ones(1, 1, 1, 1, dtype=dtype)
        gate = torch.zeros(1, 1, 1)
        y, state = muon_memory(one, one, v, gate, gate + 1, eta=0.0, muon=Muon.off(), impl="native")
        assert torch.equal(y, v)
        assert torch.equal(state.S.flatten(), every.float())
        third = torch.full_like(one, 1 / 3)
        y, _ = muon_memory(third, one, v, gate, gate + 1, eta=0.0, muon=Muon.off(), impl="native")
        assert torch.equal(y.flatten(), (every.float() * third.float().item()).to(dtype))


def test_difference_to_the_reference_is_small_where_keys_repeat_and_beta_is_large():
    """With DeltaNet's negative eigenvalues (beta up to 2) and equal keys, the system of a chunk is ill-conditioned."""
    L = 256
    k = torch.nn.functional.normalize(torch.ones(1, L, 1, 8), dim=-1)
    v = torch.randn(1, L, 1, 4, generator=torch.Generator().manual_seed(0))
    inputs = (k, k, v, torch.zeros(1, L, 1), torch.full((1, L, 1), 1.9))
    wanted, _ = muon_memory(*(x.double() for x in inputs), impl="reference")
    assert difference(muon_memory(*inputs, impl="native")[0], wanted) < 1e-5
    assert difference(muon_memory(*inputs, impl="chunked")[0], wanted) < 1e-4
