"""Build the C++ kernels of csrc/. Everything else about the project is in pyproject.toml.

This needs a C++17 compiler, but neither torch's nor Python's headers. If there is no compiler or it fails, the package
is installed without the kernels, and `muonssm info` says why.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

CSRC = Path(__file__).parent / "csrc"
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=fast", "-DNDEBUG"]
INSTRUCTION_SETS = {
    "portable": (16, []),
    "avx2": (32, ["-mavx2", "-mfma"]),
    "avx512": (64, ["-mavx512f", "-mavx512dq", "-mavx2", "-mfma"]),
}


def find_compiler() -> list[str]:
    """Return the compiler command: $CXX, or the first of c++, g++, clang++ on the PATH."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise RuntimeError("no C++ compiler was found when the package was installed (tried $CXX, c++, g++, clang++)")


def run(command: list[str]) -> None:
    """Run a command; raise RuntimeError with the first lines of its output if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(f"the C++ compiler could not be started when the package was installed: {error}") from error
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise RuntimeError("the C++ compiler failed when the package was installed: " + " | ".join(lines[:3]))


def build(target: Path, objects: Path, extra: list[str] | None = None) -> None:
    """Compile csrc/ for every instruction set of this type of machine, and link `target`."""
    compiler = find_compiler()
    extra = (extra or []) + shlex.split(os.environ.get("CXXFLAGS", ""))
    openmp = ["-fopenmp"] if accepts(compiler, ["-fopenmp"], objects) else []
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    sets = INSTRUCTION_SETS if x86 else {"portable": INSTRUCTION_SETS["portable"]}
    flags = [*FLAGS, *openmp, *extra]
    jobs: list[tuple[list[str], Path, list[str]]] = [([str(CSRC / "api.cpp")], objects / "api.o", [])]
    for name, (width, machine) in sets.items():
        names = [f"-DMUONSSM_ISA={name}", f"-DMUONSSM_VECTOR_BYTES={width}"]
        for source in ("kernels", "decode"):
            jobs.append(([str(CSRC / f"{source}.cpp")], objects / f"{source}_{name}.o", machine + names))
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        commands = [[*compiler, *flags, *own, "-c", *source, "-o", str(out)] for source, out, own in jobs]
        list(pool.map(run, commands))
    run([*compiler, "-shared", *openmp, *extra, *(str(out) for _, out, _ in jobs), "-o", str(target)])


def accepts(compiler: list[str], flags: list[str], objects: Path) -> bool:
    """Return whether an empty program compiles and links with `flags`."""
    objects.mkdir(parents=True, exist_ok=True)
    source = objects / "empty.cpp"
    source.write_text("int main() { return 0; }\n")
    try:
        run([*compiler, *flags, str(source), "-o", str(objects / "empty")])
    except RuntimeError:
        return False
    return True


class BuildNative(build_ext):
    """Build muonssm/_native.so, or write the reason why not to muonssm/_native.log."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the name of a plain shared library, the same for every Python."""
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compile; write a failure to the log instead of raising it."""
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.log_file = target.with_suffix(".log")
        for old in (target, self.log_file):
            old.unlink(missing_ok=True)
        try:
            build(target, Path(self.build_temp))
        except RuntimeError as error:
            self.log_file.write_text(f"{error}\n")
            print(f"muonssm is installed without its C++ kernels: {error}")

    def copy_extensions_to_source(self) -> None:
        """For editable installs: put the library or the log next to the sources, never both."""
        source = CSRC.parent / "muonssm"
        for suffix in (".so", ".log"):
            (source / f"_native{suffix}").unlink(missing_ok=True)
        super().copy_extensions_to_source()
        if self.log_file.exists():
            shutil.copy(self.log_file, source / "_native.log")


class PlatformWheel(bdist_wheel):
    """Tag the wheel for this platform and every Python 3: the library depends on neither Python nor torch."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return py3-none-PLATFORM."""
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    setup(
        ext_modules=[Extension("muonssm._native", sources=[], optional=True)],
        cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
    )
