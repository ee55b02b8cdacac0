"""Nonsense configs, flags and commands: one line and exit code 2, never a traceback."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import faults_small as small
import pytest
import yaml
from forks import cli_main, command, forked

import tacit
from tacit import config as configs
from tacit.config.sweep import read_sweep

FUZZED = 400
NOBODY = 65534
"""A user who owns nothing."""
GOOD = {
    "name": "x",
    "seed": 1,
    "rounds": 2,
    "data": {"name": "fashion-mnist-slice", "partition": {"kind": "dirichlet", "clients": 12, "alpha": 0.5}},
    "model": {"name": "mlp", "hidden": [8]},
    "method": {"name": "fedprox", "mu": 0.1},
    "cohort": {"size": 5},
    "local": {"epochs": 1, "batch": 6, "lr": 0.1, "schedule": {"kind": "cosine"}},
    "server": {"optimizer": "adam", "lr": 0.01},
    "privacy": {"unit": "client", "clip": 0.5, "noise": 1.0, "delta": 1e-3, "epsilon": 5},
    "evaluate": {"every": 1},
    "checkpoint": {"every": 1, "keep": 2},
    "engine": {"workers": 0},
}
ODD = [
    "null", "true", "''", "[]", "{}", "-1", "0", "1e400", ".inf", "-.inf", ".nan", "9" * 5000,
    "0x" + "f" * 400, "2026-11-16", "2026-11-16T10:00:00Z", "12:30:45", "!!binary aGVsbG8=",
    "!!set {a, b}", "!!python/name:os.system", "!!timestamp 2026-11-16", "!!int 'x'", "!!float x",
    "!!timestamp x", "!!bool maybe", "!!omap [a]",
    "1e-320", "99999999999999999999", "-0.0", "0.1.2", "~", "{a: {b: {c: 1}}}", "[1, [2, [3]]]", "'\\0'",
    "\"\\u0000\"", "../../x", "a/b", "'a\\nb'", "ß" * 300, "&a [*a]", "{? [1] : 2}", "{? {a: 1} : 2}",
    "1_000", "0o17", "=", "<<", "*missing", "&x 1", "[", "{", "'", "- -", "\t1",
]  # fmt: skip


def leaves(values: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(values, dict):
        return [path]
    return [path, *(leaf for key, value in values.items() for leaf in leaves(value, (*path, key)))]


def fuzzed(rng: random.Random) -> str:
    """A config's text with a few things wrong."""
    values = deepcopy(GOOD)
    marks = {}
    for number in range(rng.randint(1, 3)):
        path = rng.choice(leaves(GOOD)[1:])
        here = values
        for key in path[:-1]:
            here = here[key] if isinstance(here, dict) and isinstance(here.get(key), dict) else {}
        if isinstance(here, dict):
            mark = f"MARK{number}X"
            key = path[-1] if rng.random() < 0.9 else rng.choice(["lr", "extra", "", "1", "name", "<<"])
            here[key] = mark
            marks[mark] = rng.choice(ODD)
    text = yaml.dump(values, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False)
    for mark, odd in marks.items():
        text = text.replace(mark, odd)
    if rng.random() < 0.2:
        place = rng.randrange(len(text))
        text = (
            text[:place]
            + rng.choice(["\0", "\x85", ":", "- ", "&a ", "*a", "%", "\ufeff", "{", "}"])
            + text[place:]
        )
    if rng.random() < 0.05:
        text = text[: rng.randrange(len(text))]
    return text


def read(file: Path) -> str:
    """What becomes of a config file: built, or refused in one line."""
    try:
        sweep = read_sweep(file, {})
        if sweep is None:
            found = configs.load(file)
            from tacit.config.build import build_settings

            build_settings(found)
    except tacit.UserError as error:
        assert "\n" not in str(error).strip(), str(error)
        assert len(str(error)) < 2000, len(str(error))
        return "refused"
    return "read"


