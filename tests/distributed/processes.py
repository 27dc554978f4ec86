"""Run functions of `worker.py` in several processes that share a gloo group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_processes(functions: str, size: int, store: Path) -> dict[str, int]:
    """Run functions of the worker one after the other in `size` processes, one thread each; return their counts."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    code = "import sys; from tests.distributed.worker import main; main(sys.argv[1:])"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, functions, str(rank), str(size), str(store)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=400)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    failed = [output[-3000:] for process, output in zip(running, outputs, strict=True) if process.returncode]
    assert not failed, "\n".join(failed)
    return json.loads(outputs[0].splitlines()[-1])  # type: ignore[no-any-return]
