"""No traceback and no riddle: every mistake gives one line that says what to do."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tacit
from command import GOOD
from command import tacit as cli
from conftest import blobs
from tacit.cli.common import print_json
from tacit.config.imports import made
from tacit.data.records import Batch
from tacit.tasks import Classification


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    return lambda *arguments: cli(*arguments, monkeypatch=monkeypatch, capsys=capsys)


def one_line(answer: tuple[int, str, str]) -> str:
    code, _, err = answer
    assert code == 2, err
    assert len(err.strip().splitlines()) == 1 and "Traceback" not in err, err
    return err


@pytest.mark.parametrize(("text", "value"), [("1e-1", 0.1), ("5E2", 500.0), ("-1e3", -1000.0), (".5e1", 5.0)])
def test_a_number_is_a_number_in_every_key(text, value) -> None:
    from tacit.config.loading import parse_overrides

    assert parse_overrides([f"a={text}"]) == {"a": value}
    Path("c.yaml").write_text(GOOD.replace("lr: 0.1", "lr: 1e-1") + "method: {name: fedprox, mu: 1e-2}\n")
    config = tacit.load("c.yaml")
    assert config.local.lr == 0.1 and config.method.options == {"mu": 0.01}
    assert parse_overrides(["a=1e", "b=e1", "c=1e2x"]) == {"a": "1e", "b": "e1", "c": "1e2x"}


@pytest.mark.parametrize(
    "setting",
    [
        "rounds=99999999999999999999",
        "engine.workers=1000",
        "engine.threads=100000",
        "rounds=0",
        "cohort=1e99",
    ],
)
def test_absurd_numbers_are_answered_at_once(command, setting) -> None:
    Path("c.yaml").write_text(GOOD)
    assert setting.split("=")[0] in one_line(command("run", "c.yaml", "--set", setting, "--out", "run"))
    assert not Path("run").exists()


def test_damaged_and_missing_files_of_a_run_are_named(command) -> None:
    Path("c.yaml").write_text(GOOD)
    assert command("run", "c.yaml", "--out", "run")[0] == 0
    metrics, config = Path("run/metrics.jsonl"), Path("run/config.yaml")
    kept = metrics.read_bytes(), config.read_bytes()
    metrics.write_bytes(b"{broken\n" + kept[0])
    for arguments in (("compare", "run"), ("report", "run")):
        assert "metrics.jsonl: line 1" in one_line(command(*arguments))
    metrics.unlink()
    assert "none of these runs" in one_line(command("compare", "run"))
    metrics.write_bytes(kept[0])
    for damage in (b"{", b"- 1\n", b"\xff\xfe"):
        config.write_bytes(damage)
        for arguments in (("compare", "run"), ("report", "run"), ("resume", "run"), ("export", "run", "out")):
            assert "config.yaml" in one_line(command(*arguments)), arguments


def test_a_folder_that_cannot_be_written_is_named(command) -> None:
    Path("c.yaml").write_text(GOOD)
    Path("file").write_text("in the way")
    assert "cannot be written" in one_line(command("run", "c.yaml", "--out", "file/run"))
    assert command("run", "c.yaml", "--out", "run")[0] == 0
    assert "file" in one_line(command("export", "run", "file/out"))


def broken(**changes: object) -> tacit.Dataset:
    return replace(blobs(), **changes)  # type: ignore[arg-type]


ODD = [
    (lambda d: tacit.ArrayRecords(d.x, d.y + 1), "labels run from 1 to 4, and 4 classes are 0 to 3"),
    (lambda d: tacit.ArrayRecords(d.x, d.y - 1), "labels run from -1"),
    (lambda d: tacit.ArrayRecords(d.x, d.y.astype(str)), "y holds <U21, not numbers; tacit.dataset"),
    (lambda d: tacit.ArrayRecords(d.x.astype(np.float64), d.y), "float64"),
    (lambda d: tacit.ArrayRecords(np.where(np.arange(len(d))[:, None, None, None] == 9, np.nan, d.x)
                                  .astype(np.float32), d.y), "record 9 holds NaN"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), ODD)
@pytest.mark.parametrize("part", ["train", "test"])
def test_odd_records_are_named_before_anything_starts(config, change, message, part) -> None:
    data = blobs()
    with pytest.raises(tacit.UserError, match=message):
        tacit.run(config(), "run", dataset=replace(data, **{part: change(getattr(data, part))}))
    assert not Path("run").exists()


def test_a_data_set_without_a_test_set_says_so(config) -> None:
    with pytest.raises(tacit.UserError, match="it has no test records"):
        tacit.run(config(), "run", dataset=broken(test=None))


class Answers(nn.Module):
    """A linear network that puts its logits into something."""

    def __init__(self, wrapped: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.layers, self.wrapped = nn.Sequential(nn.Flatten(), nn.Linear(16, 4)), wrapped

    def forward(self, x: Tensor) -> object:
        return self.wrapped(self.layers(x))


class Odd(nn.Module):
    """A layer of another type than the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Unwraps(Classification):
    """A task of one's own that knows its model's answer."""

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().losses(lambda x: model(x)["logits"], batch)  # type: ignore[arg-type]

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return super().evaluate(lambda x: model(x)["logits"], batch)  # type: ignore[arg-type]


