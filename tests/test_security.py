"""Nothing in the code runs code of others, and nothing is fetched unless a name on the hub was given.

The first half reads the source: no pickles, no shells, no remote code, images of known formats alone. The second runs
commands in a process that ends at its first use of the network. docs/security.md says what is promised.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("muonssm", "benchmarks", "examples", "docs")
SOURCES = [ROOT / "setup.py", *sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
UNSAFE_MODULES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
UNSAFE_CALLS = {
    "eval", "exec", "builtins.eval", "builtins.exec", "os.system", "os.popen", "subprocess.getoutput",
    "subprocess.getstatusoutput", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "pandas.read_pickle",
    "torch.hub.load", "torch.hub.load_state_dict_from_url", "numpy.lib.npyio.NpzFile", "tempfile.mktemp",
}  # fmt: skip
NETWORK_MODULES = {
    "urllib.request", "urllib3", "requests", "http.client", "http.server", "httpx", "aiohttp", "ftplib", "smtplib",
    "socketserver", "xmlrpc", "huggingface_hub",
}  # fmt: skip
SAFE_LOADERS = {"yaml.SafeLoader", "yaml.CSafeLoader"}


# ---- the source


def names_of_imports(tree: ast.AST) -> dict[str, str]:
    """What each imported name stands for: `np` for numpy, `load` for torch.load."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names}
    return names


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """The full names of all modules, or names in modules, that are imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def full_name(node: ast.expr, imported: dict[str, str]) -> str:
    """The dotted name of an expression, with what its first word was imported as."""
    first, dot, rest = ast.unparse(node).partition(".")
    return imported.get(first, first) + dot + rest


def problems(text: str) -> Iterator[str]:
    """What a source file must not do, with the line."""
    tree = ast.parse(text)
    imported = names_of_imports(tree)
    for name in imported_modules(tree):
        if any(f"{name}.".startswith(f"{module}.") for module in NETWORK_MODULES):
            yield f"imports {name}, which uses the network"
    for name in imported.values():
        if name.partition(".")[0] in UNSAFE_MODULES:
            yield f"imports {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = full_name(node.func, imported)
            given = {word.arg: full_name(word.value, imported) for word in node.keywords if word.arg}
            yield from (f"{problem} in line {node.lineno}" for problem in problems_of_call(name, given))


def problems_of_call(name: str, given: dict[str, str]) -> Iterator[str]:
    """What is wrong with a call of `name` with these keyword arguments."""
    if name in UNSAFE_CALLS:
        yield f"calls {name}"
    if name == "torch.load" and given.get("weights_only") != "True":
        yield "torch.load without weights_only=True"
    if name == "yaml.load" and given.get("Loader") not in SAFE_LOADERS:
        yield "yaml.load without a safe loader"
    if name.endswith("Image.open") and "formats" not in given:
        yield "Image.open without formats"
    for keyword in ("allow_pickle", "trust_remote_code", "shell"):
        if given.get(keyword, "False") != "False":
            yield f"{keyword} is not False"
    if name.endswith(".from_pretrained"):
        yield from problems_of_loading(name.removesuffix(".from_pretrained"), given)


def problems_of_loading(owner: str, given: dict[str, str]) -> Iterator[str]:
    """Configs are local; tokenizers and models run no code; weights are safetensors."""
    is_config, is_tokenizer = owner.endswith("Config"), "Tokenizer" in owner
    if is_config and given.get("local_files_only") != "True":
        yield "a config without local_files_only=True"
    if not is_config and given.get("trust_remote_code") != "False":
        yield "from_pretrained without trust_remote_code=False"
    if not is_config and not is_tokenizer and given.get("use_safetensors") != "True":
        yield "from_pretrained without use_safetensors=True"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_runs_code_of_others(path):
    assert not list(problems(path.read_text()))


def test_the_trainer_of_transformers_loads_weights_only():
    """Our checkpoints have optimizer.pt, which transformers reads."""
    import transformers.trainer

    found = list(problems(Path(transformers.trainer.__file__).read_text()))
    assert not [problem for problem in found if "torch.load" in problem]


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import joblib.numpy_pickle as j",
        "import torch\ntorch.load(x)",
        "from torch import load as read\nread(x, weights_only=False)",
        "import numpy as np\nnp.load(x, allow_pickle=True)",
        "import numpy as np\nnp.load(x, allow_pickle=flag)",
        "import os\nos.system('ls')",
        "from os import popen\npopen('ls')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "eval('1')",
        "exec('1')",
        "import yaml\nyaml.load(x)",
        "import yaml\nyaml.load(x, Loader=yaml.Loader)",
        "from PIL import Image\nImage.open(x)",
        "import PIL.Image\nPIL.Image.open(x)",
        "from transformers import AutoTokenizer\nAutoTokenizer.from_pretrained(x)",
        "from transformers import AutoModel\nAutoModel.from_pretrained(x, trust_remote_code=True)",
        "from a import Model\nModel.from_pretrained(x, trust_remote_code=False)",
        "from a import MyConfig\nMyConfig.from_pretrained(x)",
        "load_dataset(x, trust_remote_code=True)",
        "import urllib.request",
        "from urllib import request",
        "from http.client import HTTPConnection as C",
        "import requests",
    ],
)
def test_problems_are_found(text):
    assert list(problems(text))


@pytest.mark.parametrize(
    "text",
    [
        "model.eval()",
        "import re\nre.compile(x)",
        "from urllib.parse import quote",
        "import torch\ntorch.load(x, weights_only=True)",
        "import yaml\nyaml.load(x, Loader=yaml.SafeLoader)",
        "from PIL import Image\nImage.open(x, formats=['PNG'])",
        "from transformers import AutoTokenizer\nAutoTokenizer.from_pretrained(x, trust_remote_code=False)",
    ],
)
def test_safe_code_is_accepted(text):
    assert not list(problems(text))


def test_every_source_was_read():
    names = {str(path.relative_to(ROOT)) for path in SOURCES}
    assert {"muonssm/cli.py", "muonssm/lab/language/tokenizer.py", "benchmarks/gpu.py", "docs/hooks.py"} <= names


# ---- the network

# Ends the process, so that no library can catch the error and go on.
OFFLINE = """
import os, socket, sys

