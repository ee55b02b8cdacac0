"""One writer for each run: a lock on its folder, taken before anything in it is read or written.

The lock is the operating system's, on the file `lock`, and ends with its process, however that ends. It is a
record lock and not `flock`, since processes that a killed run leaves behind must not keep it; a list of this
process's own locks keeps two runs of one process apart.

>>> import tempfile
>>> folder = Path(tempfile.mkdtemp()) / "run"
>>> with locked(folder, create=True):
...     with locked(folder):
...         pass
Traceback (most recent call last):
tacit.errors.UserError: ...is in use by another process; wait until that run has ended
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tacit import system
from tacit.errors import UserError

LOCK = "lock"

_held: set[tuple[int, int]] = set()
"""Device and inode of the lock files that this process holds."""


@contextmanager
def locked(folder: Path, create: bool = False) -> Iterator[None]:
    """Hold a folder's lock. `create`: make the folder if need be, and leave none behind that stayed empty."""
    try:
        if create and not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):  # somebody else made it just now; the lock decides
                folder.mkdir(mode=0o700)
        fd = _taken(folder / LOCK)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from None
    identity = _identity(os.fstat(fd))
    _held.add(identity)
    try:
        yield
    finally:
        with suppress(OSError):
            if create and [entry.name for entry in folder.iterdir()] == [LOCK]:
                (folder / LOCK).unlink()
                folder.rmdir()
        _held.discard(identity)
        os.close(fd)


def _taken(file: Path) -> int:
    busy = UserError(f"{file.parent} is in use by another process; wait until that run has ended")
    # Asked before it is opened: to close a second descriptor of a file gives up this process's lock on it.
    with suppress(FileNotFoundError):
        if _identity(file.stat()) in _held:
            raise busy
    fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        system.lock(fd)
        # Whoever held it before may have removed the file since it was opened here.
        if not file.exists() or _identity(file.stat()) != _identity(os.fstat(fd)):
            raise busy
        return fd
    except (OSError, UserError) as error:
        os.close(fd)
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EAGAIN):
            raise busy from None
        raise


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
