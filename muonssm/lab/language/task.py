"""Language modelling as a task: tokens in, the next token out; perplexity. Pre-training and instruction tuning."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from muonssm.checks import is_int
from muonssm.lab.core.library_output import hide_progress_bars
from muonssm.lab.core.scorer import LossScorer
from muonssm.lab.core.task import DataSplits, Metric, Task
from muonssm.models.language import PRESETS, MuonSSMConfig, MuonSSMForCausalLM, check_mixer, preset
from muonssm.ops import Muon

from .generate import generate_text
from .instructions import Examples, pad_examples
from .prepare import embedded
from .pretrained import MAY_BE, load_pretrained
from .shards import Blocks, PreparedTokens, TokenPart, open_tokens
from .tokenizer import load_tokenizer

if TYPE_CHECKING:
    from muonssm.lab.core.experiment import Experiment

AGAIN = "prepare the data with the tokenizer of that model"
SAMPLES = ("import ", "def ", "class ")  # what samples begin with, where the text is Python's
OF_PRESETS = ("hidden_size", "intermediate_size", "num_hidden_layers", "mixer")


@dataclass(frozen=True)
class LanguageConfig:
    """The tokens to train on.

    Attributes:
        source: a folder that `muonssm prepare` made, or `"stdlib"`: Python's own library, prepared when first used.
        length: tokens a sequence; examples of instructions are cut to it.
        keep_apart: whether documents in a block see nothing of each other.
        vocab_size: of the tokenizer that is trained for `"stdlib"`.
        validation_items: at most so many sequences are validated on, spread evenly; 0 takes all.
    """

    source: str = "stdlib"
    length: int = 512
    keep_apart: bool = False
    vocab_size: int = 4096
    validation_items: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not self.source:
            raise ValueError(f"source is {self.source!r}; it may be 'stdlib' or a folder of `muonssm prepare`")
        for name, least in (("length", 2), ("vocab_size", 257), ("validation_items", 0)):
            value = getattr(self, name)
            if not is_int(value, least):
                raise ValueError(f"{name} is {value!r}; it may be an integer >= {least}")
        if self.keep_apart not in (True, False):
            raise ValueError(f"keep_apart is {self.keep_apart!r}; it may be True or False")

    def open(self) -> PreparedTokens:
        """The prepared tokens, checked."""
        return open_tokens(embedded(self.vocab_size) if self.source == "stdlib" else self.source)


@dataclass(frozen=True)
class LanguageModelConfig:
    """The network; a preset's sizes, or one's own.

    Attributes:
        backbone: a name in `muonssm.layers.BACKBONES`.
        preset: `"170m"`, or None for the sizes that follow.
        hidden_size, intermediate_size, num_hidden_layers, mixer, ssm_every, dropout: as in `MuonSSMConfig`.
        momentum: `"fixed"`, `"per_head"` or `"per_step"`.
        start: a run or a saved model whose weights and sizes are taken in place of new ones, to tune it.
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
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f"preset is {self.preset!r}; it may be None or one of {tuple(PRESETS)}")
        if self.preset is not None:
            self._check_preset()
        check_mixer(self.build(Muon(), vocab_size=300))

    def _check_preset(self) -> None:
        """What a preset has of its own may not be set beside it."""
        for each in fields(self):
            usual = {} if each.name == "mixer" else each.default
            if each.name in OF_PRESETS and getattr(self, each.name) != usual:
                raise ValueError(f"{each.name} is {getattr(self, each.name)!r}; with a preset it may be left out")
        if self.ssm_every not in (1, 2):
            raise ValueError(f"ssm_every is {self.ssm_every!r}; with a preset it may be 1 or 2")

    def build(self, muon: Muon, **metadata: Any) -> MuonSSMConfig:
        """The same for transformers, with what is known of the data."""
        if self.preset is not None:
            base = preset(self.preset, self.backbone, muon, hybrid=self.ssm_every == 2)
            given = {"vocab_size": base.vocab_size, **metadata, "momentum": self.momentum, "dropout": self.dropout}
            kept: dict[str, Any] = {**base.to_diff_dict(), **given, "muon": base.muon, "layer_types": None}
            return MuonSSMConfig(**{name: value for name, value in kept.items() if name != "transformers_version"})
        names = ("backbone", "hidden_size", "intermediate_size", "num_hidden_layers", "mixer", "ssm_every")
        own: dict[str, Any] = {name: getattr(self, name) for name in (*names, "momentum", "dropout")}
        heads = _heads(self.hidden_size) if isinstance(self.hidden_size, int) else 1  # the rest is said there
        return MuonSSMConfig(**own, muon=muon, num_attention_heads=heads, **metadata)


