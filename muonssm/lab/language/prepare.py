"""Prepare tokens: from a source of documents to a folder of shards, in a job that can be interrupted and resumed.

    prepare(PrepareConfig("stdlib", vocab_size=4096), Path("tokens"))
    prepare(PrepareConfig("fineweb-edu", tokenizer="TinyLlama/TinyLlama_v1.1"), Path("tokens"), resume=True)

Documents are read in order. A hash of its number assigns each to the training or the validation split. Shard k of both
splits ends at the same document; then `progress.json` is written with everything that the rest of the job depends on,
so that a resumed job writes the same bytes as an uninterrupted one. At the end `tokens.json` replaces it.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from muonssm.checks import check_bool, check_choice, check_int, check_number
from muonssm.lab.core.files import LEFTOVER, cache_folder, remove_leftovers, write_json
from muonssm.lab.core.lock import LOCK, locked

from .corpora import ALIASES, KINDS, WIKIPEDIA, Document, Item, Position, Source, Unusable, open_source
from .manifest import FORMAT, SHARD_FILE, SPLITS, DamagedFileError, Fields, read_manifest, read_progress
from .shards import MANIFEST, PROGRESS, ShardWriter, check_files, dtype_for, open_tokens
from .tokenizer import (
    MIN_VOCAB_SIZE,
    EncodedDocument,
    encode_documents,
    load_tokenizer,
    sample_texts,
    save_tokenizer,
    train_bpe,
    vocabulary_size,
)

if TYPE_CHECKING:
    from tqdm import tqdm
    from transformers import PreTrainedTokenizerBase

BATCH_ITEMS, BATCH_CHARACTERS = 1024, 4_000_000  # tokenized at once, in parallel
MAX_UNUSABLE = 10_000  # a source that begins with so many unusable items probably has another field
MAX_NAMES = 100  # names kept per reason; the rest are only counted
FOR_SPLIT, FOR_TOKENIZER = "part", "tokenizer"  # hashed with a document's number; changing them changes the splits


class EmptySourceError(ValueError):
    """A source without documents to train on."""


@dataclass(frozen=True)
class PrepareConfig:
    """Which documents to prepare, and how.

    Attributes:
        source: `"stdlib"` (Python's standard library), `"enwik8-text"` (the articles of enwik8), `"fineweb-edu"`,
            `"alpaca"`, a file or a folder (.txt, .md and .py: one document per file; .jsonl and .parquet: one per row;
            .json, a list: only when named directly or for instructions; all but .parquet also compressed, .gz or .xz),
            or a data set on the hub, `"owner/name"` or `"owner/name:config"`, whose training split is streamed.
        kind: `"text"`, or `"instructions"` for rows with instruction, input and output. None: by the source.
        field: the field of a row that has the text.
        tokenizer: a name on the hub, a folder or a tokenizer.json. None: train a byte-level BPE on the source.
        vocab_size: the most tokens that a trained tokenizer has.
        tokenizer_characters: the most characters that it is trained on, sampled evenly. Training takes one more pass
            over the source.
        validation: share of documents in the validation split, at least one document; 0 for none. None: 0.05 for
            `stdlib`, 0.01 otherwise.
        shard_tokens: a shard ends with the document that brings it to this many tokens.
        limit: use only this many documents, the first ones. None: all.
        max_length: the most tokens of an instruction with its response and EOS; longer ones are truncated.
        cut: split text files of more characters into several documents, at the ends of lines. None: do not split.
        revision: commit, branch or tag of a data set on the hub. None: the newest.
        follow_links: whether links that lead out of a source folder are followed. No file is read twice.
        file: enwik8 or enwik8.gz, for `enwik8-text`.
        other_file: accept a file that is not enwik8.
    """

    source: str = "stdlib"
    kind: str | None = None
    field: str = "text"
    tokenizer: str | None = None
    vocab_size: int = 32000
    tokenizer_characters: int = 100_000_000
    validation: float | None = None
    shard_tokens: int = 100_000_000
    limit: int | None = None
    max_length: int = 2048
    cut: int | None = None
    revision: str | None = None
    follow_links: bool = False
    file: str | None = None
    other_file: bool = False

    def __post_init__(self) -> None:
        for name in ("source", "field", "tokenizer", "revision", "file"):
            _check_name(name, getattr(self, name), optional=name in ("tokenizer", "revision", "file"))
        if self.kind is None:
            is_alpaca = self.source in ("alpaca", ALIASES["alpaca"])
            object.__setattr__(self, "kind", "instructions" if is_alpaca else "text")
        check_choice("kind", self.kind, ("text",) if self.source in ("stdlib", WIKIPEDIA) else KINDS)
        if (self.file is None) == (self.source == WIKIPEDIA):
            wanted = "the file enwik8 or enwik8.gz" if self.file is None else f"None unless source is {WIKIPEDIA!r}"
            raise ValueError(f"file (--from) must be {wanted} for source {self.source!r}, got {self.file!r}")
        if self.validation is None:
            object.__setattr__(self, "validation", 0.05 if self.source == "stdlib" else 0.01)
        if check_number("validation", self.validation, 0, 1) == 1:
            raise ValueError("validation must be < 1, got 1: no document would be left for training")
        least = {"vocab_size": MIN_VOCAB_SIZE, "tokenizer_characters": 1, "shard_tokens": 1, "max_length": 2}
        for name, bound in least.items():
            check_int(name, getattr(self, name), bound)
        for name in ("follow_links", "other_file"):
            check_bool(name, getattr(self, name))
        for name in ("limit", "cut"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)


def _check_name(name: str, value: Any, optional: bool) -> None:
    wanted = "None or a non-empty string" if optional else "a non-empty string"
    if not isinstance(value, str) and not (optional and value is None):
        raise TypeError(f"{name} must be {wanted}, got {value!r}")
    if value == "":
        raise ValueError(f"{name} must be {wanted}, got ''")


def prepare(config: PrepareConfig, output: Path, resume: bool = False, progress: bool = True) -> dict[str, Any]:
    """Fill the folder `output` with tokens; return its manifest. `resume` continues a job with the same settings.

    An error before the first shard is finished leaves nothing behind; a later one leaves a job that can be resumed.
    The folder is locked meanwhile.
    """
    output = Path(output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"output must be a new or empty folder, got {str(output)!r}, which is a file")
    with locked(output):
        return _prepare(config, output, resume, progress)


def _prepare(config: PrepareConfig, output: Path, resume: bool, progress: bool) -> dict[str, Any]:
    state = _read_state(config, output, resume)
    remove_leftovers(output)
    if (output / MANIFEST).is_file():
        (output / PROGRESS).unlink(missing_ok=True)
        return open_tokens(output, check=False).manifest
    settings = (config.field, config.cut, config.revision, config.follow_links, config.file, config.other_file)
    source = open_source(config.source, str(config.kind), *settings)
    if state is not None and state["source"] != json.loads(json.dumps(source.metadata)):
        raise ValueError(
            f"source must be as it was when the job began, got {config.source!r}, which has changed since; "
            f"{output / PROGRESS} describes the earlier one"
        )
    if state is not None and not source.has_position(state["batch"]["position"]):
        raise DamagedFileError(
            output / PROGRESS, "batch.position", "a position in the source", state["batch"]["position"]
        )
    try:
        return _Job(config, output, source, state, progress).run()
    except Exception as error:
        if state is None and (isinstance(error, EmptySourceError) or not any(output.glob("train-*.bin"))):
            _empty(output)
        raise


def _read_state(config: PrepareConfig, output: Path, resume: bool) -> dict[str, Any] | None:
    """The state of the job in the folder; None if there is none. Raise if the folder must not be written to."""
    another = "use another --output"
    names = sorted({path.name for path in output.iterdir()} - {LOCK}) if output.exists() else []
    if names and not resume:
        raise ValueError(
            f"output must be a new or empty folder, got {str(output)!r}, which has {names[0]}; use --resume to "
            f"continue a job, or {another}"
        )
    name = next((name for name in (MANIFEST, PROGRESS) if name in names), None)
    if name is None:
        foreign = [file for file in names if not _is_temporary(file)]
        if foreign:
            raise ValueError(
                f"output must have a job to resume, got {str(output)!r}, which has {foreign[0]} and no job; {another}"
            )
        return None
    state = (read_manifest if name == MANIFEST else read_progress)(output / name)
    earlier = Fields(output / name, state).inner("config")
    for key, value in asdict(config).items():
        before = earlier.get(key, "a setting", lambda value: isinstance(value, str | int | float | None))
        if before != value:
            raise ValueError(f"{key} must be {before!r:.100}, as in the job in {output}, got {value!r}; or {another}")
    return state


def _is_temporary(name: str) -> bool:
    """Whether a file is one that a job was writing when it was killed."""
    return bool(LEFTOVER.fullmatch(name)) or (name.endswith(".part") and bool(SHARD_FILE.fullmatch(name[:-5])))


def _empty(output: Path) -> None:
    """Empty a folder that was empty before, except for its lock."""
    for path in output.iterdir():
        if path.name != LOCK:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


# ---- the job


class _Batch(NamedTuple):
    """Consecutive items: the number of the first, its position in the source, and the items."""

    number: int
    position: Position
    items: list[Item]


class _Job:
    """One preparation. `state` is the content of `progress.json`, which is written whenever a shard ends."""

    def __init__(
        self, config: PrepareConfig, folder: Path, source: Source, state: dict[str, Any] | None, progress: bool
    ) -> None:
        self.config, self.folder, self.source, self.progress = config, folder, source, progress
        self.state = _new_state(config, source) if state is None else state
        if self.state["tokenizer"] is None:
            self._make_tokenizer()
        check_files(folder, self.state, check=False)
        self.tokenizer = load_tokenizer(str(folder))
        self.writers: dict[str, ShardWriter] = {}
        self.validation_documents = self._total("validation", "documents")

    def run(self) -> dict[str, Any]:
        """Write the remaining shards and the manifest."""
        batch, end = None, self.state["number"]
        try:
            with self._progress_bar("preparing", end) as bar:
                for batch in self._batches():
                    self._add(batch)
                    before, end = end, batch.number + len(batch.items)
                    bar.update(end - before)
                    bar.set_postfix(tokens=f"{self._tokens():,}", refresh=False)
            if batch is not None and self.writers:
                self._end_shard(end, batch)
        finally:
            for writer in self.writers.values():
                writer.abandon()
        return self._finish(end)

    def _make_tokenizer(self) -> None:
        """Load or train the tokenizer, and save it in the folder."""
        write_json(self.folder / PROGRESS, self.state)
        name = self.config.tokenizer
        tokenizer = load_tokenizer(name) if name else self._train_tokenizer()
        size = vocabulary_size(tokenizer)
        self.state["tokenizer"] = {"name": name, "files": save_tokenizer(tokenizer, self.folder)}
        self.state |= {"vocab_size": size, "eos_id": int(tokenizer.eos_token_id), "dtype": dtype_for(size)}
        write_json(self.folder / PROGRESS, self.state)

    def _train_tokenizer(self) -> PreTrainedTokenizerBase:
        """Train a BPE on the training documents."""

        def texts() -> Iterator[tuple[float, str]]:
            with self._progress_bar("reading for the tokenizer") as bar:
                for number, item in enumerate(self._items()):
                    bar.update()
                    if isinstance(item, Document) and _hash(number, FOR_SPLIT) >= float(self.config.validation or 0):
                        yield _hash(number, FOR_TOKENIZER), (item.prompt or "") + item.text

        return train_bpe(sample_texts(texts(), self.config.tokenizer_characters), self.config.vocab_size)

    def _progress_bar(self, description: str, initial: int = 0) -> tqdm:
        from tqdm import tqdm

        total = min((n for n in (self.source.total, self.config.limit) if n is not None), default=None)
        disable = not self.progress
        return tqdm(desc=description, unit=" documents", total=total, initial=initial, delay=1, disable=disable)

    def _items(self, start: int = 0, position: Position = None) -> Iterator[Item]:
        """Yield the items of the source up to the limit, from number `start` on, which is at `position`."""
        any_usable = start > 0
        limit = None if self.config.limit is None else self.config.limit - start
        for number, item in enumerate(islice(self.source.items(position), limit), start):
            if isinstance(item, Document):
                any_usable = True
            elif not any_usable and number == MAX_UNUSABLE:
                raise EmptySourceError(
                    f"source must have usable documents, got {self.config.source!r}, whose first {MAX_UNUSABLE} are "
                    f"unusable ({item.name}: {item.reason})"
                )
            yield item

    def _batches(self) -> Iterator[_Batch]:
        """Yield the remaining items; after a resume, the first batch can begin before them."""
        number, position = self.state["batch"]["number"], self.state["batch"]["position"]
        items: list[Item] = []
        size = 0
        for item in self._items(number, position):
            items.append(item)
            size += len(item.text) if isinstance(item, Document) else 0
            if len(items) >= BATCH_ITEMS or size >= BATCH_CHARACTERS:
                yield _Batch(number, position, items)
                number, position, items, size = number + len(items), self.source.position(), [], 0
        if items:
            yield _Batch(number, position, items)

    def _add(self, batch: _Batch) -> None:
        """Tokenize a batch and write it; end a shard at each document that fills one."""
        written = max(0, self.state["number"] - batch.number)
        items = batch.items[written:]
        documents = [item for item in items if isinstance(item, Document)]
        encoded = iter(encode_documents(self.tokenizer, documents, self.config.max_length))
        for number, item in enumerate(items, start=batch.number + written):
            result = item if isinstance(item, Unusable) else next(encoded)
            if isinstance(result, Unusable):
                _count(self.state["left_out"], result)
            else:
                self._write(number, result)
            if sum(writer.tokens for writer in self.writers.values()) >= self.config.shard_tokens:
                self._end_shard(number + 1, batch)

    def _write(self, number: int, document: EncodedDocument) -> None:
        """Write a document to its split. The first document is for validation, so that there is at least one."""
        share = float(self.config.validation or 0)
        validates = _hash(number, FOR_SPLIT) < share or (share > 0 and not self.validation_documents)
        split = SPLITS[validates]
        if split not in self.writers:
            self.writers[split] = ShardWriter(self.folder, split, self.state["shards"], self.state["dtype"])
        self.writers[split].add(document.tokens, document.prompt_length)
        self.validation_documents += validates
        self.state["truncated"] += document.truncated

    def _end_shard(self, number: int, batch: _Batch) -> None:
        """Close the shards of both splits before document `number`, and record them."""
        for split in SPLITS:
            if split in self.writers:
                self.state[split]["shards"].append(self.writers[split].close())
        self.writers = {}
        self.state["shards"] += 1
        self.state["number"] = number
        self.state["batch"] = {"number": batch.number, "position": batch.position}
        write_json(self.folder / PROGRESS, self.state)

    def _total(self, split: str, quantity: str) -> int:
        """The tokens or documents in the finished shards of a split."""
        return sum(shard[quantity] for shard in self.state[split]["shards"])

    def _tokens(self) -> int:
        """All tokens so far."""
        open_shards = sum(writer.tokens for writer in self.writers.values())
        return open_shards + sum(self._total(split, "tokens") for split in SPLITS)

    def _finish(self, number: int) -> dict[str, Any]:
        """Write the manifest, which completes the folder."""
        state = self.state
        self._check_not_empty(number)
        source = {"name": self.config.source, **state["source"]}
        manifest = {"format": FORMAT, "kind": self.config.kind, "source": source}
        copied = ("config", "tokenizer", "vocab_size", "eos_id", "dtype", *SPLITS, "left_out", "truncated")
        manifest |= {key: state[key] for key in copied}
        for split in SPLITS:
            totals = {quantity: self._total(split, quantity) for quantity in ("documents", "tokens")}
            manifest[split] = {**totals, **state[split]}
        write_json(self.folder / MANIFEST, manifest)
        (self.folder / PROGRESS).unlink()
        return manifest

    def _check_not_empty(self, number: int) -> None:
        """Raise unless there are documents to train on."""
        source, state = self.config.source, self.state
        if state["train"]["shards"]:
            return
        if state["validation"]["shards"]:
            raise EmptySourceError(
                f"source must have documents for training, got {source!r}, whose {self.validation_documents} documents "
                f"are all for validation; use a smaller --validation, or --cut to split long files"
            )
        reasons = ", ".join(f"{count['count']}: {reason}" for reason, count in state["left_out"].items())
        raise EmptySourceError(
            f"source must have usable documents, got {source!r}, with none among {number} ({reasons or 'empty'})"
        )


def _new_state(config: PrepareConfig, source: Source) -> dict[str, Any]:
    """The state of a new job.

    `number` counts the documents in finished shards; `batch` is a position in the source at or before it.
    """
    left_out: dict[str, Any] = {}
    for unusable in source.left_out:
        _count(left_out, unusable)
    state = {
        "config": asdict(config),
        "source": source.metadata,
        "tokenizer": None,
        "left_out": left_out,
        "truncated": 0,
    }
    state |= {"number": 0, "batch": {"number": 0, "position": None}, "shards": 0}
    return {**state, **{split: {"shards": []} for split in SPLITS}}


def _count(left_out: dict[str, Any], unusable: Unusable) -> None:
    record = left_out.setdefault(unusable.reason, {"count": 0, "names": []})
    record["count"] += 1
    if len(record["names"]) < MAX_NAMES:
        record["names"].append(unusable.name)


def _hash(number: int, purpose: str) -> float:
    """A uniform pseudo-random number in [0, 1) per document; independent for different purposes."""
    digest = hashlib.blake2b(f"{purpose} {number}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


# ---- the cache


def prepare_stdlib(vocab_size: int) -> Path:
    """The folder of `stdlib` for this Python, with a BPE of at most `vocab_size` tokens; prepared on first use."""
    config = PrepareConfig("stdlib", vocab_size=vocab_size)
    folder = cache_folder() / f"stdlib-{platform.python_version()}-{vocab_size}-{FORMAT}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Other processes can do the same at once: each prepares a folder of its own, and the first renames it.
        with tempfile.TemporaryDirectory(prefix=".preparing-", dir=folder.parent) as private:
            prepare(config, Path(private) / "tokens")
            try:
                (Path(private) / "tokens").rename(folder)
            except OSError:
                if not folder.exists():
                    raise
    open_tokens(folder, check=False)
    return folder
