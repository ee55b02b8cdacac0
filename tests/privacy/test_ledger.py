"""The ledger under crashes, damage and rivals; the odometer against brute force."""

import json
import math
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tacit.errors import UserError
from tacit.privacy import (
    Charge,
    FixedSizeGaussian,
    Header,
    Ledger,
    Part,
    PoissonGaussian,
    epsilon,
    replay,
)
from tacit.privacy.totals import ClientTotals

EVENT = PoissonGaussian(0.1, 1.0)
HEADER = Header("client", 1e-5, Part(EVENT))


def rounds_on_disk(path: Path) -> int:
    return sum(entry.times for entry in Ledger.read(path)[1])


def test_epsilon_is_a_replay(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger.open(path, HEADER) as ledger:
        for number in range(5):
            ledger.charge(Charge(number, (Part(EVENT),)))
        live = ledger.epsilon()
    assert replay(Ledger.read(path)[1]).worst(1e-5).epsilon == live == epsilon({EVENT: 5}, 1e-5)


def test_equal_charges_are_merged_without_changing_epsilon(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger.open(path, HEADER) as ledger:
        for number in range(200):
            ledger.charge(Charge(number, (Part(EVENT),)))
        ledger.charge(Charge(150, (Part(EVENT),)))  # played again after a crash
        ledger.charge(Charge(151, (Part(PoissonGaussian(0.1, 2.0)),)))
        before = ledger.epsilon()
    assert len(path.read_text().splitlines()) == 203
    with Ledger.open(path, HEADER) as ledger:
        assert ledger.epsilon() == before
    lines = path.read_text().splitlines()
    assert [json.loads(line).get("last") for line in lines[1:]] == [199, None, None]
    assert rounds_on_disk(path) == 202


def test_a_charge_reaches_the_disk_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    real = os.fsync
    path = tmp_path / "ledger.jsonl"
    with Ledger.open(path, HEADER) as ledger:
        monkeypatch.setattr(os, "fsync", lambda fd: (real(fd), synced.append(path.read_bytes()))[0])
        ledger.charge(Charge(0, (Part(EVENT),)))
    assert synced and synced[-1].endswith(b'{"round":0,"parts":[{"rate":0.1,"noise":1.0}]}\n')


@pytest.mark.parametrize("unit", ["client", "example"])
def test_a_torn_line_is_counted_at_every_possible_cut(tmp_path: Path, unit: str) -> None:
    clients = None if unit == "client" else (3, 5)
    dear = Part(PoissonGaussian(0.2, 0.8), 7)
    header = Header(unit, 1e-5, dear)
    path = tmp_path / "ledger.jsonl"
    with Ledger.open(path, header) as ledger:
        for number in range(2):
            ledger.charge(Charge(number, (Part(EVENT, 2, clients),)))
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    torn_cost = replay([Charge(0, (Part(EVENT, 2, clients),)), Charge(1, (dear,))]).worst(1e-5).epsilon
    for cut in range(start + 1, len(whole)):
        path.write_bytes(whole[:cut])
        with Ledger.open(path, header) as ledger:
            assert len(ledger.entries) == (2 if cut < len(whole) - 1 else 1)
            complete = cut == len(whole) - 1  # only the line's end is missing: the charge itself is there
            assert ledger.entries[-1].torn != complete
            if not complete:
                assert ledger.epsilon() == torn_cost
            ledger.charge(Charge(1, (Part(EVENT, 2, clients),)))
        assert rounds_on_disk(path) == 3  # mended: the next line was not glued to the torn one
        path.with_name("ledger.jsonl.new").unlink(missing_ok=True)


def test_damage_elsewhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger.open(path, HEADER) as ledger:
        for number in (0, 5, 9):
            ledger.charge(Charge(number, (Part(EVENT),)))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:-9] + b"\n" + lines[2])
    with pytest.raises(UserError, match="line 2 is damaged"):
        Ledger.open(path, HEADER)
    for content in (b"", lines[1], b"\x00\x01"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="line 1"):
            Ledger.open(path, HEADER)
    with pytest.raises(UserError, match="does not exist"):
        Ledger.read(tmp_path / "nothing")


def test_another_unit_or_relation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger.open(path, HEADER).close()
    with pytest.raises(UserError, match="start a new run"):
        Ledger.open(path, Header("example", 1e-5, Part(EVENT)))
    with pytest.raises(UserError, match="start a new run"):
        Ledger.open(path, Header("client", 1e-5, Part(FixedSizeGaussian(1, 10, 1.0))))