@dataclass(frozen=True)
class LanguageTask(Task):
    """The sections of a language recipe."""

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

    data: LanguageConfig
    model: LanguageModelConfig
    muon: Muon

    @property
    def title(self) -> str:
        return f"{self.model.backbone} on {Path(self.data.source).name}"

    def load_data(self) -> DataSplits:
        data = self.data.open()
        train, validation = (self._items(data, part) for part in (data.train, data.validation))
        keep = self.data.validation_items
        if keep and len(validation) > keep:
            validation = Subset(validation, [i * len(validation) // keep for i in range(keep)])
        manifest = data.manifest
        metadata = {
            "folder": str(data.folder.resolve()),
            "kind": manifest["kind"],
            "vocab_size": manifest["vocab_size"],
            "eos_token_id": manifest["eos_id"],
            "tokens_per_item": _tokens_per_item(manifest, self.data.length),
            "tokenizer_files": sorted(manifest["tokenizer"]["files"]),
            "summary": _summary(manifest, len(train), len(validation), self.data.length),
        }
        return DataSplits(train, validation, None, metadata)

    def _items(self, data: PreparedTokens, part: TokenPart) -> Any:
        if data.manifest["kind"] == "instructions":
            return Examples(part, self.data.length)
        return Blocks(part, self.data.length, self.data.keep_apart)

    def build_model(self, metadata: dict[str, Any]) -> MuonSSMForCausalLM:
        eos = metadata["eos_token_id"]
        told: dict[str, Any] = {"bos_token_id": eos, "eos_token_id": eos, "max_position_embeddings": self.data.length}
        if self.model.start is None:
            told |= {"vocab_size": metadata["vocab_size"], "architectures": [MuonSSMForCausalLM.__name__]}
            return MuonSSMForCausalLM(self.model.build(self.muon, **told))
        config = self._started(self.model.start, metadata)
        with hide_progress_bars():
            return MuonSSMForCausalLM.from_pretrained(self.model.start, config=config)

    def _started(self, start: str, metadata: dict[str, Any]) -> MuonSSMConfig:
        """The configuration of the start, with this recipe's memory update and length; raises if it does not fit."""
        named = f"model.start is {start!r}"
        if not (Path(start) / "config.json").is_file():
            raise ValueError(f"{named}, which has no config.json; it may be {MAY_BE}")
        config = MuonSSMConfig.from_pretrained(start)
        have, need = config.vocab_size, metadata["vocab_size"]
        if have < need:
            raise ValueError(f"{named} with {have} tokens, and the data has {need}; {AGAIN}")
        if (Path(start) / "tokenizer_config.json").is_file():
            one, two = (load_tokenizer(folder).get_vocab() for folder in (start, metadata["folder"]))
            if one != two:
                raise ValueError(f"{named}, whose tokenizer is not that of the data; {AGAIN}")
        if config.momentum not in ("fixed", self.model.momentum):
            lost = f"with model.momentum {config.momentum!r}, whose weights would be lost"
            raise ValueError(f"{named} {lost}; model.momentum is {self.model.momentum!r}, and may be the same")
        if (before := config.build_muon()) != self.muon:
            warnings.warn(f"{named}, trained with {before}; here it goes on with {self.muon}", stacklevel=2)
        config.muon, config.momentum = asdict(self.muon), self.model.momentum
        config.max_position_embeddings = max(config.max_position_embeddings, self.data.length)
        return config

    def rebuild_model(self, metadata: dict[str, Any], run: Path) -> MuonSSMForCausalLM:
        """From the run's own config.json: the start of a tuned one may be gone."""
        return MuonSSMForCausalLM(MuonSSMConfig.from_pretrained(run))

    def collate(self, items: list[Any], training: bool) -> dict[str, Tensor]:
        if "document_ids" in items[0]:
            return _flat(items)
        if len({len(item["input_ids"]) for item in items}) > 1:
            batch = pad_examples(items, 0)
        else:
            batch = {name: torch.stack([item[name] for item in items]) for name in ("input_ids", "labels")}
        return {**batch, "shift_labels": batch["labels"]}

    def scorer(self, split: Dataset) -> LossScorer:
        return LossScorer(lambda loss: {"perplexity": math.exp(min(loss, 700.0)), "loss": loss})

    def sample_outputs(self, run: Path) -> Iterator[str]:
        """Samples, the same for the same weights."""
        model, tokenizer = load_pretrained(run)
        if not all(bool(parameter.isfinite().all()) for parameter in model.parameters()):
            yield "there are no samples: the weights are not numbers"
            return
        for prompt in SAMPLES if self.data.source == "stdlib" else ("",):
            yield f"--- sample ---\n{prompt}{generate_text(model, tokenizer, prompt, max_new_tokens=80, seed=0)}"

    def files_to_copy(self, metadata: dict[str, Any]) -> list[Path]:
        return [Path(metadata["folder"]) / name for name in metadata["tokenizer_files"]]

    def report_sections(self, experiment: Experiment) -> list[Any]:
        """Return the zero-shot scores and the needle tests."""
        from .report_sections import sections

        return sections(experiment)

    def missing_evaluations(self, experiment: Experiment) -> list[str]:
        """Return the commands of evaluations that were not run."""
        from .report_sections import missing

        return missing(experiment)


def _heads(hidden_size: int) -> int:
    """Heads of attention: of 64 channels or more, an even number each."""
    return next((h for h in range(hidden_size // 64, 1, -1) if hidden_size % (2 * h) == 0), 1)


def _flat(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Blocks as one row of documents with their bounds, and positions that begin anew in each."""
    begins = [torch.nn.functional.pad(item["document_ids"].diff() != 0, (1, 0), value=True) for item in items]
    starts = torch.cat(begins).nonzero().flatten()
    inputs, labels = (torch.cat([item[name] for item in items])[None] for name in ("input_ids", "labels"))
    total = inputs.shape[1]
    bounds = torch.cat([starts, torch.tensor([total])])
    positions = torch.arange(total) - starts.repeat_interleave(bounds.diff())
    packed = {"position_ids": positions[None], "cu_seq_lens_q": bounds}
    return {"input_ids": inputs, "labels": labels, "shift_labels": labels, **packed}


def _tokens_per_item(manifest: dict[str, Any], length: int) -> float:
    """A block is full; an instruction with its response is as long as it is."""
    if manifest["kind"] != "instructions":
        return length
    return min(length, manifest["train"]["tokens"] / max(1, manifest["train"]["documents"]))


def _summary(manifest: dict[str, Any], train: int, validation: int, length: int) -> str:
    parts = [f"{manifest[part]['documents']:,} documents, {manifest[part]['tokens']:,} tokens ({part})"
             for part in ("train", "validation")]  # fmt: skip
    items = f"{train:,} sequences of {length} to train on, {validation:,} to validate on"
    return "\n".join([f"source {manifest['source']['name']}, {manifest['vocab_size']:,} tokens", *parts, items])