def test_a_task_of_ones_own_may_understand_any_answer(config, dataset) -> None:
    model = Answers(lambda logits: {"logits": logits})
    assert tacit.run(config(rounds=1), "run", model=model, dataset=dataset, task=Unwraps()).finished


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), "has 3 outputs, and blobs has 4 classes"),
        (nn.Sequential(nn.Flatten(), nn.Linear(15, 4)), "cannot read a record of blobs"),
        (nn.Embedding(10, 4), "cannot read a record of blobs"),
        (Answers(lambda logits: {"logits": logits}), "Answers answers with a dict; let its `forward` return"),
        (Answers(lambda logits: (logits, logits)), "Answers answers with a tuple; let its `forward` return"),
        (Answers(lambda logits: logits[:, 0]), r"Answers answers one record with a tensor \[1\]; let it be"),
        (Answers(lambda logits: logits.argmax(1)), r"let it be \[records, 4\], a logit for each"),
        (
            nn.Sequential(nn.Flatten(), nn.LazyLinear(4)),
            "has lazy layers .*pass one batch through",
        ),
        (nn.Sequential(nn.Flatten(), nn.Linear(16, 4), Odd()), "dtypes .*float16.*float32.*to one"),
    ],
)
def test_a_model_that_does_not_fit_is_named(config, dataset, model, message) -> None:
    with pytest.raises(tacit.UserError, match=message):
        tacit.run(config(), "run", model=model, dataset=dataset)
    assert not Path("run").exists()


