"""`--set` on sections in short form."""

from __future__ import annotations

from typing import Any

import pytest

from tacit import UserError
from tacit.config.loading import load, override

SMALL: dict[str, Any] = {
    "rounds": 2,
    "data": {"name": "fashion-mnist-slice", "partition": {"kind": "iid", "clients": 12}},
    "model": {"name": "mlp", "hidden": [8]},
    "cohort": 4,
    "local": {"steps": 1, "batch": 5, "lr": 0.1},
}
PRIVACY = {"unit": "client", "delta": 1e-3, "clip": 1.0, "noise": 1.0}


@pytest.mark.parametrize(
    ("short", "key", "value", "whole"),
    [
        ({"method": "fedprox"}, "method.mu", 0.1, {"name": "fedprox", "mu": 0.1}),
        ({"model": "mlp"}, "model.hidden", [4], {"name": "mlp", "hidden": [4]}),
        ({"task": "tokens"}, "task.ignore", 0, {"name": "tokens", "ignore": 0}),
        ({"data": "shakespeare"}, "data.holdout", 0.1, {"name": "shakespeare", "holdout": 0.1}),
        ({"data": {"partition": "natural"}}, "data.partition.share", 0.5, {"kind": "natural", "share": 0.5}),
        ({"privacy": {"mechanism": "blt"}}, "privacy.mechanism.buffers", 3, {"kind": "blt", "buffers": 3}),
        ({"privacy": {"clip": 1.0}}, "privacy.clip.per", "dim", {"bound": 1.0, "per": "dim"}),
        ({"privacy": {"metrics": True}}, "privacy.metrics.share", 0.1, {"share": 0.1}),
        ({"cohort": 4}, "cohort.sampling", "fixed", {"size": 4, "sampling": "fixed"}),
    ],
)
def test_a_short_form_becomes_the_section_it_stands_for(
    short: dict[str, Any], key: str, value: Any, whole: dict[str, Any]
) -> None:
    override(short, key, value)
    here: Any = short
    for part in key.split(".")[:-1]:
        here = here[part]
    assert here == whole


def test_a_section_that_is_laid_over_another_stays_its_giver_s() -> None:
    """A later key goes into it: a sweep's point, or a person's dict, is none the wiser."""
    given = {"model": {"name": "mlp", "hidden": [8]}, "model.hidden": [16], "model.start": "runs/seed"}
    config = load(SMALL, given)
    assert config.model.options["hidden"] == [16] and config.model.start == "runs/seed"
    assert given["model"] == {"name": "mlp", "hidden": [8]}


def test_what_was_overridden_is_a_config() -> None:
    natural = SMALL | {"data": {"name": "fashion-mnist-slice", "partition": "natural"}}
    assert load(natural, {"data.partition.share": 0.5}).data.partition.share == 0.5
    private = SMALL | {"privacy": PRIVACY | {"mechanism": "blt", "metrics": True}}
    found = load(private, {"privacy.mechanism.buffers": 3, "privacy.metrics.share": 0.1}).privacy
    assert found is not None and found.mechanism is not None and found.metrics is not None
    assert (found.mechanism.kind, found.mechanism.buffers, found.metrics.share) == ("blt", 3, 0.1)


@pytest.mark.parametrize(
    ("key", "value"), [("name.x", "run"), ("server.schedule.floor", "cosine"), ("privacy.clip.per", True)]
)
def test_what_is_short_for_nothing_is_no_section(key: str, value: Any) -> None:
    values: dict[str, Any] = {}
    override(values, key.rpartition(".")[0], value)
    with pytest.raises(UserError, match=f"--set {key}: {key.split('.')[-2]} is a value, not a section"):
        override(values, key, 0.1)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("address", "nowhere", "must be auto, local, or a cluster's HOST:PORT (got 'nowhere')"),
        ("address", "http://here:1", "must be auto, local, or a cluster's HOST:PORT"),
        ("state", "elsewhere", "must be auto, shared, carried, or the URL of an object store"),
    ],
)
def test_what_a_text_must_look_like_is_said_in_words(key: str, value: str, said: str) -> None:
    with pytest.raises(UserError) as told:
        load(SMALL, {"engine": {"kind": "ray", key: value}})
    assert f"engine.{key}: {said}" in str(told.value)
