"""Keep freed memory in the process, so that the next training step can reuse it.

glibc returns large freed blocks to the system, and the system clears every page again when it is next used. Training
allocates the same blocks at every step, and on CPUs clearing them can take much of its time.
"""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # parameters in glibc's malloc.h
NEVER_TRIM, NO_MMAP = -1, 0
MALLOC_VARIABLES = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
)


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory, for the whole process; return whether that worked.

    Does nothing where the user has configured glibc's malloc by an environment variable.
    """
    if any(name in os.environ for name in MALLOC_VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):  # another system, or another C library
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, NEVER_TRIM)) and bool(mallopt(M_MMAP_MAX, NO_MMAP))
