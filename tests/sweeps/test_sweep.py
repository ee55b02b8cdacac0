"""One config, many runs, one table."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from command import GOOD, tacit
from tacit.api.folders import recorded_config
from tacit.cli.sweep import Bar
from tacit.config.sweep import read_sweep
from tacit.errors import UserError
from tacit.report import compare
from tacit.sweeps import sweep
from tacit.sweeps.schedule import SweepWatch, run_point, run_sweep

SWEEP = GOOD.replace("alpha: 0.5}", "alpha: 0.5}\n  validation: 0.2\n  holdout: 0.1") + (
    "name: mini\n"
    "sweep:\n"
    "  cases:\n"
    "    - {method: fedavg}\n"
    "    - {method: {name: dp-fedavg-client, momentum: 0.0}, privacy.entropy: seed}\n"
    "  seed: [0, 1]\n"
    "  tune: {local.lr: [0.0001, 0.1, 1.0e+30]}\n"
)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    return lambda *arguments: tacit(*arguments, monkeypatch=monkeypatch, capsys=capsys)


def test_choosing_by_protected_records_is_refused(tmp_path: Path) -> None:
    """What runs are judged by is exact, and each of them has a price: a claim would not cover the choice."""
    file = tmp_path / "sweep.yaml"
    file.write_text(SWEEP.replace(", privacy.entropy: seed", ""))
    with pytest.raises(UserError, match=r"sweep\.tune chooses .* privacy\.entropy: seed") as refused:
        read_sweep(file, {})
    price = re.search(
        r"with 3 of them on average, ε = ([\d.]+) where one run has ([\d.]+)", str(refused.value)
    )
    assert price is not None and float(price[2]) < float(price[1]) < 3 * float(price[2])
    with pytest.raises(UserError, match=r"with 3 of them on average, ε = "):
        sweep(file, {"sweep.seed": [1]}, "out")
    assert not Path("out").exists(), "nothing was run, and nothing charged"
    file.write_text(SWEEP.replace(", privacy.entropy: seed", "").replace("  tune:", "  #"))
    assert read_sweep(file, {}) is not None, "comparing without choosing claims what each run claims"


def test_choosing_by_a_part_that_nobody_trains_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(SWEEP.replace("{method: fedavg}", "{method: centaur, privacy.entropy: seed}"))
    with pytest.raises(UserError, match=r"sweep\.tune: clients of centaur keep head .* evaluate\.clients"):
        read_sweep(file, {})
    assert read_sweep(file, {"evaluate.clients": 4}) is not None
    file.write_text(file.read_text().replace("  tune:", "  #"))
    assert read_sweep(file, {}) is not None, "nothing is chosen"


def test_what_a_run_warns_of_is_a_line_for_a_person(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a sweep each run has a process of its own, which told where in the program it was said."""
    file = tmp_path / "sweep.yaml"
    privacy = "privacy: {unit: client, noise: 0.1, delta: 1.0e-3, clip: 1.0, entropy: seed}\n"
    file.write_text(f"{GOOD}{privacy}sweep: {{seed: [0]}}\n")
    found = read_sweep(file, {"rounds": 1})
    assert found is not None
    run_sweep(found, Path("out"), 1)
    told = capfd.readouterr().err
    assert "note: round 1: ε has passed 20" in told
    assert ".py" not in told and "RuntimeWarning" not in told


def test_a_log_has_a_line_for_each_run_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bar, "SILENCE", float("inf"))
    log = io.StringIO()
    bar = Bar(Console(file=log))
    bar.start("tuning", 4, 16)
    for runs, rounds in ((0, 1), (1, 4), (1, 5), (3, 12), (3, 13), (4, 16)):
        bar.progress(runs, rounds)
    bar.end()
    done = [(1, 4), (2, 12), (3, 12), (4, 16)]
    assert log.getvalue().splitlines() == [f"tuning: {n}/4 runs, {r}/16 rounds done" for n, r in done]


