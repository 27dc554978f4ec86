"""Commands killed at random moments, on a full disk and two at a time: resumed, they end as if nothing had happened.

`make torture` kills at many more moments than `make test`: MUONSSM_TORTURE is the number per command.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from .commands import Running as Process
from .commands import can_mount, killed_in_checkpoint, on_small_disk, run, start, trained_by_a_worker

MOMENTS = int(os.environ.get("MUONSSM_TORTURE", "1"))
WEIGHTS = {"model.safetensors", "last.safetensors"}
RESULTS = {*WEIGHTS, "recipe.json", "metadata.json", "metrics.json", "history.json", "comparison.json"}

pytestmark = pytest.mark.slow


def results_of_runs(folder: Path) -> dict[str, bytes]:
    """Weights and scores of all runs in a folder; the report, TensorBoard's files and times are left out."""
    found = {path for path in folder.rglob("*") if path.name in RESULTS and "checkpoints" not in path.parts}
    return {str(path.relative_to(folder)): normalized(path) for path in found}


def normalized(path: Path) -> bytes:
    """The content; rows of a history have their keys in another order after a resume."""
    if path.name != "history.json":
        return path.read_bytes()
    return json.dumps(json.loads(path.read_text()), sort_keys=True).encode()


def results_of_analysis(folder: Path) -> dict[str, bytes]:
    """Also the JSON of the analysis."""
    analysis = sorted((folder / "analysis").glob("*.json"))
    return results_of_runs(folder) | {f"analysis/{path.name}": path.read_bytes() for path in analysis}


def all_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Command(NamedTuple):
    """A command, with the folder that it works in as its last argument."""

    arguments: tuple[str, ...]
    results: Callable[[Path], dict[str, bytes]]
    source: Path | None = None  # what the folder has before


@pytest.fixture(scope="module")
def commands(tmp_path_factory, changes) -> dict[str, Command]:
    """The commands that can be resumed, on small data."""
    root = tmp_path_factory.mktemp("torture")
    texts = root / "texts"
    texts.mkdir()
    for number in range(60):
        (texts / f"{number:02}.txt").write_text(f"page {number}: the memory keeps what it reads.\n" * 20)
    tiny = [word for change in (*changes, "training.epochs=2", "data.length=24") for word in ("--set", change)]
    sets = [word for change in changes for word in ("--set", change)]
    compared = root / "compared"
    ended = run(root / "log", "compare", "folder", *tiny, "--output", str(compared))
    assert ended.code == 0, ended.printed
    prepare = ("prepare", str(texts), "--vocab-size", "300", "--validation", "0.2", "--shard-tokens", "200")
    return {
        "train": Command(("train", "folder", *sets, "--output"), results_of_runs),
        "compare": Command(("compare", "folder", *tiny, "--output"), results_of_runs),
        "prepare": Command((*prepare, "--output"), all_files),
        "analyze": Command(("analyze", "--what", "spectrum,rank"), results_of_analysis, compared),
    }


class Undisturbed(NamedTuple):
    results: dict[str, bytes]
    seconds: float
    size: int  # bytes of all files


NAMES = ("train", "compare", "prepare", "analyze")


@pytest.fixture(scope="module")
def undisturbed(commands, tmp_path_factory) -> Callable[[str], Undisturbed]:
    """The results of each command, if nothing happens to it."""
    done: dict[str, Undisturbed] = {}

    def get(name: str) -> Undisturbed:
        if name not in done:
            folder = begin(commands[name], tmp_path_factory.mktemp(name))
            begun = time.monotonic()
            ended = run(folder.parent / "log", *commands[name].arguments, str(folder))
            assert ended.code == 0, ended.printed
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            results = commands[name].results(folder)
            assert len(results) >= 5
            done[name] = Undisturbed(results, time.monotonic() - begun, size)
        return done[name]

    return get


def begin(command: Command, place: Path) -> Path:
    """The folder that a command works in, with what it needs there."""
    if command.source:
        shutil.copytree(command.source, place / "run")
    return place / "run"


def assert_clean(folder: Path) -> None:
    """No lock and no temporary file is left."""
    left = [path for path in folder.rglob("*") if path.name == "lock" or path.name.endswith((".part", ".tmp"))]
    assert not left


def assert_resumes(command: Command, folder: Path, expected: Undisturbed, log: Path) -> str:
    """The command with --resume ends well, with the results of the undisturbed one; returns what it printed."""
    ended = run(log, *command.arguments, str(folder), "--resume")
    assert ended.code == 0, ended.printed
    assert command.results(folder) == expected.results
    assert_clean(folder)
    return ended.printed


