"""What counts as a number in an argument."""

import math

import numpy as np
import pytest

from muonssm.checks import is_real, is_whole


@pytest.mark.parametrize(
    ("value", "whole", "real"),
    [(3, True, True), (0, True, True), (2.5, False, True), (math.inf, False, True), (True, False, False),
     ("3", False, False), (None, False, False), (np.float64(1), False, True)],
)  # fmt: skip
def test_numbers(value, whole, real):
    assert is_whole(value) == whole
    assert is_real(value) == real


def test_whole_numbers_have_a_least():
    assert is_whole(1, 1)
    assert not is_whole(0, 1)
