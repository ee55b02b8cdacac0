"""A bit flips in a file of a run: either this is noticed, or it changes nothing that matters."""

from __future__ import annotations

import errno
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faults_small as small
import pytest
import torch

import tacit
from tacit.engine.states import STATES
from tacit.federation import checkpoint
from tacit.federation.tracking import read_metrics
from tacit.report.compare import find_runs

FLIPS = 40
"""Flips for each kind of run in the quick tests; `make torture` makes thousands."""


FOR_A_PERSON = {"report.html"}
"""Nothing is made of it."""


def flip(file: Path, rng: random.Random) -> tuple[int, int] | None:
    """Flip one bit somewhere in a file; where, or None if it is empty."""
    content = bytearray(file.read_bytes())
    if not content:
        return None
    place, bit = rng.randrange(len(content)), rng.randrange(8)
    content[place] ^= 1 << bit
    file.write_bytes(content)
    return place, bit


def attack(kind: str, run: Path, scratch: Path, reference: dict, epsilon: float | None, rng) -> str:
    """Flip a bit of a run that is half done, then resume it; how that ended, if it is right."""
    folder = small.copy(run, scratch)
    file = rng.choice([f for f in small.files(folder) if f.stat().st_size and f.name not in FOR_A_PERSON])
    where = f"{file.relative_to(folder)} at {flip(file, rng)}"
    noticed = any(finding.problem for finding in tacit.verify(folder))
    if epsilon is not None:
        try:
            told = tacit.statement(folder)
        except tacit.UserError:
            pass
        else:
            assert told.epsilon >= epsilon, where
    try:
        for found in find_runs([folder]):
            assert [r["round"] for r in found.metrics] == sorted(r["round"] for r in found.metrics)
    except tacit.UserError:
        pass
    try:
        result = small.resume(folder)
    except tacit.UserError as error:
        assert "\n" not in str(error), where
        assert noticed or file.name == "lock", f"{where}: refused, and verify had nothing to say: {error}"
        return "refused"
    assert result.finished
    # A round that is played again under a guarantee gets other noise, so its model may differ.
    if epsilon is None or (kind == "seeded" and not noticed):
        assert small.same(small.vectors(folder), reference), f"another model: {where}"
    if epsilon is not None:
        assert tacit.statement(folder).rounds >= 4, where
    return "noticed, and went on" if noticed else "harmless"


@pytest.mark.parametrize("kind", list(small.KINDS))
def test_flipped_bits_give_no_other_model_and_no_lower_epsilon(tmp_path: Path, kind: str) -> None:
    rng = random.Random(f"flips {kind}")
    run, whole = tmp_path / "run", tmp_path / "whole"
    small.half(kind, run, 2, 4)
    small.run(kind, whole, 4)
    epsilon = tacit.statement(run).epsilon if "privacy" in small.KINDS[kind] else None
    ends = [attack(kind, run, tmp_path / "scratch", small.vectors(whole), epsilon, rng) for _ in range(FLIPS)]
    assert ends.count("harmless") <= FLIPS // 10, "most flips should be noticed"


def test_every_part_of_a_ledger_counts(tmp_path: Path) -> None:
    """Positions all over the file: a statement never says less than it should."""
    folder = tmp_path / "run"
    small.run("client", folder, 2)
    ledger, epsilon = folder / "ledger.jsonl", tacit.statement(folder).epsilon
    whole = ledger.read_bytes()
    rng = random.Random(7)
    for place in range(0, len(whole), 7):
        ledger.write_bytes(
            whole[:place] + bytes([whole[place] ^ (1 << rng.randrange(8))]) + whole[place + 1 :]
        )
        try:
            told = tacit.statement(folder)
        except tacit.UserError:
            continue
        assert told.epsilon >= epsilon, f"byte {place}"
    for length in range(0, len(whole), 11):
        ledger.write_bytes(whole[:length])
        with pytest.raises(tacit.UserError):
            tacit.statement(folder)


