"""From a source of documents to a folder of tokens, in a job that can be killed and taken up again.

    prepare(PrepareConfig("stdlib", vocab_size=4096), Path("tokens"))
    prepare(PrepareConfig("fineweb-edu", tokenizer="TinyLlama/TinyLlama_v1.1"), Path("tokens"), resume=True)

Documents are read in order and go to the training or the validation part by a hash of their number. Shard k of both
parts ends at the same document. `progress.json` is written when it has, and holds all that the rest of the job depends
on, so that a job taken up from there writes the same bytes as one that was never stopped. `tokens.json` replaces it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from muonssm.checks import is_int, is_number

from .corpora import ALIASES, KINDS, Document, Lost, Place, Row, Source, open_source
from .shards import FORMAT, MANIFEST, PARTS, PROGRESS, ShardWriter, check_files, dtype_for, open_tokens, write_json
from .tokenizer import LEAST, Encoded, encode_documents, load_tokenizer, save_tokenizer, spread, train_bpe, vocabulary

if TYPE_CHECKING:
    from tqdm import tqdm
    from transformers import PreTrainedTokenizerBase

BATCH_ROWS, BATCH_CHARACTERS = 1024, 4_000_000  # tokenised at once, in parallel
TRIED = 10_000  # rows of which one at least must be of use: a wrong field is to be noticed early
NAMED = 100  # names kept for each reason that something is left out for; the rest are counted


class EmptySourceError(ValueError):
    """A source without documents to train on."""


@dataclass(frozen=True)
class PrepareConfig:
    """Which documents, and how they become tokens.

    Attributes:
        source: `"stdlib"` (the text of Python's own library), `"fineweb-edu"`, `"alpaca"`, a file or a folder (.txt,
            .md and .py: a document a file; .jsonl and .parquet: a document a row; .json, a list, where named itself or
            for instructions), or a data set of the hub, `"owner/name"` or `"owner/name:config"`, of which the training
            part is streamed.
        kind: `"text"`, or `"instructions"` for rows with instruction, input and output. None: what the source is.
        field: of a row, the field with the text.
        tokenizer: a name on the hub, a folder or a tokenizer.json. None: a byte-level BPE is trained on the source.
        vocab_size: how many tokens that one has, at most.
        tokenizer_characters: how many characters, from all over the source, it is trained on at most. It takes one
            more pass over the source.
        validation: share of documents in the validation part: at least one document, or 0 for none. None: 0.05 of
            `stdlib`, 0.01 of everything else.
        shard_tokens: a shard ends with the document that brings it to so many tokens.
        limit: only the first so many documents of the source. None: all.
        max_length: tokens of an instruction with its response and EOS; what is beyond is left out.
        cut: a text file of more characters becomes several documents, which end where lines do. None: one document.
        revision: of a data set of the hub, a commit, branch or tag. None: the newest.
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

    def __post_init__(self) -> None:
        for name in ("source", "field"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it may be a name")
        for name in ("tokenizer", "revision"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"{name} is {value!r}; it may be None or a name")
        if self.kind is None:
            known = self.source in ("alpaca", ALIASES["alpaca"])
            object.__setattr__(self, "kind", "instructions" if known else "text")
        if self.kind not in KINDS or (self.kind == "instructions" and self.source == "stdlib"):
            raise ValueError(
                f"kind is {self.kind!r} with source {self.source!r}; it may be one of {KINDS} that fits it"
            )
        if self.validation is None:
            object.__setattr__(self, "validation", 0.05 if self.source == "stdlib" else 0.01)
        share = self.validation
        if not is_number(share) or not 0 <= share < 1:
            raise ValueError(f"validation is {self.validation!r}; it may be None or in [0, 1)")
        self._check_counts()

    def _check_counts(self) -> None:
        least = {"vocab_size": LEAST, "tokenizer_characters": 1, "shard_tokens": 1, "max_length": 2}
        for name in (*least, "limit", "cut"):
            value, bound = getattr(self, name), least.get(name, 1)
            if value is None and name not in least:
                continue
            if not is_int(value, bound):
                raise ValueError(
                    f"{name} is {value!r}; it may be {'' if name in least else 'None or '}an integer >= {bound}"
                )


def prepare(config: PrepareConfig, output: Path, resume: bool = False, progress: bool = True) -> dict[str, Any]:
    """Fills the folder `output`; returns its manifest. `resume` takes up a job of the same settings, if there is one.

    An error before the first shard is finished leaves nothing behind; after that, what there is can be taken up.
    """
    output = Path(output)
    state = _state_of(config, output, resume)
    if (output / MANIFEST).is_file():
        (output / PROGRESS).unlink(missing_ok=True)
        return open_tokens(output, check=False).manifest
    source = open_source(config.source, str(config.kind), config.field, config.cut, config.revision)
    if state is not None and state["source"] != json.loads(json.dumps(source.metadata)):
        raise ValueError(f"{output} was begun when source {config.source!r} was another; {PROGRESS} says what it was")
    made = [path for path in (output, *output.parents) if not path.exists()]
    try:
        output.mkdir(parents=True, exist_ok=True)
        return _Job(config, output, source, state, progress).run()
    except Exception as error:
        if state is None and (isinstance(error, EmptySourceError) or not any(output.glob("train-*.bin"))):
            _remove(output, made)
        raise


def _state_of(config: PrepareConfig, output: Path, resume: bool) -> dict[str, Any] | None:
    """What is known of the job in the folder; None if there is none. Raises unless the folder may be written to."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"output is {str(output)!r}, which is a file; it may be a folder, new or empty")
    there = sorted(path.name for path in output.iterdir()) if output.exists() else []
    if there and not resume:
        raise ValueError(f"{output} has {there[0]} already; resume takes up a job, output may name another folder")
    name = next((name for name in (MANIFEST, PROGRESS) if name in there), None)
    if name is None:
        if any(not file.endswith(".part") for file in there):
            raise ValueError(f"{output} has {there[0]}, and no job to resume; output may name another folder")
        return None
    try:
        state = json.loads((output / name).read_text(encoding="utf-8"))
        before = {key: state["config"][key] for key in asdict(config)}
        whole = name == MANIFEST or set(state) >= {"source", "tokenizer", "number", "batch", "shards", *PARTS}
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise ValueError(f"{output / name} is damaged; remove the folder, and prepare it anew")
    for key, value in asdict(config).items():
        if before[key] != value:
            raise ValueError(
                f"{output} has a job with {key} {before[key]!r}, and here it is {value!r}; resume takes the same "
                "settings, output may name another folder"
            )
    return state


def _remove(output: Path, made: list[Path]) -> None:
    """Empties a folder that was free before, and takes away the folders `made` for it."""
    for path in output.iterdir() if output.is_dir() else ():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for folder in made:
        if folder.is_dir():
            folder.rmdir()


# the job


class _Batch(NamedTuple):
    """Rows read together: the number of the first, where it is in the source, and all of them."""

    number: int
    place: Place
    rows: list[Row]


class _Job:
    """One preparation. `state` is what `progress.json` holds, which is written only where a shard ends."""

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
        self.held = self._total("validation", "documents")

    def run(self) -> dict[str, Any]:
        """Writes what is left of the shards, and the manifest."""
        batch, end = None, self.state["number"]
        try:
            with self._bar("preparing", end) as bar:
                for batch in self._batches():
                    self._add(batch)
                    done, end = end, batch.number + len(batch.rows)
                    bar.update(end - done)
                    bar.set_postfix(tokens=f"{self._tokens():,}", refresh=False)
            if batch is not None and self.writers:
                self._end_shard(end, batch)
        finally:
            for writer in self.writers.values():
                writer.abandon()
        return self._finish(end)

    def _make_tokenizer(self) -> None:
        """Saves the tokenizer in the folder: that given, or one trained on the source."""
        write_json(self.folder / PROGRESS, self.state)
        given = self.config.tokenizer
        tokenizer = load_tokenizer(given) if given else self._train()
        size = vocabulary(tokenizer)
        self.state["tokenizer"] = {"name": given, "files": save_tokenizer(tokenizer, self.folder)}
        self.state |= {"vocab_size": size, "eos_id": int(tokenizer.eos_token_id), "dtype": dtype_for(size)}
        write_json(self.folder / PROGRESS, self.state)

    def _train(self) -> PreTrainedTokenizerBase:
        """A BPE of the training documents."""

        def texts() -> Iterator[tuple[float, str]]:
            with self._bar("reading for the tokenizer") as bar:
                for number, row in enumerate(self._rows()):
                    bar.update()
                    if isinstance(row, Document) and _share(number, "part") >= float(self.config.validation or 0):
                        yield _share(number, "tokenizer"), (row.prompt or "") + row.text

        return train_bpe(spread(texts(), self.config.tokenizer_characters), self.config.vocab_size)

    def _bar(self, what: str, done: int = 0) -> tqdm:
        from tqdm import tqdm

        known = [count for count in (self.source.total, self.config.limit) if count is not None]
        total = min(known, default=None)
        return tqdm(desc=what, unit=" documents", total=total, initial=done, delay=1, disable=not self.progress)

    def _rows(self, start: int = 0, place: Place = None) -> Iterator[Row]:
        """The rows of the source from number `start` on, which is at `place`, up to the limit."""
        usable = start > 0
        limit = None if self.config.limit is None else self.config.limit - start
        for number, row in enumerate(islice(self.source.rows(place), limit), start):
            if isinstance(row, Document):
                usable = True
            elif not usable and number == TRIED:
                reason = f"none of the first {TRIED} documents can be used ({row.name} {row.reason})"
                raise EmptySourceError(f"source {self.config.source!r}: {reason}")
            yield row

    def _batches(self) -> Iterator[_Batch]:
        """The rows that are left; the first batch may begin before them, at the last known place of the source."""
        number, place = self.state["batch"]["number"], self.state["batch"]["place"]
        rows: list[Row] = []
        size = 0
        for row in self._rows(number, place):
            rows.append(row)
            size += len(row.text) if isinstance(row, Document) else 0
            if len(rows) >= BATCH_ROWS or size >= BATCH_CHARACTERS:
                yield _Batch(number, place, rows)
                number, place, rows, size = number + len(rows), self.source.place(), [], 0
        if rows:
            yield _Batch(number, place, rows)

    def _add(self, batch: _Batch) -> None:
        """Tokenises a batch, and ends a shard at each document that fills one."""
        skipped = max(0, self.state["number"] - batch.number)
        rows = batch.rows[skipped:]
        documents = [row for row in rows if isinstance(row, Document)]
        encoded = iter(encode_documents(self.tokenizer, documents, self.config.max_length))
        for number, row in enumerate(rows, start=batch.number + skipped):
            found = row if isinstance(row, Lost) else next(encoded)
            if isinstance(found, Lost):
                _count(self.state["left_out"], found)
            else:
                self._write(number, found)
            if sum(writer.tokens for writer in self.writers.values()) >= self.config.shard_tokens:
                self._end_shard(number + 1, batch)

    def _write(self, number: int, document: Encoded) -> None:
        """Adds a document to its part. The first one is for validation, so that there is one."""
        share = float(self.config.validation or 0)
        held = _share(number, "part") < share or (share > 0 and not self.held)
        part = PARTS[held]
        if part not in self.writers:
            self.writers[part] = ShardWriter(self.folder, part, self.state["shards"], self.state["dtype"])
        self.writers[part].add(document.tokens, document.prompt_length)
        self.held += held
        self.state["truncated"] += document.truncated

    def _end_shard(self, number: int, batch: _Batch) -> None:
        """Closes the shards of both parts before document `number`, then records them."""
        for part in PARTS:
            if part in self.writers:
                self.state[part]["shards"].append(self.writers[part].close())
        self.writers = {}
        self.state["shards"] += 1
        self.state["number"] = number
        self.state["batch"] = {"number": batch.number, "place": batch.place}
        write_json(self.folder / PROGRESS, self.state)

    def _total(self, part: str, what: str) -> int:
        """The tokens or documents in the finished shards of a part."""
        return sum(shard[what] for shard in self.state[part]["shards"])

    def _tokens(self) -> int:
        """All tokens so far."""
        open_shards = sum(writer.tokens for writer in self.writers.values())
        return open_shards + sum(self._total(part, "tokens") for part in PARTS)

    def _finish(self, number: int) -> dict[str, Any]:
        """Writes the manifest, which makes the folder whole."""
        state, source = self.state, self.config.source
        if not state["train"]["shards"] and state["validation"]["shards"]:
            raise EmptySourceError(
                f"source {source!r} has {self.held} documents, none of which is left for training with validation "
                f"{self.config.validation}; validation may be less, or 0, or cut may make several documents of one"
            )
        if not state["train"]["shards"]:
            reasons = ", ".join(f"{count['count']} {reason}" for reason, count in state["left_out"].items())
            raise EmptySourceError(f"source {source!r}: none of {number} documents can be used ({reasons or 'empty'})")
        manifest = {"format": FORMAT, "kind": self.config.kind, "source": {"name": source, **state["source"]}}
        kept = ("config", "tokenizer", "vocab_size", "eos_id", "dtype", *PARTS, "left_out", "truncated")
        manifest |= {key: state[key] for key in kept}
        for part in PARTS:
            totals = {what: self._total(part, what) for what in ("documents", "tokens")}
            manifest[part] = {**totals, **state[part]}
        write_json(self.folder / MANIFEST, manifest)
        (self.folder / PROGRESS).unlink()
        return manifest


def _new_state(config: PrepareConfig, source: Source) -> dict[str, Any]:
    """That of a job which has done nothing yet.

    `number` counts the documents in finished shards; `batch` is a place in the source at or before it.
    """
    left_out: dict[str, Any] = {}
    for lost in source.lost:
        _count(left_out, lost)
    state = {
        "config": asdict(config),
        "source": source.metadata,
        "tokenizer": None,
        "left_out": left_out,
        "truncated": 0,
    }
    state |= {"number": 0, "batch": {"number": 0, "place": None}, "shards": 0}
    return {**state, **{part: {"shards": []} for part in PARTS}}


def _count(left_out: dict[str, Any], lost: Lost) -> None:
    record = left_out.setdefault(lost.reason, {"count": 0, "names": []})
    record["count"] += 1
    if len(record["names"]) < NAMED:
        record["names"].append(lost.name)


def _share(number: int, purpose: str) -> float:
    """A number in [0, 1) for a document, spread evenly; another one for each purpose."""
    digest = hashlib.blake2b(f"{purpose} {number}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


# the embedded source


def cache_folder() -> Path:
    """Where data that can be made again is kept: $MUONSSM_CACHE, $XDG_CACHE_HOME/muonssm or ~/.cache/muonssm."""
    own, common = os.environ.get("MUONSSM_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else Path(common or "~/.cache").expanduser() / "muonssm"


def embedded(vocab_size: int) -> Path:
    """The folder of `stdlib` for this Python, with a BPE of at most so many tokens; prepared when first asked for."""
    config = PrepareConfig("stdlib", vocab_size=vocab_size)
    folder = cache_folder() / f"stdlib-{platform.python_version()}-{vocab_size}-{FORMAT}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Another process may do the same: each works in its own folder, and the first to finish gives it its name.
        with tempfile.TemporaryDirectory(prefix=".preparing-", dir=folder.parent) as private:
            prepare(config, Path(private) / "tokens")
            try:
                (Path(private) / "tokens").rename(folder)
            except OSError:
                if not folder.exists():
                    raise
    open_tokens(folder, check=False)
    return folder