def test_the_command_and_the_package_show_what_they_have(command) -> None:
    code, out, _ = command("--version")
    assert code == 0 and out.strip() == tacit.__version__
    code, out, _ = command("-h")
    assert code == 0 and "board" in out and "report" in out
    assert {"run", "resume", "dataset", "compare", "page", "test", "Task", "Tracker"} <= set(dir(tacit))
    assert all(getattr(tacit, name) is not None for name in tacit.__all__)
    done = subprocess.run(
        [sys.executable, "-m", "tacit", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == tacit.__version__


def test_compare_and_report_from_python(config, dataset) -> None:
    for seed in (0, 1):
        tacit.run(config(rounds=1, seed=seed), f"runs/{seed}", dataset=dataset)
    (row,) = tacit.compare("runs")
    assert row["seeds"] == 2
    assert tacit.page("runs", "page.html").read_text().startswith("<!doctype html>")


def test_a_plan_of_a_config_is_what_the_run_will_spend(command) -> None:
    Path("c.yaml").write_text(GOOD + "privacy: {unit: client, clip: 0.2, epsilon: 3, delta: 1e-3}\n")
    config = tacit.load("c.yaml")
    planned = tacit.plan(config)
    result = tacit.run(config, "run")
    assert planned["epsilon"] == pytest.approx(result.last("epsilon"), rel=1e-6) and planned["epsilon"] <= 3
    assert planned["noise"] == tacit.load("run/config.yaml").privacy.noise
    d = sum(p.numel() for p in result.model.parameters())
    assert planned["signal_to_noise"] == pytest.approx(4 / (planned["noise"] * d**0.5))
    code, out, _ = command("plan", "c.yaml", "--set", "rounds=5")
    assert code == 0 and "within the budget of 3" in out and "whole clients" in out
    assert "no `privacy` section" in one_line(command("plan", "c.yaml", "--set", "privacy=null"))


@pytest.mark.parametrize("unit", ["client", "example"])
def test_a_plan_refuses_the_network_that_the_run_would(command, unit) -> None:
    network = "--set", "model={name: resnet18, norm: batch}"
    Path("c.yaml").write_text(GOOD + f"privacy: {{unit: {unit}, clip: 0.2, epsilon: 3, delta: 1e-3}}\n")
    said = one_line(command("plan", "c.yaml", *network))
    assert "BatchNorm2d" in said and said == one_line(command("run", "c.yaml", *network))
    assert said == one_line(command("plan", "c.yaml", *network, "--json"))


@pytest.mark.parametrize(
    ("setting", "drawn", "said"),
    [
        ("", "poisson", "4 of 40 a round, on average"),
        ("cohort.sampling=fixed", "fixed", "4 of 40 a round"),
        ("privacy.unit=example", "fixed", "4 of 40 a round"),
        ("privacy.mechanism=blt", "in turn", "4 of 40 a round, in turn"),
    ],
)
def test_a_plan_says_how_cohorts_are_chosen(command, setting, drawn, said) -> None:
    Path("c.yaml").write_text(GOOD + "privacy: {unit: client, clip: 0.2, noise: 4, delta: 1e-3}\n")
    _, out, _ = command("plan", "c.yaml", *(("--set", setting) if setting else ()))
    (line,) = (line for line in out.splitlines() if line.startswith("clients"))
    assert line.removeprefix("clients").strip() == said
    _, out, _ = command("plan", "c.yaml", "--json", *(("--set", setting) if setting else ()))
    assert json.loads(out)["sampling"] == drawn


def test_a_plan_for_records_names_the_client_that_its_epsilon_is_of(command) -> None:
    Path("c.yaml").write_text(GOOD + "privacy: {unit: example, clip: 0.2, noise: 4, delta: 1e-3}\n")
    _, out, _ = command("plan", "c.yaml", "--json")
    worst = json.loads(out)["worst"]
    tacit.run(tacit.load("c.yaml"), "run")
    told = f"{worst['steps']} steps at rate {worst['rate']:.3g}"
    assert f"worst client: {told} " in tacit.statement("run").sampling
    assert worst["rate"] == min(1, 10 / worst["records"]), "a batch of ten"
    (line,) = (line for line in command("plan", "c.yaml")[1].splitlines() if line.startswith("worst"))
    assert line.split(maxsplit=1)[1].strip() == f"a client of {worst['records']} records: {told}"


@pytest.mark.parametrize(
    "option",
    [
        "--examples 10", "--batch 2", "--local-steps 2", "--participations 2", "--queries 2", "--metrics 0.1",
        "--sampling fixed", "--noise-on average", "--compare-closed-form", "--rounds 3", "--at 9:3",
        "--sampling poisson", "--queries 1", "--noise-on sum",  # not even what would change nothing
    ],
)  # fmt: skip
def test_a_plan_of_a_config_takes_no_other_settings(command, option) -> None:
    Path("c.yaml").write_text(GOOD + "privacy: {unit: client, clip: 0.2, noise: 1, delta: 1e-3}\n")
    assert "change them with --set" in one_line(command("plan", "c.yaml", *option.split()))


def test_a_plan_says_that_a_budget_is_not_kept_and_a_run_leaves_nothing_behind(command) -> None:
    Path("c.yaml").write_text(
        GOOD + "privacy: {unit: client, clip: 0.2, noise: 1, delta: 1e-3, epsilon: 100}\n"
    )

    def plan(*sets: str) -> tuple[str, dict]:
        more = [part for setting in sets for part in ("--set", setting)]
        return command("plan", "c.yaml", *more)[1], json.loads(command("plan", "c.yaml", *more, "--json")[1])

    text, found = plan()
    assert "within the budget of 100" in text and not [w for w in found["warnings"] if "budget" in w]
    one = plan("rounds=1")[1]["epsilon"]
    text, found = plan("rounds=50", f"privacy.epsilon={one * 1.5}")
    (warning,) = (w for w in found["warnings"] if "budget" in w)
    assert "over the budget" in text and found["epsilon"] > found["budget"]
    most = int(warning.split("room for ")[1].split()[0])
    fits, beyond = (plan(f"rounds={rounds}")[1]["epsilon"] for rounds in (most, most + 1))
    assert 1 <= most < 50 and fits <= one * 1.5 < beyond
    tight = ("--set", f"privacy.epsilon={one * 0.9}")
    assert "not even one round" in command("plan", "c.yaml", *tight, "--json")[1]
    assert "not even one round" in one_line(command("run", "c.yaml", *tight, "--out", "run"))
    assert not list(Path().glob("run/*")), "the same command with more noise must find its folder free"


def test_what_is_missing_in_a_section_of_one_word_is_named(command) -> None:
    Path("c.yaml").write_text(GOOD)
    assert "data.partition.clients: " in one_line(command("plan", "c.yaml", "--set", "data.partition=iid"))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_users_error_in_a_client_arrives_as_one(config, dataset, workers) -> None:
    from tacit.algorithms import FedAvg

    class Refuses(FedAvg):
        def client(self, msg, memory, work):
            raise tacit.UserError("feature 7 is empty; fill it in")

    with pytest.raises(
        tacit.UserError, match=r"client \d+, round 1, step 0: feature 7 is empty; fill it in$"
    ):
        tacit.run(config(engine__workers=workers), "run", dataset=dataset, algorithm=Refuses())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dataset": {"x": [1]}}, "dataset: this is a dict; tacit.dataset"),
        ({"model": "mlp"}, "model: this is a str; give a torch module"),
        ({"engine": "pool"}, "engine: 'pool' is no engine"),
        ({"algorithm": "scaffold"}, "algorithm: this is a str; give a tacit.Algorithm"),
        ({"task": "regression"}, "task: this str has no losses, evaluate, summarise; give an object"),
        ({"sampling": 0.5}, "sampling: this float has no repeatable, expected; give a tacit.privacy.Sampler"),
        ({"sampling": tacit.privacy.Poisson}, "sampling: Poisson is a class"),
    ],
)
def test_objects_of_another_kind_are_named(config, dataset, given, said) -> None:
    with pytest.raises(tacit.UserError, match=said):
        tacit.run(config(), "run", **given)
    assert not Path("run").exists()
    tacit.run(config(rounds=1), "run", dataset=dataset)
    with pytest.raises(tacit.UserError, match=said):
        tacit.resume("run", **({"dataset": dataset} | given), rounds=2)


