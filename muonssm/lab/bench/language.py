"""`muonssm bench --language`: training and decoding of a small language model, ours and transformers' Mamba.

The peer is `MambaForCausalLM` with `use_mambapy=True`. Our model has the same blocks (norm and mixer, no SwiGLU) and
the peer's weights; the peer also runs under `torch.compile`. The logits are compared, for the whole sequence and token
by token, before anything is timed. Training steps of models with SwiGLU stand beside the machine's matmul limit, see
`limits`.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muonssm.checks import check_int
from muonssm.lab.core.timing import best_seconds
from muonssm.layers import BACKBONES, Mixer, load_weights

from . import limits
from .measure import check_close, forward, threads
from .record import LEGEND, Row, write_record

CHECKED_TOKENS = 32  # of the prompt; a quarter as many generated tokens are checked
COMPILED_PEER = True  # whether to time transformers' model under `torch.compile` too, which takes a minute to compile
TOKENS_PER_RUN = 16  # single tokens that are timed together at one position
BACKBONES_WITHOUT_PEER = tuple(name for name in BACKBONES if name != "mamba")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of the workloads.

    Attributes:
        hidden, layers, vocabulary: width, number of blocks and vocabulary size of the model.
        batch, length: number of sequences of a training step, and of tokens per sequence.
        prompt, new: number of tokens of a prompt, and of generated tokens.
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
            check_int(name, value, least.get(name, 1))


@dataclass(frozen=True)
class Speed(Row):
    """The speed of a contender; `milliseconds` are per token."""

    tokens_per_second: float


@dataclass(frozen=True)
class Bound:
    """The range in which a ratio should be."""

    least: float = 0.0
    most: float = math.inf

    def verdict(self, value: float) -> str:
        """Whether a ratio is in the range, in words."""
        target = f"{self.least:g} or more" if self.most == math.inf else f"{self.most:g} or less"
        return f"(target: {target}; {'met' if self.least <= value <= self.most else 'missed'})"


@dataclass(frozen=True)
class TrainedModel:
    """A model whose training step is compared with the matmul limit; by default the recipe language-demo's.

    Attributes:
        name: in the table.
        backbone: a name in `BACKBONES`.
        hidden, intermediate, layers, vocabulary, mixer: sizes of `MuonSSMConfig`.
        batch, length: sequences of a step, and tokens per sequence.
    """

    name: str = "language-demo"
    backbone: str = "gated_deltanet"
    hidden: int = 192
    intermediate: int = 512
    layers: int = 4
    vocabulary: int = 4096
    mixer: dict[str, Any] = field(default_factory=dict)
    batch: int = 16
    length: int = 256

    def build(self, muon: bool) -> Any:
        """Build the model."""
        from muonssm.models.language import MuonSSMConfig, MuonSSMForCausalLM

        torch.manual_seed(0)
        config = MuonSSMConfig(
            vocab_size=self.vocabulary, hidden_size=self.hidden, intermediate_size=self.intermediate,
            num_hidden_layers=self.layers, backbone=self.backbone, muon=muon, mixer=dict(self.mixer),
        )  # fmt: skip
        return MuonSSMForCausalLM(config)


WIDE = {"hidden": 672, "intermediate": 6144, "layers": 2, "vocabulary": 32000, "batch": 2, "length": 1024}
TRAINED_MODELS = (
    TrainedModel(),
    TrainedModel("width 672, gated_deltanet", "gated_deltanet", mixer={"num_heads": 9}, **WIDE),
    TrainedModel("width 672, mamba", "mamba", **WIDE),  # type: ignore[arg-type]
)
TRAINING, DECODING, POSITION = Bound(least=4.0), Bound(least=2.0), Bound(most=1.2)


@dataclass
class LanguageSuite:
    """Times one section after the other and collects the results.

    Attributes:
        rounds: the number of rounds of which the best counts.
        progress: a tqdm bar.
        rows: the speeds so far.
        summary: ratios of times so far.
        bounds: the ranges in which these ratios should be, where there is one.
    """

    rounds: int
    progress: Any
    rows: list[Speed] = field(default_factory=list)
    summary: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, Bound] = field(default_factory=dict)

    def section(
        self,
        title: str,
        functions: Mapping[str, Callable[[], object]],
        tokens: int,
        budget: float,
        round_factor: int = 1,
    ) -> dict[str, float]:
        """Time `functions`, each of which processes `tokens` tokens; the first one is the baseline.

        There are `round_factor` times as many rounds as usual.
        """
        self.progress.set_description(title)
        best = best_seconds(functions, round_factor * self.rounds, budget)
        seconds = {name: best[name] for name in functions}
        first = next(iter(seconds.values()))
        self.rows += [Speed(title, n, 1e3 * s / tokens, s / first, tokens / s) for n, s in seconds.items()]
        self.progress.update()
        return seconds

    def ratio(self, name: str, value: float, bound: Bound | None = None) -> None:
        """Record a ratio, and the range in which it should be."""
        self.summary[name] = value
        if bound is not None:
            self.bounds[name] = bound

    def table(self) -> str:
        """The text that is printed: one block per section, then the ratios."""
        lines, section = [], None
        for row in self.rows:
            if row.section != section:
                section = row.section
                lines.append(f"\n{section}")
            speed, per_token = f"{row.tokens_per_second:>10.0f} tokens/s", f"{row.milliseconds:>9.4f} ms per token"
            lines.append(f"  {row.name:<24} {speed} {per_token} {row.times:>8.2f}x")
        lines.append("")
        for name, value in self.summary.items():
            verdict = self.bounds[name].verdict(value) if name in self.bounds else ""
            lines.append(f"{name:<50} {value:>6.2f}  {verdict}".rstrip())
        return "\n".join(lines)


def build(backbone: str, sizes: Sizes, muon: bool) -> Any:
    """Build our model, without SwiGLU and without an end-of-sequence token, so that generation never stops early."""
    from muonssm.models.language import MuonSSMConfig, MuonSSMForCausalLM

    torch.manual_seed(0)
    config = MuonSSMConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=0, num_hidden_layers=sizes.layers,
        backbone=backbone, muon=muon,
    )  # fmt: skip
    return MuonSSMForCausalLM(config)


def build_peer(sizes: Sizes) -> Any:
    """Build transformers' model of the same shape."""
    importlib.import_module("mambapy.pscan")  # without it transformers silently falls back to a loop
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
    """Copy the weights of `peer` into `model`; both tie their embeddings."""
    model.model.embed_tokens.weight.copy_(peer.backbone.embeddings.weight)
    model.model.norm.weight.copy_(peer.backbone.norm_f.weight)
    for block, peer_block in zip(model.model.layers, peer.backbone.layers, strict=True):
        block.mixer_norm.weight.copy_(peer_block.norm.weight)
        load_weights(block.mixer, peer_block.mixer.state_dict(), "transformers")
    return model


