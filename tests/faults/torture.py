"""Break runs for a while, and count the failures: `make torture SECONDS=3600 SEED=1`.

    python tests/faults/torture.py --seconds 60 --seed 1

torch and tacit are imported once; every attacked run is a fork of this process that calls the `tacit`
command's own entry point. Some runs are separate processes, and some have a pool of workers. After a chain of
attacks, an ordinary resume must finish the run, with the model of an undisturbed run (without privacy), no
charge missing (with privacy), no traceback, and nothing left behind. Each failure is printed with the command
to repeat it (`--again "kills 17" --seed 1`), and makes the exit code 1. Counts are printed every minute.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import faults_small as small
import numpy as np
import test_hostile_clients
import torch
from faults_small import KINDS
from forks import HANG, End, Hung, alarm, cli_main, command, forked, session, start, waited
from nonsense import Nonsense, mutated
from points import ERRORS, KILLS, NEVER, Faults

import tacit
from tacit.engine import ClientError, InProcess, Order, Participant
from tacit.federation.statements import read_ledger, read_statement
from tacit.privacy import Ledger, epsilon
from tacit.vector import read_values

ROUNDS = 4
TARGETS = {
    "kills": 1000,
    "fault points": 2000,
    "corruptions": 20_000,
    "fuzzed inputs": 50_000,
    "hostile clients": 200,
    "pool runs": 10,
    "processes": 10,
}
"""How many of each are made, relative to each other: an hour of one core should reach all of them."""
LITTLE = {"cohort": 3, "local": {"steps": 1, "batch": 5, "lr": 0.1}, "evaluate": {"every": 2}}
"""What is trained matters little: files do."""
BATCH = {"fault points": 20, "corruptions": 100, "fuzzed inputs": 250, "hostile clients": 50}
"""What one fork makes."""


class Broken(Exception):
    """A promise that does not hold: which one, and how."""

    def __init__(self, promise: str, how: str) -> None:
        super().__init__(f"{promise}: {how}")
        self.promise = promise


_released: list[Path] = []
"""Where releases are noted, if they are."""


def count_releases() -> None:
    """From now on, every release of this process is noted in a file before it is made."""
    from tacit.privacy.mechanisms.client import ClientLevel

    release, summed = ClientLevel.release, InProcess.sum

    def note() -> None:
        for file in _released:
            with file.open("ab", buffering=0) as stream:
                stream.write(b"x")

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        note()
        return release(self, *args, **options)

    def noted_sum(self: Any, *args: Any, **options: Any) -> Any:
        if getattr(self.worker.job.privacy, "unit", None) == "example":
            note()
        return summed(self, *args, **options)

    ClientLevel.release = noted  # type: ignore[method-assign]
    InProcess.sum = noted_sum  # type: ignore[method-assign]


class Torture:
    """All attacks, with what they need."""

    def __init__(self, seed: int, scratch: Path, disk: Path) -> None:
        """`scratch`: where most of it happens, in memory if it can be; `disk`: for true processes."""
        self.seed, self.scratch, self.disk = seed, scratch, disk
        self.place, self.here = scratch, False
        count_releases()
        self.counts: Counter[str] = Counter()
        self.operations_hit: Counter[str] = Counter()
        self.broken: Counter[str] = Counter()
        self.numbers: Counter[str] = Counter()
        self.half: dict[str, Path] = {}
        self.other: dict[str, Path] = {}
        self.reference: dict[str, Any] = {}
        self.epsilon: dict[str, float] = {}
        self.operations: dict[tuple[str, bool], list[str]] = {}
        self.spent: Counter[str] = Counter()
        for kind in KINDS:
            self._prepare(kind)
        small.recipe(
            "plain",
            scratch / "pool.yaml",
            12,
            engine={"workers": 2},
            local={"steps": 20, "batch": 5, "lr": 0.1},
        )
        small.recipe("plain", scratch / "alone.yaml", 12, local={"steps": 20, "batch": 5, "lr": 0.1})
        self._done(command("run", scratch / "alone.yaml", "--out", scratch / "alone"))
        self.reference["pool"] = small.vectors(scratch / "alone")
        self.nonsense = Nonsense(self.half, scratch)
        self._hostile_engine()

    def _prepare(self, kind: str) -> None:
        """A whole run, half of one and half of another with another seed, and their file operations."""
        whole, half, other = (self.scratch / f"{name}-{kind}" for name in ("whole", "half", "other"))
        small.recipe(kind, self.recipe(kind), ROUNDS, **LITTLE)
        faults = Faults(whole, NEVER, "kill")

        def play() -> None:
            faults.install()
            cli_main("run", self.recipe(kind), "--out", whole)()

        self._done(forked(play))
        self.operations[kind, False], self.reference[kind] = faults.seen, small.vectors(whole)
        if self.private(kind):
            first = read_ledger(whole).charges[0].parts[0].event
            for count in range(1, 13):  # known to all forks from here on
                epsilon({first: count}, read_ledger(whole).header.delta)
        for folder, seed in ((half, 0), (other, 7)):
            # Stopped as a person would, by SIGTERM, after the second round.
            small.recipe(kind, self.scratch / "half.yaml", ROUNDS, seed=seed, **LITTLE)
            self._done(forked(_stopped(2, cli_main("run", self.scratch / "half.yaml", "--out", folder))), 130)
        self.half[kind], self.other[kind] = half, other
        resumed = self._fresh(kind)
        faults = Faults(resumed, NEVER, "kill")
        self._done(self.attempt(kind, resumed, faults))
        self.operations[kind, True] = faults.seen
        if self.private(kind):
            self.epsilon[kind] = read_statement(half).epsilon

    @staticmethod
    def _done(end: End, code: int = 0) -> None:
        if end.code != code:
            raise RuntimeError(f"nothing was attacked yet, and: {end}")

    @staticmethod
    def private(kind: str) -> bool:
        return "privacy" in KINDS[kind]

    def recipe(self, kind: str) -> Path:
        return self.scratch / f"{kind}.yaml"

    # --- chains of kills and failing file operations ------------------------------------------------------

    def attempt(self, kind: str, folder: Path, faults: Faults | None, kill_after: float | None = None) -> End:
        """Run, or resume what is there, in a fork; or here, in a fork that makes many attempts."""

        there = (folder / "config.yaml").exists()
        words = ["resume", folder] if there else ["run", self.recipe(kind), "--out", folder]
        _released[:] = [folder.with_name(f"{folder.name}.released")] if self.private(kind) else []

        def play() -> None:
            if faults is not None:
                faults.install()
            cli_main(*words)()

        try:
            if not self.here:
                return forked(play, kill_after=kill_after)
            remove = faults.install() if faults is not None else lambda: None
            try:
                return command(*words)
            finally:
                remove()
        finally:
            _released.clear()

    def errors(self, rng: random.Random, place: Path) -> str:
        """File operations of a run fail, one attempt after the other; then it is finished."""
        self.place, self.here = place, True
        self.chain(rng, ERRORS)
        return "runs finished after errors"

    def kills(self, rng: random.Random) -> None:
        """A run is killed again and again, now and then an operation fails; then it is finished."""
        self.place, self.here = self.scratch, False
        self.chain(rng, (*KILLS, *KILLS, *KILLS, "moment", "moment", "moment", *ERRORS))

    def chain(self, rng: random.Random, modes: Sequence[str]) -> None:
        kind = rng.choices(list(KINDS), [1.0 if kind != "example" else 0.4 for kind in KINDS])[0]
        folder = self._fresh(kind if rng.random() < 0.4 else None)
        told = []
        end = End(1)
        for _ in range(rng.randint(2, 4)):
            mode = rng.choice(modes)
            if mode == "moment":
                told.append("kill at some moment")
                end = self.attempt(kind, folder, None, kill_after=rng.random() * 0.25)
                self.counts["kills"] += end.code == -signal.SIGKILL
            else:
                at = self._operation(kind, (folder / "config.yaml").exists(), rng)
                told.append(f"{mode} at {at}")
                faults = Faults(folder, at, mode)
                end = self.attempt(kind, folder, faults)
                if faults.struck is not None and (mode in ERRORS or end.code == -signal.SIGKILL):
                    self.counts["kills" if mode in KILLS else "fault points"] += 1
                    self.operations_hit[faults.struck] += 1
            if end.hung:
                raise Broken("hangs", f"{kind}: {told}")
            if end.riddle is not None:
                raise Broken("tracebacks", f"{kind}: {told}: {end.riddle}")
            if end.code == 0:
                break
            if mode == "full" and end.code == 2 and self.private(kind) and rng.random() < 0.3:
                self._full_disk_costs_nothing(kind, folder, told)
        try:
            # One that came to its end in spite of all is judged as it is, unless a write failed on the way.
            if end.code == 0 and not any(mode in words for mode in ERRORS for words in told):
                self._judge(kind, folder)
            else:
                self._finish(kind, folder)
        except Broken as error:
            raise Broken(error.promise, f"{kind}: {told}: {error}") from None
        self.counts["runs finished"] += 1

    def _operation(self, kind: str, resumed: bool, rng: random.Random) -> int:
        """Which file operation is struck: each sort (write, fsync, rename, …) as often as any other."""
        known = self.operations[kind, resumed]
        sort = rng.choice(sorted(set(known)))
        return rng.choice([number for number, name in enumerate(known, start=1) if name == sort])

    def _fresh(self, kind: str | None = None) -> Path:
        folder = self.place / "run"
        shutil.rmtree(folder, ignore_errors=True)
        Path(f"{folder}.released").unlink(missing_ok=True)
        if kind is not None:
            shutil.copytree(self.half[kind], folder)
            if self.private(kind):
                Path(f"{folder}.released").write_text("xx")
        return folder

    def _full_disk_costs_nothing(self, kind: str, folder: Path, told: list[str]) -> None:
        """Resume after resume on a full disk: at most the one charge that was cut off, and no more."""
        if not (folder / "ledger.jsonl").exists():
            return
        seen = []
        for _ in range(2):
            end = self.attempt(kind, folder, Faults(folder, 0, "full"))
            if end.riddle is not None:
                raise Broken("tracebacks", f"{kind}: {told}, then a full disk: {end.riddle}")
            seen.append(len(Ledger.read(folder / "ledger.jsonl").charges))
        if seen[-1] > seen[0]:
            raise Broken("ε wasted", f"{kind}: {told}, then {seen} charges on a full disk")

    def _finish(self, kind: str, folder: Path) -> None:
        """An ordinary resume (or start) must come to the right end."""
        end = self.attempt(kind, folder, None)
        if end.hung:
            raise Broken("hangs", "an ordinary resume has no end")
        if end.code != 0 or end.riddle:
            raise Broken("resumes", f"exit {end.code}: {end.err}")
        self._judge(kind, folder)

    def _judge(self, kind: str, folder: Path) -> None:
        """A finished run: its model, its metrics, what it says of its cost, and what it left behind."""
        repeatable = kind not in ("client", "example", "seeded")
        if kind == "seeded":  # a round that is played again has other noise
            repeatable = len(read_ledger(folder).charges) == ROUNDS
        if repeatable and not small.same(small.vectors(folder), self.reference[kind]):
            raise Broken("wrong models", "not the model of a run that was left alone")
        rounds = small.metric_rounds(folder)
        if rounds != list(range(1, max(rounds) + 1)):
            raise Broken("metrics", str(rounds))
        if kind in KINDS and self.private(kind):
            released = Path(f"{folder}.released")
            charged = len(read_ledger(folder).charges)
            if released.exists() and charged < released.stat().st_size:
                raise Broken("lower ε", f"{released.stat().st_size} releases and {charged} charges")
            if charged < ROUNDS or read_statement(folder).epsilon < self.epsilon[kind]:
                raise Broken("lower ε", "less than half of the run cost")
        problems = [finding for finding in tacit.verify(folder) if finding.problem]
        if problems:
            raise Broken("verify", str(problems))
        left = [f.name for f in small.files(folder) if f.name.endswith(".partial") or f.name == "reserved"]
        if left:
            raise Broken("leaks", str(left))

    # --- what one fork makes many of ------------------------------------------------------------------------

    def batch(self, name: str, rng: random.Random) -> None:
        """A fork makes a batch of attacks of one kind by itself, and tells of each that got through."""
        play = {
            "fault points": self.errors,
            "corruptions": self.corrupt,
            "fuzzed inputs": self.fuzz,
            "hostile clients": self.hostile,
        }[name]
        report = self.scratch / "report.jsonl"
        report.unlink(missing_ok=True)

        def many() -> None:
            place = Path(tempfile.mkdtemp(dir=self.scratch, prefix="batch-"))
            os.chdir(place)
            found: dict[str, Any] = {"broken": []}
            self.counts.clear(), self.operations_hit.clear()
            before = None
            for number in range(BATCH[name]):
                try:
                    with alarm(HANG):
                        self.counts[f"  {play(rng, place)}"] += 1
                except Broken as error:
                    found["broken"].append((error.promise, f"{name}, number {number}: {error}"))
                except Hung:
                    found["broken"].append(("hangs", f"{name}, number {number}: {traceback.format_exc()}"))
                except BaseException:
                    found["broken"].append(
                        ("tracebacks", f"{name}, number {number}: {traceback.format_exc()}")
                    )
                self.counts[name] += name != "fault points"  # those are counted where they strike
                if number == BATCH[name] // 2:  # by then all that is made once has been made
                    before = _descriptors()
            after = _descriptors()
            if before is not None and after > before:
                found["broken"].append(("leaks", f"{name}: {before} descriptors became {after}"))
            found |= {"counts": self.counts, "operations": self.operations_hit}
            report.write_text(json.dumps(found))
            shutil.rmtree(place, ignore_errors=True)

        end = forked(many, seconds=20 * HANG)
        if not report.exists():
            raise Broken("hangs" if end.hung else "tracebacks", f"{name}: {end}")
        found = json.loads(report.read_text())
        self.counts.update(found["counts"])
        self.operations_hit.update(found["operations"])
        for promise, how in found["broken"]:
            self._tell(promise, how)

    def corrupt(self, rng: random.Random, place: Path) -> str:
        """One file is damaged. `verify` sees it, or it is of no consequence; a statement never says less."""
        kind = rng.choice(list(KINDS))
        run = place / kind
        if not run.exists():
            shutil.copytree(self.half[kind], run)
        files = [f for f in small.files(run) if f.stat().st_size]
        file = rng.choices(files, [0.1 if f.name == "report.html" else 1.0 for f in files])[0]
        whole = file.read_bytes()
        how, damaged = self._damaged(kind, file.relative_to(run), whole, rng)
        where = f"{kind}: {file.relative_to(run)}: {how}"
        file.write_bytes(damaged)
        try:
            noticed = [finding.name for finding in tacit.verify(run) if finding.problem]
            if self.private(kind) and not file.name.startswith(("metrics", "report", "result", "lock")):
                self._statement_says_no_less(kind, run, where)
            if noticed and rng.random() > 0.03:
                return f"{kind}, noticed"
            folder = small.copy(run, place / "damaged")
        finally:
            file.write_bytes(whole)
        end = command("resume", folder)
        if end.riddle is not None:
            raise Broken("hangs" if end.hung else "tracebacks", f"{where}: {end.riddle}")
        if end.code == 2:
            if not noticed:
                raise Broken("verify", f"{where}: refused, and verify had nothing to say: {end.err}")
            return f"{kind}, refused"
        repeatable = not self.private(kind) or (kind == "seeded" and not noticed)
        if repeatable and not small.same(small.vectors(folder), self.reference[kind]):
            raise Broken("wrong models", where)
        if self.private(kind):
            self._statement_says_no_less(kind, folder, where)
            if len(read_ledger(folder).charges) < ROUNDS:
                raise Broken("lower ε", where)
        problems = [finding for finding in tacit.verify(folder) if finding.problem]
        # A checkpoint that is damaged and not replaced stays, until newer ones take its place.
        if any(not finding.name.startswith(("checkpoint/00000", "best/00000")) for finding in problems):
            raise Broken("verify", f"{where}: finished, and still {problems}")
        return f"{kind}, went on" if noticed else f"{kind}, harmless"

    def _damaged(self, kind: str, name: Path, whole: bytes, rng: random.Random) -> tuple[str, bytes]:
        """A file's new contents, which are not those it had."""
        while True:
            how = rng.choices(["flip", "flips", "mutated", "other run", "other file"], [70, 10, 10, 5, 5])[0]
            content = bytearray(whole)
            if how in ("flip", "flips"):
                places = [
                    (rng.randrange(len(whole)), rng.randrange(8)) for _ in range(1 if how == "flip" else 5)
                ]
                for place, bit in places:
                    content[place] ^= 1 << bit
                told = f"{how} {places}"
            elif how == "mutated":
                state = rng.getrandbits(32)
                content, told = bytearray(mutated(whole, random.Random(state))), f"mutated {state}"
            else:
                names = (
                    [name]
                    if how == "other run"
                    else [f.relative_to(self.half[kind]) for f in small.files(self.half[kind])]
                )
                chosen = rng.choice(names)
                source = (self.other if how == "other run" else self.half)[kind] / chosen
                if not source.exists():
                    continue
                content, told = bytearray(source.read_bytes()), f"{how}'s {chosen}"
            if content != whole:
                return told, bytes(content)

    def _statement_says_no_less(self, kind: str, run: Path, where: str) -> None:
        try:
            told = read_statement(run)
        except tacit.UserError:
            return
        if told.epsilon < self.epsilon[kind]:
            raise Broken("lower ε", f"{where}: {told.epsilon} is stated")

    def fuzz(self, rng: random.Random, place: Path) -> str:
        self.nonsense.scratch = place
        which, wrong = self.nonsense.one(rng)
        if wrong is not None:
            promise = "lower ε" if "accepted" in wrong else "hangs" if "no end" in wrong else "tracebacks"
            raise Broken(promise, f"{which}: {wrong}")
        return which

    def _hostile_engine(self) -> None:
        from tacit.algorithms import Algorithm
        from tacit.config.build import build_job

        self.hostile_kind, self.hostile_seed = 0, 0
        torture = self

        class Hostile(Algorithm):
            def client(self, msg: Any, memory: Any, work: Any) -> Any:
                if torture.hostile_kind >= 100:
                    hows = test_hostile_clients.WRITES
                    test_hostile_clients.write(msg["theta"], hows[torture.hostile_kind % len(hows)])
                rng = np.random.default_rng(torture.hostile_seed)
                kind = torture.hostile_kind % 20
                return {"delta": test_hostile_clients.hostile_upload(kind, msg["theta"], rng)}, {}

        privacy = {"unit": "client", "clip": 0.5, "noise": 1e-3, "delta": 1e-3, "entropy": "seed"}
        settings = small.settings("plain", privacy=privacy)
        self.job = build_job(settings, self.scratch / "hostile", None, small.blobs(48), Hostile())
        self.engine = InProcess(self.job)
        self.theta = read_values(self.job.model, self.job.layout).clone()

    def hostile(self, rng: random.Random, place: Path) -> str:
        """A client that sends what it should not, or writes where it should not."""
        self.hostile_kind, self.hostile_seed = rng.randrange(200), rng.randrange(2**32)
        mechanism, before = self.job.privacy, self.theta.clone()
        assert mechanism is not None
        bounding = mechanism.bounding(mechanism.init(), self.job.upload_sizes, self.job.layout, 1)
        assert bounding is not None
        assert bounding.grid is not None
        outcome = "client, refused"
        try:
            order = Order(0, 0.1, 1, bounding=bounding)
            total, _ = self.engine.sum(order, {"theta": self.theta}, [Participant(0)])
        except ClientError:
            pass
        else:
            outcome = "client, bounded"
            square = sum(int(k) ** 2 for k in total["delta"].tolist())
            if square > bounding.grid.radius**2:
                raise Broken("clip", f"hostile kind {self.hostile_kind}, seed {self.hostile_seed}")
        if not torch.equal(self.theta, before):
            raise Broken("clip", "the server's own tensor was changed")
        return outcome

    # --- pools and true processes ---------------------------------------------------------------------------

    def pool(self, rng: random.Random) -> None:
        """A run with two worker processes: one of them is killed, or the run, or its whole group is told to
        stop; nothing of it is left, and the model is that of a run without workers.
        """
        folder = self._fresh()
        who = rng.choice(["a worker", "the run", "the group", "at start"])
        leader = start(cli_main("run", self.scratch / "pool.yaml", "--out", folder), *self._silence())
        self._until(lambda: bool(self._workers(leader)), leader, "no worker started")
        if who != "at start":
            self._until(lambda: self._rounds(folder) >= 1, leader, "no round ended")
            time.sleep(rng.random() * 0.05)
        named = [place for pid in (leader, *self._workers(leader)) for place in self._named_memory(pid)]
        if named:
            raise Broken("leaks", f"shared memory with a name: {named}")
        if who == "a worker":
            for pid in self._workers(leader)[:1]:
                os.kill(pid, signal.SIGKILL)
                self.counts["kills"] += 1
        elif who == "the group":
            os.killpg(leader, signal.SIGTERM)
        else:
            os.kill(leader, signal.SIGKILL)
            self.counts["kills"] += 1
        code, hung = waited(leader)
        expected = {"a worker": (0,), "the group": (0, 130)}.get(who, (-signal.SIGKILL,))
        if hung or code not in expected:
            raise Broken("hangs" if hung else "workers", f"{who}: exit code {code}: {self._last_words()}")
        self._until(lambda: not session(leader), None, f"{who}: processes outlived their run")
        if who != "a worker":
            there = (folder / "config.yaml").exists()
            again = ["resume", folder] if there else ["run", self.scratch / "pool.yaml", "--out", folder]
            end = forked(cli_main(*again))
            if end.code != 0 or end.riddle:
                raise Broken("resumes", f"{who}: {end}")
        self._judge("pool", folder)
        self.counts["pool runs"] += 1

    def process(self, rng: random.Random) -> None:
        """The command as a person starts it, on a disk: killed at a random moment, and resumed."""
        kind = rng.choice(list(KINDS))
        folder = self.disk / "run"
        shutil.rmtree(folder, ignore_errors=True)
        Path(f"{folder}.released").unlink(missing_ok=True)
        path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path}
        entry = [sys.executable, "-m", "tacit"]
        process = subprocess.Popen(
            [*entry, "run", str(self.recipe(kind)), "--out", str(folder)], env=environment, cwd=self.disk,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        begun = time.monotonic()
        while process.poll() is None and not (folder / "lock").exists() and time.monotonic() - begun < HANG:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.6)
        process.kill()
        _, err = process.communicate(timeout=HANG)
        self.counts["kills"] += process.returncode == -signal.SIGKILL
        if "Traceback" in err:
            raise Broken("tracebacks", f"{kind}: a process: {err}")
        again = (
            ["resume", str(folder)]
            if (folder / "config.yaml").exists()
            else ["run", str(self.recipe(kind)), "--out", str(folder)]
        )
        done = subprocess.run(
            [*entry, *again],
            env=environment,
            cwd=self.disk,
            capture_output=True,
            text=True,
            timeout=HANG,
            check=False,
        )
        if done.returncode != 0 or "Traceback" in done.stderr:
            raise Broken("resumes", f"{kind}: a process: exit {done.returncode}: {done.stderr}")
        self._judge(kind, folder)
        self.counts["processes"] += 1

    def _silence(self) -> tuple[Any, Any]:
        self.words = tempfile.TemporaryFile()  # noqa: SIM115
        return self.words, self.words

    def _last_words(self) -> str:
        self.words.seek(0)
        return str(self.words.read().decode(errors="replace"))[-2000:]

    @staticmethod
    def _workers(leader: int) -> list[int]:
        try:
            return list(small.children(leader))
        except OSError:
            return []

    @staticmethod
    def _rounds(folder: Path) -> int:
        file = folder / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def _named_memory(self, pid: int) -> list[str]:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            return []
        return [line for line in maps.splitlines() if "/dev/shm/" in line and str(self.scratch) not in line]

    def _until(self, true: Callable[[], bool], leader: int | None, otherwise: str) -> None:
        begun = time.monotonic()
        while not true():
            ended = leader is not None and not Path(f"/proc/{leader}/task").exists()
            if ended or time.monotonic() - begun > HANG:
                raise Broken("workers", f"{otherwise}: {self._last_words()}")
            time.sleep(0.01)

    # --- an hour of it --------------------------------------------------------------------------------------

    def attack(self) -> None:
        """Whatever there is least of, compared with what there should be."""
        least = min(TARGETS, key=lambda name: self.counts[name] / TARGETS[name])
        self.play(least)

    def play(self, name: str, number: int | None = None) -> None:
        """One attack by its name, the number of its kind: the same again, but for what time decides."""
        if number is None:
            number = self.numbers[name]
            self.numbers[name] += 1
        rng, before = random.Random(f"{self.seed} {name} {number}"), _processor_seconds()
        try:
            if name in BATCH:
                self.batch(name, rng)
            else:
                {"kills": self.kills, "pool runs": self.pool, "processes": self.process}[name](rng)
        except Broken as error:
            self._tell(error.promise, f'--again "{name} {number}": {error}')
        except Exception:
            self._tell("tracebacks", f'--again "{name} {number}": {traceback.format_exc()}')
        self.spent[name] += _processor_seconds() - before

    def _tell(self, promise: str, how: str) -> None:
        self.broken[promise] += 1
        print(f"BROKEN {promise}: {how}", flush=True)

    def summary(self, seconds: float) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "seconds": round(seconds),
            "processor_seconds": round(_processor_seconds()),
            "spent_on": {name: round(spent) for name, spent in self.spent.items()},
            **{name: self.counts[name] for name in (*TARGETS, "runs finished")},
            "operations": dict(sorted(self.operations_hit.items())),
            "broken": dict(self.broken),
        }


