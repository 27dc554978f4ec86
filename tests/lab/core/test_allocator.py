"""Memory that stays with the process: counted in pages that the system had to bring again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from muonssm.lab.core.allocator import MALLOC_VARIABLES

WORK = """
import resource, sys
import torch
from muonssm.lab.core.allocator import keep_freed_memory

print(keep_freed_memory() if sys.argv[1] == "keep" else None)
for _ in range(20):  # until it has found its places
    torch.ones(12 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(12 << 20)  # 48 MiB
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how, **settings):
    clean = {name: value for name, value in os.environ.items() if name not in MALLOC_VARIABLES}
    command = [sys.executable, "-c", WORK, how]
    done = subprocess.run(command, env={**clean, **settings}, capture_output=True, text=True, check=True)
    said, count = done.stdout.split()
    return said, int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc alone can be told so")
def test_memory_that_was_freed_is_not_asked_for_again():
    _, before = faults("leave")
    said, after = faults("keep")
    assert said == "True"
    assert after < 100
    assert before > 10 * after


def test_settings_of_the_environment_stay():
    assert faults("keep", MALLOC_TOP_PAD_="65536")[0] == "False"
