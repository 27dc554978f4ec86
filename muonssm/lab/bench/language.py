"""`muonssm bench --language`: training and decoding of a small language model, ours and transformers' Mamba.

The peer is `MambaForCausalLM` with `use_mambapy=True`. Ours has the same blocks (norm and mixer, no SwiGLU) and its
weights. What a model computes is compared, whole and token by token, before anything is timed.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muonssm.checks import is_int
from muonssm.layers import BACKBONES, Mixer, load_weights

from .measure import best_seconds, forward, threads
from .operators import Row, write_record
from .workloads import TOLERANCE

CHECKED = 32  # tokens at most of a prompt that is checked, and a quarter of it of what is generated
PER_RUN = 16  # single tokens a run at one position
OTHERS = tuple(name for name in BACKBONES if name != "mamba")


@dataclass(frozen=True)
class Sizes:
    """Of the model and of the work.

    Attributes:
        hidden, layers, vocabulary: of the model.
        batch, length: sequences of a training step, and their tokens.
        prompt, new: tokens of a prompt, and tokens generated from it.
        early, late: positions at which single tokens are timed.
    """

    hidden: int = 256
    layers: int = 4
    vocabulary: int = 4096
    batch: int = 4
    length: int = 512
    prompt: int = 64
    new: int = 128
    early: int = 100
    late: int = 10_000

    def __post_init__(self) -> None:
        least = {"vocabulary": 2, "length": 2, "late": self.early + 1}
        for name, value in asdict(self).items():
            check_count(name, value, least.get(name, 1))


@dataclass(frozen=True)
class Speed(Row):
    """A contender, and its tokens per second; `milliseconds` are those of one token."""

    tokens_per_second: float


@dataclass(frozen=True)
class Bound:
    """What a ratio may be."""

    least: float = 0.0
    most: float = math.inf

    def verdict(self, value: float) -> str:
        """In words."""
        wanted = f"{self.least:g} or more" if self.most == math.inf else f"{self.most:g} or less"
        return f"(bound: {wanted}; {'met' if self.least <= value <= self.most else 'missed'})"


TRAINING, DECODING, POSITION = Bound(least=4.0), Bound(least=2.0), Bound(most=1.2)


@dataclass
class Report:
    """Times sections one after the other, and keeps what they measured."""

    rounds: int
    progress: Any  # a tqdm bar
    rows: list[Speed] = field(default_factory=list)
    metadata: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, Bound] = field(default_factory=dict)

    def section(
        self, title: str, functions: Mapping[str, Callable[[], object]], tokens: int, budget: float, often: int = 1
    ) -> dict[str, float]:
        """Times `functions`, each of which works on `tokens` tokens, in `often` times as many rounds as usual.

        The others are compared with the first.
        """
        self.progress.set_description(title)
        found = best_seconds(functions, often * self.rounds, budget)
        seconds = {name: found[name] for name in functions}  # in this order, whoever came in first
        first = next(iter(seconds.values()))
        self.rows += [Speed(title, n, 1e3 * s / tokens, s / first, tokens / s) for n, s in seconds.items()]
        self.progress.update()
        return seconds

    def ratio(self, name: str, value: float, bound: Bound | None = None) -> None:
        """Keeps a ratio, and what it may be."""
        self.metadata[name] = value
        if bound is not None:
            self.bounds[name] = bound

    def table(self) -> str:
        """What is printed: one block a section, then the ratios."""
        lines, section = [], None
        for row in self.rows:
            if row.section != section:
                section = row.section
                lines.append(f"\n{section}")
            speed, each = f"{row.tokens_per_second:>10.0f} tokens/s", f"{row.milliseconds:>9.4f} ms a token"
            lines.append(f"  {row.name:<24} {speed} {each} {row.times:>8.2f}x")
        lines.append("")
        for name, value in self.metadata.items():
            verdict = self.bounds[name].verdict(value) if name in self.bounds else ""
            lines.append(f"{name:<50} {value:>6.2f}  {verdict}".rstrip())
        return "\n".join(lines)


def check_count(name: str, value: object, least: int) -> None:
    """An integer that is large enough."""
    if not is_int(value, least):
        raise ValueError(f"{name} is {value!r}; it may be an integer >= {least}")


def build(backbone: str, sizes: Sizes, muon: bool) -> Any:
    """Our model, without a SwiGLU; nothing it generates ends it."""
    from muonssm.models.language import MuonSSMConfig, MuonSSMForCausalLM

    torch.manual_seed(0)
    config = MuonSSMConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=0, num_hidden_layers=sizes.layers,
        backbone=backbone, muon=muon,
    )  # fmt: skip
    return MuonSSMForCausalLM(config)


def build_peer(sizes: Sizes) -> Any:
    """transformers' model of the same shape."""
    importlib.import_module("mambapy.pscan")  # without it transformers falls back to a loop and says nothing
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, num_hidden_layers=sizes.layers, state_size=16, expand=2,
        conv_kernel=4, use_mambapy=True, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
        pad_token_id=None,
    )  # fmt: skip
    return MambaForCausalLM(config)


