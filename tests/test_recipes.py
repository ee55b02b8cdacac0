"""Every recipe loads, names things that exist, runs, and keeps the structure of its twin; the index agrees
with them.
"""

from __future__ import annotations

import fnmatch
import math
import re
import shlex
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tacit
from tacit import ArrayRecords, Dataset, data, models
from tacit.config import Config, load, parse_overrides
from tacit.config.methods import build_algorithm
from tacit.config.sweep import Sweep, read_sweep, slug
from tacit.data.speech.tiny import tiny
from tacit.data.text import TextRecords, Texts
from tacit.data.tokens import Bytes
from tacit.errors import UserError
from tacit.models.weights import KNOWN_WEIGHTS
from tacit.privacy import PoissonGaussian, epsilon
from tacit.vector import Layout

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
INDEX = (RECIPES / "README.md").read_text(encoding="utf-8")
PAPERS = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
FILES = sorted(RECIPES.rglob("*.yaml"))
TABLES = [f for f in FILES if f.parent.name.isdigit()]
SMALL = [f for f in TABLES if f.is_relative_to(RECIPES / "small")]
FULL = [f for f in TABLES if f not in SMALL]
AT_HAND = {
    "fashion-mnist-slice", "fashion-mnist", "cifar-10", "rotten-tomatoes", "chitchat", "synthetic-speech",
    "synthetic-speech-seed",
}  # fmt: skip
SAME_TWIN = {
    "000/table-12-tiny-imagenet": "000/table-12",
    "000/ablation-tiny-imagenet": "000/ablation",
    "000/epsilon-1-tiny-imagenet": "000/epsilon-1",
    "004/table-2-tiny-imagenet": "004/table-2",
    "002/table-3-femnist": "002/table-3-cifar10",
    "003/table-10-german": "003/table-10",
    "003/table-18-german": "003/table-18",
    "003/figure-21": "003/figure-19",
}
"""Recipes that differ from another in their data alone, and share its small twin."""


def shown(file: Path) -> str:
    return str(file.relative_to(RECIPES))


@cache
def sweep_of(file: Path) -> Sweep | None:
    return read_sweep(file, {})


def recipe(name: str) -> Sweep:
    sweep = sweep_of(RECIPES / f"{name}.yaml")
    assert sweep is not None
    return sweep


@cache
def runs(file: Path) -> list[Config]:
    """The config of every run that a recipe compares, or of its single one."""
    sweep = sweep_of(file)
    return [load(file)] if sweep is None else [sweep.config(point) for point in sweep.points]


@pytest.mark.parametrize("file", FILES, ids=shown)
def test_names_only_what_exists(file: Path) -> None:
    configs = runs(file)
    for config in configs:
        build_algorithm(config.method.name, config.method.options)  # refuses an unknown option
        if config.model.name is not None:
            assert config.model.options.keys() <= models.options(config.model.name).keys()
    for section in {config.data.model_dump_json(): config.data for config in configs}.values():
        if section.name == "speech":
            continue  # a corpus of one's own: its folder is given when the recipe is run
        try:
            data.check(section.name, section.path)
        except UserError as error:
            pytest.fail(str(error))


@pytest.mark.parametrize("file", FILES, ids=shown)
def test_every_run_of_a_sweep_has_a_folder_of_its_own(file: Path) -> None:
    sweep = sweep_of(file)
    if sweep is None:
        return
    points = [*sweep.points, *(c for p in sweep.points for c in sweep.candidates(p))]
    distinct = {repr(sorted(point.items(), key=lambda item: item[0])) for point in points}
    names = {slug(point) for point in points}
    assert len(names) == len(distinct)
    assert max(map(len, names)) < 250, "longer than a file system's names may be"


SETTINGS = re.compile(r"""(?:(?:^|\s)--set\s+(?:'[^']*'|"[^"]*"|[^\s,;)\[]+(?:\[[^\]]*\])?))+""")


def promised(file: Path) -> list[tuple[Path, list[str]]]:
    """What a recipe's comments say may be set, with the recipe it is set for: its own, or the one named just
    before as the file of a command.
    """
    comment = " ".join(line.lstrip("# ") for line in file.read_text().splitlines() if line.startswith("#"))
    found = []
    for settings in SETTINGS.finditer(comment):
        before = comment[: settings.start()]
        command = re.search(r"tacit (\w+) (\S+)$", before)
        if command and command[1] == "test":
            continue  # of a run, which is not here
        named = re.search(r"(?:recipes/)?((?:small/)?\d{3}/[\w-]+\.yaml)$", before)
        beside = re.search(r"\b([\w-]+\.yaml) with$", before)
        target = RECIPES / named[1] if named else file.parent / beside[1] if beside else file
        words = shlex.split(settings[0].replace("SIZE", "narrow"))
        found.append((target, [word.rstrip(".:") for word in words if word != "--set"]))
    return found