def test_runs_that_choose_are_counted_once(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(SWEEP)
    found = read_sweep(file, {})
    assert found is not None and len(found.choosing) == 6 and len(found.points) == 4


@pytest.mark.slow
def test_a_sweep_tunes_runs_compares_and_continues(command, tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(SWEEP)
    code, out, err = command("run", file, "--json")
    assert code == 0, err
    assert "mini: 6 runs that tune, then 4 to compare → " in err
    told = [line.split(",")[0] for line in err.splitlines() if " rounds done" in line]
    ended = [f"tuning: {n}/6 runs" for n in range(1, 7)] + [f"runs: {n}/4 runs" for n in range(1, 5)]
    assert [line for line in dict.fromkeys(told) if ": 0/" not in line] == ended, "a log hears of every run"
    rows = {row["label"].split(",")[0]: row for row in json.loads(out)}
    assert rows.keys() == {"fedavg", "dp-fedavg-client"}
    assert all(row["seeds"] == 2 for row in rows.values())
    assert rows["fedavg"]["epsilon"] is None
    assert rows["dp-fedavg-client"]["epsilon"] <= 1.0
    chosen = json.loads(Path("runs/mini/tuned.json").read_text())
    assert chosen["method=fedavg"] == {"local.lr": 0.1}, "a rate that learns beats one that does not move"

    finished = {p: p.stat().st_mtime_ns for p in Path("runs/mini").rglob("metrics.jsonl")}
    assert len(finished) == 6 + 4, "three rates for each of two methods, then two seeds of each"
    assert list(Path("runs/mini/tuning").glob("method=fedavg,*lr=1e+30*/diverged")), "it loses, and no more"
    code, again, _ = command("run", file, "--json")
    assert json.loads(again) == json.loads(out)
    assert finished == {p: p.stat().st_mtime_ns for p in Path("runs/mini").rglob("metrics.jsonl")}

    code, _, err = command("run", file, "--set", "rounds=3")
    assert code == 2, "results of other settings must not pass for those asked for"
    assert "rounds 2, not 3" in err

    code, out, _ = command("compare", "runs/mini", "--picture", "curves.png")
    assert code == 0
    assert "fedavg" in out
    assert max(map(len, out.splitlines())) <= 80
    assert Path("curves.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seed: [0, 1]", "seed: 0", "sweep.seed: give a list"),
        ("{method: fedavg}", "{method: fedavgg}", "sweep point method=fedavgg"),
        ("  validation: 0.2\n", "", "set data.validation"),
        ("local.lr: [0.0001, 0.1, 1.0e+30]", "local.lr: [0.0001, -1]", "local.lr: must be greater than 0"),
    ],
)
def test_every_point_is_checked_before_the_first_run(
    command, tmp_path: Path, old: str, new: str, message: str
) -> None:
    file = tmp_path / "sweep.yaml"
    assert old in SWEEP
    file.write_text(SWEEP.replace(old, new))
    code, _, err = command("run", file)
    assert code == 2
    assert message in err
    assert not Path("runs").exists()


def test_what_a_method_cannot_work_with_is_refused_before_the_first_run(command, tmp_path: Path) -> None:
    """Not after the runs of the methods that can: hours later, and with their budgets spent."""
    file = tmp_path / "sweep.yaml"
    privacy = "privacy: {unit: example, noise: 1.0, delta: 1.0e-3, clip: 1.0}\n"
    file.write_text(GOOD + privacy + "sweep: {method: [dp-fedavg, dp2-fedsam]}\n")
    code, _, err = command("run", file)
    assert code == 2
    assert "sweep point method=dp2-fedsam: privacy.unit: dp2-fedsam trains a personal part" in err
    assert not Path("runs").exists()