def test_fuzzed_configs_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    rng = random.Random(16)
    file = tmp_path / "config.yaml"
    ends = []
    for _ in range(FUZZED):
        file.write_text(fuzzed(rng), encoding="utf-8", errors="surrogatepass")
        ends.append(read(file))
    assert ends.count("read") > FUZZED // 50
    assert ends.count("refused") > FUZZED // 2


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{this}: &{this} [{', '.join([f'*{before}'] * 9)}]"
    for before, this in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        "rounds: &r [*r]\n",
        "a: &a\n  b: *a\n",
        "rounds: " + "9" * 6000,
        "x: " + "[" * 5000,
        "x: " + "{a: " * 3000,
        "rounds: 2026-11-16\n",
        "? [1, 2]\n: 3\n",
        "\0",
        "- 1\n",
        "",
        "a: b: c",
        "x" * 3_000_000,
        'name: "a\\0b"\n',
        'name: "\\ud800"\n',
        'base: "\\0"\n',
    ],
    ids=["bomb", "itself", "recursive", "digits", "deep", "deeper", "date", "key", "null", "list", "empty",
         "colons", "long", "nul", "half", "base"],
)  # fmt: skip
def test_yaml_that_is_a_trap_is_refused_at_once(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(tacit.UserError) as told:
        configs.load(file)
    assert "\n" not in str(told.value)
    assert read(file) == "refused"
    with pytest.raises(tacit.UserError):
        configs.load(GOOD, configs.parse_overrides([f"local={text}"]))


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--rate=0.1", "--noise=1", "--delta=1e-5", "--rounds=" + "9" * 5000],
        ["plan", "--rate=0.1", "--noise=1", "--delta=1e-5", "--noise-on=" + "x" * 5000],
        ["run", "a\nb\nc.yaml"],
        ["run", "recipe.yaml", "--set", "a\nb"],
        ["run", "recipe.yaml", "--set", 'name="\\0"'],
        ["recipes", "\udcff"],
    ],
    ids=["digits", "choice", "lines", "set", "nul", "bytes"],
)
def test_what_is_typed_makes_no_second_line(tmp_path: Path, monkeypatch: Any, words: list[str]) -> None:
    """Nor a page: what is long is shortened."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)
    end = command(*words)
    assert (end.code, end.out) == (2, ""), end
    [line] = end.err.splitlines()
    assert line.startswith("tacit: ") and len(line) < 1500


@pytest.mark.parametrize("tune", [True, -1, "x", [1], [[]], 0.5])
def test_a_case_of_a_sweep_tunes_by_a_mapping(tmp_path: Path, tune: Any) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump({**GOOD, "sweep": {"cases": [{"seed": 1, "tune": tune}]}}))
    with pytest.raises(tacit.UserError, match="`tune` names keys and a list of values for each"):
        read_sweep(file, {})


@pytest.mark.parametrize("noise", ["1e7", "1e17", "1e60", "1e300"])
def test_however_much_noise_has_a_plan(noise: str) -> None:
    """Also so much that losses drown in the rounding of 1, and where ε is 0."""
    words = ["--rate=0.1", "--rounds=10", "--delta=1e-5", "--compare-closed-form", "--json"]
    end = command("plan", f"--noise={noise}", *words)
    assert (end.code, end.err) == (0, ""), end
    assert 0 <= json.loads(end.out)["epsilon"] < 1e-3


@pytest.mark.parametrize("noise", ["1e-9", "1e-99", "1e-160", "5e-324"])
def test_however_little_noise_has_a_plan(noise: str) -> None:
    for how in ("--rate=0.1", "--rate=1"):
        end = command("plan", f"--noise={noise}", how, "--rounds=10", "--delta=1e-5", "--json")
        assert (end.code, end.err) == (0, ""), end
        epsilon = json.loads(end.out)["epsilon"]
        assert epsilon is None or epsilon > 1e6, "null: no finite one"


@pytest.mark.parametrize("name", ["../../elsewhere", "..", "/tmp/x", "a/../../b", ".hidden", "."])
def test_a_sweeps_name_does_not_leave_its_folder(tmp_path: Path, name: str) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump({**GOOD, "name": name, "sweep": {"seed": [0, 1]}}))
    try:
        sweep = read_sweep(file, {})
    except tacit.UserError:
        return
    assert sweep is not None
    home = tmp_path / "runs"
    assert (home / sweep.name).resolve().parent == home.resolve()


RECIPE = (
    "rounds: 6\ndata: {name: fashion-mnist-slice, partition: {kind: iid, clients: 20}}\n"
    "model: {name: logistic}\ncohort: 4\nlocal: {steps: 1, batch: 5, lr: 0.1}\nengine: {workers: 0}\n"
)


@pytest.mark.slow
def test_a_reader_that_leaves_does_not_end_the_training(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    command = [
        sys.executable,
        "-c",
        "from tacit.cli import main; main()",
        "run",
        "recipe.yaml",
        "--out",
        "run",
    ]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "COLUMNS": "80"}, preexec_fn=lambda: signal.signal(signal.SIGPIPE, signal.SIG_DFL),
    )  # fmt: skip
    process.stdout.readline()
    process.stdout.close()
    process.wait(timeout=120)
    assert "Traceback" not in process.stderr.read()
    assert small.metric_rounds(tmp_path / "run") == [1, 2, 3, 4, 5, 6]


def test_a_folder_that_cannot_be_written_is_told_in_one_line() -> None:
    """As nobody in particular: to the superuser no folder is read-only."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        small.half("client", folder, 2, 4)
        before = small.snapshot(folder)

        def refused() -> int:
            if os.geteuid() == 0:
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            try:
                small.resume(folder)
            except tacit.UserError as error:
                print(error)
                return 2
            return 0

        Path(place).chmod(0o755)
        if os.geteuid() == 0:
            for each in (folder, *folder.rglob("*")):
                os.chown(each, NOBODY, NOBODY)
        for each in (folder, *folder.rglob("*")):
            each.chmod(0o500 if each.is_dir() else 0o400)
        end = forked(refused)
        for each in (folder, *(each for each in folder.rglob("*") if each.is_dir())):
            each.chmod(0o700)
        assert end.code == 2, end
        assert "cannot be written" in end.out or "no room" in end.out
        assert len(end.out.strip().splitlines()) == 1
        assert small.snapshot(folder) == before