def test_a_clients_state_of_another_round_run_or_client_is_noticed(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    small.half("states", run, 2, 4)
    small.half("states", other, 2, 4, again=True)
    facts = json.loads((run / "checkpoint" / "000002" / "state.json").read_text())
    versions = facts["versions"]
    clients = sorted(versions)
    file = {c: next((run / STATES).rglob(f"{c}/{versions[c]}.safetensors")) for c in clients}
    first, second = clients[:2]
    content = file[first].read_bytes()
    file[first].write_bytes(file[second].read_bytes())
    assert any("not the state that was saved" in (f.problem or "") for f in tacit.verify(run))
    file[first].write_bytes(content)
    assert not any(f.problem for f in tacit.verify(run))
    file[first].unlink()
    assert any("is missing" in (f.problem or "") for f in tacit.verify(run))


def test_files_of_another_run_do_not_belong(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    small.half("plain", one, 2, 4)
    small.run("plain", other, 4, seed=7)
    config = (one / "config.yaml").read_text()
    (one / "config.yaml").write_text((other / "config.yaml").read_text())  # sealed, but of the other run
    with pytest.raises(tacit.UserError, match="not the one that round 2 was saved with"):
        small.resume(one)
    with pytest.raises(tacit.UserError, match="not the one that round 2 was saved with"):
        tacit.trained(one, dataset=small.blobs(48))
    (one / "config.yaml").write_text(config.replace("lr: 0.1", "lr: 0.2"))
    with pytest.raises(tacit.UserError, match="was changed after the run began"):
        small.resume(one)
    (one / "config.yaml").write_text(config)
    assert small.resume(one).finished


def test_a_finished_run_with_damaged_metrics_is_sound_again_after_a_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    small.run("client", folder, 3)
    file = folder / "metrics.jsonl"
    content = bytearray(file.read_bytes())
    content[200] ^= 4
    file.write_bytes(content)
    assert any(finding.problem for finding in tacit.verify(folder))
    small.resume(folder)
    assert not [finding for finding in tacit.verify(folder) if finding.problem]


def test_damaged_metrics_are_set_aside_and_their_sound_lines_kept(tmp_path: Path) -> None:
    folder, whole = tmp_path / "run", tmp_path / "whole"
    small.half("plain", folder, 3, 5)
    small.run("plain", whole, 5)
    file = folder / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[1].replace(b"0", b"1", 1) + lines[2])
    with pytest.raises(tacit.UserError, match="line 2 is damaged"):
        read_metrics(file)
    with pytest.raises(tacit.UserError, match="line 2 is damaged"):
        find_runs([folder])
    result = small.resume(folder)
    assert [record["round"] for record in result.metrics] == [1, 3, 4, 5]
    assert (folder / "metrics.jsonl.damaged").exists()
    assert small.same(small.vectors(folder), small.vectors(whole))
    assert not any(finding.problem for finding in tacit.verify(folder))


def test_checkpoints_are_ordered_by_number(tmp_path: Path) -> None:
    from tacit.federation import checkpoint
    from tacit.federation.checkpoint import Checkpoint

    for number in (999_999, 1_000_000, 1_000_001):
        saved = Checkpoint(number, {"theta": torch.full((2,), float(number))}, {})
        checkpoint.save(tmp_path, saved, keep=2)
    found, _ = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.round == 1_000_001
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1000000", "1000001"]


def test_verify_tells_what_is_damaged_and_what_can_be_saved(tmp_path: Path, capsys, monkeypatch) -> None:
    from tacit.cli import main

    folder = tmp_path / "run"
    small.run("client", folder, 3)

    def verify(*flags: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["tacit", "verify", str(folder), *flags])
        with pytest.raises(SystemExit) as left:
            main()
        return int(left.value.code or 0), " ".join(capsys.readouterr().out.split())

    code, out = verify()
    assert (code, out.count("sound"), out.count("damaged")) == (0, 9, 0)
    state = folder / "checkpoint" / "000003" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1] + b"\x01")
    code, out = verify()
    assert code == 2
    assert "damaged checkpoint/000003" in out
    assert "resume goes on from checkpoint/000002 instead" in out
    code, out = verify("--json")
    assert code == 2
    assert json.loads(out)["sound"] is False


def test_the_best_model_is_the_one_that_the_checkpoint_names(tmp_path: Path) -> None:
    run, other, later = tmp_path / "run", tmp_path / "other", tmp_path / "later"
    small.run("best", run, 4)
    small.run("best", other, 4, seed=7)
    best = checkpoint.kept(run)
    assert best is not None
    place = run / "best" / f"{best.round:06d}"
    findings = {finding.name: finding for finding in tacit.verify(run)}
    assert findings[f"best/{place.name}"].problem is None
    assert len(list((run / "best").iterdir())) <= 2, "no more than the two checkpoints name"

    def refused(damage: Callable[[Path], object]) -> None:
        folder = small.copy(run, tmp_path / "damaged")
        damage(folder / "best" / place.name)
        [problem] = [finding for finding in tacit.verify(folder) if finding.problem]
        assert problem.name == f"best/{place.name}"
        for play in (checkpoint.kept, small.resume):
            with pytest.raises(tacit.UserError, match="the best model is damaged or gone") as told:
                play(folder)
            assert "\n" not in str(told.value)

    rng = random.Random(3)
    refused(lambda there: flip(there / "state.safetensors", rng))
    refused(lambda there: flip(there / "state.json", rng))
    refused(shutil.rmtree)
    refused(lambda there: shutil.rmtree(there.parent))
    refused(lambda there: small.copy(next((other / "best").iterdir()), there))
    # What a run that was killed had just called its best is nobody's: no checkpoint names it.
    small.copy(place, run / "best" / "000009")
    small.copy(run, later)
    found = checkpoint.kept(run)
    assert found is not None and found.round == best.round
    assert all(finding.problem is None for finding in tacit.verify(run))
    assert small.resume(later, 5).finished
    assert not (later / "best" / "000009").exists()


