"""Nonsense inputs: configs, flags, ledgers, metrics, and sealed files with nonsense inside."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import faults_small as small
import test_inputs
from forks import End, command

import tacit
from tacit import config as configs
from tacit.federation.files import sealed, sealed_text
from tacit.federation.statements import read_statement
from tacit.federation.tracking import read_metrics
from tacit.privacy import Ledger

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 10**30, -(10**30), 1e308, -0.0, 5e-324, float("nan"), float("inf"), "", "x",
    "\u0000", "a" * 5000, "../../x", [], [[]], {}, {"a": {}}, [None], {"": 0}, "1", 0.5, 2**63, [1, 2, 3],
]  # fmt: skip
"""What stands where something else should."""
COMMANDS = (
    "run", "resume", "statement", "verify", "compare", "report", "ledger", "export", "plan", "methods",
    "blocks", "layers", "test", "data", "drift", "hessian", "audit", "corpus", "pretrain", "board",
    "nothing", "",
)  # fmt: skip
FLAGS = (
    "--json", "--set", "--out", "--jobs", "--rounds", "--at", "--picture", "--limit", "--noise", "--rate",
    "--delta", "--epsilon", "--help", "-x", "--", "--set=a", "--metric", "--port", "--rounds=x", "=", "-h",
)  # fmt: skip


def mutated(whole: bytes, rng: random.Random) -> bytes:
    """Bytes with a few things wrong: some changed, lost, added, moved or left out."""
    content = bytearray(whole)
    for _ in range(rng.randint(1, 3)):
        if not content:
            break
        place, how = rng.randrange(len(content)), rng.randrange(7)
        if how == 0:
            content[place] = rng.randrange(256)
        elif how == 1:
            del content[place : place + rng.randint(1, 200)]
        elif how == 2:
            content[place:place] = rng.randbytes(rng.randint(1, 9))
        elif how == 3:
            del content[place:]
        elif how == 4:
            stretch = rng.randint(1, 64)
            content[place : place + stretch] = bytes(len(content[place : place + stretch]))
        else:
            lines = bytes(content).splitlines(keepends=True)
            if how == 5:
                rng.shuffle(lines)
            else:
                del lines[rng.randrange(len(lines))]
            content = bytearray(b"".join(lines))
    return bytes(content)


def misplaced(plain: Any, rng: random.Random) -> Any:
    """JSON with one value, or one key, that should not be there."""
    if isinstance(plain, dict) and plain and rng.random() < 0.9:
        key = rng.choice(list(plain))
        how = rng.random()
        if how < 0.7:
            return {**plain, key: misplaced(plain[key], rng)}
        if how < 0.85:
            return {name: value for name, value in plain.items() if name != key}
        return {**plain, rng.choice(["x", "", "hash", "round"]): rng.choice(VALUES)}
    if isinstance(plain, list) and plain and rng.random() < 0.9:
        at = rng.randrange(len(plain))
        return [*plain[:at], misplaced(plain[at], rng), *plain[at + 1 :]]
    return rng.choice(VALUES)


class Nonsense:
    """Makes them, a different one each time, and says what was wrong with how they were received."""

    def __init__(self, runs: dict[str, Path], scratch: Path) -> None:
        """`runs`: a sound half-done run of each kind; what is damaged is a copy."""
        self.runs, self.scratch = runs, scratch
        self.ledger = (runs["example"] / "ledger.jsonl").read_bytes()
        self.metrics = (runs["plain"] / "metrics.jsonl").read_bytes()
        self.paths = [
            str(runs["client"]),
            str(runs["plain"]),
            "nowhere",
            "",
            str(scratch),
            "/dev/null",
            "/dev/full",
        ]
        self.makers: list[tuple[float, Callable[[random.Random], str | None]]] = [
            (20.0, self.config),
            (25.0, self.override),
            (20.0, self.some_ledger),
            (15.0, self.hashed_ledger),
            (10.0, self.some_metrics),
            (8.0, self.sealed_nonsense),
            (2.0, self.flags),
        ]

    def one(self, rng: random.Random) -> tuple[str, str | None]:
        """Which kind of input, and what is wrong if anything is."""
        maker = rng.choices([m for _, m in self.makers], [weight for weight, _ in self.makers])[0]
        try:
            wrong = maker(rng)
        except tacit.UserError as error:
            wrong = None if "\n" not in str(error).strip() else f"more than a line: {error}"
        return maker.__name__, wrong

    def config(self, rng: random.Random) -> str | None:
        file = self.scratch / "config.yaml"
        file.write_text(test_inputs.fuzzed(rng), encoding="utf-8", errors="surrogatepass")
        test_inputs.read(file)
        return None

    def override(self, rng: random.Random) -> str | None:
        settings = []
        for _ in range(rng.randint(1, 2)):
            key = ".".join(rng.choice(test_inputs.leaves(test_inputs.GOOD)[1:]))
            if rng.random() < 0.1:
                key = rng.choice(["", ".", "a..b", key + ".x", key.upper(), "privacy.", " rounds"])
            settings.append(f"{key}{rng.choice(['=', '=', '=', ''])}{rng.choice(test_inputs.ODD)}")
        configs.load(test_inputs.GOOD, configs.parse_overrides(settings))
        return None

    def some_ledger(self, rng: random.Random) -> str | None:
        content = mutated(self.ledger, rng)
        file = self.scratch / "ledger.jsonl"
        file.write_bytes(content)
        found, known = Ledger.read(file), self.ledger.count(b"\n") - 1
        # What is accepted is the ledger itself, or a beginning of it (which checkpoints know to be short).
        if not self.ledger.startswith(content[: content.rfind(b"\n") + 1]) or len(found.charges) > known + 1:
            return "a ledger that was changed was accepted"
        return None

    def hashed_ledger(self, rng: random.Random) -> str | None:
        """Nonsense with the right hashes: read strictly, refused in a line."""
        lines = [json.loads(line) for line in self.ledger.splitlines()]
        at = rng.randrange(len(lines))
        changed = misplaced({k: v for k, v in lines[at].items() if k not in ("hash", "after")}, rng)
        lines[at] = changed if isinstance(changed, dict) else {"x": changed}
        before, made = "", []
        for line in lines:
            body = {"after": before, **{k: v for k, v in line.items() if k not in ("hash", "after")}}
            text = json.dumps(body, separators=(",", ":")).encode()
            before = sha256(text).hexdigest()
            made.append(json.dumps(body | {"hash": before}, separators=(",", ":")).encode() + b"\n")
        file = self.scratch / "ledger.jsonl"
        file.write_bytes(b"".join(made))
        Ledger.read(file)
        return None

    def some_metrics(self, rng: random.Random) -> str | None:
        file = self.scratch / "metrics.jsonl"
        content = mutated(self.metrics, rng)
        file.write_bytes(content)
        known = set(self.metrics.split(b"\n"))
        if any(line not in known for line in content.split(b"\n")[:-1]) and len(read_metrics(file)) > 2:
            return "metrics that were changed were accepted"
        return None

    def sealed_nonsense(self, rng: random.Random) -> str | None:
        """A file of a run whose seal is right and whose contents are not: told in a line by all."""
        kind = rng.choice(["client", "states"])
        run = self.scratch / f"sealed-{kind}"
        if not run.exists():
            small.copy(self.runs[kind], run)
        names = ["result.json", "lineage.json", "objects.json", "checkpoint/000002/state.json"]
        name = rng.choice([*names, "config.yaml", *(["statement.json"] if kind == "client" else [])])
        file, indent = run / name, 1 if name in ("objects.json", "statement.json") else None
        if not file.exists():  # an attempt before went on with the run, and its first checkpoint is gone
            shutil.rmtree(run)
            small.copy(self.runs[kind], run)
        whole = file.read_bytes()
        try:
            return self._told(kind, run, file, indent, rng)
        finally:
            file.write_bytes(whole)

    def _told(self, kind: str, run: Path, file: Path, indent: int | None, rng: random.Random) -> str | None:
        name = file.name
        if name == "config.yaml":
            plain = misplaced(configs.loading.read_values(file)[0], rng)
            file.write_text(sealed_text(json.dumps(plain) + "\n"))
        else:
            plain = {k: v for k, v in json.loads(file.read_text()).items() if k != "hash"}
            changed = misplaced(plain, rng)
            changed = changed if isinstance(changed, dict) else {"x": changed}
            file.write_text(sealed({k: v for k, v in changed.items() if k != "hash"}, indent))
        findings = tacit.verify(run)
        if any("\n" in (finding.problem or "") for finding in findings):
            return f"{name}: more than a line: {findings}"
        if kind == "client":
            try:
                read_statement(run)
            except tacit.UserError as error:
                if "\n" in str(error):
                    return f"{name}: more than a line: {error}"
        if rng.random() < 0.1:
            return self._riddle(command("compare", run), f"compare with {name}: {plain}")
        return None

    def flags(self, rng: random.Random) -> str | None:
        """A command line: a command, and some of everything."""
        words = [rng.choice(COMMANDS)]
        for _ in range(rng.randint(0, 5)):
            words.append(rng.choice([rng.choice(FLAGS), rng.choice(self.paths), rng.choice(test_inputs.ODD)]))
        if words[0] == "board":
            words.append("--port=x")  # else it would serve for ever
        words = [word.replace("\0", "") for word in words]
        return self._riddle(command(*words), " ".join(map(repr, words)))

    @staticmethod
    def _riddle(end: End, what: str) -> str | None:
        return None if end.riddle is None else f"{what}: {end.riddle}"
