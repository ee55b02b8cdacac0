"""Fault points: every file operation inside a folder is counted, and one of them fails or is the last one."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

KILLS = ("kill", "kill after", "torn")
ERRORS = ("ENOSPC", "EIO", "short", "full")
CALLS = ("open", "write", "fsync", "replace", "rename", "link", "unlink", "mkdir", "rmdir", "ftruncate",
         "posix_fallocate", "chmod", "save_file")  # fmt: skip
GROWS = ("write", "save_file", "mkdir", "posix_fallocate", "link")
SAVES = ("tacit.federation.checkpoint", "tacit.engine.states")
NEVER = 1 << 30


class Faults:
    """Does something at the `at`-th file operation inside a folder.

    `kill`: SIGKILL before it; `kill after`; `torn`: in the middle of a write. `ENOSPC` and `EIO`: it fails.
    `short`: a write takes only half, and then the disk is full; `full`: the disk is full from here on.

    What came of it is in memory that the forks of this process share: `seen`, the operations so far, and
    `struck`, the one at which it happened.
    """

    def __init__(self, folder: Path, at: int, mode: str) -> None:
        self.folder, self.at, self.mode = os.fspath(folder), at, mode
        self.full = mode == "full" and at == 0
        self._shared = mmap.mmap(-1, 8192)

    @property
    def count(self) -> int:
        return int.from_bytes(self._shared[:4], "little")

    @property
    def seen(self) -> list[str]:
        return [CALLS[number] for number in self._shared[8 : 8 + self.count]]

    @property
    def struck(self) -> str | None:
        number = self._shared[4]
        return CALLS[number - 1] if number else None

    def install(self) -> Callable[[], None]:
        """From now on, in this process, until what is returned is called."""
        places: list[tuple[Any, str]] = [(os, name) for name in CALLS[:-1]]
        places += [(sys.modules[module], "save_file") for module in SAVES]
        before = [(place, name, getattr(place, name)) for place, name in places]
        for place, name, original in before:
            setattr(place, name, self._wrapped(name, original))

        def remove() -> None:
            for place, name, original in before:
                setattr(place, name, original)

        return remove

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if not self._inside(name, args):
                return original(*args, **options)
            count = self.count + 1
            self._shared[:4] = count.to_bytes(4, "little")
            self._shared[7 + count] = CALLS.index(name)
            if count == self.at:
                self._shared[4] = CALLS.index(name) + 1
                return self._act(name, original, args, options)
            if self.full and (name in GROWS or (name == "open" and args[1] & os.O_CREAT)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args, **options)

        return call

    def _inside(self, name: str, args: tuple[Any, ...]) -> bool:
        what = args[1] if name == "save_file" else args[0]
        if isinstance(what, int):
            try:
                what = Path(f"/proc/self/fd/{what}").readlink()
            except OSError:
                return False
        place = os.fspath(what)
        return place == self.folder or place.startswith(self.folder + "/")

    def _act(self, name: str, original: Callable[..., Any], args: Any, options: Any) -> Any:
        if self.mode == "torn" and name == "write":
            original(args[0], args[1][: len(args[1]) // 2])
        elif self.mode == "torn" and name == "save_file":
            original(*args, **options)
            os.truncate(args[1], Path(args[1]).stat().st_size // 2)
        elif self.mode == "kill after":
            with suppress(OSError):
                original(*args, **options)
        if self.mode in KILLS:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mode == "short" and name == "write" and len(args[1]) > 1:
            self.full = True
            return original(args[0], args[1][: len(args[1]) // 2])
        self.full = self.mode in ("short", "full")
        number = errno.EIO if self.mode == "EIO" else errno.ENOSPC
        raise OSError(number, os.strerror(number))
