"""One config, many runs, one table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tacit.config.sweep import read_sweep
from tacit.report import compare
from test_cli import GOOD, tacit

SWEEP = GOOD.replace("alpha: 0.5}", "alpha: 0.5}\n  validation: 0.2\n  holdout: 0.1") + (
    "name: mini\n"
    "sweep:\n"
    "  method: [fedavg, {name: dp-fedavg-client, momentum: 0.0}]\n"
    "  seed: [0, 1]\n"
    "  tune: {local.lr: [0.0001, 0.1, 1.0e+30]}\n"
)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    return lambda *arguments: tacit(*arguments, monkeypatch=monkeypatch, capsys=capsys)


@pytest.mark.slow
def test_a_sweep_tunes_runs_compares_and_continues(command, tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(SWEEP)
    code, out, err = command("run", file, "--json")
    assert code == 0, err
    rows = {row["label"].split(",")[0]: row for row in json.loads(out)}
    assert rows.keys() == {"fedavg", "dp-fedavg-client"}
    assert all(row["seeds"] == 2 for row in rows.values())
    assert rows["fedavg"]["epsilon"] is None
    assert rows["dp-fedavg-client"]["epsilon"]["mean"] <= 1.0
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
        ("[fedavg, {name: dp-fedavg-client, momentum: 0.0}]", "fedavg", "sweep.method: give a list"),
        ("fedavg, {", "fedavgg, {", "sweep point method=fedavgg"),
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
    assert sweep.tune == {"local.lr": [0.5]}
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
