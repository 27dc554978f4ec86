"""The self-check of the Triton kernels, under the interpreter: kernels made wrong are found, warned about and not used.

test_self_check.py runs this. `auto` takes Triton on a CPU here, as it does on a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
import warnings
from pathlib import Path

import pytest
import torch

from muonssm import Muon, muon_selective_scan
from muonssm.cli import main
from muonssm.ops import dispatch
from muonssm.ops.memory import kernels as memory_kernels
from muonssm.ops.memory.kernels.aot import KERNELS
from muonssm.ops.selective import triton as selective_triton
from muonssm.ops.triton import self_check
from muonssm.ops.triton.kinds import Kind

from .cases import Case, call, make_inputs

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1, or run test_self_check.py"

CPU = torch.device("cpu")
CASE = Case(lengths=(10,), initial_state=False, gamma="float")
MUTATIONS = {  # kernel: file, function, a line's beginning and what it becomes
    "memory_output": ("fwd_output.py", "output", "Y += product(Cm * QK", "Y -= product(Cm * QK"),
    "memory_keys": ("bwd_keys.py", "keys", "dK += product(tl.trans(scores), Q", "dK -= product(tl.trans(scores), Q"),
}


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """Let `auto` take Triton here, and start without findings."""
    monkeypatch.setitem(dispatch.KERNELS, "cpu", ("triton",))
    monkeypatch.setenv("MUONSSM_CACHE", str(tmp_path / "cache"))
    self_check._finding.cache_clear()
    yield
    self_check._finding.cache_clear()


def findings():
    (file,) = self_check.cache_folder().glob("gpu-check-*.json")
    return json.loads(file.read_text())["findings"]


def mutated(folder: Path, file: str, function: str, old: str, new: str):
    """A kernel with one change."""
    source = (Path(memory_kernels.__file__).parent / file).read_text()
    assert source.count(old) == 1, old
    path = folder / f"mutated_{file}"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(f"muonssm.ops.memory.kernels.{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)


def auto_and_chunked():
    inputs = make_inputs(CASE, torch.float32)
    return call(CASE, inputs, "auto")[0], call(CASE, inputs, "chunked")[0], call(CASE, inputs, "triton")[0]


def test_right_kernels_are_used_and_the_finding_is_remembered(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        auto, _, triton = auto_and_chunked()
    assert torch.equal(auto, triton)
    assert list(findings().values()) == [None]

    def never(*arguments):
        raise AssertionError("checked again")

    monkeypatch.setattr(self_check, "check", never)
    auto_and_chunked()
    self_check._finding.cache_clear()  # as in another process
    auto_and_chunked()


@pytest.mark.parametrize("kernel", MUTATIONS)
def test_a_wrong_kernel_is_found_warned_about_once_and_not_used(kernel, tmp_path, monkeypatch):
    monkeypatch.setitem(KERNELS, kernel, mutated(tmp_path, *MUTATIONS[kernel]))
    with pytest.warns(
        UserWarning, match="failed their check on cpu, interpreted and impl='auto' takes 'chunked'"
    ) as got:
        auto, chunked, triton = auto_and_chunked()
    assert torch.equal(auto, chunked)
    assert not torch.equal(auto, triton)  # asked for by name, the kernels run
    assert len(got) == 1
    (found,) = findings().values()
    assert ("differs from 'chunked' in y" in found) == (kernel == "memory_output")
    assert ("the gradient of k by" in found) == (kernel == "memory_keys")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(auto_and_chunked()[0], chunked)  # it warned once


def test_a_compiler_error_is_named_and_chunked_runs(monkeypatch):
    class Broken:
        arg_names = KERNELS["memory_solve"].arg_names

        def __getitem__(self, grid):
            raise RuntimeError("ptxas fatal: out of registers")

    monkeypatch.setitem(KERNELS, "memory_solve", Broken())
    inputs = make_inputs(CASE, torch.float32)
    with pytest.warns(UserWarning, match="RuntimeError: ptxas fatal: out of registers"):
        auto = call(CASE, inputs, "auto")[0]
    assert torch.equal(auto, call(CASE, inputs, "chunked")[0])
    with pytest.raises(RuntimeError, match="ptxas"):
        call(CASE, inputs, "triton")  # asked for by name: it runs or raises


def test_the_selective_scan_is_checked_too(monkeypatch):
    inputs = make_inputs(Case("selective", (9,), initial_state=False, gamma="float"), torch.float32)
    x, dt, A, B, C = (inputs[name] for name in ("x", "dt", "A", "B", "C"))
    y, _ = muon_selective_scan(x, dt, A, B, C, muon=Muon())
    assert torch.equal(y, muon_selective_scan(x, dt, A, B, C, muon=Muon(), impl="triton")[0])
    self_check._finding.cache_clear()
    self_check.cache_folder().rename(self_check.cache_folder().with_name("other"))
    forward = selective_triton._forward

    def doubled(*arguments):
        y, *others = forward(*arguments)
        return 2 * y, *others

    monkeypatch.setattr(selective_triton, "selective_triton", doubled)
    with pytest.warns(UserWarning, match="operator selective"):
        y, _ = muon_selective_scan(x, dt, A, B, C, muon=Muon())
    assert torch.equal(y, muon_selective_scan(x, dt, A, B, C, muon=Muon(), impl="chunked")[0])


def test_it_takes_less_than_a_second_per_kind_on_a_gpu_and_seconds_here():
    kind = Kind("memory", torch.float32, 16, 16, erases=True)
    start = time.perf_counter()
    assert self_check.check(kind, CPU) is None
    assert time.perf_counter() - start < 60


def test_every_rule_passes():
    rules = [
        Kind("memory", torch.float16, 7, 5),
        Kind("memory", torch.float32, 7, 5, True, True, True, True, -1),
        Kind("memory", torch.float32, 7, 5, True, False, False, False, 0, True),
        Kind("selective", torch.float16, 7, 5, True),
        Kind("selective", torch.float32, 7, 5, momentum=False, steps=-1),
    ]
    assert [self_check.check(kind, CPU) for kind in rules] == [None] * len(rules)


def test_a_decision_is_made_while_compiling():
    case = Case(lengths=(20,), heads=1, gamma="float", initial_state=False)
    inputs = make_inputs(case, torch.float32)
    compiled = torch.compile(lambda **tensors: call(case, tensors, "auto")[0], backend="eager", fullgraph=True)
    assert torch.equal(compiled(**inputs), call(case, inputs, "triton")[0])


def test_the_table_of_info(capsys, monkeypatch):
    monkeypatch.setattr(self_check, "LENGTHS", (3,))
    assert main(["info", "--check"]) == 0
    printed = capsys.readouterr().out
    assert "all agree" in printed
    assert printed.count("passed") == 12
    monkeypatch.setattr(self_check, "TOLERANCE", dict.fromkeys(self_check.TOLERANCE, 0.0))
    assert main(["info", "--check"]) == 1
    assert "differs from 'chunked'" in capsys.readouterr().out


def test_spilling_cases_are_left_to_chunked():
    for architecture in ("sm_80", "sm_90", "sm_100"):
        for kind, wanted in (
            (Kind("memory", torch.float32, 64, 64), "float32"),
            (Kind("memory", torch.bfloat16, 256, 64), "heads above 128"),
            (Kind("memory", torch.bfloat16, 128, 128), None),
            (Kind("selective", torch.float32, 512, 16), None),
        ):
            reason = self_check.spills(kind, architecture)
            assert reason is None if wanted is None else wanted in reason
    assert self_check.spills(Kind("memory", torch.float32, 256, 256), "gfx942") is None


def test_damaged_files_of_findings_are_as_good_as_none(tmp_path):
    for content in ("", "[]", '{"findings": {"a": 1}}', '{"findings": [1]}', "\xff"):
        path = tmp_path / "findings.json"
        path.write_text(content)
        assert self_check._read(path) == {}
    assert self_check._read(tmp_path / "none.json") == {}
