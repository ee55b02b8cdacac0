"""The cache of downloads, and archives that are unpacked into it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from archives import tgz
from tacit.errors import UserError
from tacit.fetching import cache, packages


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "cache"))


def test_a_half_written_entry_never_appears_and_a_damaged_one_is_named() -> None:
    with pytest.raises(RuntimeError), cache.adding("x") as (scratch, _):
        np.save(scratch / "a.npy", np.arange(3))
        raise RuntimeError("killed")
    assert not cache.has("x") and list(cache.root().iterdir()) == []
    with cache.adding("x") as (scratch, about):
        np.save(scratch / "a.npy", np.arange(3))
        about["n"] = 3
    with cache.adding("x"):
        pass  # a slower process; the first entry stays
    arrays, about = cache.read("x")
    assert arrays["a"].tolist() == [0, 1, 2] and about == {"n": 3}
    (cache.root() / "x" / "a.npy").write_bytes(b"torn")
    with pytest.raises(UserError, match="delete that folder"):
        cache.read("x")


def test_an_unwritable_cache_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set TACIT_CACHE"), cache.adding("x"):
        pass


def test_an_archive_cannot_write_outside(tmp_path: Path) -> None:
    archive = tgz(tmp_path / "bad.tgz", {"../escaped": b"!"})
    with pytest.raises(UserError, match="cannot be unpacked"):
        packages.unpack(archive, tmp_path / "into")
    assert not (tmp_path / "escaped").exists()
