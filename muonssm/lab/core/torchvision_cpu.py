"""torchvision beside a build of torch without CUDA.

torchvision's wheel on PyPI is linked with CUDA's libraries. Beside a torch without CUDA they are missing, and `import
torchvision` fails ("operator torchvision::nms does not exist"), and with it whatever imports torchvision: parts of
transformers, timm, torchmetrics. Its operators for CPUs are in the wheel all the same.

    torchvision = import_torchvision()

gives what is missing to the loader first: libraries with the same names whose functions do nothing (those torchvision
calls when it is loaded) or end the process (those it would call for tensors on a GPU, which such a torch cannot make).
They are a few kilobytes of memory: no compiler, no file, nothing that outlives the process. Where torchvision imports
by itself, or is not installed, nothing is done.

It must run before anything else imports torchvision. Only the `muonssm` command and the tests switch it on; the library
never does. In your own script call it before you import transformers or timm:

    from muonssm.lab.core.torchvision_cpu import prepare_torchvision; prepare_torchvision()
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import platform
import sys
from pathlib import Path
from types import ModuleType

from . import elf

TORCH_HALF = "libtorch_cuda.so"  # what a torch without CUDA has not
ADVICE = "pip install torchvision from download.pytorch.org/whl/cpu, in the version that goes with torch"


def import_torchvision() -> ModuleType:
    """torchvision; raises ImportError that says what to do where it cannot be used."""
    if not _is_installed():
        raise ModuleNotFoundError("torchvision is not installed: pip install 'muonssm[vision]'", name="torchvision")
    prepare_torchvision()
    try:
        return importlib.import_module("torchvision")
    except (ImportError, RuntimeError, OSError) as error:
        raise ImportError(f"torchvision is installed, but its import fails ({error}); {ADVICE}") from error


@functools.cache
def prepare_torchvision() -> tuple[str, ...]:
    """Loads stand-ins for the libraries that torchvision lacks here; returns their names, none where it lacks nothing.

    What cannot be helped is left to the import of torchvision to say. Once a process is enough; those that are forked
    from it have the stand-ins too, those that are spawned must ask for them again.
    """
    if "torchvision" in sys.modules or sys.platform != "linux" or not _is_installed():
        return ()
    libraries = [path for path in _folder("torchvision").glob("*.so") if TORCH_HALF in elf.needed(path)]
    if not libraries or platform.machine() not in elf.MACHINES:
        return ()
    import torch

    if torch.version.cuda is not None:
        return ()
    for name in [name for name in sys.modules if name.startswith("torchvision.")]:
        del sys.modules[name]  # of an import that failed before
    missing = sorted({name for path in libraries for name in elf.needed(path) if "cuda" in name and not _loads(name)})
    wanted = {name for path in libraries for name in elf.undefined(path) if "cuda" in name.lower()}
    present = ctypes.CDLL(str(_folder("torch") / "lib" / "libtorch_python.so"))  # with all of torch behind it
    try:
        _load_stand_ins(missing, sorted(name for name in wanted if not hasattr(present, name)))
    except OSError:  # a system that runs nothing from memory; torchvision's own error follows
        return ()
    return tuple(missing)


def torchvision_is_prepared() -> bool:
    """Whether this process has called `prepare_torchvision`."""
    return prepare_torchvision.cache_info().currsize > 0


def _is_installed() -> bool:
    return "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _loads(name: str) -> bool:
    """Whether torchvision finds this library: beside itself, or where the system has it."""
    if (_folder("torchvision").parent / "torchvision.libs" / name).exists():
        return True
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _load_stand_ins(libraries: list[str], symbols: list[str]) -> None:
    """One stand-in for each library, and all names in that for torch's CUDA half.

    CUDA's runtime has plain names, and torchvision registers its kernels there when it is loaded: these return 0. They
    do not stand in the runtime's own stand-in, where the loader would insist on versions; elsewhere it takes them
    without. All else is C++ of torch, which is never called. (One name is a variable; it is never read either.)
    """
    machine = elf.MACHINES[platform.machine()]
    files = []
    for name in libraries:
        own = symbols if name == TORCH_HALF else []
        zeros = [symbol for symbol in own if not symbol.startswith("_Z")]
        traps = [symbol for symbol in own if symbol.startswith("_Z")]
        file = os.memfd_create(name)
        files.append(file)
        os.write(file, elf.stand_in(name, machine, zeros, traps))
        ctypes.CDLL(f"/proc/self/fd/{file}")  # stays loaded; torchvision's libraries find it by its name
    for file in files:  # only now: the loader takes two files by one path for one
        os.close(file)
