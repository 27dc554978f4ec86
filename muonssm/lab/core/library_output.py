"""Hide progress bars of other libraries, warnings of theirs that do not apply here, and errors that come twice."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Hide the bar that transformers shows for every file it loads or writes."""
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            enable_progress_bar()


@contextmanager
def hide_length_warning() -> Iterator[None]:
    """Hide transformers' warning about the training length, which does not limit a recurrent memory."""
    logger = logging.getLogger("transformers.generation.stopping_criteria")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def hide_kept_thread_errors() -> Iterator[None]:
    """Hide the traceback of a thread that keeps its error in `exception`, as TensorBoard's writer does on a full disk.

    The thread that uses the writer raises the error.
    """
    shown = threading.excepthook

    def hook(found: threading.ExceptHookArgs) -> None:
        if getattr(found.thread, "exception", None) is not found.exc_value:
            shown(found)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = shown
