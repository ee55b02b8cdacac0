"""Reading what must be a plain file: a device would never end, and a pipe would wait for a writer.

>>> read_bytes(Path("/dev/zero"))
Traceback (most recent call last):
OSError: [Errno 22] not a regular file: '/dev/zero'
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from tacit.system import BINARY

AT_ONCE: int = getattr(os, "O_NONBLOCK", 0)


def opened(file: Path) -> BinaryIO:
    """A regular file, to read it; OSError of anything else, at once."""
    fd = os.open(file, os.O_RDONLY | BINARY | AT_ONCE)  # a pipe without a writer is not waited for
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
        raise OSError(errno.EINVAL, "not a regular file", str(file))
    return os.fdopen(fd, "rb")


def read_bytes(file: Path) -> bytes:
    """All of a regular file."""
    with opened(file) as stream:
        return stream.read()


def read_text(file: Path) -> str:
    """All of a regular file, as UTF-8 with lines that end as they were written."""
    return read_bytes(file).decode("utf-8")
