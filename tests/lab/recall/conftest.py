"""Fixtures for tests that train small models."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def one_thread():
    """Run torch on one thread: more threads slow small models down, and change the last bits of sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
