"""`muonssm bench --decode`: tokens per second of decoding, ours and its peers', and the share of the memory bandwidth.

Three sections:

    peers    a model in the shape of mamba-130m with the same random weights in transformers, llama.cpp (by `xllamacpp`,
             on a GGUF file that this benchmark writes) and upcycled, plain and with Muon
    presets  the 170M presets of all backbones, plain and with Muon
    small    the model of `bench --language`

Outputs are compared before anything is timed: ours with transformers' and with its own float32, llama.cpp's with
transformers'. Contenders take turns; the best of all rounds counts, and the range of the rounds stands beside it.
The read bandwidth is one more contender of every section: all threads read an array for about as long as a round lasts,
before each contender, and the best of these readings counts.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muonssm.checks import check_int
from muonssm.layers import BACKBONES, upcycle
from muonssm.ops import Muon, decode_steps, launch

from . import llama_cpp
from .language import Sizes as LanguageSizes
from .language import build, random_tokens
from .measure import check_close, threads
from .record import Row, write_record

WEIGHTS = ("float32", "bfloat16", "int8")
ROUGH = {"bfloat16": 0.1, "int8": 0.3}  # largest relative error by rounding weights, which random models amplify
LLAMA_ERROR = 0.02  # largest difference of llama.cpp's log-probabilities from transformers'
LLAMA_WEIGHTS = {"float32": "float32", "q8_0": "int8"}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the models and of the workloads.

    Attributes:
        hidden, layers, vocabulary: of the model that is compared with its peers; mamba-130m's by default.
        preset: name of the preset of all backbones; None leaves the section out.
        prompt: number of tokens of a prompt whose reading is timed.
        tokens: number of tokens that are decoded in a round.
    """

    hidden: int = 768
    layers: int = 24
    vocabulary: int = 50280
    preset: str | None = "170m"
    prompt: int = 512
    tokens: int = 32

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "vocabulary", "prompt", "tokens"):
            check_int(name, getattr(self, name), 2)


@dataclass(frozen=True)
class Speed(Row):
    """The speed of a contender; `milliseconds` are per token.

    Attributes:
        tokens_per_second, slowest: in the best and in the worst round.
        bandwidth: share of the measured read bandwidth; 0 if unknown.
        extra_megabytes: memory besides the float32 weights; of packed weights, memory in place of them; 0 if unknown.
    """

    tokens_per_second: float
    slowest: float
    bandwidth: float = 0.0
    extra_megabytes: float = 0.0


@dataclass
class Contender:
    """A function that runs a round and returns seconds per token, and what it reads per token."""

    round: Callable[[], float]
    read_bytes: float = 0.0
    extra_bytes: float = 0.0


def read_bandwidth(thread_count: int, megabytes: int = 256, seconds: float = 0.2) -> float:
    """Measure how many bytes per second all threads read, over `seconds`, from an array that fits into no cache.

    The array is in large pages, as weights are: the same memory in pages of 4 KiB is read more slowly.
    """
    numbers = _numbers(megabytes << 18)
    arguments = decode_steps.ReadArguments(thread_count, numbers.numel(), numbers.data_ptr())
    count, start = 0, time.perf_counter()
    while (taken := time.perf_counter() - start) < seconds or not count:
        decode_steps.load().muonssm_read_memory(ctypes.byref(arguments))
        count += 1
    return 4 * numbers.numel() * count / taken


@functools.cache
def _numbers(count: int) -> Tensor:
    """Ones in large pages."""
    return launch.empty(torch.empty(0), (count,)).fill_(1)


@dataclass
class DecodeSuite:
    """Times contenders in turns, and collects the rows."""

    rounds: int
    thread_count: int
    progress: Any
    rows: list[Speed]
    summary: dict[str, float]

    def section(self, title: str, contenders: dict[str, Contender]) -> dict[str, float]:
        """Time all contenders; return the best seconds per token. The first contender is the baseline."""
        self.progress.set_description(title)
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        bandwidth = 0.0
        for round_ in range(self.rounds + 1):  # the first round warms up
            for name, contender in contenders.items():
                bandwidth = max(bandwidth, read_bandwidth(self.thread_count))
                value = contender.round()
                if round_ > 0:
                    seconds[name].append(value)
        best = {name: min(values) for name, values in seconds.items()}
        first = next(iter(best.values()))
        for name, contender in contenders.items():
            s = best[name]
            row = Speed(
                title, name, 1e3 * s, s / first, 1 / s, 1 / max(seconds[name]),
                contender.read_bytes / s / bandwidth, contender.extra_bytes / 1e6,
            )  # fmt: skip
            self.rows.append(row)
        self.summary[f"{title}: read bandwidth, GB/s"] = bandwidth / 1e9
        self.progress.update()
        return best

    def table(self) -> str:
        """The text that is printed."""
        lines, section = [f"{self.thread_count} threads"], None
        for row in self.rows:
            if row.section != section:
                section = row.section
                lines.append(f"\n{section}")
            share = f"{100 * row.bandwidth:>5.0f}% of bandwidth" if row.bandwidth else ""
            extra = f"{row.extra_megabytes:>8.1f} MB" if row.extra_megabytes else ""
            speed = f"{row.tokens_per_second:>9.1f} tokens/s (slowest {row.slowest:.1f})"
            lines.append(f"  {row.name:<28} {speed:<44} {row.times:>6.2f}x {share:<19} {extra}".rstrip())
        lines.append("")
        lines += [f"{name:<72} {value:>7.2f}" for name, value in self.summary.items()]
        return "\n".join(lines)