PROMISED = [(f, *promise) for f in FILES for promise in promised(f)]


@pytest.mark.parametrize(("file", "target", "settings"), PROMISED, ids=lambda x: getattr(x, "stem", str(x)))
def test_what_a_comment_sets_can_be_set(file: Path, target: Path, settings: list[str]) -> None:
    """A sweep that varies a key refuses to have it set; a key that does not exist is refused, too."""
    overrides = parse_overrides(settings)
    if read_sweep(target, overrides) is None:
        load(target, overrides)


def test_comments_were_found() -> None:
    assert len(PROMISED) >= 20
    assert any(target != file for file, target, _ in PROMISED)


def test_names_of_runs_are_unique() -> None:
    names = [runs(file)[0].name for file in FILES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("file", TABLES, ids=shown)
def test_a_table_is_named_after_its_file(file: Path) -> None:
    assert runs(file)[0].name == "-".join(file.relative_to(RECIPES).with_suffix("").parts)


# --- twins --------------------------------------------------------------------------------------------


def twin_of(file: Path) -> Path:
    name = str(file.relative_to(RECIPES).with_suffix(""))
    return RECIPES / "small" / f"{SAME_TWIN.get(name, name)}.yaml"


def lists(file: Path) -> list[dict[str, int]]:
    """Of each family of runs, what it varies and in how many values, apart from seeds and what it tunes."""
    sweep = sweep_of(file)
    if sweep is None:
        return []
    return [{k: len(v) for k, v in f.grid.items() if k != "seed" and len(v) > 1} for f in sweep.families]


@pytest.mark.parametrize("file", FULL, ids=shown)
def test_the_small_twin_keeps_the_structure(file: Path) -> None:
    twin = twin_of(file)
    assert twin.exists()
    if shown(file) == "002/table-3-femnist.yaml":
        return  # people as clients; the twin has the pathological split instead
    if shown(file) == "003/table-21.yaml":
        pairs = zip(lists(twin), lists(file), strict=True)
        assert [sorted(a.values()) for a, _ in pairs] == [sorted(b.values()) for b in lists(file)]
    else:
        assert lists(twin) == lists(file)
    for small, full in zip(first_seed(twin), first_seed(file), strict=True):
        assert small.method == full.method
        assert type(small.local.schedule) is type(full.local.schedule)
        assert small.data.holdout == full.data.holdout
        assert heterogeneity(small) == heterogeneity(full)
        assert participation(small) == pytest.approx(participation(full))
        assert guarantee(small) == guarantee(full)
        assert work(small) < work(full)


def first_seed(file: Path) -> list[Config]:
    """One config for each combination, whatever the seeds."""
    first = runs(file)[0].seed
    return [config for config in runs(file) if config.seed == first]


def heterogeneity(config: Config) -> dict[str, Any]:
    return config.data.partition.model_dump(exclude={"clients"})


def participation(config: Config) -> float:
    clients = config.data.partition.model_dump().get("clients")
    return 0.0 if clients is None else config.cohort.size / float(clients)


def guarantee(config: Config) -> dict[str, Any] | None:
    if config.privacy is None:
        return None
    if config.data.partition.kind == "natural":
        return {"unit": config.privacy.unit, "clip": asdict(config.privacy.clip)}
    return config.privacy.model_dump(exclude={"entropy", "delta"})  # δ follows the number of records


def work(config: Config) -> int:
    """Local rounds in all; the twins' smaller networks come on top."""
    return config.rounds * config.cohort.size * (config.local.steps or 1)


@pytest.mark.parametrize("file", [f for f in FILES if f.is_relative_to(RECIPES / "small")], ids=shown)
def test_small_recipes_need_nothing_but_data_at_hand(file: Path) -> None:
    assert {config.data.name for config in runs(file)} <= AT_HAND
    assert {config.model.hub for config in runs(file)} <= {None, *KNOWN_WEIGHTS}


# --- every recipe plays -------------------------------------------------------------------------------


class Little(nn.Module):
    """Stands for any network of pictures or texts: a body, and a head that can be personal."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(inputs, 6), nn.Linear(6, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.relu(self.body(x.flatten(1))))
        return logits


@cache
def pictures() -> Dataset:
    rng = np.random.default_rng(0)

    def part(count: int) -> ArrayRecords:
        x, y = rng.normal(size=(count, 1, 4, 4)).astype(np.float32), np.arange(count) % 10
        return ArrayRecords(x, y, users=np.arange(count) % 600)

    return Dataset("pictures", part(6000), part(40), 10, (1, 4, 4))


@cache
def voices() -> Dataset:
    return tiny(speakers=8, utterances=3)


@cache
def talk() -> Dataset:
    lines = TextRecords(
        Texts.of(["to be or not"] * 240), Bytes(), 16, users=[f"u{i % 120}" for i in range(240)]
    )
    return Dataset("talk", lines, lines, 0, (16,), task="language", tokenizer=Bytes())


LITTLE_VOICE = {"size": "tiny", "depth": 1, "width": 8, "hidden": 8, "heads": 2}
LITTLE_WRITER = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
UNPLAYED: Any = {
    "name": True,
    "checkpoint": True,
    "data": {"name", "path", "size", "speech", "image", "label", "text", "user", "max_length", "tokenizer"},
    "evaluate": {"batch", "records"},
}
"""What has no say in a tiny run, whose records are made here."""
PLAYED: set[str] = set()
"""What was played already, but for that: many recipes are alike once they are small."""


def shrunk(config: Config) -> dict[str, Any]:
    """Two rounds of few clients and few steps; nothing of the method, the guarantee or the split is
    changed.
    """
    local, less = config.local, {"rounds": 2, "cohort.size": min(4, config.cohort.size), "engine.workers": 0}
    less |= {"local.steps": 2} if local.steps is not None else {"local.epochs": 1}
    less |= {"local.batch": min(4, local.batch)} if local.batch is not None else {"local.seconds": 2.0}
    less |= {"evaluate.every": 2, "checkpoint.every": 2, "evaluate.clients": min(2, config.evaluate.clients)}
    less |= {"evaluate.train": min(10, config.evaluate.train), "model.start": None}
    if config.local.within is not None:
        less["local.within.warmup"] = 0
    return less


@pytest.mark.parametrize("file", TABLES, ids=shown)
def test_two_tiny_rounds(file: Path, tmp_path: Path) -> None:
    """The first run of every family of every recipe, on pictures and voices made here."""
    sweep = sweep_of(file)
    points = [{}] if sweep is None else [family.points[0] for family in sweep.families]
    for number, point in enumerate(points):
        if sweep is None:
            small = {"pretrain.steps": 2, "pretrain.seconds": 2.0, "evaluate.every": 2}
            config = load(file, small | {f"model.{k}": v for k, v in LITTLE_VOICE.items()})
        else:
            config = sweep.config(point)
            config = sweep.config({**point, **shrunk(config)})
            if config.model.name in ("ctc-transformer", "ctc_transformer"):
                width = {k: v for k, v in LITTLE_VOICE.items() if f"model.{k}" not in point or k == "size"}
                config = sweep.config(
                    {**point, **shrunk(config), **{f"model.{k}": v for k, v in width.items()}}
                )
        if config.task is not None and config.task.name == "language":
            config = sweep.config(
                {**point, **shrunk(config), "model": {"config": LITTLE_WRITER}, "data.tokenizer": "bytes"}
            )
        speech = config.model.name in ("ctc-transformer", "ctc_transformer")
        writes = config.model.config is not None
        unplayed = UNPLAYED if speech else {**UNPLAYED, "model": True}
        same = config.model_dump_json(exclude=unplayed, exclude_defaults=True)
        if same in PLAYED:
            continue
        PLAYED.add(same)
        dataset = voices() if speech else talk() if writes else pictures()
        model = None if speech or writes else Little(16, 10)
        result = tacit.run(config, tmp_path / str(number), model=model, dataset=dataset)
        assert [record["round"] for record in result.metrics] == [1, 2]
        assert all(torch.isfinite(p).all() for p in result.model.parameters())
        assert all(math.isfinite(r["train_loss"]) for r in result.metrics if "train_loss" in r)
        assert (result.path / "report.html").exists()


def test_every_network_is_built_at_its_full_size() -> None:
    """Of what recipes name, without memory for it; parameters as the papers count them (002, Section 5.1;
    003, Appendix F and H.7, rounded; 000, B.3, and 004, Appendix C, by their descriptions).
    """
    counted: dict[tuple[str | None, str], int] = {}
    for config in (config for file in FULL for config in runs(file)):
        model, source = config.model, config.data.name
        which = (model.name, f"{sorted(model.options.items())} of {source}")
        if model.name is None or which in counted:
            continue
        shape, classes = (3, 32, 32), 100 if "100" in source else 10
        if source == "speech":
            shape, classes = (80,), 30
        elif "femnist" in source:
            shape, classes = (1, 28, 28), 62
        with torch.device("meta"):
            network = models.build(model.name, shape, classes, **model.options)
        counted[which] = sum(p.numel() for p in network.parameters())

    def sizes(name: str, option: str) -> set[int]:
        return {count for (found, options), count in counted.items() if found == name and option in options}

    for size, millions in (("narrow", 114), ("shallow", 114), ("base", 255), ("wide", 450), ("deep", 510)):
        found = sizes("ctc-transformer", f"'size', '{size}'")  # with and without a last norm
        assert found and all(abs(count / 1e6 - millions) < 5 for count in found)
    assert sizes("cnn", "") == {667_402}
    assert sizes("resnet18", "of cifar-10") == {11_173_962}
    assert sizes("vit_tiny", "") == {2_698_468}


@pytest.mark.parametrize("name", ["003/figure-15", "003/figure-16"])
def test_noise_by_layer_plays(name: str, tmp_path: Path) -> None:
    """The last run of each: noise on the last projections alone, whose ε is infinite; half of it there."""
    sweep = recipe(name)
    point = sweep.points[-1]
    little = {f"model.{key}": value for key, value in LITTLE_VOICE.items()}
    config = sweep.config({**point, **shrunk(sweep.config(point)), **little})
    result = tacit.run(config, tmp_path / "run", dataset=voices())
    assert math.isinf(tacit.statement(result.path).epsilon) == (name == "003/figure-15")
    assert all(torch.isfinite(p).all() for p in result.model.parameters())


# --- a cell that a paper prints twice is one experiment -----------------------------------------------


def cell(name: str, **where: Any) -> tuple[Any, ...]:
    """What decides the outcome of the one run of a recipe where these keys have these values (`__` is a
    dot).
    """
    sweep = recipe(name)
    wanted = {key.replace("__", "."): value for key, value in where.items()}
    points = [
        p for p in sweep.points if p.get("seed", 0) == 0 and all(p.get(k) == v for k, v in wanted.items())
    ]
    assert len(points) == 1, (name, wanted, points)
    config = sweep.config(points[0])
    plain = config.model_dump(exclude={"name", "method", "checkpoint", "engine", "evaluate"})
    if config.model.name is not None:
        plain["model"] = {**models.options(config.model.name), **plain["model"]}
    tuned = [
        {k: v for k, v in c.items() if k in sweep.family(points[0]).tune} for c in sweep.candidates(points[0])
    ]
    return plain, build_algorithm(config.method.name, config.method.options), tuned


def but_for_the_cohort(name: str, **where: Any) -> tuple[Any, ...]:
    plain, algorithm, tuned = cell(name, **where)
    privacy = {key: value for key, value in plain["privacy"].items() if key not in ("noise", "extrapolate")}
    kept = {key: value for key, value in plain.items() if key not in ("cohort", "rounds", "privacy")}
    return kept, privacy, algorithm, tuned


VIT, SWIN = "004/table-1-vit-tiny", "000/table-11"
LS100, CV_EN = "runs/003-seed", "runs/003-seed-cv-en"
TWICE = {
    "004: Local AdamW, 36.86 (Tables 1, 5, 6, 7, 11)": [
        cell(VIT, method="local-adamw", data__partition__alpha=0.1),
        cell("004/table-5", method="local-adamw"),
        cell("004/table-6", method="local-adamw", method__weight_decay=0.01),
        cell("004/table-7", method="agg-none"),
        cell("004/table-11-vit-tiny", method="local-adamw", data__partition__alpha=0.1),
    ],
    "004: FedAdamW, 39.86 (Tables 1, 4, 5, 6, 11)": [
        cell(VIT, method="fedadamw", data__partition__alpha=0.1),
        cell(
            "004/table-4",
            method="fedadamw",
            method__aggregate=None,
            method__alpha=None,
            method__decoupled=None,
        ),
        cell("004/table-5", method="fedadamw", method__alpha=0.5),
        cell("004/table-6", method="fedadamw", method__weight_decay=0.01),
        cell("004/table-11-vit-tiny", method="fedadamw", data__partition__alpha=0.1),
    ],
    "004: Local Adam, 29.88 (Tables 1, 6)": [
        cell(VIT, method="local-adam", data__partition__alpha=0.1),
        cell("004/table-6", method="local-adam", method__weight_decay=0.001),
    ],
    "004: ResNet-18, 63.01 (Tables 1, 11)": [
        cell("004/table-1-resnet18", method="fedadamw", data__partition__alpha=0.1),
        cell("004/table-11-resnet18", method="fedadamw", data__partition__alpha=0.1),
    ],
    "000: DP-LocalAdamW, 65.28 (Tables 11, 14, 001)": [
        cell(SWIN, method="dp-local-adamw", data__partition__alpha=0.1, privacy__noise=1.0),
        cell("000/table-14", method="dp-local-adamw", method__beta1=0.9, method__beta2=0.999),
        cell("000/ablation", method="dp-local-adamw"),
    ],
    "000: DP-FedAdamW, 67.45 (Tables 11, 14, 001)": [
        cell(SWIN, method="dp-fedadamw", data__partition__alpha=0.1, privacy__noise=1.0),
        cell("000/table-14", method="dp-fedadamw", method__beta1=0.9, method__beta2=0.999),
        cell("000/ablation", method="dp-fedadamw"),
        cell("000/aggregation", method="dp-fedadamw"),
        cell("000/adaptive", method="dp-fedadamw"),
    ],
    "002: DP²-FedSAM, 84.1 (Tables 2, 3)": [
        cell("002/table-2-cifar10-1000-2", method="dp2-fedsam"),
        cell("002/table-3-cifar10", method="dp2-fedsam", privacy__epsilon=1.0),
        cell("002/figure-6", method__rho=0.1),
    ],
    "002: DP-FedAvg, 54.8 and with -FT 79.2 (Tables 2, 3)": [
        cell("002/table-2-cifar10-1000-2", method="dp-fedavg-client"),
        cell("002/table-3-cifar10", method="dp-fedavg-client", privacy__epsilon=1.0),
    ],
    "003: LibriSpeech from LS-100, cohort 8 (Tables 3, 5, 11)": [
        cell("003/table-3", model__start=LS100, cohort=8),
        cell("003/table-5", model__start=LS100, cohort=8, data__partition__iid=None),
        cell("003/table-11", model__start=LS100, cohort=8, model__augment=True),
    ],
    "003: LibriSpeech without a seed, cohort 16 (Tables 3, 5, 8, 11)": [
        cell("003/table-3", model__start=None, cohort=16),
        cell("003/table-5", model__start=None, cohort=16, data__partition__iid=None),
        cell("003/table-8", model__start=None, cohort=16, server__optimizer="lamb"),
        cell("003/table-11", model__start=None, cohort=16, model__augment=True),
    ],
    "003: LibriSpeech from CV-en, cohort 8 (Tables 3, 5, 8, 11)": [
        cell("003/table-3", model__start=CV_EN, cohort=8),
        cell("003/table-5", model__start=CV_EN, cohort=8, data__partition__iid=None),
        cell("003/table-8", model__start=CV_EN, cohort=8, server__optimizer="lamb"),
        cell("003/table-11", model__start=CV_EN, cohort=8, model__augment=True),
    ],
    "003: Common Voice from LS-100, cohort 16 (Tables 4, 6, 12, 13, 16)": [
        cell("003/table-4", model__start=LS100, cohort=16),
        cell("003/table-6", model__start=LS100, cohort=16, data__partition__iid=None),
        cell("003/table-12", model__start=LS100, cohort=16, model__augment=True),
        cell("003/table-16", model__start=LS100, cohort=16),
    ],
    "003: Common Voice without a seed, cohort 16 (Tables 4, 6, 9)": [
        cell("003/table-4", model__start=None, cohort=16),
        cell("003/table-6", model__start=None, cohort=16, data__partition__iid=None),
        cell("003/table-9-scratch", server__optimizer="lamb", cohort=16),
    ],
    "003: Common Voice from a tenth of it, cohort 64 (Tables 4, 9; smaller ones differ)": [
        cell("003/table-4", model__start="runs/003-seed-cv-en-10", cohort=64),
        cell("003/table-9", server__optimizer="lamb", cohort=64),
    ],
    "003: LS-960 with global clipping at σ 30·1e-6, but for its cohort (Tables 19, 20)": [
        but_for_the_cohort("003/table-19", model__start="runs/003-seed-ls-960", privacy__clip__per="global"),
        but_for_the_cohort("003/table-20", privacy__noise__average=3e-5, privacy__clip__per="global"),
    ],
}


@pytest.mark.parametrize("what", TWICE)
def test_a_cell_that_a_paper_prints_twice_is_one_experiment(what: str) -> None:
    first, *others = TWICE[what]
    for other in others:
        assert other == first


def test_fedprox_without_a_pull_is_the_cell_of_tables_3_and_4() -> None:
    for name, table in (("003/table-13", "003/table-4"), ("003/table-13-librispeech", "003/table-3")):
        for start in (LS100, None):
            plain, _, _ = cell(name, model__start=start, cohort=16, method__mu=0.0)
            assert plain == cell(table, model__start=start, cohort=16)[0]


# --- what the papers print, in the recipes ------------------------------------------------------------


def test_decay_and_rates_of_the_families() -> None:
    """000 Table 20 and B.4; 004 Appendix C: weight decay 0.001 for SGD, 0.01 for AdamW, Local Adam as in
    Table 6.
    """
    for name in (
        "000/table-10",
        "000/table-18-resnet18-cifar10",
        "004/table-1-resnet18",
        "004/table-2",
        "004/table-3-sst2",
    ):
        for config in runs(RECIPES / f"{name}.yaml"):
            adam = "adam" in config.method.name.replace("fedadam", "fed") or "fedadamw" in config.method.name
            lada = config.method.name == "fedlada"
            assert config.local.weight_decay == (0.0 if adam and not lada else 0.001), config.method.name
            if adam and name.startswith("004"):
                algorithm = build_algorithm(config.method.name, config.method.options)
                assert algorithm.weight_decay == (0.001 if config.method.name == "local-adam" else 0.01)
    sweep = recipe("000/table-10")
    grids = {f.grid["method"][0]: f.tune for f in sweep.families}
    assert grids["dp-fedavg"] == {"local.lr": [0.01, 0.03, 0.05, 0.1, 0.3]}
    assert grids["dp-fedsam"]["method.rho"] == [0.01, 0.05, 0.1, 0.5]
    assert grids["dp-fedadamw"] == {"local.lr": [0.0001, 0.0002, 0.0003, 0.0005, 0.0008, 0.001]}


def test_the_closed_form_of_paper_002() -> None:
    """Its Theorem 2: σ² ≥ 7r²T(ε + 2 log 1/δ)/ε², at r 0.05, T 200 and δ 1/N."""
    (family,) = {tuple(f.grid["privacy.noise"]) for f in recipe("002/closed-form").families}
    for noise, budget in zip(family, (1.0, 2.0), strict=True):
        expected = math.sqrt(7 * 0.05**2 * 200 * (budget + 2 * math.log(1000)) / budget**2)
        assert noise == pytest.approx(expected, abs=5e-4)


def test_adagrad_of_paper_003_has_optaxs_defaults() -> None:
    """Appendix G.4: "the remaining parameters were set to their default values from optax library"."""
    for name in ("003/table-9", "003/table-9-scratch", "small/003/table-9"):
        found = [c.server.options for c in runs(RECIPES / f"{name}.yaml") if c.server.optimizer == "adagrad"]
        assert found and all(o == {"initial_accumulator_value": 0.1, "eps": 1e-7} for o in found)


def test_the_rows_of_paper_003s_table_1() -> None:
    """σ_DP·1e6, C and clipping of every row that was trained, and (K, S, T) of every one that was not."""
    configs = runs(RECIPES / "003" / "table-1.yaml")
    rows = {
        (round(float(c.privacy.noise) / 1024 * 1e6, 3), c.privacy.clip.bound, c.privacy.clip.per)  # type: ignore[union-attr,arg-type]
        for c in configs
    }
    layers = {(s, 0.01, per) for s in (30.0, 20.0, 10.0, 3.0, 1.0) for per in ("uniform", "dim")}
    whole = {(s, 0.01, "global") for s in (10.0, 3.0, 1.0)}
    bare = {(0.0, c, per) for c in (0.01, 1.0) for per in ("global", "uniform")}
    assert rows == layers | whole | bare
    assert configs[0].privacy is not None
    assert {(s.population, s.cohort, s.rounds or 2006) for s in configs[0].privacy.extrapolate} == {
        (347_530, 10_240, 2006), (1_737_650, 51_200, 2006), (3_475_300, 102_400, 2006),
        (6_950_600, 204_800, 2006), (69_506_000, 204_800, 2034), (695_060_000, 204_800, 3390),
    }  # fmt: skip


def test_the_rows_of_paper_003s_table_12() -> None:
    """Seeds, cohorts and SpecAugment (G.6); the rates of Table 4, whose caption gives them with and without a
    seed.
    """
    rows = {
        (c.model.start, c.cohort.size, c.model.options.get("augment"), c.local.lr, c.server.lr)
        for c in runs(RECIPES / "003" / "table-12.yaml")
    }
    seeds = ("runs/003-seed-cv-en-10", LS100, "runs/003-seed-ls-960")
    seeded = {(seed, n, on, 0.2, 0.002) for seed in seeds for n in (8, 16, 32) for on in (True, False)}
    assert rows == seeded | {(None, n, on, 0.4, 0.006) for n in (8, 16, 32) for on in (True, False)}


def test_the_columns_of_paper_003s_table_3() -> None:
    """Its caption: rates and transition steps without and with a seed; "train:" LS-960, LS-860, LS-960."""
    columns = {
        c.model.start: (
            c.local.lr,
            c.server.lr,
            asdict(c.server.schedule),
            len(c.data.speech.splits["train"]),
        )  # type: ignore[union-attr,call-overload]
        for c in runs(RECIPES / "003" / "table-3.yaml")
    }
    decay = {"kind": "exponential", "rate": 0.6, "start": 1000, "warmup": 0}
    assert columns == {
        None: (0.4, 0.006, {**decay, "every": 500}, 3),
        LS100: (0.2, 0.003, {**decay, "every": 250}, 2),
        CV_EN: (0.2, 0.003, {**decay, "every": 250}, 3),
    }


@pytest.mark.parametrize(
    ("name", "language", "rows"),
    [
        ("table-18", "fr", {(1_542_750, None), (15_427_500, 2013), (46_282_500, 1991)}),
        ("table-18-german", "de", {(1_603_750, None), (16_037_500, 2016), (48_112_500, 2068)}),
    ],
)
def test_the_rows_of_paper_003s_table_18(name: str, language: str, rows: set[tuple[int, int | None]]) -> None:
    """σ_DP·1e6, clipping and T of every row that was trained; (K, T) of those that were not, S 256,000."""
    configs = runs(RECIPES / "003" / f"{name}.yaml")
    sections = [(c.privacy, c.rounds) for c in configs if c.privacy is not None]
    trained = {(round(float(p.noise) / 1024 * 1e6, 3), p.clip.per, t) for p, t in sections}  # type: ignore[arg-type]
    assert trained == {
        (10.0, "dim", 2002), (3.0, "dim", 2002), (3.0, "global", 2002),
        (0.0, "dim", 2000), (0.0, "global", 2000),
    }  # fmt: skip
    for config, (privacy, _) in zip(configs, sections, strict=True):
        assert {(s.population, s.rounds) for s in privacy.extrapolate} == rows
        assert {s.cohort for s in privacy.extrapolate} == {256_000}
        speech = config.data.speech
        assert speech is not None and speech.language == language and speech.share == (0.1, 1.0)
        assert (config.model.start or "").endswith(f"cv-{language}-10") and language in str(config.data.path)


def test_the_sizes_of_paper_003s_table_21_start_from_seeds_of_their_own() -> None:
    """H.7: "a model pre-trained on LS-100", five of them, "with layer drop set 0.1 for all models"."""
    configs = runs(RECIPES / "003" / "table-21.yaml")
    for config in configs:
        assert config.model.start == f"runs/003-seed-{config.model.options['size']}"
        assert config.model.options["layer_drop"] == 0.1
    assert len(configs) == 15 and len({c.model.start for c in configs}) == 5


def test_a_seed_has_a_command_that_makes_it() -> None:
    """Every folder that a recipe of 003 starts from is the --out of a command in some comment, or one of the
    names that seed.yaml lists.
    """
    told = " ".join(f.read_text(encoding="utf-8") for f in (RECIPES / "003").glob("*.yaml"))
    made = set(re.findall(r"--out (runs/003-seed[\w-]*)", told.replace("-SIZE", "")))
    listed = re.findall(
        r"CV-en(?:-\d+)?|CV-\w\w-\d+", (RECIPES / "003/seed.yaml").read_text(encoding="utf-8")
    )
    made |= {f"runs/003-seed-{name.lower()}" for name in listed} | {"runs/003-seed-cv-en-05"}
    sizes = {f"runs/003-seed-{size}" for size in ("narrow", "shallow", "base", "wide", "deep")}
    steps = {f"runs/003-seed-{n}" for n in (30, 50, 70)}
    starts = {c.model.start for f in FULL if f.parent.name == "003" for c in runs(f)} - {None}
    assert starts - steps <= made | sizes, starts - steps - made - sizes


def test_the_layers_of_paper_003s_figures_15_and_16() -> None:
    """H.5: noise on attention (wqkv), MLP (w1, w2), LayerNorms (ln) or the last projection (wf) alone; for
    "dim" also on all but one of them, and half of it on one. Names are those of the network.
    """
    names = Layout.of(models.build("ctc-transformer", (80,), 30, size="tiny")).layers
    kinds = {
        "*.qkv": {n for n in names if n.endswith("attention.qkv")},
        "*.mlp.*": {n for n in names if n.endswith(("mlp.up", "mlp.down"))},
        "*.norm?": {n for n in names if n.endswith((".norm1", ".norm2"))},
        "*.attention.out": {n for n in names if n.endswith("attention.out")},
    }
    for pattern, expected in kinds.items():
        assert expected and set(fnmatch.filter(names, pattern)) == expected
    alone = [{kind: 1.0, "*": 0.0} for kind in kinds]
    others = [{kind: factor} for factor in (0.0, 0.5) for kind in kinds]
    for name, factors, clips in (
        ("figure-15", [{}, *alone], ("global", "uniform")),
        ("figure-16", [{}, *alone, *others], ("dim",)),
    ):
        sections = [c.privacy for c in runs(RECIPES / "003" / f"{name}.yaml") if c.privacy is not None]
        noisy = [s for s in sections if s.noise]
        found = sorted((s.clip.per, repr(s.noise_by_layer)) for s in noisy)
        assert found == sorted((per, repr(f)) for per in clips for f in factors)
        assert {s.noise for s in noisy} == {1e-5 * 1024} and {s.clip.bound for s in sections} == {0.01}
        assert [s.clip.per for s in sections if not s.noise] == list(clips)


@pytest.mark.parametrize("noise", [1e-3, 6.144e-4, 1e-4])
def test_next_to_no_noise_has_an_enormous_but_finite_epsilon(noise: float) -> None:
    """003 Table 17: z = 0.0006144 over 2,006 rounds is 4.0·10⁹ by Rényi divergences."""
    found = epsilon({PoissonGaussian(1024 / 34753, noise): 2006}, 1e-9)
    assert 1e6 < found.value <= found.rdp < math.inf
    if noise == 6.144e-4:
        assert found.rdp == pytest.approx(4.0e9, rel=0.3)


# --- the index ----------------------------------------------------------------------------------------

STATES = (
    "full size run here", "small twin run to its end", "first rounds run", "not run yet",
    "needs data or GPUs", "–",
)  # fmt: skip
ITEMS = {
    "000": [f"Table {n}" for n in range(10, 21)],
    "001": ["results at ε 1", "component ablation", "aggregation ablation", "other adaptive methods"],
    "002": [*(f"Table {n}" for n in (1, 2, 3)), *(f"Figure {n}" for n in range(1, 8))],
    "003": [*(f"Table {n}" for n in range(1, 23)), *(f"Figure {n}" for n in range(1, 24))],
    "004": [*(f"Table {n}" for n in range(1, 12)), *(f"Figure {n}" for n in range(1, 9))],
}


def rows_of_index() -> list[list[str]]:
    lines = [line for line in PAPERS.splitlines() if re.match(r"\| 00\d ", line)]
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if len(row) == 4]


def test_the_index_has_every_table_and_figure_of_the_papers() -> None:
    listed = [row[0] for row in rows_of_index()]
    for paper, items in ITEMS.items():
        for item in items:
            assert any(re.match(rf"{paper} .*{re.escape(item)}(?!\d)", name) for name in listed), (
                f"{paper} {item}"
            )


def test_the_index_and_the_files_agree() -> None:
    rows = rows_of_index()
    named = {name for row in rows for name in re.findall(r"`([^`]+\.yaml)`", row[1])}
    assert named == {shown(f) for f in FULL}
    for _, recipes, twin, state in rows:
        assert any(part in state for part in STATES), state
        for name in re.findall(r"`([^`]+\.yaml)`", recipes):
            expected = twin_of(RECIPES / name)
            if re.findall(r"`([^`]+\.yaml)`", twin):
                assert f"`{shown(expected)}`" in twin
            else:
                assert twin == "the same name" and expected == RECIPES / "small" / name


def test_what_the_index_says_was_run_is_told_below_it() -> None:
    """Recipes whose first rounds were run, twins that were run to their end: each has its numbers; and what
    has a row of numbers is said to have been run.
    """
    _, _, told = PAPERS.partition("## What was seen")
    rounds, _, twins = told.partition("| twin | runs |")
    assert rounds and twins
    tabled = "\n".join(line for line in rounds.splitlines() if line.startswith("|"))
    for _, recipes, twin, state in rows_of_index():
        (name,) = re.findall(r"`([^`]+\.yaml)`", recipes) or [""]
        if "first rounds run" in state:
            assert f"`{name}`" in rounds, name
        else:
            assert not name or f"`{name}`" not in tabled, name
        if twin == "the same name":
            assert ("small twin run to its end" in state) == (f"`small/{name}`" in twins), name


@pytest.mark.parametrize("file", [f for f in FILES if f not in TABLES], ids=shown)
def test_the_readme_lists_every_other_recipe(file: Path) -> None:
    assert f"`{shown(file)}`" in INDEX


def test_the_readme_names_no_file_that_is_missing() -> None:
    named = [part for part in INDEX.split("`")[1::2] if part.endswith(".yaml") and " " not in part]
    assert named
    assert [name for name in named if not (RECIPES / name).exists()] == []


def test_no_file_points_to_a_document_that_is_not_here() -> None:
    here = {p.name for p in ROOT.rglob("*.md")}
    here |= set(
        re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text())
    )  # the site makes some of its pages
    places = [
        ROOT / "README.md",
        *(p for d in ("src", "tests", "docs", "recipes", "bench") for p in (ROOT / d).rglob("*")),
    ]
    for place in places:
        if place.suffix not in (".py", ".md", ".yaml", ".toml") or not place.is_file():
            continue
        named = re.findall(r"\b([A-Za-z][\w-]*\.md)\b", place.read_text(encoding="utf-8"))
        missing = sorted(set(named) - here - {"x.md"})
        assert not missing, f"{place.relative_to(ROOT)} points to {', '.join(missing)}"


def test_a_recipe_says_where_it_differs_from_its_paper() -> None:
    """In its own comment, or in that of the recipe it names."""
    for file in FULL:
        text = file.read_text(encoding="utf-8").lower()
        assert "differ" in text or "needs what" in text or file.stem in ("seed", "figure-8"), shown(file)


@pytest.mark.parametrize("kind", ["example", "client", "none"])
def test_comparisons_have_three_seeds_and_tune_every_method_alike(kind: str) -> None:
    file = {"example": "results-example-level", "client": "results-client-level"}.get(
        kind, "results-not-private"
    )
    sweep = recipe(f"small/{file}")
    (family,) = sweep.families
    assert len(family.grid["seed"]) >= 3
    assert len(family.tune["local.lr"]) >= 3
    for point in sweep.points:
        config = sweep.config(point)
        assert config.data.validation > 0
        assert ("none" if config.privacy is None else config.privacy.unit) == kind
        if config.privacy is not None:  # equal ε, not equal σ
            assert config.privacy.epsilon is not None
            assert config.privacy.noise is None
