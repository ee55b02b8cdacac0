"""The form of a picture's pixels: 8 bits for each channel, grey or in colour."""

from __future__ import annotations

from typing import Any

import numpy as np

GREY = ("1", "L")
DEEP = ("I", "F")
"""Prefixes of PIL's modes with more than 8 bits a pixel: I;16 for a 16-bit grey PNG, F for a TIFF."""


def mode_of(picture: Any) -> str:
    """The mode in which a picture is read: `L` or `RGB`. ValueError if its pixels have more than 8 bits: PIL
    does not scale them but cuts off values above 255, so most of an X-ray picture would be white.
    """
    if picture.mode.startswith(DEEP):
        raise ValueError(
            f"its pixels have more than 8 bits (mode {picture.mode}); save it with 8, or pass arrays of "
            "numbers to tacit.dataset"
        )
    return "L" if picture.mode in GREY else "RGB"


def coloured(picture: Any) -> bool:
    """Whether a picture would lose anything in grey: many grey pictures have three equal channels."""
    if picture.mode in GREY:
        return False
    pixels = np.asarray(picture.convert("RGB"))
    return bool((pixels != pixels[..., :1]).any())
