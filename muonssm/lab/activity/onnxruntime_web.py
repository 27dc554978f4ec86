"""onnxruntime-web, which runs ONNX programs in a browser: one version, fetched from npm or taken from a folder.

The three files that the page needs are checked against the checksums of that version, wherever they come from, and kept
in the cache folder.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from muonssm.lab.core.files import atomic, cache_folder
from muonssm.lab.core.untrusted import printable, read_bytes

PACKAGE, VERSION = "onnxruntime-web", "1.30.0"
SCRIPT, GLUE, PROGRAM = "ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"
SHA256 = {
    SCRIPT: "faece07e84faa9001f5104bbe4e5c70861d06cb2376a0dea1fa0ad33a67adc81",
    GLUE: "e13f7f94fc51b4ca72b12faeb1ee95f4ace6dfbc8939bc718aabdc0a27c4299b",
    PROGRAM: "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
}
SECONDS = 600  # that npm may take
MAX_BYTES = 1 << 26  # of one file
HERE = "muonssm.lab.activity.onnxruntime_web"

Files = dict[str, bytes]


class DownloadError(ValueError):
    """onnxruntime-web is not at hand, and npm cannot fetch it."""


def load(folder: Path | None = None) -> Files:
    """Return the files by name: from `folder` if it is given, otherwise from the cache, otherwise from npm."""
    if folder is not None:
        return _read(folder)
    cache = cache_folder() / f"{PACKAGE}-{VERSION}"
    if not all((cache / name).is_file() for name in SHA256):
        _keep(_fetch(), cache)
    return _read(cache)


def _read(folder: Path) -> Files:
    """Read a copy of the package: a folder with the files, or with `dist/`, which has them in the package."""
    if not folder.is_dir():
        raise FileNotFoundError(f"--onnxruntime must be a folder with {PACKAGE} {VERSION}, got {str(folder)!r}")
    inside = folder / "dist" if (folder / "dist").is_dir() else folder
    return _checked(lambda name: read_bytes(inside / name, MAX_BYTES, f"{HERE}.MAX_BYTES"), inside)


def _checked(read: Callable[[str], bytes], where: str | Path) -> Files:
    files = {}
    for name, wanted in SHA256.items():
        content = read(name)
        got = hashlib.sha256(content).hexdigest()
        if got != wanted:
            raise ValueError(f"{where}: {name} must be that of {PACKAGE} {VERSION} (SHA-256 {wanted}), got {got}")
        files[name] = content
    return files


def _keep(files: Files, cache: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        with atomic(cache / name) as temporary:
            temporary.write_bytes(content)


def _fetch() -> Files:
    """Fetch the package with npm, and read the three files from its archive."""
    npm = shutil.which("npm")
    if npm is None:
        raise DownloadError(_advice("npm is not installed"))
    with tempfile.TemporaryDirectory() as folder:
        # Scripts of packages do not run: `npm pack` of a name downloads an archive, and that is all.
        command = [npm, "pack", f"{PACKAGE}@{VERSION}", "--ignore-scripts", "--pack-destination", folder]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired as error:
            raise DownloadError(_advice(f"npm took more than {SECONDS} s")) from error
        archives = sorted(Path(folder).glob("*.tgz"))
        if done.returncode or not archives:
            errors = [line for line in done.stderr.splitlines() if "error" in line.lower()] or ["no error message"]
            raise DownloadError(_advice(f"npm cannot fetch it: {printable(errors[0])[:200]}"))
        return _checked(lambda name: _member(archives[0], name), f"{PACKAGE} from npm")


def _member(archive: Path, name: str) -> bytes:
    """Read one file of the archive; nothing is unpacked."""
    try:
        with tarfile.open(archive) as package:
            member = package.getmember(f"package/dist/{name}")
            if not member.isreg() or member.size > MAX_BYTES:
                raise ValueError(f"{name} must be a file of {MAX_BYTES} bytes or less ({HERE}.MAX_BYTES)")
            content = package.extractfile(member)
            assert content is not None
            return content.read()
    except (tarfile.TarError, KeyError, EOFError) as error:
        raise ValueError(f"{archive.name} must be the archive of {PACKAGE}, got an error: {error}") from error


def _advice(reason: str) -> str:
    return (
        f"--to web needs {PACKAGE} {VERSION}, and {reason}; install npm, connect to the network, or name a folder with "
        f"a copy of the package (--onnxruntime FOLDER)"
    )
