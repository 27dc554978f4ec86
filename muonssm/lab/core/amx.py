"""Detect virtual machines that announce AMX but kill the process at its first instruction, and avoid AMX there."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

SETTING = "ONEDNN_MAX_CPU_ISA"  # read by oneDNN at its first matmul, so setting it after `import torch` is early enough
PROBE = "import torch; torch.nn.functional.linear(*torch.ones(2, 32, 32, dtype=torch.bfloat16))"


@functools.cache
def disable_broken_amx() -> bool:
    """Keep oneDNN off AMX if a bfloat16 matmul crashes here. Returns whether AMX was switched off.

    Costs a second, once per process, on machines that announce AMX; nothing elsewhere. Child processes inherit the
    setting. A value that the user has set stays.
    """
    if SETTING in os.environ or not _announces_amx():
        return False
    if subprocess.run([sys.executable, "-c", PROBE], capture_output=True).returncode >= 0:
        return False
    os.environ[SETTING] = "AVX512_CORE_FP16"
    return True


def _announces_amx() -> bool:
    try:
        return " amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