def test_data_and_blocks_show_the_first_run_of_a_sweep(command, tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(SWEEP)
    for name in ("data", "blocks"):
        code, out, err = command(name, file, "--json")
        assert code == 0, err
        assert json.loads(out)


@pytest.mark.slow
def test_ctrl_c_stops_a_sweep_and_starts_nothing_new(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(
        GOOD.replace("rounds: 2", "rounds: 100000") + "name: long\nsweep: {seed: [0, 1, 2, 3, 4]}\n"
    )
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from tacit.cli import main\nif __name__ == '__main__': main()"
    (tmp_path / "start.py").write_text(code)
    arguments = [sys.executable, "start.py", "run", str(file), "--jobs", "2"]
    sweep = subprocess.Popen(
        arguments, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        while len(list(tmp_path.glob("runs/long/*/metrics.jsonl"))) < 2:
            assert sweep.poll() is None
            time.sleep(0.1)
        os.killpg(sweep.pid, signal.SIGINT)  # as a terminal does: to every process of the group
        _, err = sweep.communicate(timeout=60)
    finally:
        if sweep.poll() is None:
            os.killpg(sweep.pid, signal.SIGKILL)
    assert sweep.returncode == 130
    assert err.strip().splitlines() == [
        "tacit: stopped; every round that was finished is saved, the same command goes on"
    ]
    assert len(list(tmp_path.glob("runs/long/*/config.yaml"))) == 2, "the other three were never started"


def test_overrides_mean_the_same_in_a_sweep_as_in_a_run(tmp_path: Path) -> None:
    from tacit.config.loading import load
    from tacit.config.sweep import read_sweep

    single, many = tmp_path / "one.yaml", tmp_path / "many.yaml"
    private = "privacy: {unit: client, clip: 0.2, noise: 1.0, delta: 1.0e-3}\n"
    single.write_text(GOOD + private)
    many.write_text(GOOD + private + "sweep: {seed: [0]}\n")
    overrides = {"cohort.sampling": "fixed", "privacy.clip.per": "dim", "method.momentum": 0.5}
    sweep = read_sweep(many, overrides)
    assert sweep is not None
    assert sweep.config(sweep.points[0]) == load(single, overrides)


def test_compare_refuses_what_is_no_run(command) -> None:
    code, _, err = command("compare", "nowhere")
    assert code == 2
    assert "no run there" in err


def test_seeds_whose_noise_was_found_for_one_budget_are_one_row() -> None:
    def run(seed: int, noise: float) -> compare.Run:
        config = {"seed": seed, "method": {"name": "dp-fedavg"}, "privacy": {"epsilon": 3.0, "noise": noise}}
        return compare.Run(Path(f"{seed}-{noise}"), config, [{"round": 1, "accuracy": 0.5}])

    assert [len(row.runs) for row in compare.rows([run(0, 1.0), run(1, 1.1), run(2, 1.0)])] == [3]
    assert [len(row.runs) for row in compare.rows([run(0, 1.0), run(1, 1.0), run(0, 2.0)])] == [2, 1]


@pytest.mark.parametrize("key", ["seed", "method", "method.momentum", "local.lr", "local"])
def test_what_a_sweep_varies_is_not_set_for_all_of_it(command, tmp_path: Path, key: str) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(SWEEP)
    code, _, err = command("run", file, "--set", f"{key}=1")
    assert code == 2
    assert f"--set {key}: the sweep gives" in err


def test_a_sweep_is_not_set_as_a_whole(command, tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(SWEEP)
    code, _, err = command("run", file, "--set", "sweep=null")
    assert code == 2
    assert "one list of it at a time" in err


def test_records_to_choose_by_may_come_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(SWEEP.replace("  validation: 0.2\n", ""))
    assert read_sweep(file, {"data.validation": 0.2}) is not None


def test_lists_of_a_sweep_are_set_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(SWEEP)
    sweep = read_sweep(file, {"sweep.seed": [3], "sweep.tune.local.lr": [0.5], "rounds": 1})
    assert sweep is not None
    assert [point["seed"] for point in sweep.points] == [3, 3]
    assert [family.tune for family in sweep.families] == [{"local.lr": [0.5]}] * 2
    assert sweep.config(sweep.points[0]).rounds == 1

    file.write_text(GOOD)
    assert read_sweep(file, {"rounds": 1}) is None
    made = read_sweep(file, {"sweep.seed": [3, 4]})
    assert made is not None and [point["seed"] for point in made.points] == [3, 4]


def test_runs_without_noise_have_a_row_too() -> None:
    def run(seed: int) -> compare.Run:
        return compare.Run(Path(str(seed)), {"seed": seed}, [{"round": 1, "epsilon": float("inf")}])

    (row,) = compare.rows([run(0), run(1), run(2)])
    epsilon = row.last("epsilon")
    assert epsilon is not None
    assert (epsilon.mean, epsilon.std) == (float("inf"), 0.0)


CASES = GOOD + (
    "name: mini\n"
    "sweep:\n"
    "  cases:\n"
    "    - {method: [fedavg, scaffold], local.lr: 0.1, local.weight_decay: 0.001}\n"
    "    - {method: fedadamw, method.weight_decay: 0.02, tune: {local.lr: [0.001, 0.003]}}\n"
    "  seed: [0, 1]\n"
    "  validation: 0.2\n"
)


def test_cases_are_whole_settings_beside_the_product(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(CASES)
    sweep = read_sweep(file, {})
    assert sweep is not None
    told = [
        (p["method"], c.local.lr, c.local.weight_decay, c.seed)
        for p in sweep.points
        for c in [sweep.config(p)]
    ]
    assert told[:4] == [("fedavg", 0.1, 0.001, 0), ("fedavg", 0.1, 0.001, 1), ("scaffold", 0.1, 0.001, 0),
                        ("scaffold", 0.1, 0.001, 1)]  # fmt: skip
    assert [t[0] for t in told[4:]] == ["fedadamw"] * 2 and told[4][2] == 0.0, (
        "a case says nothing of another"
    )
    assert sweep.config(sweep.points[4]).method.options == {"weight_decay": 0.02}
    assert [sweep.candidates(p) for p in sweep.points[:4]] == [[]] * 4, "only its own case is tuned"
    judged = sweep.candidates(sweep.points[5])
    assert [(p["local.lr"], p["seed"]) for p in judged] == [(0.001, 0), (0.003, 0)]
    assert {sweep.config(p).data.validation for p in judged} == {0.2}
    assert {sweep.config(p).data.validation for p in sweep.points} == {0.0}, (
        "only the runs that choose hold out"
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  seed: [0, 1]\n", "  seed: [0, 1]\n  local.lr: [0.2]\n", "sweep.local.lr: a case gives it too"),
        (
            "    - {method: fedadamw,",
            "    - fedadamw\n    - {method: fedadamw,",
            "sweep.cases: give a list of settings",
        ),
        ("  validation: 0.2\n", "", "set sweep.validation"),
        ("[fedavg, scaffold]", "[fedavg, fedavg]", "two of its runs are both"),
    ],
)
def test_cases_are_checked_before_the_first_run(
    command, tmp_path: Path, old: str, new: str, message: str
) -> None:
    file = tmp_path / "sweep.yaml"
    assert old in CASES
    file.write_text(CASES.replace(old, new))
    code, _, err = command("run", file)
    assert code == 2
    assert message in err
    code, _, err = command("run", file, "--set", "local.lr=1")
    assert code == 2


def test_cases_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(CASES)
    sweep = read_sweep(file, {"sweep.cases": [{"method": "fedcm", "local.lr": 0.5}], "sweep.seed": [7]})
    assert sweep is not None
    assert sweep.points == [{"method": "fedcm", "local.lr": 0.5, "seed": 7}]


@pytest.mark.slow
def test_a_sweep_of_cases_tunes_each_with_its_own_grid(command, tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(CASES)
    code, out, err = command("run", file, "--json")
    assert code == 0, err
    assert [row["seeds"] for row in json.loads(out)] == [2, 2, 2]
    chosen = json.loads(Path("runs/mini/tuned.json").read_text())
    assert list(chosen) == ["method=fedadamw,weight_decay=0.02"]
    assert len(list(Path("runs/mini/tuning").iterdir())) == 2


def test_a_config_is_laid_over_its_base(tmp_path: Path) -> None:
    from tacit.config.loading import load

    below, above = tmp_path / "below.yaml", tmp_path / "sub" / "above.yaml"
    above.parent.mkdir()
    below.write_text(GOOD + "sweep: {seed: [0, 1], method: [fedavg]}\n")
    above.write_text(
        "base: ../below.yaml\nrounds: 7\nlocal: {lr: 0.5}\nmodel: {name: logistic}\n"
        "sweep: {seed: [3], method: null}\n"
    )
    sweep = read_sweep(above, {})
    assert sweep is not None and sweep.points == [{"seed": 3}], (
        "a list replaces the other's, and null takes one out"
    )
    (tmp_path / "one.yaml").write_text(GOOD)
    one, config = load(tmp_path / "one.yaml"), sweep.config(sweep.points[0])
    assert (config.rounds, config.local.lr, config.local.batch) == (7, 0.5, one.local.batch)
    assert config.model.options == {}, "another model takes no options of the one below"

    above.write_text("base: ../below.yaml\nrounds: 3\nsweep: null\n")
    assert read_sweep(above, {}) is None and load(above).rounds == 3, "one run of what is a sweep below"

    above.write_text("base: ../below.yaml\nsweep: {seed: [3]}\nlocal: {lr: -1}\n")
    with pytest.raises(UserError, match="must be greater than 0"):
        read_sweep(above, {})
    single = tmp_path / "single.yaml"
    (tmp_path / "bad.yaml").write_text(GOOD.replace("rounds: 2", "rounds: none"))
    single.write_text("base: bad.yaml\n")
    with pytest.raises(UserError, match=r"bad\.yaml, line \d+: rounds"):
        load(single)
    single.write_text("base: nowhere.yaml\n")
    with pytest.raises(UserError, match=r"single\.yaml, line 1: base: there is no"):
        load(single)
    single.write_text("base: single.yaml\n")
    with pytest.raises(UserError, match="based on this very file"):
        load(single)


def test_a_run_of_a_sweep_keeps_its_engines_settings(tmp_path: Path) -> None:
    """In one process, and all else as the config says: bf16 that became float32 would be other results."""
    plain = yaml.safe_load(GOOD) | {
        "engine": {"kind": "pool", "workers": 2, "threads": 2, "precision": "bf16"}
    }
    assert run_point(plain, {"rounds": 1}, str(tmp_path / "run"))
    engine = recorded_config(tmp_path / "run").engine.model_dump()
    assert engine.items() >= {"kind": "auto", "workers": 0, "threads": 2, "precision": "bf16"}.items()


class Slow(SweepWatch):
    """Looks up only when whatever was under way is done: a machine that is busy with other things."""

    def __init__(self, folder: Path, runs: int) -> None:
        self._folder, self._runs, self._seen = folder, runs, 0

    def progress(self, runs: int, rounds: int) -> None:
        for _ in range(600):
            if len(list(self._folder.glob("*/finished"))) > self._seen or self._seen == self._runs:
                break
            time.sleep(0.1)
        self._seen = len(list(self._folder.glob("*/finished")))
        time.sleep(0.5)


def test_a_sweep_is_run_to_its_end_however_seldom_it_is_looked_after(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(GOOD + "sweep: {seed: [0, 1, 2]}\n")
    read = read_sweep(tmp_path / "s.yaml", {})
    assert read is not None
    tasks = run_sweep(read, tmp_path / "runs", jobs=1, watch=Slow(tmp_path / "runs", 3))
    assert [task.finished() for task in tasks] == [True] * 3


def test_a_sweep_does_not_move_in_with_other_files_or_into_a_run(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(GOOD + "sweep: {seed: [0]}\n")
    read = read_sweep(tmp_path / "s.yaml", {})
    assert read is not None
    for name, said in (("people.csv", "is not empty, and holds no sweep"), ("config.yaml", "holds a run")):
        place = tmp_path / name.partition(".")[0]
        place.mkdir()
        (place / name).touch()
        with pytest.raises(UserError, match=said):
            run_sweep(read, place)
        assert [file.name for file in place.iterdir()] == [name]
