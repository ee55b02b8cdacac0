"""Options of methods: a config may set what an algorithm's fields declare."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal, get_type_hints

import pytest

from tacit import UserError
from tacit.algorithms.base import Decay
from tacit.config.methods import METHODS, _checked, build_algorithm


@pytest.mark.parametrize(
    ("value", "declared", "said"),
    [
        (1.0, Decay, r"must be in \[0, 1\)"),
        (-0.1, Decay, r"must be in \[0, 1\)"),
        (-0.1, float, r"must be in \[0, inf\)"),
        (float("nan"), float, r"must be in"),
        (True, float, "must be a number"),
        (-1, int, "must be a whole number"),
        (1, bool, "must be true or false"),
        ("c", Literal["a", "b"], "must be one of a, b"),
        (3, tuple[str, ...], "must be a list of names"),
        (["head", 3], tuple[str, ...], "must be a list of names"),
        ({"head": True}, tuple[str, ...], "must be a list of names"),
    ],
)
def test_a_range_is_declared_by_type_and_not_by_name(value: Any, declared: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        _checked("keep", value, declared)
    assert _checked("beta", 2, float) == 2.0, "a name decides nothing"


@pytest.mark.parametrize("name", METHODS)
def test_every_moving_average_has_its_range(name: str) -> None:
    """No β and no momentum of ours may be 1: a later algorithm that forgets to declare it is found here."""
    hints = get_type_hints(METHODS[name].algorithm, include_extras=True)
    options = [f.name for f in fields(METHODS[name].algorithm)]
    for option in options:
        if option.startswith("beta") or option == "momentum":
            assert hints[option] == Decay
            with pytest.raises(UserError, match=f"method.{option}: must be in"):
                build_algorithm(name, {option: 1.0})


def test_a_bare_name_is_a_list_of_one() -> None:
    for given in ("head", ["head"], ("head",)):
        assert build_algorithm("centaur", {"personal": given}).personal_part == ("head",)
