"""Client state: versions of two plays never mix, whoever writes last."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tacit.engine.states import NONE, DirectoryStates, version


def test_a_worker_given_up_for_lost_writes_to_a_version_that_nobody_names(tmp_path: Path) -> None:
    states = DirectoryStates(tmp_path)
    lost, counted, again = version(3, 0, 0), version(3, 0, 1), version(3, 1, 0)
    assert len({lost, counted, again, NONE}) == 4
    states.save(7, counted, {"c": torch.ones(2)})
    known = states.digest(7, counted)
    states.save(7, lost, {"c": torch.full((2,), 9.0)})  # it still lives, and is late
    assert states.digest(7, counted) == known
    assert states.load(7, counted)["c"].tolist() == [1.0, 1.0]
    states.prune(7, {counted})
    with pytest.raises(ValueError, match="is missing"):
        states.digest(7, lost)
    assert states.load(7, NONE) == {}
