"""Exported models, loaded by a process that never imports this package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tacit
from conftest import blobs
from tacit import models
from tacit.config import Config
from tacit.errors import UserError
from tacit.models import hub
from tacit.models.export import save_model
from tacit.models.weights import hub_name
from texts import GPT2, QUIET, ROBERTA, VIT, text_config, texts

pytest.importorskip("peft")

LOAD = """
import json, sys
import numpy as np, torch
from peft import PeftModel
import transformers
kind, folder, base, classes, inputs = sys.argv[1:]
torch.set_num_threads(1)
auto = getattr(transformers, kind)
more = {"num_labels": int(classes)} if int(classes) else {}
model = auto.from_pretrained(base or folder, local_files_only=True, ignore_mismatched_sizes=True, **more)
if base:
    model = PeftModel.from_pretrained(model, folder)
given = {name: torch.from_numpy(value) for name, value in np.load(inputs).items()}
with torch.no_grad():
    logits = model.eval()(**given).logits
np.save(inputs + ".logits.npy", logits.numpy())
assert "tacit" not in sys.modules
"""

TEXT, PICTURE, LANGUAGE = (
    "AutoModelForSequenceClassification", "AutoModelForImageClassification", "AutoModelForCausalLM"
)  # fmt: skip


def elsewhere(
    tmp_path: Path, kind: str, base: Path | None, classes: int, given: dict[str, torch.Tensor]
) -> Any:
    """The logits of the exported model in a process of its own."""
    inputs = tmp_path / "inputs.npz"
    np.savez(inputs, **{name: value.numpy() for name, value in given.items()})
    where = [str(tmp_path / "export"), str(base or ""), str(classes), str(inputs)]
    environment = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", LOAD, kind, *where], check=True, env=environment, cwd=tmp_path)
    return torch.from_numpy(np.load(f"{inputs}.logits.npy"))


def text_inputs() -> dict[str, torch.Tensor]:
    batch = texts().test.take(np.arange(5))
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def trained(config: Config, tmp_path: Path, dataset: tacit.Dataset) -> nn.Module:
    """Run and export; the model that was trained."""
    result = tacit.run(config, tmp_path / "run", dataset=dataset)
    tacit.export(tmp_path / "run", tmp_path / "export", dataset=dataset)
    return result.model.eval()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(4)
    hub.from_config({**ROBERTA, **QUIET}, (9,), 5).save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    return tmp_path / "base"


@pytest.mark.slow
def test_an_adapter_is_loaded_by_peft(tmp_path: Path, base: Path) -> None:
    privacy = {"unit": "example", "clip": 1.0, "noise": 0.5, "delta": 1e-3, "entropy": "seed"}
    model = {"hub": str(base), "lora": {"rank": 2, "alpha": 16, "dropout": 0.1}}
    ours = trained(text_config({"privacy": privacy}, **model), tmp_path, texts())
    names = {file.name for file in (tmp_path / "export").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "statement.json"} <= names
    assert "base" in names, "the run's base has five classes and the data two: one with two goes along"
    told = (tmp_path / "export" / "README.md").read_text()
    assert "library_name: peft" in told and "Somebody with several of them" in told
    assert "base_model" not in told, "a folder's path means nothing to others"
    saved = json.loads((tmp_path / "export" / "adapter_config.json").read_text())
    home = str((tmp_path / "export" / "base").resolve())
    assert saved["base_model_name_or_path"] == home and saved["task_type"] == "SEQ_CLS"
    theirs = elsewhere(tmp_path, TEXT, base, 2, text_inputs())
    with torch.no_grad():
        assert torch.equal(ours(**text_inputs()).logits, theirs)


@pytest.mark.slow
def test_a_base_that_goes_along_is_loaded_as_its_card_says_wherever_it_is(tmp_path: Path, base: Path) -> None:
    trained(text_config(hub=str(base), lora={"rank": 2}), tmp_path, texts())
    away = tmp_path / "another machine"
    away.mkdir()
    (tmp_path / "export").rename(away / "export")
    code = (away / "export" / "README.md").read_text().split("```")[1].removeprefix("python")
    subprocess.run([sys.executable, "-c", code + "assert model.peft_config"], check=True, cwd=away)


@pytest.mark.slow
def test_a_base_without_a_home_goes_along(tmp_path: Path) -> None:
    config = text_config(config=VIT, lora={"rank": 2})
    ours = trained(config, tmp_path, blobs(side=8))
    x = torch.randn(3, 1, 8, 8)
    theirs = elsewhere(tmp_path, PICTURE, tmp_path / "export" / "base", 4, {"pixel_values": x})
    with torch.no_grad():
        assert torch.equal(ours(x).logits, theirs)


def test_a_card_names_a_base_as_the_hub_does(tmp_path: Path) -> None:
    assert hub_name("minilm") == "sentence-transformers/all-MiniLM-L6-v2"
    assert hub_name("someone/some-model") == "someone/some-model"
    assert hub_name(str(tmp_path)) is None


@pytest.mark.slow
def test_a_whole_model_is_loaded_by_transformers(tmp_path: Path) -> None:
    ours = trained(text_config(config={**ROBERTA, **QUIET}, train=["head"]), tmp_path, texts())
    assert "peft" not in (tmp_path / "export" / "README.md").read_text()
    theirs = elsewhere(tmp_path, TEXT, None, 0, text_inputs())
    with torch.no_grad():
        assert torch.equal(ours(**text_inputs()).logits, theirs)


def test_our_own_networks_are_tensors_with_their_recipe(tmp_path: Path) -> None:
    ours = trained(text_config(name="mlp", hidden=[4]), tmp_path, blobs())
    how = json.loads((tmp_path / "export" / "config.json").read_text())
    again = models.build(how.pop("tacit"), how.pop("shape"), how.pop("classes"), **how)
    again.load_state_dict(load_file(tmp_path / "export" / "model.safetensors"))
    x = torch.randn(3, 1, 4, 4)
    with torch.no_grad():
        assert torch.equal(ours(x), again(x))


def test_adapters_of_every_kind(tmp_path: Path) -> None:
    """Put back by peft's own functions, in this process."""
    import peft

    lora = {"rank": 2, "targets": ["query", "value"]}
    for number, (model, data) in enumerate(
        [
            ({"config": GPT2, "lora": lora}, texts()),
            ({"config": {**ROBERTA, **QUIET}, "lora": lora, "train": ["*LayerNorm*"]}, texts()),
            ({"name": "vit", "patch": 2, "width": 8, "depth": 1, "heads": 2, "lora": lora}, blobs()),
        ]
    ):
        ours = trained(text_config(**model), tmp_path / str(number), data)
        folder = tmp_path / str(number) / "export"
        config = peft.LoraConfig.from_pretrained(folder)
        base = tacit.config.build.build_base(text_config(**model), data)
        again = peft.PeftModel(base, config)
        report = peft.set_peft_model_state_dict(again, load_file(folder / "adapter_model.safetensors"))
        assert not report.unexpected_keys
        batch = data.test.prepare(data.test.take(np.arange(4)))
        with torch.no_grad():
            asked = [tacit.tasks.ask(m.eval(), batch) for m in (ours, again)]
        assert torch.equal(*asked)


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        tacit.export(tmp_path / "nothing", tmp_path / "export")
    config = text_config()
    tacit.run(config, tmp_path / "run", dataset=texts())
    (tmp_path / "export").mkdir()
    with pytest.raises(UserError, match="exists already"):
        tacit.export(tmp_path / "run", tmp_path / "export")
    for verb, more in (("export", [tmp_path / "model"]), ("trained", [])):
        # The config's own records would be described on the card, and decide how the model is built.
        with pytest.raises(UserError, match=f"given its dataset as an object.*tacit.{verb}"):
            getattr(tacit, verb)(tmp_path / "run", *more)
    with pytest.raises(UserError, match="the frozen weights are not those"):
        tacit.trained(tmp_path / "run", model=models.build("mlp", (4,), 2), dataset=texts())
    tacit.run(text_config(name="mlp", hidden=[4]), tmp_path / "other", dataset=blobs())
    with pytest.raises(UserError, match="checkpoint is of another model"):
        tacit.trained(tmp_path / "other", model=models.build("mlp", (4,), 2), dataset=blobs())


def test_no_bar_of_transformers_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny = {"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = hub.from_config({**tiny, "intermediate_size": 16, "patch_size": 4}, shape=(1, 8, 8), classes=5)
    save_model(model, {}, tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert capfd.readouterr() == ("", "")
