"""Room on the disk, set aside before a round is charged.

A charge that cannot be followed by a checkpoint buys nothing, and every resume would pay it again. So a file
as large as the next checkpoint is held while a private round is under way, and given back just before the
checkpoint is written.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from tacit import system
from tacit.errors import UserError

RESERVED = "reserved"
SPARE = 1 << 20
"""Bytes beside the vectors: a line of the ledger, metrics, a manifest, the statement."""


class Room:
    """Space in a run's folder that nobody else can take."""

    def __init__(self, run: Path) -> None:
        self._file = run / RESERVED
        self._held = 0

    def hold(self, size: int) -> None:
        """Have `size` bytes and a little more; refuses, before anything is charged, if they cannot be had."""
        wanted = size + SPARE
        try:
            if self._held < wanted or not self._file.exists():
                fd = os.open(self._file, os.O_WRONLY | os.O_CREAT | system.BINARY, 0o600)
                try:
                    system.reserve(fd, wanted)
                finally:
                    os.close(fd)
                self._held = wanted
            if system.free_bytes(self._file.parent) < SPARE:
                raise OSError(0, "the disk is full")
        except OSError as error:
            self.give_back()
            raise UserError(
                f"{self._file.parent}: no room to save another round ({error.strerror}), so none was run "
                f"or charged; {wanted / 1e6:,.0f} MB are needed: make room, then resume"
            ) from None

    def give_back(self) -> None:
        """Free the space, for what it was held for."""
        with suppress(OSError):
            self._file.unlink(missing_ok=True)
        self._held = 0