def _processor_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _stopped(rounds: int, play: Callable[[], None]) -> Callable[[], None]:
    """The same, but SIGTERM comes after so many rounds."""

    def until() -> None:
        from tacit.federation.tracking import JsonLines

        told = JsonLines.round

        def tell(self: Any, record: Any) -> None:
            told(self, record)
            if record["round"] == rounds:
                os.kill(os.getpid(), signal.SIGTERM)

        JsonLines.round = tell  # type: ignore[method-assign]
        play()

    return until


def main() -> int:
    parser = argparse.ArgumentParser(description="Break runs for a while, and count.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--few", action="store_true", help="one small batch of each, whatever the time")
    parser.add_argument("--again", metavar="'NAME NUMBER'", help="only this one attack")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # pages that forks share stay shared
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    scratch = Path(tempfile.mkdtemp(prefix="tacit-torture-", dir=memory))
    disk = Path(tempfile.mkdtemp(prefix="tacit-torture-"))
    begun = said = time.monotonic()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that what it made is taken away
    try:
        torture = Torture(asked.seed, scratch, disk)
        print(f"seed {asked.seed}; prepared in {time.monotonic() - begun:.0f} s", flush=True)
        if asked.again:
            name, _, number = asked.again.rpartition(" ")
            torture.play(name, int(number))
        if asked.few:
            BATCH.update({"fault points": 6, "corruptions": 40, "fuzzed inputs": 150, "hostile clients": 20})
            for name in (*BATCH, *["kills"] * 4):
                torture.play(name)
        while not asked.again and not asked.few and time.monotonic() - begun < asked.seconds:
            torture.attack()
            if time.monotonic() - said > 60:
                said = time.monotonic()
                print(json.dumps(torture.summary(said - begun)), flush=True)
        print(json.dumps({k.strip(): v for k, v in sorted(torture.counts.items())}))
        print(json.dumps(torture.summary(time.monotonic() - begun)))
        return 1 if torture.broken else 0
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(disk, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
