"""ε as text: every printed ε goes through here."""

from __future__ import annotations

import math
from collections.abc import Callable


def rounded_up(value: float, digits: int = 3) -> str:
    """A few digits, rounded up: a printed ε must not promise more than the exact one.

    >>> rounded_up(1.2301), rounded_up(12.0), rounded_up(0.012345), rounded_up(4.9912, digits=4)
    ('1.24', '12', '0.0124', '4.992')
    """
    return _rounded(value, digits, math.ceil)


def rounded_down(value: float, digits: int = 3) -> str:
    """The same, rounded down: for what is left of a budget, and for what an audit has shown.

    >>> rounded_down(1.2399), rounded_down(12.0), rounded_down(0.012345)
    ('1.23', '12', '0.0123')
    """
    return _rounded(value, digits, math.floor)


def _rounded(value: float, digits: int, whole: Callable[[float], int]) -> str:
    if value == 0 or math.isinf(value):
        return "0" if value == 0 else "∞"
    scale = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    # In a quotient such as 498.9999999999999, the nines come from the division.
    return f"{whole(round(value / scale, 9)) * scale:.{digits}g}"
