"""Find the files of a source folder: nothing outside of it unless told, no file twice, no loop of links.

A link counts as what it points to. Pipes, devices and sockets are never opened; each has a reason in `left_out`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from muonssm.lab.core.untrusted import UntrustedFileError, check_regular_file

OUTSIDE = "a link that leads out of the source (--follow-links reads it)"
FOLDER_TWICE = "a link to a folder that is read already"
FILE_TWICE = "a link to a file that is read already"
HIDDEN = "hidden"


class FolderFiles:
    """The files below a folder.

    Args:
        unusable_name: why a file with this name is not read; None if it is.
        follow_links: whether links out of the folder are followed.

    Attributes:
        files: files to read, in the order of their names.
        left_out: files and links that are not read, each with the reason.
    """

    def __init__(self, root: Path, unusable_name: Callable[[Path], str | None], follow_links: bool = False) -> None:
        self.root, self.unusable_name, self.follow_links = root, unusable_name, follow_links
        self.left_out: list[tuple[Path, str]] = []
        self._real_root = Path(os.path.realpath(root))
        self._files: dict[str, Path] = {}  # by their paths without links
        self._folders: set[str] = set()
        self._links: deque[Path] = deque()
        self._add_folder(root, str(self._real_root))
        while self._links:  # after everything else, so that a file is read under its own name if it has one
            self._add_link(self._links.popleft())
        self.files = sorted(self._files.values(), key=self._name)
        self.left_out.sort(key=lambda pair: self._name(pair[0]))

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _is_hidden(self, path: Path) -> bool:
        return any(component.startswith(".") for component in path.relative_to(self.root).parts)

    def _add_folder(self, start: Path, real_start: str) -> None:
        """Add the files below a folder, whose path without links is `real_start`; put its links aside."""
        pending = [(start, real_start)]
        while pending:
            folder, real = pending.pop()
            if real in self._folders:
                continue
            if not self._is_hidden(folder):  # a hidden folder can be read through a link
                self._folders.add(real)
            try:
                with os.scandir(folder) as found:
                    entries = sorted(found, key=lambda entry: entry.name)
            except OSError as error:
                self.left_out.append((folder, f"cannot be read: {error.strerror or error}"))
                continue
            for entry in entries:
                path, real_path = folder / entry.name, os.path.join(real, entry.name)
                if entry.is_symlink():
                    self._links.append(path)
                elif entry.is_dir(follow_symlinks=False):
                    pending.append((path, real_path))
                else:
                    self._add_file(path, real_path)

    def _add_link(self, path: Path) -> None:
        real = os.path.realpath(path)
        if self._is_hidden(path):
            self.left_out.append((path, HIDDEN))
        elif not self.follow_links and not Path(real).is_relative_to(self._real_root):
            self.left_out.append((path, OUTSIDE))
        elif not os.path.isdir(real):
            self._add_file(path, real)
        elif real in self._folders:
            self.left_out.append((path, FOLDER_TWICE))
        else:
            self._add_folder(path, real)

    def _add_file(self, path: Path, real: str) -> None:
        reason = self._unusable(path)
        if reason is None and real in self._files:
            reason = FILE_TWICE
        if reason is None:
            self._files[real] = path
        else:
            self.left_out.append((path, reason))

    def _unusable(self, path: Path) -> str | None:
        """Why a file is not read; None if it is. Nothing is opened."""
        if self._is_hidden(path):
            return HIDDEN
        try:
            check_regular_file(path)
        except FileNotFoundError:
            return "a broken link"
        except UntrustedFileError as error:
            return error.reason
        return self.unusable_name(path)