def test_a_config_or_a_sampler_of_another_kind_is_named(config, dataset) -> None:
    with pytest.raises(tacit.UserError, match=r"config: this is a str; tacit.load"):
        tacit.run("c.yaml", "run")
    private = config(privacy={"unit": "client", "clip": 0.2, "noise": 1, "delta": 1e-3})
    with pytest.raises(tacit.UserError, match="sampling: this float has no repeatable"):
        tacit.plan(private, dataset=dataset, sampling=0.5)
    with pytest.raises(tacit.UserError, match=r"task.import: this Fraction has no losses"):
        tacit.run(config(task={"import": "fractions:Fraction"}), "run", dataset=dataset)


@pytest.mark.parametrize("task", ["language", "speech", "token-classification"])
def test_a_task_for_other_records_is_refused_before_anything_starts(command, task) -> None:
    Path("c.yaml").write_text(GOOD)
    assert f"task: {task}" in one_line(command("run", "c.yaml", "--set", f"task={task}", "--out", "run"))
    assert not Path("run").exists()


def test_numbers_are_no_classes(config) -> None:
    x, y = np.random.default_rng(0).random((2, 40, 1)).astype("float32")
    data = tacit.dataset((x, y[:, 0]), task="regression")
    with pytest.raises(tacit.UserError, match=r"task: classification .* has float32 labels; set task: reg"):
        tacit.run(config(task="classification"), "run", dataset=data)
    assert not Path("run").exists()