def test_a_full_disk_stops_the_run_before_a_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.open(path, HEADER)
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: len(data) // 2]))
    with pytest.raises(UserError, match="nothing was released"):
        ledger.charge(Charge(0, (Part(EVENT),)))
    monkeypatch.setattr(os, "write", real)
    with pytest.raises(UserError):  # and it stays closed: a line after half a line would be lost
        ledger.charge(Charge(0, (Part(EVENT),)))
    with Ledger.open(path, HEADER) as ledger:
        assert [entry.torn for entry in ledger.entries] == [True]


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger.open(path, HEADER):
        child = os.fork()
        if child == 0:
            try:
                Ledger.open(path, HEADER)
                os._exit(0)
            except UserError as error:
                os._exit(3 if "in use" in str(error) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    Ledger.open(path, HEADER).close()


def play_until_killed(folder: Path, tell: int) -> None:
    """A run in miniature: charge, release, checkpoint; from the last checkpoint on when it starts."""
    checkpoint, released = folder / "checkpoint", folder / "released"
    number = int(checkpoint.read_text()) if checkpoint.exists() else 0
    out = os.open(released, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    ledger = Ledger.open(folder / "ledger.jsonl", HEADER)
    os.write(tell, b"x")
    while True:
        ledger.charge(Charge(number, (Part(EVENT),)))
        os.write(out, b"x")  # the world has seen this round
        number += 1
        if number % 3 == 0:
            (folder / "checkpoint.new").write_text(str(number))
            (folder / "checkpoint.new").replace(checkpoint)


@pytest.mark.slow
def test_killed_hundreds_of_times_the_ledger_covers_every_release(tmp_path: Path) -> None:
    """SIGKILL at random moments: between charge and release, release and checkpoint, while opening."""
    rng = random.Random(0)
    for kill in range(250):
        playing, tell = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                play_until_killed(tmp_path, tell)
            finally:
                os._exit(1)
        os.close(tell)
        if rng.random() < 0.9:  # else: kill it while it opens the ledger
            os.read(playing, 1)
        time.sleep(rng.uniform(0, 0.008))
        os.close(playing)
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        if kill % 10 == 0 and (tmp_path / "ledger.jsonl").exists():
            assert rounds_on_disk(tmp_path / "ledger.jsonl") >= (tmp_path / "released").stat().st_size
    released = (tmp_path / "released").stat().st_size
    with Ledger.open(tmp_path / "ledger.jsonl", HEADER) as ledger:
        charged = sum(entry.times for entry in ledger.entries)
        assert released > 20  # it did play
        assert released <= charged <= released + 250  # at most one charge without a release for each kill
        assert ledger.epsilon().value >= epsilon({EVENT: released}, 1e-5).value


@pytest.mark.parametrize("crash", ["after the charge", "after the release"])
def test_a_round_played_again_is_charged_again(tmp_path: Path, crash: str) -> None:
    path = tmp_path / "ledger.jsonl"
    releases = 0
    for _ in range(4):
        with Ledger.open(path, HEADER) as ledger:
            ledger.charge(Charge(0, (Part(EVENT),)))
            releases += crash == "after the release"
    assert rounds_on_disk(path) == 4 >= releases


def test_the_budget_is_never_exceeded(tmp_path: Path) -> None:
    budget = 3.0
    with Ledger.open(tmp_path / "ledger.jsonl", HEADER) as ledger:
        number = 0
        while not ledger.would_exceed(Charge(number, (Part(EVENT),)), budget):
            ledger.charge(Charge(number, (Part(EVENT),)))
            number += 1
        assert number > 5
        assert ledger.epsilon().value <= budget < epsilon({EVENT: number + 1}, 1e-5).value


# --- example level ----------------------------------------------------------------------------------------


def test_the_worst_client_is_found_as_by_brute_force() -> None:
    rng = np.random.default_rng(0)
    meter, totals = ClientTotals(), {c: dict[PoissonGaussian, int]() for c in range(30)}
    sizes = rng.choice([20, 50, 60, 70], 30)
    for _ in range(12):
        cohort = rng.choice(30, 6, replace=False)
        for client in cohort:
            event, steps = PoissonGaussian(min(1.0, 5 / int(sizes[client])), 1.0), int(rng.integers(1, 3))
            meter.add(event, steps, [int(client)])
            totals[int(client)][event] = totals[int(client)].get(event, 0) + steps
    everyone = PoissonGaussian(0.05, 3.0)
    meter.add(everyone, 4)
    distinct = {frozenset(own.items()) for own in totals.values()}
    brute = max(epsilon(dict(own) | {everyone: 4}, 1e-5).value for own in distinct)
    assert meter.worst(1e-5).epsilon.value == brute
    assert not meter.would_exceed([], brute, 1e-5)
    assert meter.would_exceed([], brute * 0.999, 1e-5)


def test_many_cheap_steps_can_be_worse_than_few_dear_ones() -> None:
    cheap, dear = PoissonGaussian(0.01, 1.0), PoissonGaussian(0.1, 1.0)
    meter = ClientTotals()
    meter.add(dear, 2, [1])
    meter.add(cheap, 5000, [2])
    assert meter.worst(1e-5).profile == ((cheap, 5000),)


def test_a_client_that_stays_home_does_not_pay() -> None:
    meter = ClientTotals()
    event = PoissonGaussian(0.1, 1.0)
    for number in range(10):
        meter.add(event, 5, [number])
    assert meter.worst(1e-5).epsilon == epsilon({event: 5}, 1e-5)
    one_more = [(event, 5, (3,))]
    assert meter.would_exceed(one_more, epsilon({event: 9}, 1e-5).value, 1e-5)
    assert not meter.would_exceed(one_more, epsilon({event: 10}, 1e-5).value, 1e-5)


def test_example_charges_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    rare, common = PoissonGaussian(0.016, 1 / math.sqrt(2)), PoissonGaussian(0.5, 1.0)
    header = Header("example", 1e-5, Part(common, 10))
    parts = (Part(rare, 10, (1, 2)), Part(common, 3, (7,)))
    with Ledger.open(path, header) as ledger:
        ledger.charge(Charge(0, parts))
        ledger.charge(Charge(1, parts))
        found = ledger.epsilon()
    header_read, entries = Ledger.read(path)
    assert header_read == header
    assert [(e.round, e.last, e.parts) for e in entries] == [(0, 1, parts)]
    assert found == max((epsilon({rare: 20}, 1e-5), epsilon({common: 6}, 1e-5)), key=lambda e: e.value)