def compiled_training_step(peer: Any, ids: Tensor) -> Callable[[], None]:
    """`training_step` of the peer under `torch.compile`."""
    compiled = copy.deepcopy(peer)
    compiled.forward = torch.compile(compiled.forward)
    return training_step(compiled, ids)


def contenders(backbone: str, sizes: Sizes) -> dict[str, Any]:
    """Our model, plain and with Muon; for Mamba also the peer. All have the same weights."""
    models = {name: build(backbone, sizes, muon) for name, muon in (("plain", False), ("muon", True))}
    if backbone != "mamba":
        return models
    peer = build_peer(sizes)
    return {**{name: load_peer(model, peer) for name, model in models.items()}, "transformers": peer}


@torch.no_grad()
def check(models: Mapping[str, Any], ids: Tensor, new: int) -> None:
    """Check the logits of all models, so that no time is reported for a wrong result.

    The peer is taken as correct, and our plain model must agree with it. Every other model must agree with itself on
    the `reference` implementation. The logits of `generate` must agree with those of one pass over the whole sequence.
    """
    peer = models.get("transformers")
    for name, model in models.items():
        actual = model.eval()(ids).logits
        if model is not peer:
            by_peer = peer is not None and name == "plain"
            check_close(name, actual, peer.eval()(ids).logits if by_peer else reference_logits(model, ids))  # type: ignore[union-attr]
        out = model.generate(ids, max_new_tokens=new, do_sample=False, output_logits=True, return_dict_in_generate=True)
        expected = model(out.sequences).logits[:, ids.shape[1] - 1 : -1]
        check_close(f"{name}, token by token,", torch.stack(out.logits, dim=1), expected)


def reference_logits(model: Any, ids: Tensor) -> Tensor:
    """The logits of `model` with the `reference` implementation."""
    slow = copy.deepcopy(model)
    for module in slow.modules():
        if isinstance(module, Mixer):
            module.impl = "reference"
    return slow(ids).logits


def training_step(model: Any, ids: Tensor) -> Callable[[], None]:
    """A function that runs forward, loss, backward and AdamW."""
    parameters = model.train().parameters()
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()

    return step


def generation(model: Any, prompt: Tensor, new: int) -> Callable[[], Tensor]:
    """A function that generates `new` tokens greedily with a cache."""
    model.eval()
    return lambda: model.generate(prompt, max_new_tokens=new, do_sample=False)