def test_a_plan_of_absurd_length_is_answered_at_once(command) -> None:
    ask = ["plan", "--rate", "0.1", "--noise", "1", "--delta", "1e-5", "--rounds"]
    for rounds in ("99999999999999999999", "1e9"):
        assert "--rounds" in one_line(command(*ask, rounds))


def test_hardly_any_noise_is_told_and_nothing_is_divided_by_zero(command, recwarn) -> None:
    Path("c.yaml").write_text(GOOD)
    private = ["unit=client", "delta=1e-3", "clip=1", "noise=1e-9"]
    sets = [part for setting in private for part in ("--set", f"privacy.{setting}")]
    everyone = ["--set", "rounds=1", "--set", "cohort=40"]  # so that no draw is empty
    code, out, _ = command("run", "c.yaml", *sets, *everyone, "--out", "run")
    assert code == 0 and "Mind: " in out
    assert not [str(one.message) for one in recwarn if "divide" in str(one.message)]


def test_json_has_no_word_for_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    """Programs read JSON, and `Infinity` is none."""
    print_json({"epsilon": math.inf, "all": [1.0, (math.nan, 2)], "name": "ε"})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "epsilon": None,
        "all": [1.0, [None, 2]],
        "name": "ε",
    }


@pytest.mark.parametrize(
    "option",
    [["--queries", "2"], ["--noise-on", "average"], ["--dimension", "9"], ["--sampling", "fixed"]],
)
def test_a_plan_of_turns_takes_no_other_settings(
    option: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = ["--population", "1000", "--cohort", "10", "--rounds", "20", "--epsilon", "2", "--delta", "1e-6"]
    code, _, said = cli("plan", "--mechanism", "blt", *fleet, *option, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2 and "--mechanism takes" in said


def test_an_import_that_says_nothing_is_told_in_one_line() -> None:
    with pytest.raises(tacit.UserError, match="builtins:dict does not say what it takes"):
        made("import:builtins:dict", "task", {})


@pytest.mark.parametrize("asked", ["layers", "ledger", "statement", "verify", "export"])
def test_a_folder_without_a_run_is_told_as_one(asked: str, command) -> None:
    answer = command(asked, "nowhere", *(["out"] if asked == "export" else []))
    assert "nowhere holds no run (there is no config.yaml in it)" in one_line(answer)


@pytest.mark.parametrize(("unit", "also"), [("client", " --set privacy.entropy=seed"), ("example", "")])
def test_the_advice_on_missing_layers_can_be_followed(unit: str, also: str, command) -> None:
    private = f"privacy: {{unit: {unit}, noise: 9, delta: 1e-3, clip: 1}}\n"
    Path("c.yaml").write_text(GOOD + private)
    assert command("run", "c.yaml", "--out", "one")[0] == 0
    said = one_line(command("layers", "one"))
    assert said.strip().endswith(f"run it with --set evaluate.layers=true{also}")
    again = said.partition("run it with ")[2].split()
    assert command("run", "c.yaml", "--out", "two", *again)[0] == 0 and command("layers", "two")[0] == 0