@torch.no_grad()
def load_peer(model: Any, peer: Any) -> Any:
    """`model` with the weights of `peer`; both tie their embeddings."""
    model.model.embed_tokens.weight.copy_(peer.backbone.embeddings.weight)
    model.model.norm.weight.copy_(peer.backbone.norm_f.weight)
    for block, theirs in zip(model.model.layers, peer.backbone.layers, strict=True):
        block.mixer_norm.weight.copy_(theirs.norm.weight)
        load_weights(block.mixer, theirs.mixer.state_dict(), "transformers")
    return model


def contenders(backbone: str, sizes: Sizes) -> dict[str, Any]:
    """Ours, plain and with Muon; for Mamba the peer too, and one set of weights for all three."""
    models = {name: build(backbone, sizes, muon) for name, muon in (("plain", False), ("muon", True))}
    if backbone != "mamba":
        return models
    peer = build_peer(sizes)
    return {**{name: load_peer(model, peer) for name, model in models.items()}, "transformers": peer}


@torch.no_grad()
def check(models: Mapping[str, Any], ids: Tensor, new: int) -> None:
    """No speed is reported for a wrong result.

    The peer is right by definition, and plain has to agree with it; without a peer, and with Muon, a model has to agree
    with itself on the `reference` implementation. What `generate` computes has to agree with a pass over the whole.
    """
    peer = models.get("transformers")
    for name, model in models.items():
        found = model.eval()(ids).logits
        if model is not peer:
            compare(name, found, by_steps(model, ids) if peer is None or name == "muon" else peer.eval()(ids).logits)
        out = model.generate(ids, max_new_tokens=new, do_sample=False, output_logits=True, return_dict_in_generate=True)
        wanted = model(out.sequences).logits[:, ids.shape[1] - 1 : -1]
        compare(f"{name}, token by token,", torch.stack(out.logits, dim=1), wanted)


def by_steps(model: Any, ids: Tensor) -> Tensor:
    """The logits of `model`, its memory computed step after step in torch."""
    slow = copy.deepcopy(model)
    for module in slow.modules():
        if isinstance(module, Mixer):
            module.impl = "reference"
    return slow(ids).logits


def compare(name: str, found: Tensor, wanted: Tensor) -> None:
    """Logits `[B, L, vocabulary]`, ours and as they should be; NaN is wrong."""
    if found.shape != wanted.shape:
        raise RuntimeError(f"{name} has shape {list(found.shape)}, not {list(wanted.shape)}: no speed is reported")
    error = ((found - wanted).norm() / wanted.norm()).item()
    if not error <= TOLERANCE:
        raise RuntimeError(f"{name} is off by {error:.2e} (it may be {TOLERANCE:g}): no speed is reported")


