"""Memory that a step frees stays with the process, for the next step.

glibc gives large blocks back to the system as they are freed, and the system clears each page again when it is next
touched. Training asks for the same blocks at every step: on CPUs that can cost it much time.
"""

from __future__ import annotations

import ctypes
import os

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # of glibc's malloc.h
NEVER, NONE = -1, 0
OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Tells glibc to keep what is freed, once for the whole process; False where that is not to be had.

    Whoever has set glibc's malloc by the environment keeps those settings.
    """
    if any(name in os.environ for name in OWN):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):  # another system, or another library
        return False
    return bool(mallopt(TRIM_THRESHOLD, NEVER)) and bool(mallopt(MMAP_MAX, NONE))