@torch.no_grad()
def tokens_at(model: Any, position: int, vocabulary: int) -> Callable[[], object]:
    """Read `position` tokens at once; return a function that reads `TOKENS_PER_RUN` more from there, one by one."""
    ids = random_tokens(1, position + 1, vocabulary)
    cache = model.eval()(ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values

    def read() -> Tensor:
        own_cache, out = copy.deepcopy(cache), None  # the model changes its cache in place
        for _ in range(TOKENS_PER_RUN):
            out = model(ids[:, -1:], past_key_values=own_cache, use_cache=True)
        return out.logits  # type: ignore[union-attr]

    return forward(read)


def random_tokens(sequences: int, length: int, vocabulary: int) -> Tensor:
    """Random tokens, the same at every call."""
    return torch.randint(vocabulary, (sequences, length), generator=torch.Generator().manual_seed(1))


def measure_backbone(suite: LanguageSuite, backbone: str, sizes: Sizes, budget: float) -> None:
    """Time decoding, positions and training of one backbone; each model gets about `budget` seconds for training."""
    models = contenders(backbone, sizes)
    prompt = random_tokens(1, sizes.prompt, sizes.vocabulary)
    ids = random_tokens(sizes.batch, sizes.length, sizes.vocabulary)
    check(models, prompt[:, :CHECKED_TOKENS], max(1, min(CHECKED_TOKENS // 4, sizes.new)))
    functions: dict[str, Callable[[], object]]
    functions = {name: generation(model, prompt, sizes.new) for name, model in models.items()}
    title = f"{backbone}, decoding {sizes.new} tokens after {sizes.prompt}"
    add_ratios(suite, backbone, "decoding", suite.section(title, functions, sizes.new, budget / 2), DECODING)
    measure_positions(suite, backbone, models, sizes)
    functions = {name: training_step(model, ids) for name, model in models.items()}
    if COMPILED_PEER and "transformers" in models:
        functions["transformers, compiled"] = compiled_training_step(models["transformers"], ids)
    title = f"{backbone}, training step, {sizes.batch} x {sizes.length} tokens"
    seconds = suite.section(title, functions, sizes.batch * sizes.length, budget)
    add_ratios(suite, backbone, "training", seconds, TRAINING)


def measure_limits(suite: LanguageSuite, models: Sequence[TrainedModel], budget: float) -> None:
    """Time training steps, plain and Muon, in the precisions that this machine is fast in, beside its matmul limit."""
    for sizes in models:
        works = {}
        ids = random_tokens(sizes.batch, sizes.length, sizes.vocabulary)
        for precision in limits.fast_precisions():
            for variant in ("plain", "muon"):
                model = sizes.build(variant == "muon")
                name = f"{sizes.name}, {variant}, {precision}"
                works[name] = limits.training_work(model, ids.numel(), precision, input_ids=ids, labels=ids)
        rates = limits.matmul_rates()
        title = f"{sizes.name}, training step, {sizes.batch} x {sizes.length} tokens"
        seconds = suite.section(title, {name: work.step for name, work in works.items()}, ids.numel(), budget)
        faster = limits.matmul_rates()
        rates = {precision: max(rates[precision], faster[precision]) for precision in rates}
        for precision, rate in rates.items():
            suite.ratio(f"matmul limit, {sizes.name}, {precision}, GFLOP/s", rate / 1e9)
        for name, share in limits.shares(works, seconds, rates).items():
            suite.ratio(name, share)
        first = next(iter(works.values()))
        suite.ratio(f"peak memory, {sizes.name}, float32, GB", limits.memory_bytes(first) / 1e9)


def add_ratios(suite: LanguageSuite, backbone: str, job: str, seconds: Mapping[str, float], bound: Bound) -> None:
    """Record the ratios of one section."""
    suite.ratio(f"muon over plain, {backbone}, {job}", seconds["muon"] / seconds["plain"])
    if "transformers" in seconds:
        for name in ("plain", "muon"):
            for peer in ("transformers", "transformers, compiled"):
                if peer in seconds:
                    suite.ratio(f"{peer} over {name}, {job}", seconds[peer] / seconds[name], bound)


def measure_positions(suite: LanguageSuite, backbone: str, models: Mapping[str, Any], sizes: Sizes) -> None:
    """Time a single token after few tokens and after many."""
    for name in ("plain", "muon"):
        functions = {
            f"at position {position}": tokens_at(models[name], position, sizes.vocabulary)
            for position in (sizes.early, sizes.late)
        }
        title = f"{backbone}, {name}, one token"
        early, late = suite.section(title, functions, TOKENS_PER_RUN, budget=3.0, round_factor=2).values()
        suite.ratio(f"position {sizes.late} over {sizes.early}, {backbone}, {name}", late / early, POSITION)


def run(
    output: Path,
    rounds: int,
    thread_count: int,
    sizes: Sizes = Sizes(),  # noqa: B008  a frozen value
    trained: Sequence[TrainedModel] = TRAINED_MODELS,
) -> int:
    """Print the table and write language.json into `output`."""
    from tqdm import tqdm

    check_int("--rounds", rounds, 1)
    check_int("--threads", thread_count, 1)
    output.mkdir(parents=True, exist_ok=True)  # fail before minutes of work if the folder cannot be written
    with threads(thread_count), tqdm(total=4 * len(BACKBONES) + len(trained), unit="section") as progress:
        suite = LanguageSuite(rounds, progress)
        measure_backbone(suite, "mamba", sizes, budget=30.0)
        for backbone in BACKBONES_WITHOUT_PEER:
            measure_backbone(suite, backbone, sizes, budget=8.0)
        measure_limits(suite, trained, budget=10.0)
    model = f"width {sizes.hidden}, {sizes.layers} layers, vocabulary {sizes.vocabulary}"
    print(f"\n{model}, no SwiGLU, float32, {thread_count} threads")
    print(suite.table())
    print(f"\n{LEGEND}")
    summary = suite.summary | {f"size, {name}": float(value) for name, value in asdict(sizes).items()}
    write_record(output / "language.json", thread_count, suite.rows, summary)
    return 0
