"""Checks of arguments: what passes, and what the error says."""

import math

import numpy as np
import pytest

from muonssm.checks import check_bool, check_choice, check_int, check_number, is_int, is_number


@pytest.mark.parametrize(
    ("value", "integer", "number"),
    [(3, True, True), (0, True, True), (2.5, False, True), (math.inf, False, True), (True, False, False),
     ("3", False, False), (None, False, False), (np.float64(1), False, True)],
)  # fmt: skip
def test_what_counts_as_a_number(value, integer, number):
    assert is_int(value) == integer
    assert is_number(value) == number


def test_integers_have_a_lower_bound():
    assert is_int(1, 1)
    assert not is_int(0, 1)


@pytest.mark.parametrize(
    ("check", "error", "message"),
    [
        (lambda: check_int("heads", "4", 1), TypeError, "heads must be an integer >= 1, got '4'"),
        (lambda: check_int("heads", True), TypeError, "heads must be an integer, got True"),
        (lambda: check_int("heads", 0, 1), ValueError, "heads must be an integer >= 1, got 0"),
        (lambda: check_int("heads", 2**63), ValueError, r"heads must be an integer, at most 2\*\*63 - 1, got 92233"),
        (lambda: check_number("tau", 10**400), ValueError, "tau must be a finite number, got 1000"),
        (lambda: check_number("tau", None), TypeError, "tau must be a finite number, got None"),
        (lambda: check_number("tau", math.nan), ValueError, "tau must be a finite number, got nan"),
        (lambda: check_number("tau", 0.0, 0, open_low=True), ValueError, "tau must be a finite number > 0, got 0.0"),
        (lambda: check_number("gamma", 1.5, 0, 1), ValueError, r"gamma must be a number in \[0, 1\], got 1.5"),
        (
            lambda: check_number("dropout", 1, 0, 1, open_high=True),
            ValueError,
            r"dropout must be a number in \[0, 1\), got 1",
        ),
        (lambda: check_bool("bias", 1), TypeError, "bias must be True or False, got 1"),
        (lambda: check_choice("keep", "all", ("best", "last")), ValueError, "keep must be .*'last', got 'all'"),
        (lambda: check_choice("keep", 1, (True, False)), ValueError, "keep must be one of True, False, got 1"),
    ],
)  # fmt: skip
def test_errors_name_the_argument_the_rule_and_the_value(check, error, message):
    with pytest.raises(error, match=message):
        check()


def test_valid_values_are_returned():
    assert check_int("n", 3, 3) == 3
    assert check_number("x", 1, 0, 1) == 1
    assert check_bool("b", False) is False
    assert check_choice("c", None, ("a", None)) is None
