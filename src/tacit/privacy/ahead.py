"""Noise that is drawn on the host while the gradient it is meant for is computed on another device.

What is drawn are the same numbers, from the same stream, that would be drawn afterwards. They are handed
out once; what nobody comes for is thrown away, and the stream goes on behind it. Where the gradient is
computed on the host's own cores, drawing beside it takes longer than drawing behind it (measured).

>>> noise = Drawn(5, 1000.0, Bits.named(1))
>>> noise.for_each_stretch(5, 1000.0, lambda start, draws: print(start, draws.tolist()))
0 [-783, 974, 1463, -454, 914]
>>> noise.for_each_stretch(5, 1000.0, lambda start, draws: print(start, draws.tolist()))
Traceback (most recent call last):
RuntimeError: this noise has been used, and none is used twice
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import numpy as np
from numpy.typing import NDArray

from tacit.privacy.bits import Bits
from tacit.privacy.gaussian import STRETCH, rounded_gaussian


class Drawn:
    """`count` rounded Gaussians of standard deviation `std`, in the making, to be used once."""

    def __init__(self, count: int, std: float, bits: Bits) -> None:
        """From here to the use (or for ever) the stream is the other thread's alone."""
        self._what = count, std
        self._draws: Future[NDArray[np.int64]] | None = _thread().submit(rounded_gaussian, count, std, bits)

    def for_each_stretch(self, count: int, std: float, use: Callable[[int, NDArray[np.int64]], None]) -> None:
        """As `gaussian.for_each_stretch`, with what was drawn."""
        draws = self.take(count, std)
        for start in range(0, count, STRETCH):
            use(start, draws[start : start + STRETCH])

    def take(self, count: int, std: float) -> NDArray[np.int64]:
        """All of what was drawn, once."""
        if self._draws is None:
            raise RuntimeError("this noise has been used, and none is used twice")
        if self._what != (count, std):
            raise RuntimeError(f"noise for {self._what} was asked to serve {(count, std)}")
        draws, self._draws = self._draws.result(), None
        return draws


@cache
def _thread() -> ThreadPoolExecutor:
    """One for the process: what is asked first is drawn first."""
    return ThreadPoolExecutor(1, "noise")


os.register_at_fork(after_in_child=_thread.cache_clear)
