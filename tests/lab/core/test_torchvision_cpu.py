"""torchvision beside a torch without CUDA, and the libraries that make it load."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from muonssm.lab.core import elf, torchvision_cpu

SUPPORTED = sys.platform == "linux" and platform.machine() in elf.MACHINES
on_linux = pytest.mark.skipif(not SUPPORTED, reason="stand-ins are for Linux on x86_64 and aarch64")
has_torchvision = pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="needs torchvision")
IMPORT = """
import torch
from muonssm.lab.core.torchvision_cpu import import_torchvision
torchvision = import_torchvision()
"""
NO_CUDA = """
import torch
from muonssm.lab.core import torchvision_cpu
loads = torchvision_cpu._loads
torchvision_cpu._loads = lambda name: not name.startswith("libcudart.so") and loads(name)
"""
WORKS = """
boxes = torch.tensor([[0.0, 0, 10, 10], [1, 1, 10, 10], [20, 20, 30, 30]])
kept = torchvision.ops.nms(boxes, torch.tensor([0.5, 0.9, 0.7]), 0.5)
assert kept.tolist() == [1, 2], kept
pooled = torchvision.ops.roi_align(torch.ones(1, 2, 32, 32), [boxes], output_size=3)
assert pooled.shape == (3, 2, 3, 3) and pooled.eq(1).all()
from torchvision.io import decode_image, encode_png
image = torch.arange(3 * 8 * 9, dtype=torch.uint8).view(3, 8, 9)
assert torch.equal(decode_image(encode_png(image)), image)
"""


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def load(tmp_path, **names):
    path = tmp_path / "libstand_in.so.7"
    names = {"zeros": [], "traps": [], **names}
    path.write_bytes(elf.stand_in(path.name, elf.MACHINES[platform.machine()], **names))
    return path


@on_linux
def test_a_stand_in_loads_and_has_its_names(tmp_path):
    zeros = [f"zero_{i}" for i in range(40)]
    library = ctypes.CDLL(str(load(tmp_path, zeros=zeros, traps=["trap"])))
    assert all(getattr(library, name)() == 0 for name in zeros)
    assert hasattr(library, "trap")
    assert not hasattr(library, "another")


@on_linux
def test_a_stand_in_may_be_empty(tmp_path):
    assert not hasattr(ctypes.CDLL(str(load(tmp_path))), "anything")


@on_linux
def test_a_trap_ends_the_process(tmp_path):
    done = run(f"import ctypes; ctypes.CDLL({str(load(tmp_path, traps=['trap']))!r}).trap(); print('went on')")
    assert done.returncode < 0
    assert "went on" not in done.stdout


@on_linux
def test_what_a_library_asks_for_is_read():
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    assert "libc.so.6" in elf.needed(library)
    names = elf.undefined(library)
    assert "free" in names
    assert "muonssm_isa" not in names


def test_a_file_that_is_no_library_is_refused(tmp_path):
    (tmp_path / "file").write_text("hello, this is text")
    with pytest.raises(ValueError, match=r"must be a 64-bit little-endian ELF file, got .*b'hello,'"):
        elf.needed(tmp_path / "file")


@has_torchvision
def test_torchvision_works():
    done = run(IMPORT + "assert import_torchvision() is torchvision" + WORKS)
    assert done.returncode == 0, done.stderr


@on_linux
@has_torchvision
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_torchvision_works_where_no_library_of_cuda_is_found():
    """The machine that runs this may have CUDA's runtime; others do not."""
    done = run(NO_CUDA + "print(torchvision_cpu.prepare_torchvision())\nimport torchvision" + WORKS)
    assert done.returncode == 0, done.stderr
    assert "libcudart.so" in done.stdout or done.stdout.strip() == "()"


@has_torchvision
def test_torchvision_works_after_an_import_that_failed():
    done = run("try:\n    import torchvision\nexcept Exception:\n    pass\n" + IMPORT + WORKS)
    assert done.returncode == 0, done.stderr


@has_torchvision
def test_nothing_is_done_where_it_is_not_needed(monkeypatch):
    prepare = torchvision_cpu.prepare_torchvision.__wrapped__
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    assert prepare() == ()
    monkeypatch.setitem(sys.modules, "torchvision", torch)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert prepare() == ()


def test_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(torchvision_cpu, "_is_installed", lambda: False)
    assert torchvision_cpu.prepare_torchvision.__wrapped__() == ()
    with pytest.raises(ModuleNotFoundError, match=r"not installed: pip install 'muonssm\[vision\]'"):
        torchvision_cpu.import_torchvision()


def test_an_import_that_fails_says_what_to_do(monkeypatch):
    def fail(name):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(torchvision_cpu, "_is_installed", lambda: True)
    monkeypatch.setattr(torchvision_cpu, "prepare_torchvision", lambda: ())
    monkeypatch.setattr(torchvision_cpu.importlib, "import_module", fail)
    with pytest.raises(ImportError, match=r"fails \(operator torchvision::nms does not exist\); install"):
        torchvision_cpu.import_torchvision()


@on_linux
def test_no_file_is_left_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    torchvision_cpu._load_stand_ins(["libstand_in_a.so", "libstand_in_b.so"], ["cudaNothing"])
    assert len(os.listdir("/proc/self/fd")) == before
