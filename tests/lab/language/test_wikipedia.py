"""The articles of enwik8 without their markup, and packed files as sources."""

from __future__ import annotations

import gzip
import json
import lzma
import time

import pytest

from muonssm.lab.language import corpora, wikipedia
from muonssm.lab.language.corpora import Document, open_source
from muonssm.lab.language.prepare import PrepareConfig, prepare
from muonssm.lab.language.shards import open_tokens
from muonssm.lab.language.wikipedia import plain_text, read_page

DUMP = """<mediawiki>
  <page>
    <title>Cat &amp; mat</title>
    <text xml:space="preserve">{{Infobox|{{x}}|name=Cat}}
A '''cat''' sits on a [[mat]] or a [[rug|small rug]].&lt;ref&gt;Someone&lt;/ref&gt; See [http://x.y the page].
[[Image:cat.jpg|thumb|A [[black]] cat]]
== Food ==
* fish &amp;amp; milk
{| class=&quot;table&quot;
| a || b
|}
[[Category:Cats]]
[[de:Katze]]</text>
  </page>
  <page>
    <title>Kitty</title>
    <text xml:space="preserve">#REDIRECT [[Cat]]</text>
  </page>
  <page>
    <title>Category:Cats</title>
    <text xml:space="preserve">All of them.</text>
  </page>
  <page>
    <title>Dog</title>
    <text xml:space="preserve">A dog ran over the h"""


def test_markup_is_dropped_and_text_kept(tmp_path):
    (tmp_path / "enwik8.gz").write_bytes(gzip.compress(DUMP.encode()))
    source = open_source("enwik8-text", file=str(tmp_path / "enwik8.gz"), other_file=True)
    first, *others, last = source.items()
    assert first.text == ("Cat & mat\n\nA cat sits on a mat or a small rug. See the page.\n\nFood\n\nfish & milk\n")
    assert [item.reason for item in others] == ["a redirect", "not an article"]
    assert last == Document("page 4", "Dog\n\nA dog ran over the h\n")
    assert source.total == 4
    assert list(source.items(3)) == [last]
    assert source.has_position(4)
    assert not source.has_position(5)
    assert not source.has_position("1")


def test_only_enwik8_is_read_unless_allowed(tmp_path):
    (tmp_path / "enwik8").write_bytes(DUMP.encode())
    with pytest.raises(ValueError, match="--from must be enwik8, 100000000 bytes"):
        open_source("enwik8-text", file=str(tmp_path / "enwik8"))
    with pytest.raises(ValueError, match=r"file \(--from\) must be the file enwik8 or enwik8\.gz"):
        PrepareConfig("enwik8-text")
    with pytest.raises(ValueError, match=r"file \(--from\) must be None unless source is 'enwik8-text'"):
        PrepareConfig("stdlib", file="enwik8")


def test_articles_become_tokens(tmp_path):
    (tmp_path / "dump").write_bytes((DUMP[:-60] + DUMP[DUMP.index("  <page>") :] * 9).encode())
    config = PrepareConfig(
        "enwik8-text", tokenizer="bytes", file=str(tmp_path / "dump"), other_file=True, validation=0.2
    )
    manifest = prepare(config, tmp_path / "out", progress=False)
    assert manifest["left_out"]["a redirect"]["count"] == 10
    data = open_tokens(tmp_path / "out")
    assert data.load_tokenizer().decode(data.validation.document(0)[0]).startswith("Cat & mat\n\nA cat sits")


@pytest.mark.parametrize("piece", ["{{", "{|", "[[", "<!--", "<ref>", "[http://", "'' ", "{{|", "=", "<", "* ", " "])
def test_time_is_linear_in_the_length_of_a_page(piece):
    def seconds(count):
        start = time.process_time()
        plain_text("=" + piece * count)
        return time.process_time() - start

    seconds(1000)
    assert seconds(160_000) < 20 * max(seconds(20_000), 0.005)


def test_a_number_that_is_no_character_spoils_nothing(tmp_path):
    page = f"<title>&#{'1' * 9000};</title><text>A &amp;#{'2' * 9000}; and &amp;#65;</text>"
    assert read_page(page, "page 1").text == "\ufffd\n\nA \ufffd and A\n"


def test_long_pages_are_left_out(monkeypatch):
    monkeypatch.setattr(wikipedia, "MAX_PAGE", 20)
    item = read_page("<title>T</title><text>" + "x" * 21 + "</text>", "page 1")
    assert item.reason == "a page of more than 20 characters"


# ---- packed files


ROWS = [{"instruction": f"Say {i}", "input": "", "output": f"{i}!"} for i in range(12)]


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_packed_sources_are_read_like_plain_ones(tmp_path, suffix, pack):
    plain = {
        "a.json": json.dumps(ROWS), "a.jsonl": "\n".join(map(json.dumps, ROWS)), "a.txt": "Some text.\n" * 3,
    }  # fmt: skip
    for name, content in plain.items():
        (tmp_path / name).write_text(content)
        (tmp_path / f"{name}{suffix}").write_bytes(pack(content.encode()))
        kind = "text" if name == "a.txt" else "instructions"
        found = [list(open_source(str(tmp_path / each), kind).items()) for each in (name, f"{name}{suffix}")]
        texts = [[(item.text, item.prompt) for item in items] for items in found]
        assert texts[0] == texts[1]
        assert len(texts[0]) == (1 if name == "a.txt" else 12)


def test_instructions_in_packed_json_are_prepared(tmp_path):
    (tmp_path / "alpaca.json.xz").write_bytes(lzma.compress(json.dumps(ROWS).encode()))
    config = PrepareConfig(str(tmp_path / "alpaca.json.xz"), kind="instructions", tokenizer="bytes", validation=0.2)
    manifest = prepare(config, tmp_path / "out", progress=False)
    assert manifest["train"]["documents"] + manifest["validation"]["documents"] == 12


@pytest.mark.parametrize("name", ["a.json.xz", "a.jsonl.xz", "a.txt.xz"])
def test_damaged_and_long_packed_files_are_listed(tmp_path, monkeypatch, name):
    kind = "text" if ".txt" in name else "instructions"
    (tmp_path / name).write_bytes(lzma.compress(json.dumps(ROWS).encode())[:60])
    (item,) = open_source(str(tmp_path / name), kind).items()
    assert item.reason.startswith("must be an xz file, got a damaged one")
    monkeypatch.setattr(corpora, "MAX_FILE_BYTES", 200)
    (tmp_path / name).write_bytes(lzma.compress(b"\n" * 5000))
    (item,) = open_source(str(tmp_path / name), kind).items()
    assert item.reason.startswith("must decompress to 200 bytes or less")


def test_a_packed_parquet_file_is_not_read(tmp_path):
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(b"x"))
    with pytest.raises(ValueError, match=r"source must have a .* file"):
        open_source(str(tmp_path / "a.parquet.gz"))