def refuse(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname"):
        wanted = arguments[0]
    elif event in ("socket.connect", "socket.sendto") and arguments[0].family != socket.AF_UNIX:
        wanted = arguments[1]
    else:
        return
    os.write(2, f"the network was used: {wanted}".encode())
    os._exit(97)

sys.addaudithook(refuse)
"""
RUN_COMMANDS = """
import json
from muonssm.cli import main

for arguments in json.loads(sys.argv[1]):
    try:
        code = main(arguments)
    except SystemExit as ending:
        code = ending.code
    assert code in (0, None), (arguments, code)
"""
LANGUAGE = [
    "data.length=32", "data.vocab_size=300", "model.hidden_size=32", "model.intermediate_size=48",
    "model.num_hidden_layers=1", "model.mixer={num_heads=2}", "training.epochs=1", "training.batch_size=4",
]  # fmt: skip


@pytest.fixture
def run_offline(tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """Run commands in one process without a network, with an empty home and nothing that says "offline"."""
    import json

    kept = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    environment = {**kept, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HOME": str(tmp_path / "hub"), "PYTHONPATH": str(ROOT)}

    def run(*commands):
        arguments = [sys.executable, "-c", OFFLINE + RUN_COMMANDS, json.dumps(commands)]
        return subprocess.run(arguments, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    return run


def settings(changes):
    return [word for change in changes for word in ("--set", change)]


def test_help_and_info_need_no_network(run_offline):
    done = run_offline(["--help"], ["train", "--help"], ["prepare", "--help"], ["info"])
    assert done.returncode == 0, done.stderr


def test_a_name_on_the_hub_needs_the_network(run_offline):
    """Shows that the process does end at the use of the network."""
    done = run_offline(["prepare", "owner/name", "--output", "tokens"])
    assert done.returncode == 97, done.stderr
    assert "the network was used" in done.stderr


@pytest.mark.slow
def test_training_on_local_recordings_needs_no_network(run_offline, changes):
    train = ["train", "folder", "--output", "run", *settings([*changes, "training.epochs=1"])]
    done = run_offline(train, ["eval", "run"], ["report", "run"])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_local_language_model_needs_no_network(run_offline, tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(40):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"page {number}: the memory keeps what it reads.\n" * 5)
    done = run_offline(
        ["prepare", "texts", "--vocab-size", "300", "--validation", "0.2", "--output", "tokens"],
        ["train", "language-demo", "--output", "run", *settings(["data.source=tokens", *LANGUAGE])],
        ["generate", "run", "the memory", "--max-new-tokens", "5"],
        ["report", "run"],
    )
    assert done.returncode == 0, done.stderr