# --- files that are not files, and disks that are full ------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "ledger.jsonl", "config.yaml", "lineage.json", "result.json"]
)
@pytest.mark.parametrize("device", ["/dev/full", "/dev/zero", "pipe"])
def test_a_device_or_a_pipe_in_place_of_a_file_is_told_at_once(
    tmp_path: Path, name: str, device: str
) -> None:
    """An endless device would be read for ever, and a pipe without a writer waited for."""
    folder = tmp_path / "run"
    small.half("client", folder, 2, 4)
    (folder / name).unlink()
    if device == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to(device)
    said = [] if name in ("metrics.jsonl", "result.json") else [["statement"]]  # which reads neither
    for words in (["verify"], *said, ["compare"], ["resume"]):
        end = forked(cli_main(*words, folder), seconds=60)
        assert not end.hung, (words, end)
        assert end.riddle is None, (words, end)
        if words == ["verify"]:
            assert end.code == 2
            assert "regular file" in " ".join(end.out.split())


def test_a_disk_that_is_full_for_metrics_costs_no_round(tmp_path: Path) -> None:
    """The file of metrics may not grow beyond a limit (as on a full disk): one line; then resume finishes."""
    recipe, folder = small.recipe("plain", tmp_path / "recipe.yaml", 40), tmp_path / "run"

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
        cli_main("run", recipe, "--out", folder)()

    end = forked(limited)
    assert (end.code, end.riddle) == (2, None), end
    assert "cannot be written (File too large)" in end.err
    played = small.metric_rounds(folder)
    assert 5 < len(played) < 40
    again = forked(limited)  # nothing was freed: told again, and nothing lost
    assert (again.code, again.riddle) == (2, None), again
    assert small.metric_rounds(folder) == played
    assert forked(cli_main("resume", folder)).code == 0
    assert small.metric_rounds(folder) == list(range(1, 41))
    assert forked(cli_main("run", recipe, "--out", tmp_path / "whole")).code == 0
    assert small.same(small.vectors(folder), small.vectors(tmp_path / "whole"))


def test_diagnoses_are_of_whole_checkpoints_of_this_very_run(tmp_path: Path) -> None:
    recipe, folder = small.recipe("plain", tmp_path / "recipe.yaml", 2), tmp_path / "run"
    assert command("run", recipe, "--out", folder).code == 0
    asked = ["hessian", folder, "--limit", "1", "--steps", "1", "--records", "4"]
    assert command(*asked).code == 0
    vectors, config = folder / "checkpoint" / "000002" / "state.safetensors", folder / "config.yaml"
    for file, told in ((vectors, "is damaged"), (config, "was changed after the run began")):
        whole = file.read_bytes()
        file.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        for words in (asked, ["drift", folder, "--steps", "1", "--clients", "2"]):
            end = command(*words)
            assert (end.code, end.riddle) == (2, None), end
            assert told in end.err
        file.write_bytes(whole)


@pytest.mark.slow
def test_commands_on_a_broken_run_are_one_line(tmp_path: Path) -> None:
    """Every command that reads a run, on a run of which one file after the other is nonsense."""
    (tmp_path / "recipe.yaml").write_text(
        RECIPE + "privacy: {unit: client, clip: 1, noise: 1, delta: 0.001}\n"
    )
    assert forked(cli_main("run", "recipe.yaml", "--out", "run")).code == 0
    commands = (["verify"], ["statement"], ["compare"], ["resume"], ["ledger"])
    for name in ("config.yaml", "ledger.jsonl", "metrics.jsonl"):
        file = tmp_path / "run" / name
        whole = file.read_bytes()
        file.write_bytes(b"\xff\xfe nonsense \x00\n" + whole[40:])
        for words in commands:
            done = forked(cli_main(*words, "run"))
            assert done.code in (0, 2), (name, words, done)
            if words != ["verify"]:
                assert done.riddle is None, (name, words)
            if done.code == 2 and words != ["verify"]:
                assert len(done.err.strip().splitlines()) == 1, (name, words, done.err)
            file.write_bytes(b"\xff\xfe nonsense \x00\n" + whole[40:])
        file.write_bytes(whole)
