"""How the C library treats the memory that training frees.

By default, glibc soon returns freed memory to the system, and the next step pays for fresh pages, which the
system zeroes one by one. This costs a tenth of a small CNN's time, and an eighth of a private step that holds
many activations. Memory that is kept lies in gaps between blocks in use, so the process grows by up to the
size of its activations. A user who prefers less memory to less time can have freed blocks returned at once.
"""

from __future__ import annotations

import ctypes
import os

TRIM, MMAP = -1, -3
"""The numbers of the two settings in glibc's `mallopt`."""
KEPT = 1 << 30
"""Free bytes at the top of the heap before glibc returns them; bytes below a block in use stay."""
LARGE = 32 << 20
"""Size in bytes from which a freed block is returned at once. Older releases of glibc refuse more."""
SMALL = 256 << 10
"""The same, for users who prefer less memory to less time."""
USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Make this process keep the memory that it frees, for its next step.

    Does nothing if there is no `mallopt`, or if the user has set glibc's own environment variables.
    """
    _set(LARGE, KEPT)


def return_freed_memory() -> None:
    """Make this process return freed memory at once, which costs some time. Does nothing where
    `keep_freed_memory` would do nothing.
    """
    _set(SMALL, SMALL)


def _set(mmap: int, trim: int) -> None:
    if any(name in os.environ for name in USERS_OWN):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    # Either call stops glibc's own adaptation, so setting one without the other would be worse than setting
    # neither.
    if mallopt(ctypes.c_int(MMAP), ctypes.c_int(mmap)):
        mallopt(ctypes.c_int(TRIM), ctypes.c_int(trim))
