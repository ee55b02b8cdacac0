"""ε as a person reads it: every ε that is printed goes through here."""

from __future__ import annotations

import math


def rounded_up(value: float, digits: int = 3) -> str:
    """A few digits, rounded up: a printed ε must not promise more than the number does.

    >>> rounded_up(1.2301), rounded_up(12.0), rounded_up(0.012345), rounded_up(4.9912, digits=4)
    ('1.24', '12', '0.0124', '4.992')
    """
    if value == 0 or math.isinf(value):
        return "0" if value == 0 else "∞"
    scale = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return f"{math.ceil(round(value / scale, 9)) * scale:.{digits}g}"
