"""MkDocs hook: publish CONTRIBUTING.md of the repository as the page contributing.md."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the page, which only has a link; the links of CONTRIBUTING.md begin with `docs/`, which is dropped."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.remove(files.src_uris["contributing.md"])
    files.append(File.generated(config, "contributing.md", content=text))
    return files
