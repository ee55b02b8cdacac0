"""Reading what must be a plain file: a device would never end, and a pipe would wait for a writer.

And JSON whose sender is not trusted to have been kind.

>>> read_bytes(Path("/dev/zero"))
Traceback (most recent call last):
OSError: [Errno 22] not a regular file: '/dev/zero'
>>> from_json("[" * 100_000)
Traceback (most recent call last):
ValueError: its parts lie too deep in each other
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

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


def from_json(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError for all that is none, or nested beyond reason."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its parts lie too deep in each other") from None