def step_of(model: Any, ids: Tensor) -> Callable[[], None]:
    """Forward, loss, backward and AdamW."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()

    return step


def generation_of(model: Any, prompt: Tensor, new: int) -> Callable[[], Tensor]:
    """Greedy, from a cache."""
    model.eval()
    return lambda: model.generate(prompt, max_new_tokens=new, do_sample=False)


@torch.no_grad()
def tokens_at(model: Any, position: int, vocabulary: int) -> Callable[[], object]:
    """Reads `position` tokens at once; what is returned then reads `PER_RUN` more, one by one, always from there."""
    ids = random_tokens(1, position + 1, vocabulary)
    cache = model.eval()(ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values

    def read() -> Tensor:
        now, out = copy.deepcopy(cache), None
        for _ in range(PER_RUN):
            out = model(ids[:, -1:], past_key_values=now, use_cache=True)
        return out.logits  # type: ignore[union-attr]

    return forward(read)


def random_tokens(rows: int, columns: int, vocabulary: int) -> Tensor:
    """The same whenever it is called."""
    return torch.randint(vocabulary, (rows, columns), generator=torch.Generator().manual_seed(1))


def measure_backbone(report: Report, backbone: str, sizes: Sizes, budget: float) -> None:
    """Training, decoding and positions of one backbone; a contender gets about `budget` seconds for training."""
    models = contenders(backbone, sizes)
    prompt = random_tokens(1, sizes.prompt, sizes.vocabulary)
    ids = random_tokens(sizes.batch, sizes.length, sizes.vocabulary)
    check(models, prompt[:, :CHECKED], max(1, min(CHECKED // 4, sizes.new)))
    functions: dict[str, Callable[[], object]]
    functions = {name: generation_of(model, prompt, sizes.new) for name, model in models.items()}
    title = f"{backbone}, decoding {sizes.new} tokens after {sizes.prompt}"
    compare_with_plain(report, backbone, "decoding", report.section(title, functions, sizes.new, budget / 2), DECODING)
    measure_positions(report, backbone, models, sizes)
    functions = {name: step_of(model, ids) for name, model in models.items()}
    title = f"{backbone}, training step, {sizes.batch} x {sizes.length} tokens"
    seconds = report.section(title, functions, sizes.batch * sizes.length, budget)
    compare_with_plain(report, backbone, "training", seconds, TRAINING)


def compare_with_plain(report: Report, backbone: str, job: str, seconds: Mapping[str, float], bound: Bound) -> None:
    """The ratios of one section."""
    report.ratio(f"muon over plain, {backbone}, {job}", seconds["muon"] / seconds["plain"])
    if "transformers" in seconds:
        for name in ("plain", "muon"):
            report.ratio(f"transformers over {name}, {job}", seconds["transformers"] / seconds[name], bound)


def measure_positions(report: Report, backbone: str, models: Mapping[str, Any], sizes: Sizes) -> None:
    """A single token after few tokens and after many."""
    for name in ("plain", "muon"):
        places = {f"at position {at}": at for at in (sizes.early, sizes.late)}
        functions = {place: tokens_at(models[name], at, sizes.vocabulary) for place, at in places.items()}
        seconds = report.section(f"{backbone}, {name}, one token", functions, PER_RUN, budget=3.0, often=2)
        early, late = seconds.values()
        report.ratio(f"position {sizes.late} over {sizes.early}, {backbone}, {name}", late / early, POSITION)


def run(output: Path, rounds: int, thread_count: int, sizes: Sizes = Sizes()) -> int:  # noqa: B008  a frozen value
    """Prints the table and writes language.json into `output`."""
    from tqdm import tqdm

    check_count("rounds", rounds, 1)
    check_count("threads", thread_count, 1)
    output.mkdir(parents=True, exist_ok=True)  # what cannot be written is known before minutes of work
    with threads(thread_count), tqdm(total=4 * len(BACKBONES), unit="section") as progress:
        report = Report(rounds, progress)
        measure_backbone(report, "mamba", sizes, budget=30.0)
        for backbone in OTHERS:
            measure_backbone(report, backbone, sizes, budget=8.0)
    model = f"width {sizes.hidden}, {sizes.layers} layers, vocabulary {sizes.vocabulary}"
    print(f"\n{model}, no SwiGLU, float32, {thread_count} threads")
    print(report.table())
    print("\nbest of several, in turns; x: times the first of the section (more than 1 is slower than it)")
    metadata = report.metadata | {f"size, {name}": float(value) for name, value in asdict(sizes).items()}
    write_record(output / "language.json", thread_count, list(report.rows), metadata)
    return 0
