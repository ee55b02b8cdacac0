"""The command line: what a user types, and what a mistake shows: one line, exit code 2, no traceback."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from command import GOOD, tacit


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(GOOD)
    return file


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    return lambda *arguments: tacit(*arguments, monkeypatch=monkeypatch, capsys=capsys)


def test_run_then_refuse_then_resume(command, recipe: Path) -> None:
    code, out, _ = command("run", recipe, "--out", "here")
    assert code == 0
    assert "Done: accuracy" in out
    assert "saved in here" in out
    code, _, err = command("run", recipe, "--out", "here")
    assert code == 2
    assert "already holds a run" in err
    code, out, _ = command("resume", "here")
    assert code == 0
    assert "all 2 rounds are done already" in out
    code, out, _ = command("compare", "here", "here", "--json")
    assert [row["seeds"] for row in json.loads(out)] == [1], "one run, though named twice"
    code, out, _ = command("compare", "here")
    assert "±" not in out, "one run has no spread"
    code, _, err = command("statement", "here")
    assert code == 2
    assert "guarantees nothing" in err


def test_a_run_does_not_move_in_with_other_files(command, recipe: Path) -> None:
    Path("records").mkdir()
    Path("records", "people.csv").write_text("age\n3\n")
    code, _, err = command("run", recipe, "--out", "records")
    assert (code, err) == (2, "tacit: records is not empty, and holds no run; choose another folder\n")
    assert [file.name for file in Path("records").iterdir()] == ["people.csv"]
    Path("begun").mkdir()
    Path("begun", "lock").touch()
    Path("begun", "lineage.json.partial").touch()
    assert command("run", recipe, "--out", "begun", "--set", "rounds=1")[0] == 0, "killed before it began"


@pytest.mark.parametrize("fewer", [["--rounds", 1], ["--set", "rounds=1"]])
def test_a_run_cannot_go_on_to_a_round_that_it_has_passed(command, recipe: Path, fewer: list[object]) -> None:
    command("run", recipe, "--out", "here")
    before = {file: file.read_bytes() for file in Path("here").rglob("*") if file.is_file()}
    code, _, err = command("resume", "here", *fewer)
    assert (code, err) == (2, "tacit: rounds: here has done 2 already; give 2 or more (got 1)\n")
    assert {file: file.read_bytes() for file in Path("here").rglob("*") if file.is_file()} == before
    code, out, _ = command("resume", "here", "--rounds", 2)
    assert code == 0 and "Done" in out, "as many as it has done: it is finished"


def test_a_run_is_tested_again_where_records_have_no_users(command, recipe: Path) -> None:
    _, out, _ = command("run", recipe, "--out", "here", "--json")
    accuracy = json.loads(out)["last"]["accuracy"]
    code, out, _ = command("test", "here", "--json")
    found = json.loads(out)
    assert (code, found["round"], found["users"]) == (0, 2, {})
    assert found["all"]["accuracy"] == pytest.approx(accuracy)
    code, out, _ = command("test", "here")
    assert code == 0 and "after round 2" in out and "user" not in out


@pytest.mark.parametrize(("method", "kept"), [("fedavg", []), ("centaur", ["head"])])
def test_a_part_that_nobody_trains_is_told_where_it_judges(command, recipe: Path, method, kept) -> None:
    command("run", recipe, "--out", "here", "--set", f"method={method}")
    code, out, _ = command("test", "here", "--json")
    assert code == 0 and json.loads(out).get("untrained", []) == kept
    code, out, _ = command("test", "here")
    assert code == 0 and ("which nobody trains" in " ".join(out.split())) == bool(kept)


def test_how_a_metric_is_spread_over_users_fits_80_columns(command, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {"count": 400.0, "loss": 0.5, "accuracy": 0.8}
    users = {f"user {n}": whole for n in range(200)}
    spread = {f"percentile {n}": 0.123 for n in range(10)}
    tested = SimpleNamespace(round=2, whole=whole, users=users, spread=spread, withheld=None, untrained=())
    monkeypatch.setattr("tacit.api.test", lambda *_: tested)
    code, out, _ = command("test", "here")
    assert code == 0 and "over 200 users: percentile 0 0.123" in out
    assert max(map(len, out.splitlines())) <= 80


def test_memory_is_told_in_units_that_a_person_reads(command, recipe: Path) -> None:
    code, out, _ = command("fit", recipe)
    assert code == 0 and re.search(r"\d kB\b", out) and "GB" in out
    assert not re.search(r"\de-\d", out), "no powers of ten"


def test_json_is_one_object_on_standard_output(command, recipe: Path) -> None:
    code, out, _ = command("run", recipe, "--json", "--set", "rounds=1")
    assert code == 0
    result = json.loads(out)
    assert result["finished"] is True
    assert 0 <= result["last"]["accuracy"] <= 1
    assert Path(result["path"], "config.yaml").exists()


def test_data_shows_a_table_and_draws_a_picture(command, recipe: Path) -> None:
    code, out, _ = command("data", recipe, "--picture", "split.png", "--limit", 5)
    assert code == 0
    assert Path("split.png").read_bytes()[:4] == b"\x89PNG"
    assert max(map(len, out.splitlines())) <= 80
    code, out, _ = command("data", recipe, "--json", "--limit", 3)
    assert code == 0
    assert json.loads(out)["picture"] == "data.png"


BAD = [
    (["--set", "rounds=0"], "rounds: must be greater than 0 (got 0)"),
    (["--set", "data.partition.alpha=-1"], "data.partition.alpha: must be greater than 0"),
    (["--set", "data.partition.alpha=0"], "data.partition.alpha: must be greater than 0"),
    (["--set", "local.lrr=1"], "local.lrr: unknown key; did you mean 'lr'?"),
    (["--set", "locale.lr=1"], "locale: unknown key; did you mean 'local'?"),
    (["--set", "data.partition.kind=dirichlett"], "did you mean 'dirichlet'?"),
    (["--set", "data.partition.alfa=1"], "data.partition.alfa: unknown key; did you mean 'alpha'?"),
    (["--set", "method=fedavgg"], "there is no method 'fedavgg'; did you mean 'fedavg'?"),
    (["--set", "method.mu=1"], "method.mu: fedavg has no such option"),
    (["--set", "method={name: centaur, personal: haed}"], "'haed' matches no parameter"),
    (["--set", "model=resnet81"], "resnet18"),
    (["--set", "model.hiden=[8]"], "hiden"),
    (["--set", "model.hidden=abc"], "model: mlp cannot be built with hidden: 'abc'"),
    (["--set", "engine.workers=-1"], "engine.workers: must be"),
    (["--sett", "rounds=1"], "No such option"),
    (["--jobs", "0"], "see `tacit run --help`"),
    (["--set", "data.name=fashion-mnist-slize"], "fashion-mnist-slice"),
    (["--set", "data.partition.clients=20000"], "20000 clients"),
    (["--set", "cohort=41"], "cohort"),
    (["--set", "cohort=true"], "cohort"),
    (["--set", "local.epochs=1"], "either local.steps or local.epochs"),
    (["--set", "local.lr=fast"], "local.lr: must be a number (got 'fast')"),
    (["--set", "rounds=2.5"], "rounds: must be a whole number (got 2.5)"),
    (["--set", "data.offline=perhaps"], "data.offline: must be true or false (got 'perhaps')"),
    (["--set", "data.path=3"], "data.path: must be a text (got 3); put it in quotes"),
    (["--set", "data.label=yes"], "data.label: must be a text (got True); in YAML yes, no, on and off are"),
    (
        ["--set", "server.optimizer={import: 'a:B'}"],
        "must be a text (got {'import': 'a:B'}); nothing is imported here: pass the object in Python",
    ),
    (["--set", "server.optimizer=sdg"], "sgd"),
    (["--set", "server.momentun=0.9"], "momentun"),
    (["--set", "evaluate.clients=5"], "set data.holdout"),
    (["--set", "local.lr=.inf"], "local.lr: must be a finite number (got inf)"),
    (["--set", "local.lr=.nan"], "local.lr: must be a finite number (got nan)"),
    (["--set", "local.clip=.inf"], "local.clip: must be a finite number"),
    (["--set", "server.lr=.inf"], "server.lr: must be a finite number"),
    (["--set", "data.partition.alpha=.inf"], "data.partition.alpha: must be a finite number"),
    (["--set", "name=../../x"], "name: a name is made of letters, digits, - and _, and"),
    (["--set", "rounds"], "write it as key=value"),
    (["--set", "rounds=[1"], "not valid YAML"),
    (["--set", "data.delimiter=,"], """for a text write --set 'data.delimiter=","'"""),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(a[1:]) for a, _ in BAD])
def test_bad_values(command, recipe: Path, arguments: list[str], message: str) -> None:
    code, _, err = command("run", recipe, "--out", "run", *arguments)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not Path("run").exists(), "nothing is left behind"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "rounds: 3\n", "line 12: rounds is given twice"),
        (GOOD.replace("alpha: 0.5}", "alpha: 0.5"), "line"),
        (GOOD[:80], "recipe.yaml"),
        ("", "a config is a mapping"),
        ("- 1\n", "a config is a mapping"),
        (GOOD.replace("  lr: 0.1\n", "  lr: -1\n"), "recipe.yaml, line 10: local.lr: must be greater than 0"),
        (GOOD.replace("cohort: 4\n", ""), "cohort: this key is missing"),
        (GOOD.replace("cohort: 4\n", "cohorts: 4\n"), "cohorts: unknown key; did you mean 'cohort'?"),
        (GOOD + "server: adam\n", "server: this is a section of keys, not 'adam'"),
        (GOOD.replace("cohort: 4\n", "cohort: 0.25\n"),
         "cohort: this is a whole number of clients, or a section of keys, not 0.25"),
        (GOOD + "trackers: 3\n", "trackers: must be a list (got 3)"),
        (GOOD.replace("kind: dirichlet, ", ""), "data.partition: this section needs a `kind`; it is one of"),
        (GOOD + "privacy: {clip: 1}\n", "privacy.unit: this key is missing; it is one of client, example"),
    ],
)  # fmt: skip
def test_bad_files(command, recipe: Path, text: str, message: str) -> None:
    recipe.write_text(text)
    code, _, err = command("run", recipe)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_how_much_clients_have_is_one_line_under_a_narrow_table(command, recipe: Path) -> None:
    one = "data.partition={kind: iid, clients: 4}"
    code, out, err = command("data", recipe, "--set", one, "--set", "data.name=fashion-mnist-slice")
    assert code == 0, err
    assert "Training records a client: 2,500 to 2,500, median 2,500" in out.splitlines()


def test_data_of_owners_are_shown_by_the_owners(command, recipe: Path) -> None:
    code, _, err = command("data", recipe, "--set", "data.partition={kind: owners, clients: 40}")
    assert code == 2 and len(err.splitlines()) == 1
    assert "owners keep their records" in err and "`tacit client check`" in err


def test_missing_things(command, recipe: Path) -> None:
    for arguments, message in (
        (("run", "nowhere.yaml"), "no such file"),
        (("resume", "nowhere"), "holds no run"),
        (("data", "nowhere.yaml"), "no such file"),
        (("statement", "nowhere"), "holds no run"),
        (("run", "."), "Is a directory"),
        (("run",), "Missing argument"),
        (("nonsense",), "No such command"),
    ):
        code, _, err = command(*arguments)
        assert code == 2
        assert message in err
        assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["resume", "statement", "verify", "test", "export"])
def test_a_folder_of_runs_is_no_run_and_one_of_them_is_named(command, tmp_path: Path, name: str) -> None:
    for part in ("seed=1", "seed=0"):
        (tmp_path / "five" / part).mkdir(parents=True)
        (tmp_path / "five" / part / "config.yaml").write_text("rounds: 1\n")
    code, _, err = command(name, "five", *(["model"] if name == "export" else []))
    assert code == 2 and len(err.splitlines()) == 1
    assert "five is no run, but has 2 in it; name one of them, such as 'five/seed=0' (a sweep goes on" in err


def test_a_run_is_exported(command, recipe: Path, tmp_path: Path) -> None:
    command("run", recipe, "--out", "r")
    code, out, _ = command("export", "r", "model")
    assert code == 0 and "Saved in model: README.md, config.json, model.safetensors" in out
    code, _, err = command("export", "r", "model")
    assert code == 2 and "model exists already" in err
    command("run", recipe, "--out", "p", "--set", "method=centaur", "--set", "privacy.noise=1")
    code, out, _ = command("export", "p", "personal")
    assert code == 0 and "each client trained its own" in out


def test_no_arguments_show_the_help(command) -> None:
    code, out, _ = command()
    assert code == 0
    assert "Usage" in out


def test_a_unit_that_the_config_overrules_is_told(command, recipe: Path) -> None:
    everyone = GOOD.replace("cohort: 4", "cohort: 40")  # so that no draw is empty
    recipe.write_text(everyone + "privacy: {unit: client, noise: 1, clip: 1, delta: 1.0e-3}\n")
    code, out, _ = command("run", recipe, "--set", "method=dp-fedavg", "--set", "rounds=1")
    assert code == 0
    assert "meant for privacy.unit example" in " ".join(out.split())


def test_an_interrupted_run_does_not_pass_for_a_finished_one(command, recipe: Path, monkeypatch) -> None:
    from tacit.federation import Federation

    real = Federation.run
    monkeypatch.setattr(Federation, "run", lambda self: replace(real(self), finished=False))
    for form in ((), ("--json",)):
        code, out, _ = command("run", recipe, *form)
        assert code == 130
        assert "Stopped after round" in out or json.loads(out)["finished"] is False


def test_a_damaged_checkpoint_is_said(command, recipe: Path) -> None:
    command("run", recipe, "--out", "run")
    file = Path("run/checkpoint/000002/state.safetensors")
    file.write_bytes(file.read_bytes()[:-10])
    code, out, _ = command("resume", "run")
    assert code == 0
    assert "000002 is damaged" in " ".join(out.split())
    for file in Path("run/checkpoint").rglob("*.safetensors"):
        file.write_bytes(b"")
    code, _, err = command("resume", "run")
    assert code == 2
    assert "checkpoints are damaged" in err


def test_help_teaches(command) -> None:
    for arguments, expected in (
        (("--help",), "quickstart"),
        (("run", "--help"), "--set"),
        (("resume", "--help"), "checkpoint"),
        (("data", "--help"), "label split"),
    ):
        code, out, _ = command(*arguments)
        assert code == 0
        assert expected in out
