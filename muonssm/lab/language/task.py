"""Language modeling as a task: predict the next token, scored by perplexity. Pre-training and instruction tuning."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from muonssm.checks import check_bool, check_choice, check_int
from muonssm.lab.core.scorer import LossScorer
from muonssm.lab.core.task import DataSplits, Metric, Task
from muonssm.models.language import (
    PRESETS,
    MuonSSMConfig,
    MuonSSMForCausalLM,
    check_mixer,
    mixer_with_double_state,
    preset,
)
from muonssm.ops import Muon

from .generate import generate_text
from .instructions import Examples, pad_examples
from .manifest import splits_of
from .prepare import prepare_stdlib
from .pretrained import DivergedError, load_model, load_pretrained, read_config
from .shards import Blocks, PreparedTokens, TokenSplit, open_tokens
from .tokenizer import MIN_VOCAB_SIZE, load_tokenizer

if TYPE_CHECKING:
    from muonssm.lab.core.experiment import Experiment

SAMPLE_PROMPTS = ("import ", "def ", "class ")  # for models of Python's standard library
BYTE_VOCABULARY = 257  # 256 bytes and EOS
PRESET_FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers")  # a preset fixes these


@dataclass(frozen=True)
class LanguageConfig:
    """The tokens to train on.

    Attributes:
        source: a folder made by `muonssm prepare`, or `"stdlib"`: Python's standard library, prepared on first use.
        length: tokens per sequence; instruction examples are cut to it.
        keep_apart: whether the documents in a block are kept from seeing each other.
        vocab_size: size of the tokenizer that is trained for `"stdlib"`.
        validation_items: validate on at most this many sequences, evenly spaced; 0 for all.
        test_items: the same for the test set, of data with a published one.
    """

    source: str = "stdlib"
    length: int = 512
    keep_apart: bool = False
    vocab_size: int = 4096
    validation_items: int = 0
    test_items: int = 0

    def __post_init__(self) -> None:
        wanted = f"source must be 'stdlib' or a folder made by `muonssm prepare`, got {self.source!r}"
        if not isinstance(self.source, str):
            raise TypeError(wanted)
        if not self.source:
            raise ValueError(wanted)
        check_int("length", self.length, 2)
        check_int("vocab_size", self.vocab_size, MIN_VOCAB_SIZE)
        check_int("validation_items", self.validation_items, 0)
        check_int("test_items", self.test_items, 0)
        check_bool("keep_apart", self.keep_apart)

    def open(self) -> PreparedTokens:
        """Open the prepared tokens, with verified checksums."""
        return open_tokens(prepare_stdlib(self.vocab_size) if self.source == "stdlib" else self.source)


@dataclass(frozen=True)
class LanguageModelConfig:
    """The network: a preset, or explicit sizes.

    Attributes:
        backbone: a name in `muonssm.layers.BACKBONES`.
        preset: `"170m"`, or None for the sizes below.
        hidden_size, intermediate_size, num_hidden_layers, ssm_every, dropout: as in `MuonSSMConfig`.
        mixer: as in `MuonSSMConfig`; with a preset, changes to the preset's.
        momentum: `"fixed"`, `"per_head"` or `"per_step"`.
        start: a run or saved model to fine-tune; its weights and sizes replace those of this section.
    """

    backbone: str = "gated_deltanet"
    preset: str | None = None
    hidden_size: int = 256
    intermediate_size: int = 688
    num_hidden_layers: int = 6
    mixer: dict[str, Any] = field(default_factory=dict)
    ssm_every: int = 1
    momentum: str = "fixed"
    dropout: float = 0.0
    start: str | None = None

    def __post_init__(self) -> None:
        check_choice("preset", self.preset, (None, *PRESETS))
        if self.preset is not None:
            self._check_preset()
        check_mixer(self.build(Muon(), vocab_size=300))

    def _check_preset(self) -> None:
        """Raise if a field is set that the preset fixes."""
        for each in fields(self):
            if each.name in PRESET_FIELDS and getattr(self, each.name) != each.default:
                raise ValueError(f"{each.name} must be left out with a preset, got {getattr(self, each.name)!r}")
        if self.ssm_every not in (1, 2):
            raise ValueError(f"ssm_every must be 1 or 2 with a preset, got {self.ssm_every!r}")

    def build(self, muon: Muon, **settings: Any) -> MuonSSMConfig:
        """The configuration for transformers; `settings` are those that depend on the data."""
        if self.preset is not None:
            return self._build_preset(self.preset, muon, settings)
        names = ("backbone", "hidden_size", "intermediate_size", "num_hidden_layers", "mixer", "ssm_every")
        own: dict[str, Any] = {name: getattr(self, name) for name in (*names, "momentum", "dropout")}
        # MuonSSMConfig reports a hidden_size of another type.
        heads = _attention_heads(self.hidden_size) if isinstance(self.hidden_size, int) else 1
        return MuonSSMConfig(**own, muon=muon, num_attention_heads=heads, **settings)

    def _build_preset(self, name: str, muon: Muon, settings: dict[str, Any]) -> MuonSSMConfig:
        base = preset(name, self.backbone, muon, hybrid=self.ssm_every == 2)
        own = {"vocab_size": base.vocab_size, **settings, "momentum": self.momentum, "dropout": self.dropout}
        own["mixer"] = {**(base.mixer or {}), **self.mixer}
        merged: dict[str, Any] = {**base.to_diff_dict(), **own, "muon": base.muon, "layer_types": None}
        return MuonSSMConfig(**{key: value for key, value in merged.items() if key != "transformers_version"})


@dataclass(frozen=True)
class LanguageTask(Task):
    """A language recipe: its data, model and memory rule."""

    sections: ClassVar[dict[str, Any]] = {"data": LanguageConfig, "model": LanguageModelConfig, "muon": Muon}
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("perplexity", "perplexity", "", False),
        Metric("loss", "loss", "", False),
    )
    analyses: ClassVar[tuple[str, ...]] = (
        "spectrum",
        "rank",
        "gradients",
        "memory",
        "truncation",
        "convergence",
        "scaling",
    )
    eval_batch_factor: ClassVar[int] = 1
    eval_draws_random: ClassVar[bool] = False

    data: LanguageConfig
    model: LanguageModelConfig
    muon: Muon

    @property
    def title(self) -> str:
        return f"{self.model.backbone} on {Path(self.data.source).name}"

    def with_double_state(self) -> LanguageTask:
        """The same task with keys of twice the size; see `mixer_with_double_state`."""
        if self.model.start is not None:
            start = self.model.start
            raise ValueError(f"model.start must be left out, as it fixes the size of the state, got {start!r}")
        mixer = mixer_with_double_state(self.model.build(self.muon))
        return replace(self, model=replace(self.model, mixer=mixer))

    def load_data(self) -> DataSplits:
        data = self.data.open()
        train = self._items(data, data.train)
        validation = _spaced(self._items(data, data.validation), self.data.validation_items)
        test = None if data.test is None else _spaced(self._items(data, data.test), self.data.test_items)
        manifest = data.manifest
        metadata = {
            "folder": str(data.folder.resolve()),
            "kind": manifest["kind"],
            "vocab_size": manifest["vocab_size"],
            "eos_token_id": manifest["eos_id"],
            "tokens_per_item": _tokens_per_item(manifest, self.data.length),
            "tokenizer_files": sorted(manifest["tokenizer"]["files"]),
            "summary": _summary(manifest, train, validation, test, self.data.length),
        }
        return DataSplits(train, validation, test, metadata)

    def _items(self, data: PreparedTokens, split: TokenSplit) -> Any:
        if data.manifest["kind"] == "instructions":
            return Examples(split, self.data.length)
        return Blocks(split, self.data.length, self.data.keep_apart)

    def build_model(self, metadata: dict[str, Any]) -> MuonSSMForCausalLM:
        if self.model.start is not None:
            config = self._start_config(self.model.start, metadata)
            return load_model(Path(self.model.start), config, "model.start", _momentum_names(config))
        eos = metadata["eos_token_id"]
        config = self.model.build(
            self.muon,
            bos_token_id=eos,
            eos_token_id=eos,
            max_position_embeddings=self.data.length,
            vocab_size=metadata["vocab_size"],
            architectures=[MuonSSMForCausalLM.__name__],
        )
        return MuonSSMForCausalLM(config)

    def _start_config(self, start: str, metadata: dict[str, Any]) -> MuonSSMConfig:
        """The configuration of `model.start` with this recipe's memory rule and length; raise if it does not fit."""
        config = read_config(Path(start), "model.start")
        _check_same_tokenizer(start, config, metadata)
        if config.momentum not in ("fixed", self.model.momentum):
            raise ValueError(
                f"model.momentum must be {config.momentum!r}, as in model.start {start!r}, whose learned momentum "
                f"would be lost, got {self.model.momentum!r}"
            )
        if (start_muon := config.build_muon()) != self.muon:
            warnings.warn(
                f"model.start {start!r} was trained with {start_muon}; training continues with {self.muon}",
                stacklevel=3,
            )
        config.muon, config.momentum = asdict(self.muon), self.model.momentum
        config.max_position_embeddings = max(config.max_position_embeddings, self.data.length)
        return config

    def rebuild_model(self, metadata: dict[str, Any], run: Path) -> MuonSSMForCausalLM:
        """Build from the run's own config.json: the `model.start` of a tuned run can be gone."""
        return MuonSSMForCausalLM(read_config(run, "RUN"))

    def collate(self, items: list[Any], training: bool) -> dict[str, Tensor]:
        if "document_ids" in items[0]:
            return _pack(items)
        if len({len(item["input_ids"]) for item in items}) > 1:
            batch = pad_examples(items, 0)
        else:
            batch = {name: torch.stack([item[name] for item in items]) for name in ("input_ids", "labels")}
        return {**batch, "shift_labels": batch["labels"]}

    def can_split(self, model: Any) -> bool:
        return model.model.rotary_emb is None  # attention layers would need the keys of other processes

    def piece(self, batch: dict[str, Tensor], index: int, count: int) -> dict[str, Tensor]:
        """Cut the sequences into equal pieces. Padding is on the right, where it changes nothing, and needs no mask."""
        length = batch["input_ids"].shape[1]
        cut = slice(length * index // count, length * (index + 1) // count)
        piece = {name: batch[name][:, cut] for name in ("input_ids", "labels", "shift_labels")}
        if "cu_seq_lens_q" in batch:
            piece["cu_seq_lens_q"] = batch["cu_seq_lens_q"]
        return piece

    def scorer(self, split: Dataset) -> LossScorer:
        return LossScorer(lambda loss: {"perplexity": math.exp(min(loss, 700.0)), "loss": loss})

    def sample_outputs(self, run: Path) -> Iterator[str]:
        """Generated samples, the same for the same weights."""
        try:
            model, tokenizer = load_pretrained(run)
        except DivergedError:
            yield "no samples: some weights are not finite"
            return
        for prompt in SAMPLE_PROMPTS if self.data.source == "stdlib" else ("",):
            yield f"--- sample ---\n{prompt}{generate_text(model, tokenizer, prompt, max_new_tokens=80, seed=0)}"

    def files_to_copy(self, metadata: dict[str, Any]) -> list[Path]:
        return [Path(metadata["folder"]) / name for name in metadata["tokenizer_files"]]

    @classmethod
    def run_stages(cls, study: Path, output: str | None, options: Mapping[str, Any]) -> Iterator[str]:
        """Pre-train, tune and evaluate each variant; see `pipeline`."""
        from .pipeline import Pipeline, run_pipeline
        from .pipeline_page import text_table, write_pipeline

        given = {name: options[name] for name in ("variants", "backbones") if options[name] is not None}
        lists: dict[str, Any] = {name: [part.strip() for part in text.split(",")] for name, text in given.items()}
        seeds = {} if options["seeds"] is None else {"seeds": options["seeds"]}
        pipeline = Pipeline.load(study, options["set"], **lists, **seeds)
        result = run_pipeline(pipeline, Path(output or f"runs/study-{pipeline.name}"), options["resume"])
        yield text_table(result)
        yield f"\nreport: {write_pipeline(result)}"

    def report_sections(self, experiment: Experiment) -> list[Any]:
        from .report_sections import sections

        return list(sections(experiment))

    def missing_evaluations(self, experiment: Experiment) -> list[str]:
        from .report_sections import missing_evaluations

        return missing_evaluations(experiment)


@dataclass(frozen=True)
class ByteLanguageTask(LanguageTask):
    """Language modeling on bytes, scored by bits per byte: the loss in bits."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("bits_per_byte", "bits per byte", "", False),
        Metric("loss", "loss", "", False),
    )

    def load_data(self) -> DataSplits:
        data = super().load_data()
        if data.metadata["vocab_size"] != BYTE_VOCABULARY:
            wanted = f"{BYTE_VOCABULARY} tokens, which `--tokenizer bytes` has"
            got = f"{self.data.source!r} with {data.metadata['vocab_size']}"
            raise ValueError(f"data.source must have {wanted}, got {got}")
        return data

    def scorer(self, split: Dataset) -> LossScorer:
        return LossScorer(lambda loss: {"bits_per_byte": loss / math.log(2), "loss": loss})


def _spaced(items: Any, count: int) -> Any:
    """At most `count` items, evenly spaced; all for 0."""
    if not count or len(items) <= count:
        return items
    return Subset(items, [i * len(items) // count for i in range(count)])


def _attention_heads(hidden_size: int) -> int:
    """The most heads of at least 64 channels that divide `hidden_size` into an even number of channels each."""
    return next((h for h in range(hidden_size // 64, 1, -1) if hidden_size % (2 * h) == 0), 1)


def _momentum_names(config: MuonSSMConfig) -> set[str]:
    """The parameters of a learned momentum, which a start with a fixed one does not have."""
    fixed = MuonSSMConfig.from_dict({**config.to_dict(), "momentum": "fixed"})
    with torch.device("meta"):
        learned, without = (set(MuonSSMForCausalLM(each).state_dict()) for each in (config, fixed))
    return learned - without


def _check_same_tokenizer(start: str, config: MuonSSMConfig, metadata: dict[str, Any]) -> None:
    """Raise unless the data was prepared with the tokenizer of `model.start`."""
    advice = f"prepare the data with --tokenizer {start}"
    if config.vocab_size < metadata["vocab_size"]:
        raise ValueError(
            f"model.start must have the vocabulary of the data ({metadata['vocab_size']} tokens), got {start!r} with "
            f"{config.vocab_size}; {advice}"
        )
    if (Path(start) / "tokenizer_config.json").is_file():
        of_start, of_data = (load_tokenizer(folder).get_vocab() for folder in (start, metadata["folder"]))
        if of_start != of_data:
            raise ValueError(f"model.start must have the tokenizer of the data, got {start!r} with another; {advice}")


def _pack(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join blocks into one row of documents, with their bounds, and positions that start at 0 in each document."""
    begins = [torch.nn.functional.pad(item["document_ids"].diff() != 0, (1, 0), value=True) for item in items]
    starts = torch.cat(begins).nonzero().flatten()
    inputs, labels = (torch.cat([item[name] for item in items])[None] for name in ("input_ids", "labels"))
    total = inputs.shape[1]
    bounds = torch.cat([starts, torch.tensor([total])])
    positions = torch.arange(total) - starts.repeat_interleave(bounds.diff())
    packed = {"position_ids": positions[None], "cu_seq_lens_q": bounds}
    return {"input_ids": inputs, "labels": labels, "shift_labels": labels, **packed}


def _tokens_per_item(manifest: dict[str, Any], length: int) -> float:
    """Tokens per sequence: blocks are full, instruction examples are as long as they are on average."""
    if manifest["kind"] != "instructions":
        return length
    return min(length, manifest["train"]["tokens"] / max(1, manifest["train"]["documents"]))


def _summary(manifest: dict[str, Any], train: Any, validation: Any, test: Any, length: int) -> str:
    lines = [f"source {manifest['source']['name']}, vocabulary of {manifest['vocab_size']:,} tokens"]
    for split in splits_of(manifest):
        lines.append(f"{split}: {manifest[split]['documents']:,} documents, {manifest[split]['tokens']:,} tokens")
    scored = "" if test is None else f", {len(test):,} for testing"
    lines.append(f"sequences of {length}: {len(train):,} for training, {len(validation):,} for validation{scored}")
    return "\n".join(lines)
