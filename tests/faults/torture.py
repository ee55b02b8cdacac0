"""Break runs for a while, and count: `make torture SECONDS=3600 SEED=1`.

    python tests/faults/torture.py --seconds 60 --seed 1

Every attack is made in a process of its own where it could harm this one, and after each the run must be
finished by an ordinary resume, with the model of a run that was left alone (without privacy), no charge
missing (with it), no traceback, nothing left behind. What does not hold is printed with all it takes to do it
again, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import faults_small as small
import numpy as np
import test_corruption
import test_hostile_clients
import test_inputs
import torch
from faults_small import KINDS

import tacit
from tacit import config as configs
from tacit.engine import ClientError, InProcess, Order, Visit
from tacit.federation.statements import read_ledger
from tacit.privacy import Ledger
from tacit.vector import read_values

ROUNDS = 4
MODES = ("kill", "kill after", "torn", "ENOSPC", "EIO", "short", "full")
CALLS = ("open", "write", "fsync", "replace", "rename", "link", "unlink", "mkdir", "rmdir", "ftruncate",
         "posix_fallocate", "chmod")  # fmt: skip
SAVES = ("tacit.federation.checkpoint", "tacit.engine.states")
HANG = 60.0


class Faults:
    """Counts the file operations inside a folder, and does something at one of them."""

    def __init__(self, folder: Path, at: int, mode: str) -> None:
        self.folder, self.at, self.mode = os.fspath(folder), at, mode
        self.count, self.full = 0, False

    def install(self) -> None:
        for name in CALLS:
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        for module in SAVES:
            there = sys.modules[module]
            there.save_file = self._wrapped("save_file", there.save_file)  # type: ignore[attr-defined]

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if not self._inside(name, args):
                return original(*args, **options)
            self.count += 1
            if self.count == self.at:
                return self._act(name, original, args, options)
            grows = name in ("write", "save_file", "mkdir", "posix_fallocate", "link")
            if self.full and (grows or (name == "open" and args[1] & os.O_CREAT)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args, **options)

        return call

    def _inside(self, name: str, args: tuple[Any, ...]) -> bool:
        what = args[1] if name == "save_file" else args[0]
        if isinstance(what, int):
            try:
                what = Path(f"/proc/self/fd/{what}").readlink()
            except OSError:
                return False
        return os.fspath(what).startswith(self.folder)

    def _act(self, name: str, original: Callable[..., Any], args: Any, options: Any) -> Any:
        if self.mode == "torn" and name == "write":
            original(args[0], args[1][: len(args[1]) // 2])
        elif self.mode == "torn" and name == "save_file":
            original(*args, **options)
            os.truncate(args[1], Path(args[1]).stat().st_size // 2)
        elif self.mode == "kill after":
            original(*args, **options)
        if self.mode in ("kill", "kill after", "torn"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mode == "short" and name == "write" and len(args[1]) > 1:
            self.full = True
            return original(args[0], args[1][: len(args[1]) // 2])
        self.full = self.mode in ("short", "full")
        number = errno.EIO if self.mode == "EIO" else errno.ENOSPC
        raise OSError(number, os.strerror(number))


def count_releases(file: Path) -> None:
    """From now on, note every release of this process in a file, before it is made."""
    from tacit.privacy.mechanisms.client import ClientLevel

    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    release, summed = ClientLevel.release, InProcess.sum

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        os.write(fd, b"x")
        return release(self, *args, **options)

    def noted_sum(self: Any, *args: Any, **options: Any) -> Any:
        if getattr(self.worker.job.privacy, "unit", None) == "example":
            os.write(fd, b"x")
        return summed(self, *args, **options)

    ClientLevel.release = noted  # type: ignore[method-assign]
    InProcess.sum = noted_sum  # type: ignore[method-assign]


def go(kind: str, folder: Path, log: Path, faults: Faults | None) -> int:
    """Run, or resume, in a fork: 0 finished, 2 refused in one line, 3 anything else; negative: killed."""
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            os.setsid()
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 2)
            if "privacy" in KINDS[kind]:
                count_releases(folder.with_name(folder.name + ".released"))
            if faults is not None:
                faults.install()
            if (folder / "config.yaml").exists():
                result = small.resume(folder)
            else:
                result = small.run(kind, folder, ROUNDS)
            code = 0 if result.finished else 4
        except tacit.UserError as error:
            code = 2 if "\n" not in str(error) else 3
            log.write_text(f"UserError: {error}")
        except BaseException:
            log.write_text(traceback.format_exc())
        finally:
            os._exit(code)
    return _waited(pid)


def _waited(pid: int, kill_after: float | None = None) -> int:
    start = time.monotonic()
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        took = time.monotonic() - start
        if kill_after is not None and took > kill_after:
            os.kill(pid, signal.SIGKILL)
            kill_after = None
        if took > HANG:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise Broken("hangs", "no end within a minute")
        time.sleep(0.002)


class Broken(Exception):
    """A promise that does not hold: which one, and how."""

    def __init__(self, promise: str, how: str) -> None:
        super().__init__(f"{promise}: {how}")
        self.promise = promise


class Torture:
    """All attacks, with what they need."""

    def __init__(self, seed: int, scratch: Path) -> None:
        self.rng = random.Random(seed)
        self.scratch = scratch
        self.counts: Counter[str] = Counter()
        self.broken: Counter[str] = Counter()
        self.half: dict[str, Path] = {}
        self.reference: dict[str, Any] = {}
        self.epsilon: dict[str, float | None] = {}
        self.operations: dict[str, int] = {}
        for kind in KINDS:
            self.half[kind] = scratch / f"half-{kind}"
            small.half(kind, self.half[kind], 2, ROUNDS)
            whole = scratch / f"whole-{kind}"
            small.run(kind, whole, ROUNDS)
            self.reference[kind] = small.vectors(whole)
            private = "privacy" in KINDS[kind]
            self.epsilon[kind] = tacit.statement(self.half[kind]).epsilon if private else None
            self.operations[kind] = self._operations(kind)
        self._hostile_engine()

    def _operations(self, kind: str) -> int:
        """File operations of a whole run, by a run that is killed at none of them."""
        low, high = 1, 4096
        while low < high:  # the last operation at which a kill still finds the run
            middle = (low + high + 1) // 2
            folder = self._fresh()
            if go(kind, folder, self.scratch / "log", Faults(folder, middle, "kill")) < 0:
                low = middle
            else:
                high = middle - 1
        return low

    def _fresh(self, kind: str | None = None) -> Path:
        folder = self.scratch / "run"
        shutil.rmtree(folder, ignore_errors=True)
        Path(f"{folder}.released").unlink(missing_ok=True)
        if kind is not None:
            shutil.copytree(self.half[kind], folder)
            if "privacy" in KINDS[kind]:
                Path(f"{folder}.released").write_text("xx")
        return folder

    def finish(self, kind: str, folder: Path) -> None:
        """An ordinary resume (or start) must come to the right end."""
        log = self.scratch / "log"
        log.unlink(missing_ok=True)
        code = go(kind, folder, log, None)
        if code != 0:
            raise Broken("resumes", f"exit {code}: {log.read_text() if log.exists() else ''}")
        if kind in ("plain", "states") and not small.same(small.vectors(folder), self.reference[kind]):
            raise Broken("wrong models", "not the model of a run that was left alone")
        if small.metric_rounds(folder) != list(range(1, ROUNDS + 1)):
            raise Broken("metrics", str(small.metric_rounds(folder)))
        if "privacy" in KINDS[kind]:
            released = len(Path(f"{folder}.released").read_text())
            charged = len(read_ledger(folder).charges)
            if charged < released:
                raise Broken("lower ε", f"{released} releases and {charged} charges")
            if tacit.statement(folder).epsilon < (self.epsilon[kind] or 0.0):
                raise Broken("lower ε", "less than half of the run cost")
        problems = [finding for finding in tacit.verify(folder) if finding.problem]
        if problems:
            raise Broken("verify", str(problems))
        left = [f.name for f in small.files(folder) if f.name.endswith(".partial") or f.name == "reserved"]
        if left:
            raise Broken("leaks", str(left))

    # --- attacks ------------------------------------------------------------------------------------------

    def fault_point(self) -> str:
        """One file operation fails, or is the last one; then the run is finished."""
        kind, mode = self.rng.choice(list(KINDS)), self.rng.choice(MODES)
        resumed = self.rng.random() < 0.5
        at = self.rng.randint(1, self.operations[kind])
        folder, log = self._fresh(kind if resumed else None), self.scratch / "log"
        log.unlink(missing_ok=True)
        what = f"{mode} at operation {at} of a {'resumed ' if resumed else ''}{kind} run"
        code = go(kind, folder, log, Faults(folder, at, mode))
        if code == 3:
            raise Broken("tracebacks", f"{what}: {log.read_text() if log.exists() else ''}")
        if mode in ("full", "short") and code == 2 and self.epsilon[kind] is not None:
            self._full_disk_costs_nothing(kind, folder)
        try:
            self.finish(kind, folder)
        except Broken as error:
            raise Broken(error.promise, f"{what}: {error}") from None
        return "kills" if mode in ("kill", "kill after", "torn") and code < 0 else "fault points"

    def _full_disk_costs_nothing(self, kind: str, folder: Path) -> None:
        """Resume after resume on a full disk: at most the one charge that was cut off, and no more."""
        if not (folder / "ledger.jsonl").exists():
            return
        seen = []
        for _ in range(3):
            faults = Faults(folder, 0, "full")
            faults.full = True
            go(kind, folder, self.scratch / "log", faults)
            seen.append(len(Ledger.read(folder / "ledger.jsonl").charges))
        if seen[-1] > seen[0]:
            raise Broken("ε wasted", f"{seen} charges on a full disk")

    def kill(self) -> str:
        """SIGKILL at a random moment, a few times, then finish."""
        kind = self.rng.choice(list(KINDS))
        folder = self._fresh()
        for _ in range(self.rng.randint(1, 3)):
            pid = os.fork()
            if pid == 0:
                code = go_here(kind, folder)
                os._exit(code)
            _waited(pid, kill_after=self.rng.random() * 0.4)
            self.counts["kills"] += 1
        self.finish(kind, folder)
        return "runs finished after kills"

    def corruption(self) -> str:
        """A flipped bit in one file; most are noticed by `verify`, and all others must not matter."""
        kind = self.rng.choice(list(KINDS))
        scratch = self.scratch / "corrupted"
        if self.rng.random() < 0.1:
            try:
                test_corruption.attack(
                    kind, self.half[kind], scratch, self.reference[kind], self.epsilon[kind], self.rng
                )
            except AssertionError as error:
                raise Broken("wrong models" if "model" in str(error) else "lower ε", str(error)) from None
            return "corruptions"
        run = self.half[kind]
        file = self.rng.choice([f for f in small.files(run) if f.stat().st_size])
        whole = file.read_bytes()
        state = self.rng.getstate()
        where = test_corruption.flip(file, self.rng)
        try:
            if any(finding.problem for finding in tacit.verify(run)):
                return "corruptions"
        finally:
            file.write_bytes(whole)
        # Not noticed: then it must be of no consequence.
        folder = small.copy(run, scratch)
        self.rng.setstate(state)
        test_corruption.flip(folder / file.relative_to(run), self.rng)
        what = f"{file.relative_to(run)} at {where}"
        if self.epsilon[kind] is not None and tacit.statement(folder).epsilon < (self.epsilon[kind] or 0.0):
            raise Broken("lower ε", what)
        try:
            small.resume(folder)
        except tacit.UserError:
            return "corruptions"
        repeatable = kind not in ("client", "example")
        if repeatable and not small.same(small.vectors(folder), self.reference[kind]):
            raise Broken("wrong models", what)
        return "corruptions"

    def fuzzed(self) -> str:
        """An input that nobody should write: a config, an override, a ledger, metrics."""
        which = self.rng.random()
        try:
            if which < 0.3:
                file = self.scratch / "config.yaml"
                text = test_inputs.fuzzed(self.rng)
                file.write_text(text, encoding="utf-8", errors="surrogatepass")
                test_inputs.read(file)
            elif which < 0.4:
                key = ".".join(self.rng.choice(test_inputs.leaves(test_inputs.GOOD)[1:]))
                text = f"{key}={self.rng.choice(test_inputs.ODD)}"
                configs.load(test_inputs.GOOD, configs.parse_overrides([text]))
            elif which < 0.9:
                self._fuzzed_ledger()
            else:
                self._fuzzed_metrics()
        except tacit.UserError as error:
            if "\n" in str(error).strip():
                raise Broken("tracebacks", f"more than a line: {error}") from None
        return "fuzzed inputs"

    def _mutated(self, whole: bytes) -> bytes:
        content = bytearray(whole)
        for _ in range(self.rng.randint(1, 3)):
            place = self.rng.randrange(len(content))
            how = self.rng.randrange(5)
            if how == 0:
                content[place] = self.rng.randrange(256)
            elif how == 1:
                del content[place : place + self.rng.randint(1, 200)]
            elif how == 2:
                content[place:place] = bytes(self.rng.randrange(256) for _ in range(5))
            elif how == 3:
                lines = bytes(content).splitlines(keepends=True)
                self.rng.shuffle(lines)
                content = bytearray(b"".join(lines))
            else:
                lines = bytes(content).splitlines(keepends=True)
                del lines[self.rng.randrange(len(lines))]
                content = bytearray(b"".join(lines))
            if not content:
                break
        return bytes(content)

    def _fuzzed_ledger(self) -> None:
        whole = (self.half["example"] / "ledger.jsonl").read_bytes()
        known = len(Ledger.read(self.half["example"] / "ledger.jsonl").charges)
        file = self.scratch / "ledger.jsonl"
        content = self._mutated(whole)
        file.write_bytes(content)
        found = Ledger.read(file)
        # What is accepted is the ledger itself, or a beginning of it (which checkpoints know to be short).
        if not whole.startswith(content[: content.rfind(b"\n") + 1]) or len(found.charges) > known + 1:
            raise Broken("lower ε", "a ledger that was changed was accepted")

    def _fuzzed_metrics(self) -> None:
        from tacit.federation.tracking import read_metrics

        whole = (self.half["plain"] / "metrics.jsonl").read_bytes()
        file = self.scratch / "metrics.jsonl"
        file.write_bytes(self._mutated(whole))
        read_metrics(file)

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

    def hostile(self) -> str:
        """A client that sends what it should not, or writes where it should not."""
        self.hostile_kind, self.hostile_seed = self.rng.randrange(200), self.rng.randrange(2**32)
        mechanism, before = self.job.privacy, self.theta.clone()
        assert mechanism is not None
        bounding = mechanism.bounding(mechanism.init(), self.job.upload_sizes, self.job.layout, 1)
        assert bounding is not None
        assert bounding.grid is not None
        try:
            order = Order(0, 0.1, 1, bounding=bounding)
            total, _ = self.engine.sum(order, {"theta": self.theta}, [Visit(0)])
        except ClientError:
            pass
        else:
            square = sum(int(k) ** 2 for k in total["delta"].tolist())
            if square > bounding.grid.radius**2:
                raise Broken("clip", f"hostile kind {self.hostile_kind}, seed {self.hostile_seed}")
        if not torch.equal(self.theta, before):
            raise Broken("clip", "the server's own tensor was changed")
        return "hostile clients"

    def attack(self) -> None:
        attacks = [self.fault_point, self.kill, self.corruption, self.fuzzed, self.hostile]
        chosen = self.rng.choices(attacks, weights=[30, 10, 60, 100, 5])[0]
        try:
            self.counts[chosen()] += 1
        except Broken as error:
            self.broken[error.promise] += 1
            print(f"BROKEN {error}", flush=True)
        except Exception:
            self.broken["tracebacks"] += 1
            print(f"BROKEN traceback in {chosen.__name__}:\n{traceback.format_exc()}", flush=True)


def go_here(kind: str, folder: Path) -> int:
    """As `go`, in this very process."""
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 2)
        if "privacy" in KINDS[kind]:
            count_releases(folder.with_name(folder.name + ".released"))
        if (folder / "config.yaml").exists():
            return 0 if small.resume(folder).finished else 4
        return 0 if small.run(kind, folder, ROUNDS).finished else 4
    except BaseException:
        return 3


def main() -> int:
    parser = argparse.ArgumentParser(description="Break runs for a while, and count.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attacks", type=int, default=0, help="stop after so many, whatever the time")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    scratch = Path(tempfile.mkdtemp(prefix="tacit-torture-"))
    try:
        torture = Torture(asked.seed, scratch)
        start, done = time.monotonic(), 0
        while time.monotonic() - start < asked.seconds and not (asked.attacks and done >= asked.attacks):
            torture.attack()
            done += 1
        seconds = round(time.monotonic() - start)
        print(
            json.dumps({"seed": asked.seed, "seconds": seconds, **torture.counts, "broken": torture.broken})
        )
        return 1 if torture.broken else 0
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
