"""Hide progress bars of other libraries, and warnings of theirs that do not apply here."""

from __future__ import annotations

import logging
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