def test_a_manifest_in_the_other_folder_is_noticed(tmp_path: Path) -> None:
    """The best model's and the checkpoint's are of one round and have the same vectors."""
    run = tmp_path / "run"
    small.run("best", run, 2)
    small.copy(run, tmp_path / "before")
    for place, other in (("checkpoint", "best"), ("best", "checkpoint")):
        folder = small.copy(tmp_path / "before", tmp_path / f"wrong {place}")
        newest = checkpoint.finished(folder / "best")[0].name
        (folder / place / newest / "state.json").write_bytes(
            (folder / other / newest / "state.json").read_bytes()
        )
        problems = [finding.name for finding in tacit.verify(folder) if finding.problem]
        assert f"{place}/{newest}" in problems
    with pytest.raises(ValueError, match="it belongs into the folder 'checkpoint'"):
        checkpoint.read_facts(folder / "best" / newest)


def test_no_best_model_goes_while_a_checkpoint_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of reading may pass; what the checkpoint names must still be there then."""
    run = tmp_path / "run"
    small.run("best", run, 3)
    kept = checkpoint.kept(run)
    assert kept is not None
    read = checkpoint.read_text

    def failing(file: Path) -> str:
        if file.parent.parent.name == "checkpoint":
            raise OSError(errno.EIO, "Input/output error")
        return read(file)

    with monkeypatch.context() as once:
        once.setattr(checkpoint, "read_text", failing)
        checkpoint.tidy_best(run)
    found = checkpoint.kept(run)
    assert found is not None and found.round == kept.round


def test_the_best_is_remembered_though_its_record_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tacit.federation import run as running

    scores, folder = [0.2, 0.9, 0.3, 0.5, 0.4], tmp_path / "run"
    monkeypatch.setattr(running, "evaluation", lambda server, engine: {"accuracy": scores[server.round - 1]})
    small.run("best", folder, 3)
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(lines[0] + lines[1].replace(b"0.9", b"0.8") + lines[2])
    result = small.resume(folder, 5)
    best = checkpoint.kept(folder)
    assert best is not None and best.round == 2
    assert result.kept == "the best, accuracy 90.0%, was after round 2"


@pytest.mark.parametrize("fails", ["save_best", "metrics"])
def test_a_round_whose_best_model_could_not_be_saved_is_not_called_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """On a disk that is full for a moment, or for longer: what is kept is the model with the best test."""
    from tacit.federation import run as running
    from tacit.federation.tracking import JsonLines

    scores = [0.2, 0.5, 0.9, 0.4]
    monkeypatch.setattr(running, "evaluation", lambda server, engine: {"accuracy": scores[server.round - 1]})
    for times in (1, 2):
        folder, left = tmp_path / f"run-{times}", times
        place, name = (running.checkpoints, "save_best") if fails == "save_best" else (JsonLines, "round")
        original = getattr(place, name)

        def full(*args: Any, original: Any = original) -> Any:
            nonlocal left
            what = args[1]
            if left and (what["round"] if isinstance(what, dict) else what.round) == 3:
                left -= 1
                raise OSError(28, "No space left on device")
            return original(*args)

        with monkeypatch.context() as patched:
            patched.setattr(place, name, full)
            with pytest.raises(tacit.UserError, match="No space left on device"):
                small.run("best", folder, 4)
        assert left == 0
        result = small.resume(folder)
        best = checkpoint.kept(folder)
        assert best is not None and best.round == 3 and "after round 3" in str(result.kept)


def test_nonsense_under_a_right_seal_is_one_line(tmp_path: Path) -> None:
    """Whoever can write can seal: numbers and sections that no run has are told like any damage."""
    from tacit.federation.files import sealed_text, unsealed_text
    from tacit.federation.statements import refuse_less_than_saved
    from tacit.privacy import Ledger

    run = tmp_path / "run"
    small.run("client", run, 2)
    contents = Ledger.read(run / "ledger.jsonl")
    for charges in (-1, -(10**30), 10**30):
        with pytest.raises(tacit.UserError, match="charges where the checkpoint knows of"):
            refuse_less_than_saved(contents, {"charges": charges, "head": "x"})
    config = unsealed_text((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(sealed_text(config.replace("unit: client", "once: client")))
    with pytest.raises(tacit.UserError, match="no config of a run"):
        tacit.compare([run])
