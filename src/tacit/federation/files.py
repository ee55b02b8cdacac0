"""Files that are there whole or not at all, and that notice when they were changed.

A sealed file ends with a hash of the rest, over exactly the bytes that are there: one flipped bit and it is
refused. It says nothing about who wrote it; a checkpoint's manifest says which files belong together.

>>> unsealed(sealed({"round": 3}))
{'round': 3}
>>> unsealed(sealed({"round": 3}).replace("3", "2", 1))
Traceback (most recent call last):
ValueError: its contents do not match its hash
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from tacit.reading import from_json, opened
from tacit.system import BINARY, sync

SEAL = "# sha256 "
"""Begins the last line of a sealed text."""


def write_atomically(file: Path, text: str) -> None:
    """Replace a file's contents in one step, on disk when this returns, readable by its owner alone."""
    partial = file.with_name(file.name + ".partial")
    try:
        partial.unlink(missing_ok=True)
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, 0o600)
        try:
            write_all(fd, text.encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        partial.replace(file)
        sync(file.parent)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def write_all(fd: int, content: bytes) -> None:
    """Write every byte; a disk that takes only some of them is asked again, and then says why."""
    while content:
        content = content[os.write(fd, content) :]


def digest(file: Path) -> str:
    """The SHA-256 of a file."""
    found = sha256()
    with opened(file) as stream:
        while block := stream.read(1 << 22):
            found.update(block)
    return found.hexdigest()


def sealed(plain: Mapping[str, Any], indent: int | None = None) -> str:
    """A mapping as JSON with its hash as the last key."""
    body = json.dumps(plain, indent=indent, ensure_ascii=False)
    last = json.dumps({"hash": _hash(body)}, indent=indent)
    # Only spliced together: large manifests are not written out a second time for one more key.
    return (
        f"{body[: -1 if indent is None else -2]},{' ' * (indent is None)}{last[1:]}" if plain else last
    ) + "\n"


def unsealed(text: str, indent: int | None = None) -> dict[str, Any]:
    """What `sealed` wrote; ValueError if a single character is another."""
    plain = from_json(text)
    if not isinstance(plain, dict) or "hash" not in plain:
        raise ValueError("it has no hash: it was cut off, or written by an earlier version")
    plain.pop("hash")
    if sealed(plain, indent) != text:
        raise ValueError("its contents do not match its hash")
    return plain


def sealed_text(text: str) -> str:
    """A text (YAML, say) with its hash in a comment at its end."""
    return f"{text}{SEAL}{_hash(text)}\n"


def unsealed_text(text: str) -> str:
    """What `sealed_text` was given; ValueError if it is another."""
    body, found, seal = text.rpartition(SEAL)
    if not found:
        raise ValueError("it has no hash: it was cut off, or written by an earlier version")
    if seal != _hash(body) + "\n":
        raise ValueError("its contents do not match its hash")
    return body


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()
