"""What operating systems do differently: locks, folders and space on disk, cores.

Linux and macOS have all of it. Windows has what planning and runs in one process need, and whatever else is
asked for there says in one line what is missing.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tacit.errors import UserError

BINARY: int = getattr(os, "O_BINARY", 0)
"""For `os.open`: bytes as they are, which Windows must be asked for."""
BEYOND = 1 << 30
"""Where Windows locks a byte: its locks forbid reading, so it is one that no file here has."""


def lock(fd: int, wait: bool = False, record: bool = True) -> None:
    """Take the lock of an open file, which ends with its process; OSError (EACCES, EAGAIN) if another has it.

    A `record` lock is this process's own, which no process that it starts can keep; the other kind belongs to
    the open file, and keeps threads apart, too.
    """
    try:
        import fcntl
    except ImportError:
        _lock_on_windows(fd, wait)
        return
    (fcntl.lockf if record else fcntl.flock)(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def _lock_on_windows(fd: int, wait: bool) -> None:
    import msvcrt

    there: Any = msvcrt
    here = os.lseek(fd, 0, os.SEEK_CUR)
    os.lseek(fd, BEYOND, os.SEEK_SET)
    try:
        while True:
            try:
                there.locking(fd, there.LK_LOCK if wait else there.LK_NBLCK, 1)
                return
            except OSError as error:
                # LK_LOCK gives up after ten seconds: ask again.
                if not wait or error.errno not in (errno.EACCES, errno.EDEADLK):
                    raise
    finally:
        os.lseek(fd, here, os.SEEK_SET)


def sync(path: Path) -> None:
    """Force a file's contents, or a folder's names, to the disk; Windows keeps folders by itself."""
    windows = _is_windows()
    if windows and path.is_dir():
        return
    fd = os.open(path, os.O_RDWR | BINARY if windows else os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def unlink_open(path: Path) -> None:
    """Take a name from a file that is open and has another; Windows lets such a name stay."""
    try:
        path.unlink()
    except PermissionError:
        if not _is_windows():
            raise


def reserve(fd: int, size: int) -> None:
    """Have a file take `size` bytes of the disk; OSError if it has not so many."""
    allocate: Callable[[int, int, int], None] | None = getattr(os, "posix_fallocate", None)
    if allocate is not None:
        allocate(fd, 0, size)
        return
    block = bytes(1 << 20)  # elsewhere only what is written is sure to be there
    for start in range(0, size, len(block)):
        rest = memoryview(block)[: size - start]
        while rest:
            rest = rest[os.write(fd, rest) :]


def free_bytes(folder: Path) -> int:
    """Bytes that may still be written to a folder's disk."""
    return shutil.disk_usage(folder).free


def cores() -> int:
    """Processor cores that this process may use."""
    affinity: Callable[[int], Any] | None = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def memory_bytes() -> int:
    """Memory of this machine."""
    sysconf: Callable[[str], int] | None = getattr(os, "sysconf", None)
    if sysconf is None:
        raise UserError("this system does not say how much memory it has; ask on Linux or macOS")
    return sysconf("SC_PAGE_SIZE") * sysconf("SC_PHYS_PAGES")


def starts_workers() -> bool:
    """Whether worker processes can inherit open files, as those of a pool do."""
    return not _is_windows()


def _is_windows() -> bool:
    """Asked at run time, and of what it lacks, so that a test can be Windows for a while."""
    return sys.platform == "win32" or not hasattr(os, "fork")
