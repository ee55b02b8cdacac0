"""A frozen base in 4 bits: refused if bitsandbytes is missing, otherwise LoRA trains on top of it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import tacit
from tacit.config.build import build_job
from tacit.models import hub
from texts import ROBERTA, text_config, texts

pytest.importorskip("peft")
WIDE = {**ROBERTA, "hidden_size": 64, "intermediate_size": 64}


def base(folder: Path) -> str:
    torch.manual_seed(0)
    hub.from_config(WIDE, (9,), 2).save_pretrained(folder)
    return str(folder)


def test_without_bitsandbytes_the_refusal_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "find_spec", lambda name: None)
    config = text_config(hub=base(tmp_path / "base"), lora={"rank": 2}, frozen="4bit")
    with pytest.raises(tacit.UserError, match=r"4bit needs bitsandbytes; `pip install .*or set .* to bf16"):
        tacit.run(config, tmp_path / "run", dataset=texts())


def test_single_records_are_not_protected_around_it(tmp_path: Path) -> None:
    private = {"privacy": {"unit": "example", "noise": 0.5, "delta": 1e-3, "clip": 1.0}}
    config = text_config(private, hub=base(tmp_path / "base"), lora={"rank": 2})
    frozen = config.model.model_copy(update={"frozen": "4bit"})
    with pytest.raises(tacit.UserError, match=r"cannot be shown to keep records apart; set it to bf16, or"):
        build_job(config.model_copy(update={"model": frozen}), tmp_path / "run", dataset=texts())


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("unit", [None, "client"])
def test_two_rounds_of_lora_around_it(unit: str | None, tmp_path: Path) -> None:
    private = {"privacy": {"unit": unit, "noise": 0.5, "delta": 1e-3, "clip": 1.0, "entropy": "seed"}}
    folder = base(tmp_path / "base")
    results = []
    for workers in (0, 2):
        config = text_config(
            {"engine.workers": workers, **(private if unit else {})},
            hub=folder,
            lora={"rank": 2},
            frozen="4bit",
        )
        results.append(tacit.run(config, tmp_path / str(workers), dataset=texts()))
    kinds = {type(p).__name__ for p in results[0].model.parameters() if not p.requires_grad}
    assert "Params4bit" in kinds
    for (name, ours), (_, theirs) in zip(
        results[0].model.named_parameters(), results[1].model.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert results[0].metrics[-1]["loss"] == results[1].metrics[-1]["loss"]
