"""A layout refuses a model, or a choice of its personal part, that leaves nothing to train."""

from __future__ import annotations

import pytest
from torch import nn

from tacit import UserError
from tacit.vector import Layout


def test_a_model_or_a_choice_that_leaves_nothing_is_the_callers_to_mend() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(UserError, match=r"'h' matches no parameter; choose among .*0.weight"):
        Layout.of(model, ("h",))
    with pytest.raises(UserError, match=r"every parameter is personal"):
        Layout.of(model, ("*",))
    with pytest.raises(UserError, match=r"no trainable parameters"):
        Layout.of(model.requires_grad_(False))


def test_a_pattern_that_matches_nothing_names_its_key_and_each_parameter_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    names = r"0\.weight, 0\.bias, 2\.weight, 2\.bias \(the last layer: \['2\.\*'\]\)$"
    with pytest.raises(UserError, match=rf"^method\.personal: 'head' matches no parameter; .*: {names}"):
        Layout.of(model, ("head",))
    assert Layout.of(model, ("2.*",)).shared == 6
    deep = nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))
    with pytest.raises(UserError, match=r": 0\.weight, 0\.bias, 1\.weight, 1\.bias, …, 8\.bias \("):
        Layout.of(deep, ("head",))
