"""Rival processes and kills around a ledger, in forks of a process with few imports; see `test_ledger.py`."""

import os
import random
import signal
import time
from pathlib import Path

from tacit.errors import UserError
from tacit.privacy import Charge, Header, Ledger, Part, PoissonGaussian, epsilon

EVENT = PoissonGaussian(0.1, 1.0)
HEADER = Header("client", 1e-5, Part(EVENT), data="people")


def opened_at_once(folder: str) -> None:
    """Six processes open the same new ledger at the same moment, forty times: each that got it is in it."""
    for attempt in range(40):
        path = Path(folder, f"ledger-{attempt}.jsonl")
        begin = time.time() + 0.01
        children = []
        for number in range(6):
            child = os.fork()
            if child == 0:
                _open_and_charge(path, number, begin)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert set(codes) <= {0, 3} and 0 in codes, codes
        charged = {charge.round for charge in Ledger.read(path).charges}
        assert charged == {number for number, code in enumerate(codes) if code == 0}
        assert [file.name for file in path.parent.glob(f"{path.name}*")] == [path.name]


def _open_and_charge(path: Path, number: int, begin: float) -> None:
    try:
        time.sleep(max(0.0, begin - time.time()))
        with Ledger.open(path, HEADER) as ledger:
            ledger.charge(Charge(number, (Part(EVENT),)))
        os._exit(0)
    except UserError as error:
        os._exit(3 if "in use" in str(error) else 1)
    finally:
        os._exit(2)


def killed_hundreds_of_times(folder: str) -> None:
    """SIGKILL at random moments: between charge and release, release and checkpoint, while opening."""
    rng = random.Random(0)
    played = 0
    for number in range(10):  # a ledger takes the longer to open the longer it is, so there are several
        place = Path(folder, str(number))
        place.mkdir()
        released = _killed_again_and_again(place, rng, kills=25)
        played += released
    assert played > 20  # it did play
    with Ledger.open(place / "ledger.jsonl", HEADER) as ledger:
        assert ledger.epsilon().value >= epsilon({EVENT: released}, 1e-5).value


def _killed_again_and_again(folder: Path, rng: random.Random, kills: int) -> int:
    """The releases of a run that was killed so often; its ledger has charged for each of them."""
    for kill in range(kills):
        playing, tell = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                _play_until_killed(folder, tell)
            finally:
                os._exit(1)
        os.close(tell)
        if rng.random() < 0.9:  # else: kill it while it opens the ledger
            os.read(playing, 1)
        time.sleep(rng.uniform(0, 0.008))
        os.close(playing)
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        if kill % 5 == 0 and (folder / "ledger.jsonl").exists():
            assert Ledger.read(folder / "ledger.jsonl").rounds >= (folder / "released").stat().st_size
    released = (folder / "released").stat().st_size
    with Ledger.open(folder / "ledger.jsonl", HEADER) as ledger:
        charged = len(ledger.charges)
        assert released <= charged <= released + kills  # at most one charge without a release for each kill
    return released


def _play_until_killed(folder: Path, tell: int) -> None:
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
