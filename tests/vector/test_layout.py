"""What a layout refuses: a model, or a choice of its personal part, that leaves nothing to learn."""

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
