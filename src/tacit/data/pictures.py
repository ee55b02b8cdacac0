"""What becomes of a picture's pixels: 8 bits for each channel, grey or in colour."""

from __future__ import annotations

from typing import Any

import numpy as np

GREY = ("1", "L")
DEEP = ("I", "F")
"""PIL's modes with more than 8 bits a pixel begin so: I;16 of a grey PNG of 16 bits, F of a TIFF."""


def mode_of(picture: Any) -> str:
    """`L` or `RGB`: what a picture is read as. ValueError where its pixels have more than 8 bits: PIL does
    not scale them, it cuts off what is above 255, and most of an X-ray picture would be white.
    """
    if picture.mode.startswith(DEEP):
        raise ValueError(
            f"its pixels have more than 8 bits (mode {picture.mode}); save it with 8, or pass arrays of "
            "numbers to tacit.dataset"
        )
    return "L" if picture.mode in GREY else "RGB"


def coloured(picture: Any) -> bool:
    """Whether a picture would lose anything if it were grey: many that are grey have three equal channels."""
    if picture.mode in GREY:
        return False
    pixels = np.asarray(picture.convert("RGB"))
    return bool((pixels != pixels[..., :1]).any())
