"""Every recipe loads, names things that exist, and keeps the structure of its twin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tacit import data, models
from tacit.config import Config, load
from tacit.config.methods import build_algorithm
from tacit.config.sweep import read_sweep, slug
from tacit.errors import UserError
from tacit.models.weights import KNOWN_WEIGHTS

RECIPES = Path(__file__).parents[1] / "recipes"
INDEX = (RECIPES / "README.md").read_text(encoding="utf-8")
FILES = sorted(RECIPES.rglob("*.yaml"))
TABLES = [f for f in FILES if f.parent.name.isdigit()]
SMALL = [f for f in TABLES if f.is_relative_to(RECIPES / "small")]
FULL = [f for f in TABLES if f not in SMALL]
AT_HAND = {
    "fashion-mnist-slice", "fashion-mnist", "cifar-10", "rotten-tomatoes", "chitchat", "synthetic-speech",
    "synthetic-speech-seed",
}  # fmt: skip


def shown(file: Path) -> str:
    return str(file.relative_to(RECIPES))


def runs(file: Path) -> list[Config]:
    """The config of every run that a recipe compares, or of its single one."""
    sweep = read_sweep(file, {})
    return [load(file)] if sweep is None else [sweep.config(point) for point in sweep.points]


def grid(file: Path) -> dict[str, list[Any]]:
    """What a recipe compares, apart from seeds."""
    sweep = read_sweep(file, {})
    return {} if sweep is None else {key: values for key, values in sweep.grid.items() if key != "seed"}


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
    sweep = read_sweep(file, {})
    if sweep is None:
        return
    points = [*sweep.points, *(c for p in sweep.points for c in sweep.candidates(p) if sweep.tune)]
    distinct = {repr(sorted(point.items(), key=lambda item: item[0])) for point in points}
    assert len({slug(point) for point in points}) == len(distinct)


def test_names_of_runs_are_unique() -> None:
    names = [runs(file)[0].name for file in FILES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("file", TABLES, ids=shown)
def test_a_table_is_named_after_its_file(file: Path) -> None:
    assert runs(file)[0].name == "-".join(file.relative_to(RECIPES).with_suffix("").parts)


@pytest.mark.parametrize("file", FULL, ids=shown)
def test_the_small_twin_keeps_the_structure(file: Path) -> None:
    twin = RECIPES / "small" / file.relative_to(RECIPES)
    if natural(file):  # rates and noise follow the size of the model, cohorts that of the population
        assert {k: len(v) for k, v in grid(twin).items()} == {k: len(v) for k, v in grid(file).items()}
    else:
        assert grid(twin) == grid(file)
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


def natural(file: Path) -> bool:
    """Whether its clients are the data set's own users, whose number is not the recipe's to set."""
    return runs(file)[0].data.partition.kind == "natural"


def heterogeneity(config: Config) -> dict[str, Any]:
    return config.data.partition.model_dump(exclude={"clients"})


def participation(config: Config) -> float:
    clients = config.data.partition.model_dump().get("clients")
    return 0.0 if clients is None else config.cohort.size / float(clients)


def guarantee(config: Config) -> dict[str, Any] | None:
    if config.privacy is None:
        return None
    if config.data.partition.kind == "natural":
        return {"unit": config.privacy.unit, "clip": config.privacy.clip.model_dump()}
    return config.privacy.model_dump(exclude={"entropy"})


def work(config: Config) -> int:
    """Local rounds in all; the twins' smaller networks come on top."""
    return config.rounds * config.cohort.size


@pytest.mark.parametrize("file", [f for f in FILES if f.is_relative_to(RECIPES / "small")], ids=shown)
def test_small_recipes_need_nothing_but_data_at_hand(file: Path) -> None:
    assert {config.data.name for config in runs(file)} <= AT_HAND
    assert {config.model.hub for config in runs(file)} <= {None, *KNOWN_WEIGHTS}


@pytest.mark.parametrize("file", FILES, ids=shown)
def test_the_index_lists_every_recipe(file: Path) -> None:
    if file in SMALL and RECIPES / file.relative_to(RECIPES / "small") in FULL:
        return  # the index names the full recipe and says what the twin changes
    assert f"`{shown(file)}`" in INDEX


def test_the_index_names_no_file_that_is_missing() -> None:
    named = [part for part in INDEX.split("`")[1::2] if part.endswith(".yaml") and " " not in part]
    assert named
    assert [name for name in named if not (RECIPES / name).exists()] == []


@pytest.mark.parametrize("kind", ["example", "client", "none"])
def test_comparisons_have_three_seeds_and_tune_every_method_alike(kind: str) -> None:
    file = {"example": "results-example-level", "client": "results-client-level"}.get(
        kind, "results-not-private"
    )
    sweep = read_sweep(RECIPES / "small" / f"{file}.yaml", {})
    assert sweep is not None
    assert len(sweep.grid["seed"]) >= 3
    assert len(sweep.tune["local.lr"]) >= 3
    for point in sweep.points:
        config = sweep.config(point)
        assert config.data.validation > 0
        assert ("none" if config.privacy is None else config.privacy.unit) == kind
        if config.privacy is not None:  # equal ε, not equal σ
            assert config.privacy.epsilon is not None
            assert config.privacy.noise is None
