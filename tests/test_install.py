"""Installation with and without a compiler, a wheel in another environment, and the kernels under sanitizers."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

import pytest

from muonssm.ops import cpu_library

ROOT = Path(__file__).parent.parent
SOURCES = ("muonssm", "csrc", "setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """Copy the project as a user gets it, without build products."""
    target = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("_native.*", "__pycache__")
            shutil.copytree(ROOT / name, target / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, target / name)
    return target


def run(*command: str | Path, **environment: str) -> str:
    """Return the output of a command, run in an empty folder where this project's sources cannot be imported."""
    words = [str(word) for word in command]
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(words, capture_output=True, text=True, cwd=empty, env={**os.environ, **environment})
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def install(sources: Path, target: Path, **environment: str) -> None:
    """Run `pip install .` into a folder, with the build tools of this environment."""
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-cache-dir")
    run(*pip, "--target", target, sources, **environment)


WHICH = (
    "import muonssm, torch; from muonssm.ops.dispatch import Problem, choose; "
    "print(muonssm.__file__); print(choose('auto', Problem(torch.device('cpu'), torch.float32, 100)).name)"
)


def test_without_a_compiler_it_installs_and_says_why(sources, tmp_path):
    """The PATH is an empty folder, which hides the compiler."""
    target, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    install(sources, target, PATH=str(empty), CXX="")
    path, chosen = run(sys.executable, "-c", WHICH, PYTHONPATH=str(target)).split()
    assert Path(path).is_relative_to(target)
    assert chosen == "chunked"
    info = run(sys.executable, "-m", "muonssm", "info", PYTHONPATH=str(target))
    assert "not usable: the C++ kernels are not built: no C++ compiler was found when the package was installed" in info


def test_a_broken_compiler_does_not_stop_the_install(sources, tmp_path):
    target = tmp_path / "site"
    install(sources, target, CXX="false")
    info = run(sys.executable, "-m", "muonssm", "info", PYTHONPATH=str(target))
    assert "the C++ compiler failed when the package was installed" in info


def test_the_wheel_works_in_another_environment(sources, tmp_path):
    """Build a wheel, install it into a new virtual environment that borrows torch, and use it there."""
    wheels = tmp_path / "wheels"
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", wheels, sources)
    (wheel,) = wheels.glob("*.whl")
    assert "-py3-none-" in wheel.name
    assert "any" not in wheel.name
    venv.create(tmp_path / "other", with_pip=True)
    python = tmp_path / "other" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "torch_of_the_builder.pth").write_text(sysconfig.get_path("purelib") + "\n")
    path, chosen = run(python, "-c", WHICH).split()
    assert Path(path).is_relative_to(tmp_path / "other")
    assert chosen == "native"
    code = (
        "import torch; from muonssm import muon_memory; x = torch.rand(1, 9, 2, 4); "
        "print(muon_memory(x, x, x, -x[..., 0], x[..., 0])[0].isfinite().all().item())"
    )
    assert run(python, "-c", code).strip() == "True"


SETS = {
    "portable": (16, []),
    "avx2": (32, ["-mavx2", "-mfma"]),
    "avx512": (64, ["-mavx512f", "-mavx512dq", "-mavx2", "-mfma"]),
}


def compile_with_sanitizers(name, program, *sources):
    """Compile sources and further options for one instruction set, under two sanitizers: of addresses, of behavior."""
    if name != "portable" and platform.machine().lower() not in ("x86_64", "amd64"):
        pytest.skip(f"{name} is an instruction set of x86-64")
    width, flags = SETS[name]
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    common = ["-std=c++17", "-O1", "-fopenmp", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", *flags]
    names = [f"-DMUONSSM_ISA={name}", f"-DMUONSSM_VECTOR_BYTES={width}", "-I", str(ROOT / "csrc")]
    files = [source if source.startswith("-") else ROOT / source for source in sources]
    run(compiler, *common, *names, *files, "-o", program)


@pytest.mark.parametrize("name", ["portable", "avx2"])
def test_kernels_stay_inside_their_arrays(name, tmp_path):
    """Run the kernels of the operators on ragged shapes."""
    compile_with_sanitizers(name, tmp_path / "ragged", "csrc/kernels.cpp", "csrc/decode.cpp", "tests/csrc/ragged.cpp")
    assert run(tmp_path / "ragged").startswith("2520 runs")


@pytest.mark.parametrize(("name", "option"), [*((name, ()) for name in SETS), ("avx512", ("-DMUONSSM_NO_VNNI",))])
def test_decoding_stays_inside_its_arrays(name, option, tmp_path):
    """Run all steps of decoding on ragged shapes, with one, two and three threads, which must give the same bits."""
    if name == "avx512" and cpu_library.isa() != "avx512":
        pytest.skip("this machine has no AVX-512")
    compile_with_sanitizers(name, tmp_path / "decode", *option, "csrc/decode.cpp", "tests/csrc/decode.cpp")
    assert run(tmp_path / "decode").startswith("108 runs")


ARM_COMPILER = "aarch64-linux-gnu-g++"
ARM_EMULATOR = next(filter(shutil.which, ("qemu-aarch64", "qemu-aarch64-static")), "")
ON_ARM = (ARM_EMULATOR, "-L", "/usr/aarch64-linux-gnu")
needs_arm = pytest.mark.skipif(
    not (shutil.which(ARM_COMPILER) and ARM_EMULATOR),
    reason=f"{ARM_COMPILER} and qemu-aarch64 are not installed (Debian: g++-aarch64-linux-gnu, qemu-user)",
)


def compile_portable(compiler, program, *sources):
    """Compile sources for the portable instruction set, with the same arithmetic on every machine."""
    flags = ["-std=c++17", "-O1", "-fopenmp", "-ffp-contract=off", "-fsigned-char", "-I", str(ROOT / "csrc")]
    flags += ["-DMUONSSM_ISA=portable", "-DMUONSSM_VECTOR_BYTES=16"]
    run(compiler, *flags, *(ROOT / source for source in sources), "-o", program)


@needs_arm
def test_kernels_run_on_arm(tmp_path):
    """The ragged tests on emulated aarch64 give the bits of this machine, but for a few last bits of exp and log."""
    outputs = {}
    for compiler, runner in ((ARM_COMPILER, ON_ARM), ("g++", [])):
        program = tmp_path / f"ragged-{compiler}"
        compile_portable(compiler, program, "csrc/kernels.cpp", "csrc/decode.cpp", "tests/csrc/ragged.cpp")
        outputs[compiler] = run(*runner, program)
    assert all(output.startswith("2520 runs") for output in outputs.values())
    arm, here = (int(output.rpartition(" ")[2]) for output in outputs.values())  # sums over the bytes of all results
    assert abs(arm - here) < 1000
    code = run("aarch64-linux-gnu-objdump", "-d", tmp_path / f"ragged-{ARM_COMPILER}")
    assert re.search(r"fmul\s+v\d+\.4s", code), "no NEON instructions"


@needs_arm
def test_decoding_runs_on_arm(tmp_path):
    """All steps of decoding on emulated aarch64: one, two and three threads give the same bits there too."""
    compile_portable(ARM_COMPILER, tmp_path / "decode", "csrc/decode.cpp", "tests/csrc/decode.cpp")
    assert run(*ON_ARM, tmp_path / "decode").startswith("108 runs")