# ---- functions to time


@torch.no_grad()
def decoding(model: Any, tokens: int) -> Callable[[], float]:
    """A function that decodes `tokens` tokens greedily, one by one, and returns the seconds per token."""
    model.eval()
    prompt = random_tokens(1, 8, model.config.vocab_size)

    @torch.no_grad()
    def run() -> float:
        out = model(prompt, use_cache=True, logits_to_keep=1)
        name = "past_key_values" if "past_key_values" in out else "cache_params"
        cache, ids = out[name], out.logits[:, -1].argmax(-1, keepdim=True)
        start = time.perf_counter()
        for _ in range(tokens):
            out = model(ids, use_cache=True, logits_to_keep=1, **{name: cache})
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
        return (time.perf_counter() - start) / tokens

    return run


def prefill(model: Any, prompt: Tensor) -> Callable[[], float]:
    """A function that reads a prompt into a new cache and returns the seconds per token."""

    @torch.no_grad()
    def run() -> float:
        start = time.perf_counter()
        model(prompt, use_cache=True, logits_to_keep=1)
        return (time.perf_counter() - start) / prompt.shape[1]

    return run


def by_weights(name: str, model: Any, ids: Tensor) -> dict[str, Any]:
    """Return the model with each kind of weights; those that are packed must give nearly the logits of float32."""
    models, expected = {"float32": model}, logits_of(model, ids)
    for weights, most in ROUGH.items():
        packed = copy.deepcopy(model).prepare_decoding(weights, drop=True)
        error = ((logits_of(packed, ids) - expected).norm() / expected.norm()).item()
        if not error <= most:
            raise RuntimeError(f"{name} with {weights} must have a relative error <= {most}, got {error:.2e}")
        models[weights] = packed
    return models


def ours(model: Any, tokens: int) -> Contender:
    """Decoding of one of our models, which must have decoded before."""
    decoder = model._decoder
    if decoder is None or decoder.reason is not None:
        raise RuntimeError(f"the model must decode natively, got {None if decoder is None else decoder.reason}")
    read = 4 * sum(p.numel() for p in model.parameters())
    extra = decoder.bytes()
    if decoder.dropped:
        read = sum(matrix.bytes() for matrix in decoder.packed.values())
    return Contender(decoding(model, tokens), read, extra)


# ---- checks


@torch.no_grad()
def logits_of(model: Any, ids: Tensor) -> Tensor:
    """The logits of all tokens but the first, one by one after it."""
    out = model.eval()(ids[:, :1], use_cache=True)
    name = "past_key_values" if "past_key_values" in out else "cache_params"
    cache, logits = out[name], []
    for t in range(1, ids.shape[1]):
        logits.append(model(ids[:, t : t + 1], use_cache=True, **{name: cache}).logits)
    return torch.cat(logits, dim=1)


@torch.no_grad()
def check_llama(server: llama_cpp.LlamaServer, weights: str, peer: Any, ids: Tensor) -> None:
    """Check llama.cpp's log-probability of its next token against transformers'; q8_0 by its most likely token."""
    answer = server.complete(ids[0].tolist(), 1, top=1)
    token = answer["choices"][0]["logprobs"]["content"][0]
    expected = peer(ids).logits[0, -1].log_softmax(-1)[token["id"]].item()
    error, most = abs(token["logprob"] - expected), LLAMA_ERROR if weights == "float32" else 10 * LLAMA_ERROR
    if not error <= most:
        raise RuntimeError(f"llama.cpp's log-probability ({weights}) must be within {most} of {expected}, got {error}")


# ---- sections


def build_mamba(sizes: Sizes) -> Any:
    """Build transformers' model in the shape of mamba-130m, with random weights."""
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, num_hidden_layers=sizes.layers, state_size=16,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        initializer_range=0.02,  # with transformers' 0.1 the model is chaotic: rounding decides its outputs
    )  # fmt: skip
    return MambaForCausalLM(config).eval()