@pytest.mark.parametrize("moment", range(MOMENTS))
@pytest.mark.parametrize("name", NAMES)
def test_a_command_killed_at_any_moment_resumes_to_the_same_bytes(commands, undisturbed, tmp_path, name, moment):
    """Up to three kills one after the other, from its start to its end."""
    command, expected = commands[name], undisturbed(name)
    chance = random.Random(f"{name} {moment}")
    folder = begin(command, tmp_path)
    for number in range(chance.randint(1, 3)):
        resume = ["--resume"] if number and folder.exists() else []
        process = start(tmp_path / "log", *command.arguments, str(folder), *resume)
        time.sleep(chance.uniform(0, expected.seconds))
        assert process.kill() in (-signal.SIGKILL, 0), (tmp_path / "log").read_text()
    assert_resumes(command, folder, expected, tmp_path / "log")


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_workers_end_with_the_command_that_is_killed(undisturbed, tmp_path, changes, moment):
    """As those of `analyze` do. A worker that lived on would hold the lock of its run."""
    folder = tmp_path / "run"
    process = Process(trained_by_a_worker, tmp_path / "log", str(folder), *changes)
    end = time.monotonic() + 120
    while not (folder / "lock").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(random.Random(moment).uniform(0, 1))
    assert process.kill() in (-signal.SIGKILL, 0), (tmp_path / "log").read_text()
    wait_for_workers(folder)
    ended = Process(trained_by_a_worker, tmp_path / "log", str(folder), *changes).wait()
    assert ended.code == 0, ended.printed
    metrics, expected = (
        json.loads(text)
        for text in ((folder / "metrics.json").read_bytes(), undisturbed("train").results["metrics.json"])
    )
    assert metrics["steps"] == expected["steps"]
    # a worker has another number of threads
    assert metrics["validation"]["loss"] == pytest.approx(expected["validation"]["loss"], rel=1e-4)
    assert_clean(folder)


def wait_for_workers(folder: Path, seconds: float = 20) -> None:
    """Wait until the workers of a killed process have ended too: they must do so by themselves."""
    end = time.monotonic() + seconds
    while any(has_open(pid, folder) for pid in os.listdir("/proc") if pid.isdigit()):
        assert time.monotonic() < end, "a worker outlives the process that started it"
        time.sleep(0.05)


def has_open(pid: str, folder: Path) -> bool:
    """Whether a process has a file in the folder open: its lock, for one."""
    try:
        return any(os.readlink(entry.path).startswith(f"{folder}/") for entry in os.scandir(f"/proc/{pid}/fd"))
    except OSError:
        return False


@pytest.mark.parametrize("count", [1, 5])
def test_a_run_killed_while_it_writes_a_checkpoint_resumes(commands, undisturbed, tmp_path, count):
    command = commands["train"]
    process = Process(killed_in_checkpoint, tmp_path / "log", count, *command.arguments, str(tmp_path / "run"))
    assert process.wait().code == -signal.SIGKILL
    printed = assert_resumes(command, tmp_path / "run", undisturbed("train"), tmp_path / "log")
    assert "is damaged and skipped: it has no manifest.json" in printed


@pytest.mark.parametrize("moment", range(MOMENTS))
@pytest.mark.parametrize("name", NAMES)
def test_a_command_on_a_full_disk_says_so_and_resumes(commands, undisturbed, tmp_path, name, moment):
    """A real file system, in memory, that is full somewhere between the first byte and the last."""
    if not can_mount():
        pytest.skip("a process cannot mount a file system here; test_faults.py has a disk that only looks full")
    command, expected = commands[name], undisturbed(name)
    place, kept = tmp_path / "disk", tmp_path / "kept"
    place.mkdir()
    before = sum(path.stat().st_size for path in command.source.rglob("*") if path.is_file()) if command.source else 0
    size = int(random.Random(f"{name} {moment}").uniform(4096, 0.9 * (expected.size - before)))
    source = str(command.source) if command.source else None
    process = Process(
        on_small_disk, tmp_path / "log", str(place), size, source, str(kept), *command.arguments, str(place / "run")
    )
    code, printed = process.wait()
    assert code == 2, (size, printed)
    attempt, _, rest = printed.partition("\nleft:")
    assert "Traceback" not in attempt
    assert re.search(
        rf"muonssm {name}: .*{re.escape(str(place))}.*(No space left on device|cannot be written)", attempt
    )
    assert not re.search(r"\.part\b|\.tmp\b|/lock\b", rest.split("\n")[0])
    assert command.results(kept / "run") == expected.results
    assert_clean(kept)


@pytest.mark.parametrize("name", ["train", "compare", "prepare"])
def test_of_two_processes_on_one_folder_one_works(commands, undisturbed, tmp_path, name):
    """Started at once. The other one says who holds the folder, or that it is taken."""
    command, folder = commands[name], tmp_path / "run"
    processes = [start(tmp_path / f"log{number}", *command.arguments, str(folder)) for number in range(2)]
    ended = sorted(process.wait() for process in processes)
    assert [code for code, _ in ended] == [0, 2], ended
    assert re.search(r"--output must be .*, got ", ended[1].last_line)
    assert command.results(folder) == undisturbed(name).results
    assert_clean(tmp_path)
