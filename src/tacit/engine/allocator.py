"""How the C library treats memory that training frees.

By default glibc soon gives freed memory back to the system, and the next step pays for fresh pages, zeroed
one by one: a tenth of a small CNN's time, an eighth of a private step that holds many activations. What is
kept lies in pieces between blocks in use, which makes a process larger by up to the size of its activations;
where somebody would rather have less memory than less time, freed blocks go back at once.
"""

from __future__ import annotations

import ctypes
import os

TRIM, MMAP = -1, -3
"""glibc's numbers for the two settings, in `mallopt`."""
KEPT = 1 << 30
"""Free bytes at the top of the heap before they go back; what lies below a block in use stays."""
LARGE = 32 << 20
"""Bytes of a block that goes back at once. Older releases of glibc refuse more."""
SMALL = 256 << 10
"""The same, where memory counts for more than time."""
USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """From now on, let this whole process keep what it frees for its next step.

    Does nothing where there is no `mallopt`, or where the environment has settings of the user's own.
    """
    _set(LARGE, KEPT)


def return_freed_memory() -> None:
    """From now on, let this whole process give back what it frees, at the price of some time; where
    `keep_freed_memory` would do nothing, nor does this.
    """
    _set(SMALL, SMALL)


def _set(mmap: int, trim: int) -> None:
    if any(name in os.environ for name in USERS_OWN):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    # Either call ends glibc's own adaptation: the second without the first would be worse than neither.
    if mallopt(ctypes.c_int(MMAP), ctypes.c_int(mmap)):
        mallopt(ctypes.c_int(TRIM), ctypes.c_int(trim))