def measure_peers(suite: DecodeSuite, sizes: Sizes, folder: Path) -> None:
    """Compare ours with transformers and llama.cpp on one Mamba model."""
    peer = build_mamba(sizes)
    models = {name: upcycle(copy.deepcopy(peer), muon) for name, muon in (("plain", Muon.off()), ("muon", Muon()))}
    ids = random_tokens(1, 16, sizes.vocabulary)
    expected = logits_of(peer, ids)
    check_close("plain", logits_of(models["plain"], ids), expected)
    packed = {name: by_weights(name, model, ids) for name, model in models.items()}
    servers = {}
    for weights in LLAMA_WEIGHTS:
        path = folder / f"{weights}.gguf"
        llama_cpp.write_gguf(peer, path, weights)
        servers[weights] = llama_cpp.LlamaServer(path, suite.thread_count)
        check_llama(servers[weights], weights, peer, ids)
    prompt = random_tokens(1, sizes.prompt, sizes.vocabulary)

    contenders = {f"llama.cpp, {weights}": llama(server, sizes.tokens) for weights, server in servers.items()}
    for weights in WEIGHTS:
        contenders |= {f"{name}, {weights}": ours(packed[name][weights], sizes.tokens) for name in models}
    contenders["transformers, float32"] = Contender(decoding(peer, sizes.tokens))
    shape = f"mamba, width {sizes.hidden}, {sizes.layers} layers, vocabulary {sizes.vocabulary}"
    best = suite.section(f"{shape}: decoding", contenders)
    for theirs, own in LLAMA_WEIGHTS.items():
        for name in models:
            ratio = best[f"llama.cpp, {theirs}"] / best[f"{name}, {own}"]
            suite.summary[f"{name}, {own}: tokens/s over llama.cpp, {theirs}"] = ratio
    for weights in WEIGHTS:
        suite.summary[f"muon over plain, {weights}: time"] = best[f"muon, {weights}"] / best[f"plain, {weights}"]
    contenders = {"llama.cpp, float32": llama_prefill(servers["float32"], prompt)}
    contenders |= {f"{name}, float32": Contender(prefill(model, prompt)) for name, model in models.items()}
    best = suite.section(f"{shape}: prompt of {sizes.prompt} tokens", contenders)
    for name in models:
        ratio = best["llama.cpp, float32"] / best[f"{name}, float32"]
        suite.summary[f"{name}, prompt: tokens/s over llama.cpp, float32"] = ratio


def llama(server: llama_cpp.LlamaServer, tokens: int) -> Contender:
    """Decoding by llama.cpp, by its own clock."""
    return Contender(lambda: server.complete([1, 2, 3, 4], tokens)["timings"]["predicted_per_token_ms"] / 1e3)


def llama_prefill(server: llama_cpp.LlamaServer, prompt: Tensor) -> Contender:
    """Reading of a prompt by llama.cpp, by its own clock."""
    return Contender(lambda: server.complete(prompt[0].tolist(), 1)["timings"]["prompt_per_token_ms"] / 1e3)


def measure_preset(suite: DecodeSuite, name: str, backbone: str, tokens: int) -> None:
    """Time one backbone of a preset, plain and with Muon, with all weights."""
    from muonssm.models.language import MuonSSMForCausalLM, preset

    for rule, muon in (("plain", False), ("muon", True)):
        torch.manual_seed(0)
        model = MuonSSMForCausalLM(preset(name, backbone, muon)).eval()
        models = by_weights(backbone, model, random_tokens(1, 6, model.config.vocab_size))
        contenders = {f"{rule}, {weights}": ours(models[weights], tokens) for weights in WEIGHTS}
        suite.section(f"{name}, {backbone}, {rule}", contenders)


def measure_small(suite: DecodeSuite) -> None:
    """Time the small model of `bench --language`, all backbones with Muon, in float32."""
    models = {name: build(name, LanguageSizes(), True).eval() for name in BACKBONES}
    ids = random_tokens(1, 4, LanguageSizes().vocabulary)
    for model in models.values():
        logits_of(model, ids)
    contenders = {name: ours(model, 128) for name, model in models.items()}
    suite.section("width 256, 4 layers, vocabulary 4096, Muon: decoding", contenders)


def run(output: Path, rounds: int, thread_count: int, sizes: Sizes = Sizes()) -> int:  # noqa: B008  a frozen value
    """Print the table and write decode.json into `output`."""
    from tqdm import tqdm

    check_int("--rounds", rounds, 1)
    check_int("--threads", thread_count, 1)
    output.mkdir(parents=True, exist_ok=True)
    presets = len(BACKBONES) * 2 if sizes.preset else 0
    with threads(thread_count), tqdm(total=3 + presets, unit="section") as progress, _scratch_folder() as folder:
        suite = DecodeSuite(rounds, thread_count, progress, [], {})
        measure_peers(suite, sizes, folder)
        for backbone in BACKBONES if sizes.preset else ():
            measure_preset(suite, sizes.preset, backbone, sizes.tokens)  # type: ignore[arg-type]
        measure_small(suite)
    print(suite.table())
    write_record(output / "decode.json", thread_count, suite.rows, suite.summary)
    return 0


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    """A folder for the GGUF files."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)
