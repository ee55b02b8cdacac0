"""The ledger under crashes, damage, rival processes and copies; totals per client against brute force."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

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
HEADER = Header("client", 1e-5, Part(EVENT), data="people")


def rounds_on_disk(path: Path) -> int:
    return Ledger.read(path).rounds


def test_epsilon_is_a_replay(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger.open(path, HEADER) as ledger:
        for number in range(5):
            ledger.charge(Charge(number, (Part(EVENT),)))
        live = ledger.epsilon()
    assert replay(Ledger.read(path).charges).worst(1e-5).epsilon == live == epsilon({EVENT: 5}, 1e-5)


def test_a_charge_reaches_the_disk_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    real = os.fsync
    path = tmp_path / "ledger.jsonl"
    with Ledger.open(path, HEADER) as ledger:
        monkeypatch.setattr(os, "fsync", lambda fd: (real(fd), synced.append(path.read_bytes()))[0])
        ledger.charge(Charge(0, (Part(EVENT),)))
    charge = json.loads(synced[-1].splitlines()[-1])
    event = {"kind": "poisson-gaussian", "rate": 0.1, "noise": 1.0}
    assert (charge["round"], charge["parts"]) == (0, [{"event": event, "steps": 1}])


@pytest.mark.parametrize("unit", ["client", "example"])
def test_a_line_that_is_cut_off_is_counted_at_every_possible_cut(tmp_path: Path, unit: str) -> None:
    clients = None if unit == "client" else (3, 5)
    dear = Part(PoissonGaussian(0.2, 0.8), 7)
    header = Header(unit, 1e-5, dear, data="people")
    path = tmp_path / "ledger.jsonl"
    with Ledger.open(path, header) as ledger:
        for number in range(2):
            ledger.charge(Charge(number, (Part(EVENT, 2, clients),)))
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    cost = replay([Charge(0, (Part(EVENT, 2, clients),)), Charge(1, (dear,))]).worst(1e-5).epsilon
    for cut in range(start + 1, len(whole)):
        path.write_bytes(whole[:cut])
        read = Ledger.read(path)
        assert (len(read.charges), read.charges[-1].truncated) == (2, True)
        assert replay(read.charges).worst(1e-5).epsilon == cost
        with Ledger.open(path, header) as ledger:
            assert ledger.charges[-1].truncated and ledger.epsilon() == cost
            ledger.charge(Charge(1, (Part(EVENT, 2, clients),)))
        assert rounds_on_disk(path) == 3  # mended: the next line was not glued to the one that was cut off
        assert [charge.truncated for charge in Ledger.read(path).charges] == [False, True, False]


def test_a_file_that_ends_between_two_lines_is_shorter_and_valid(tmp_path: Path) -> None:
    """Only a checkpoint can know that a whole line is missing at the end: see the tests of private runs."""
    path = tmp_path / "ledger.jsonl"
    with Ledger.open(path, HEADER) as ledger:
        for number in range(3):
            ledger.charge(Charge(number, (Part(EVENT),)))
        head = ledger.contents.hashes[2]
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    assert (rounds_on_disk(path), Ledger.read(path).head) == (2, head)


@pytest.mark.slow
def test_no_flipped_bit_lowers_epsilon(tmp_path: Path) -> None:
    """Every bit of a ledger, one after the other: it is refused, or what it says costs no less."""
    path = tmp_path / "ledger.jsonl"
    rare = PoissonGaussian(0.01, 1.5)
    with Ledger.open(path, Header("example", 1e-5, Part(EVENT, 4), data="people")) as ledger:
        ledger.charge(Charge(0, (Part(EVENT, 4, (1, 2)), Part(rare, 2, (3,)))))
        ledger.charge(Charge(1, (Part(EVENT, 4, (1, 7)),)))
    whole = path.read_bytes()
    true = replay(Ledger.read(path).charges).worst(1e-5).epsilon.value
    accepted = 0
    for place in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            contents = Ledger.read(path)
        except UserError:
            continue
        accepted += 1
        assert replay(contents.charges).worst(1e-5).epsilon.value >= true
    assert accepted <= 8  # of the last line's end, whose loss makes it a line that was cut off


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"steps":1', b'"stops":1'),
        (b'"steps":1', b'"steps":1.0'),
        (b'"steps":1', b'"steps":true'),
        (b'"steps":1', b'"steps":-1'),
        (b'"steps":1', b'"steps":1,"steps":0'),
        (b'"steps":1', b'"steps":1,"more":2'),
        (b'"round":0', b'"round":0,"truncated":1'),
        (b'"noise":1.0', b'"noise":1'),
        (b'"noise":1.0', b'"noise":NaN'),
        (b'"noise":1.0', b'"noise":1e999'),
        (b'"rate":0.1', b'"rate":0.0'),
        (b'"kind":"poisson-gaussian"', b'"kind":"free"'),
    ],
)
def test_keys_and_types_are_strict_even_if_the_hashes_are_right(
    tmp_path: Path, before: bytes, after: bytes
) -> None:
    """A hash guards against accidents; a line that another program wrote, with its hash, is read strictly."""
    path = tmp_path / "ledger.jsonl"
    with Ledger.open(path, HEADER) as ledger:
        ledger.charge(Charge(0, (Part(EVENT),)))
    header, line = path.read_bytes().splitlines()
    body = line[: line.rindex(b',"hash"')] + b"}"
    assert before in body
    body = body.replace(before, after)
    digest = sha256(body).hexdigest().encode()
    path.write_bytes(header + b"\n" + body[:-1] + b',"hash":"' + digest + b'"}\n')
    with pytest.raises(UserError, match="line 2 is damaged"):
        Ledger.read(path)


def test_lines_cannot_be_left_out_moved_or_repeated(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger.open(path, HEADER) as ledger:
        for number in range(3):
            ledger.charge(Charge(number, (Part(EVENT),)))
    header, *lines = path.read_bytes().splitlines(keepends=True)
    for wrong in ([1, 2], [0, 2], [0, 2, 1], [0, 0, 1, 2], [0, 1, 1, 2], [2, 1, 0]):
        path.write_bytes(header + b"".join(lines[i] for i in wrong))
        with pytest.raises(UserError, match="is damaged"):
            Ledger.read(path)


def test_another_version_is_refused_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"ledger":1,"unit":"client","delta":1e-05,"costliest":{"rate":0.1,"noise":1.0}}\n')
    with pytest.raises(UserError, match="another version"):
        Ledger.open(path, HEADER)


def test_a_ledger_does_not_go_on_for_other_data(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger.open(path, HEADER).close()
    with pytest.raises(UserError, match="protects other data"):
        Ledger.open(path, replace(HEADER, data="other people"))
    with pytest.raises(UserError, match="cost more than this ledger was made for"):
        Ledger.open(path, replace(HEADER, costliest=Part(PoissonGaussian(0.1, 0.9))))
    with pytest.raises(UserError, match="cost more than this ledger was made for"):
        Ledger.open(path, replace(HEADER, costliest=Part(EVENT, 2)))
    simulated = tmp_path / "simulated.jsonl"
    Ledger.open(simulated, replace(HEADER, simulation=True)).close()
    with pytest.raises(UserError, match="simulation"):
        Ledger.open(simulated, HEADER)


@pytest.mark.slow
def test_fresh_ledgers_opened_at_once_lose_no_charge(tmp_path: Path) -> None:
    """Six processes open the same new ledger at the same moment, forty times: each that got it is in it."""
    in_a_small_process("opened_at_once", tmp_path)


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
        Ledger.open(path, replace(HEADER, unit="example"))
    with pytest.raises(UserError, match="start a new run"):
        Ledger.open(path, replace(HEADER, costliest=Part(FixedSizeGaussian(1, 10, 1.0))))


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
        assert [charge.truncated for charge in ledger.charges] == [True]


@pytest.mark.parametrize(
    ("call", "failing"), [("write", 1), ("fsync", 1), ("fsync", 2), ("link", 1), ("unlink", 1)]
)
def test_a_ledger_that_cannot_be_made_leaves_no_descriptor_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, failing: int
) -> None:
    """Any operation of making it fails: the file's own, its folder's, and the removal of its first name."""
    original, calls = getattr(os, call), []

    def fails(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == failing:
            raise OSError(5, "Input/output error")
        return original(*args, **options)

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, call, fails)
    with pytest.raises(OSError, match="Input/output error"):
        Ledger.open(tmp_path / "ledger.jsonl", HEADER)
    assert len(calls) >= failing
    assert len(list(Path("/proc/self/fd").iterdir())) == before


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


@pytest.mark.slow
def test_killed_hundreds_of_times_the_ledger_covers_every_release(tmp_path: Path) -> None:
    """SIGKILL at random moments: between charge and release, release and checkpoint, while opening."""
    in_a_small_process("killed_hundreds_of_times", tmp_path)


def in_a_small_process(play: str, folder: Path) -> None:
    """A function of `ledger_forks`: forks of this process, which has torch in it, take ten times as long."""
    code = (
        f"import sys, ledger_forks as forks; assert 'torch' not in sys.modules; forks.{play}({str(folder)!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


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


@pytest.mark.slow
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
    header = Header("example", 1e-5, Part(common, 10), data="people")
    parts = (Part(rare, 10, (1, 2)), Part(common, 3, (7,)))
    with Ledger.open(path, header) as ledger:
        ledger.charge(Charge(0, parts))
        ledger.charge(Charge(1, parts))
        found = ledger.epsilon()
    contents = Ledger.read(path)
    assert contents.header == header and contents.header.id
    assert contents.charges == [Charge(0, parts), Charge(1, parts)]
    assert found == max((epsilon({rare: 20}, 1e-5), epsilon({common: 6}, 1e-5)), key=lambda e: e.value)
