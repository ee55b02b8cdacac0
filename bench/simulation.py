"""Speed of simulating a federation, relative to a hand-written loop, pfl and Flower: `make bench`.

Prints ratios measured in one run. Contenders (see `contenders.py`) wait in their own processes and take turns
of about a second. Each one's best turn counts, so other work on the machine matters little. Flower runs after
the others, because its runtime keeps polling while it waits.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Pipe
from pathlib import Path

HERE = Path(__file__).resolve().parent
COHORT = 50
ROUNDS = {"cnn": 1, "mlp": 8}
"""Rounds in a turn."""
LAPS, SECONDS = {"cnn": 8, "mlp": 30}, 110
"""Laps in which each contender has one turn; on a busy machine, only as many as fit in so many seconds."""
FLOWER_TURNS = {"cnn": 3, "mlp": 8}
START, TURN, END = 120, 120, 20
"""Most seconds for a contender to get ready, to play a turn, and to leave."""
MEGA = 1 << 20


class Failed(Exception):
    """A contender could not run; says why."""


class Player:
    """A contender in a process (and a process group) of its own."""

    def __init__(self, contender: str, model: str, python: str = sys.executable) -> None:
        self.pipe, theirs = Pipe()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `close`)
        self._process = subprocess.Popen(
            [python, __file__, "play", contender, model, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": _python_path()},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        theirs.close()

    def rounds(self, count: int, patience: float = TURN) -> float:
        """Let it play `count` rounds; clients per second."""
        try:
            self.pipe.send(count)
            if not self.pipe.poll(patience):
                raise Failed(f"no answer within {patience:.0f} s")
            return count * COHORT / float(self.pipe.recv())
        except (EOFError, OSError):
            self._log.seek(0)
            lines = [line.strip() for line in self._log if line.strip()] or ["it said nothing"]
            raise Failed(lines[-1]) from None

    def close(self) -> None:
        self.pipe.close()
        try:
            self._process.wait(END)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))


@contextmanager
def playing(contender: str, model: str, python: str = sys.executable) -> Iterator[Player]:
    """A contender that has played its first round, which does not count."""
    player = Player(contender, model, python)
    try:
        player.rounds(1, START + TURN)
        yield player
    finally:
        player.close()


def speeds(model: str) -> dict[str, float | str]:
    """Clients per second of each contender in its best turn, or why there is none."""
    best: dict[str, float | str] = {}
    with ExitStack() as stack:
        players = {}
        for contender in ("bare", "in-process", "two workers", "pfl"):
            try:
                players[contender] = stack.enter_context(playing(contender, model))
            except Failed as failure:
                best[contender] = str(failure)
        end = time.monotonic() + SECONDS
        for lap in range(LAPS[model]):
            if lap >= 2 and time.monotonic() > end:
                break
            for contender, player in players.items():
                speed = player.rounds(ROUNDS[model])
                best[contender] = max(float(best.get(contender, 0)), speed)
    try:
        with playing("flower", model) as player:
            best["flower"] = max(player.rounds(1) for _ in range(FLOWER_TURNS[model]))
    except Failed as failure:
        best["flower"] = str(failure)
    return best


GOALS = {"bare": "", "in-process": "≥ 0.95", "two workers": "≥ 1.70", "pfl": "< ours", "flower": "< ours/10"}
LABELS = {
    "bare": "bare PyTorch loop, one thread",
    "in-process": "tacit, in-process",
    "two workers": "tacit, two workers",
    "pfl": "pfl 0.6, one process",
    "flower": "Flower, two one-CPU actors",
}


def print_speeds() -> None:
    print(f"{'':6}{'clients per second':32}{'best':>9}{'× bare':>9}   goal")
    for model in ("cnn", "mlp"):
        best = speeds(model)
        bare = best["bare"]
        for contender, label in LABELS.items():
            speed = best[contender]
            if isinstance(speed, str) or isinstance(bare, str):
                print(f"{model:6}{label:32} cannot run here: {str(speed)[:24]}", flush=True)
                continue
            goal = GOALS[contender] if (model, contender) != ("cnn", "flower") else ""
            print(f"{model:6}{label:32}{speed:9.1f}{speed / bare:9.2f}   {goal}", flush=True)


def ask(*arguments: str | int) -> list[float]:
    """Numbers that this program prints when it is started anew with these arguments."""
    command = [sys.executable, __file__, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    if done.returncode:
        raise Failed(done.stderr.strip().splitlines()[-1])
    return [float(word) for word in done.stdout.split()]


def print_memory() -> None:
    """Peak memory of a run with cohorts of 10 and of 1000, each in a fresh process."""
    print(f"\n{'peak memory of a run (CNN), MB':38}{'cohort 10':>10}{'cohort 1000':>13}{'ratio':>7}   goal")
    for workers, label in ((0, "tacit, in-process"), (2, "tacit, two workers (3 processes)")):
        small, large = (ask("memory", workers, cohort)[0] for cohort in (10, 1000))
        print(f"{label:38}{small:10.0f}{large:13.0f}{large / small:7.2f}   ≤ 1.10", flush=True)


def print_population() -> None:
    """Ten million clients: what they take to hold, and what a cohort of 1000 takes to draw."""
    held, fixed, poisson = ask("population")
    print(f"\n{'a population of 10 million clients':57}{'':>11}   goal")
    print(f"{'held in memory, MB':57}{held:11.0f}   < 200")
    print(f"{'a cohort of 1000, fixed size, ms (slowest of 20)':57}{fixed:11.2f}   < 50")
    print(f"{'a cohort of 1000 on average, Poisson, ms (slowest of 20)':57}{poisson:11.2f}   < 50")


def measure_memory(workers: int, cohort: int) -> None:
    """One round of the CNN on few records for each client, so that a cohort of 1000 does not take long."""
    import contenders

    print(contenders.peak_memory(workers, cohort) / MEGA)


def measure_population() -> None:
    import numpy as np

    from tacit.data import ArrayRecords, Population
    from tacit.privacy.mechanisms.plain import repeatable_cohort
    from tacit.privacy.sampling import FixedSize, Poisson

    clients = 10_000_000
    records = ArrayRecords(np.zeros((clients, 1), np.uint8), np.zeros(clients, np.int64))
    before = _resident()
    offsets = np.arange(clients + 1)
    population = Population(records, offsets, offsets[:-1])
    assert int(population.sizes[-1]) == 1
    del offsets
    print((_resident() - before) / MEGA)
    for sampling in (FixedSize(1000), Poisson(1000 / clients)):
        slowest = 0.0
        for round in range(20):
            start = time.perf_counter()
            repeatable_cohort(sampling, len(population), 0, round)
            slowest = max(slowest, time.perf_counter() - start)
        print(1000 * slowest)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main(arguments: Sequence[str]) -> None:
    match arguments:
        case ["play", contender, model, descriptor]:
            import contenders

            contenders.play(contender, model, int(descriptor))
        case ["memory", workers, cohort]:
            measure_memory(int(workers), int(cohort))
        case ["population"]:
            measure_population()
        case ["-h" | "--help", *_]:
            print(__doc__)
        case _:
            print("1000 clients of 50 records, cohort 50, batch 10, one local epoch, SGD")
            print(f"{os.cpu_count()} cores, load before the start {os.getloadavg()[0]:.1f}\n", flush=True)
            print_speeds()
            print_memory()
            print_population()


if __name__ == "__main__":
    main(sys.argv[1:])
