"""The docstrings of the public API say what it takes, what it returns and what it refuses."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import tacit
from tacit import algorithms, optimizers
from tacit.algorithms.base import Round, Work
from tacit.data import Records
from tacit.engine import ClientStates, Engine, EngineSettings
from tacit.privacy import MECHANISMS, Aggregation, FixedSize, Mechanism, OwnSampling, Poisson, Sampler

CONTRACTS = (Work, Round, Records, ClientStates, Engine, EngineSettings, Aggregation, Mechanism, Sampler)
PUBLIC = {f"tacit.{name}": getattr(tacit, name) for name in tacit.__all__} | {
    c.__name__: c for c in CONTRACTS
}


def functions(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    if inspect.isfunction(thing):
        yield name, thing
    elif inspect.isclass(thing):
        yield from (
            (f"{name}.{part}", getattr(value, "__func__", value))
            for part, value in vars(thing).items()
            if not part.startswith("_") and inspect.isfunction(getattr(value, "__func__", value))
        )


@pytest.mark.parametrize("name", PUBLIC)
def test_every_parameter_is_explained(name: str) -> None:
    assert (inspect.getdoc(PUBLIC[name]) or "").strip(), f"{name} has no docstring"
    for called, function in functions(name, PUBLIC[name]):
        said = inspect.getdoc(function) or ""
        for parameter in inspect.signature(function).parameters:
            if parameter not in ("self", "cls"):
                assert f"`{parameter}`" in said or f"\n    {parameter}: " in said, f"{called}: {parameter}"


@pytest.mark.parametrize("name", [n for n in tacit.__all__ if inspect.isfunction(getattr(tacit, n))])
def test_every_function_of_the_package_says_what_it_returns_and_refuses(name: str) -> None:
    said = inspect.getdoc(getattr(tacit, name)) or ""
    assert all(f"\n{part}:\n" in said for part in ("Args", "Returns", "Raises")), name


def test_every_algorithm_and_optimizer_names_its_source() -> None:
    """In its module's docstring, with a number to look it up by."""
    for room in (algorithms, optimizers):
        for name in room.__all__:
            thing = getattr(room, name)
            if inspect.isclass(thing) and thing.__module__.rpartition(".")[2] not in ("base", "schedules"):
                module = inspect.getmodule(thing)
                assert module is not None and "arXiv:" in (module.__doc__ or ""), thing


def test_every_mechanism_and_sampler_states_its_unit_or_its_neighbours() -> None:
    for thing in (*MECHANISMS.values(), Mechanism):
        module = inspect.getmodule(thing)
        said = ((thing.__doc__ or "") + (module.__doc__ or "")).lower()
        assert "unit" in said or "client level" in said, thing
    for sampling in (Poisson, FixedSize, OwnSampling):
        assert "Adjacency: " in (sampling.__doc__ or "")
