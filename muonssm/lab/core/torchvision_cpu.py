"""Make PyPI's torchvision work with a build of torch without CUDA.

torchvision's wheel on PyPI is linked with the CUDA libraries. With a torch without CUDA they are missing, so that
`import torchvision` fails ("operator torchvision::nms does not exist"), and so do packages that import torchvision,
such as parts of transformers, timm and torchmetrics. The wheel does contain torchvision's CPU operators.

    torchvision = import_torchvision()

loads stand-ins for the missing libraries first, under the same names. Functions that torchvision calls on loading do
nothing; functions that it would call for GPU tensors, which such a torch cannot create, end the process. The stand-ins
are a few kilobytes of memory: no compiler, no files, nothing that outlives the process. If torchvision works without
them, or is not installed, nothing happens.

This must happen before anything else imports torchvision. Only the `muonssm` command and the tests do it; the library
never does. In your own script, call it before you import transformers or timm:

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

TORCH_CUDA = "libtorch_cuda.so"  # missing in a torch without CUDA
ADVICE = "install the torchvision from download.pytorch.org/whl/cpu that matches your version of torch"


def import_torchvision() -> ModuleType:
    """Import torchvision; raise an ImportError that says what to do if it cannot be used."""
    if not _is_installed():
        raise ModuleNotFoundError("torchvision is not installed: pip install 'muonssm[vision]'", name="torchvision")
    prepare_torchvision()
    try:
        return importlib.import_module("torchvision")
    except (ImportError, RuntimeError, OSError) as error:
        raise ImportError(f"torchvision is installed, but its import fails ({error}); {ADVICE}") from error


@functools.cache
def prepare_torchvision() -> tuple[str, ...]:
    """Load stand-ins for the libraries that torchvision lacks; return the names of those libraries.

    Raises nothing: if this does not help, the import of torchvision raises its own error. One call per process is
    enough. Forked processes inherit the stand-ins; spawned processes must call this again.
    """
    if "torchvision" in sys.modules or sys.platform != "linux" or not _is_installed():
        return ()
    libraries = [path for path in _folder("torchvision").glob("*.so") if TORCH_CUDA in elf.needed(path)]
    if not libraries or platform.machine() not in elf.MACHINES:
        return ()
    import torch

    if torch.version.cuda is not None:
        return ()
    for name in [name for name in sys.modules if name.startswith("torchvision.")]:
        del sys.modules[name]  # left over from an import that failed
    missing = sorted({name for path in libraries for name in elf.needed(path) if "cuda" in name and not _loads(name)})
    wanted = {name for path in libraries for name in elf.undefined(path) if "cuda" in name.lower()}
    torch_library = ctypes.CDLL(str(_folder("torch") / "lib" / "libtorch_python.so"))  # depends on all others of torch
    try:
        _load_stand_ins(missing, sorted(name for name in wanted if not hasattr(torch_library, name)))
    except OSError:  # a system that loads no library from memory
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
    """Whether the loader finds this library, in torchvision's own folder or on the system."""
    if (_folder("torchvision").parent / "torchvision.libs" / name).exists():
        return True
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _load_stand_ins(libraries: list[str], symbols: list[str]) -> None:
    """Load one stand-in per library; the one for libtorch_cuda.so defines all symbols.

    Symbols with C names belong to the CUDA runtime, which torchvision calls on loading to register its kernels: these
    return 0. They are not defined in the runtime's own stand-in, where the loader would require symbol versions. All
    other symbols are C++ functions of torch that are never called. (One is a variable; it is never read.)
    """
    machine = elf.MACHINES[platform.machine()]
    files = []
    for name in libraries:
        own = symbols if name == TORCH_CUDA else []
        zeros = [symbol for symbol in own if not symbol.startswith("_Z")]
        traps = [symbol for symbol in own if symbol.startswith("_Z")]
        file = os.memfd_create(name)
        files.append(file)
        os.write(file, elf.stand_in(name, machine, zeros, traps))
        ctypes.CDLL(f"/proc/self/fd/{file}")  # stays loaded; torchvision's libraries find it by name
    for file in files:  # not earlier: the loader takes two files with one path for the same file
        os.close(file)
