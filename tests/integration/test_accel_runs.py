"""Runs on the pretended accelerator: the CPU's very bits, nothing on the wrong device, few copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import accel
import tacit
from conftest import blobs
from methods_small import CLIENTS, STEPS, configured, halves, memories, small
from tacit.config.methods import METHODS
from tacit.config.schema import Config
from tacit.data.speech.tiny import tiny
from tacit.engine import InProcessSettings
from tacit.engine.device import devices
from text_helpers import sentences


def vectors(folder: Path) -> dict[str, torch.Tensor]:
    """Everything that a run's newest checkpoint holds."""
    newest = max((folder / "checkpoint").glob("[0-9]*"))
    return {
        f"{file.stem}.{name}": vector
        for file in sorted(newest.glob("*.safetensors"))
        for name, vector in load_file(file).items()
    }


def facts(result: tacit.Result) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if "seconds" not in k} for record in result.metrics]


def both(config: Config, **objects: Any) -> accel.Traffic:
    """Run on either device, compare all that was saved, and say what moved between host and device.

    The server's step is on that device, too.
    """
    runs = {}
    for device in ("cpu", accel.NAME):
        server = config.server.model_copy(update={"device": device})
        there = config.model_copy(update={"server": server})
        with accel.counting() as traffic:
            runs[device] = tacit.run(there, device, device=device, progress=False, **objects)
    here, there = runs["cpu"], runs[accel.NAME]
    assert facts(here) == facts(there)
    ours, theirs = vectors(there.path), vectors(here.path)
    assert ours.keys() == theirs.keys()
    for name, vector in ours.items():
        assert torch.equal(vector, theirs[name]), name
    kept, also = memories(there.path), memories(here.path)
    assert kept.keys() == also.keys()
    for client, state in kept.items():
        assert all(torch.equal(vector, also[client][name]) for name, vector in state.items())
    assert (there.path / "config.yaml").read_text().count("device: accel") == 2
    return traffic


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method: str) -> None:
    noise = {"privacy.noise": 1.0} if METHODS[method].unit == "client" else {}
    config = configured(method, {**noise, "rounds": 2})
    traffic = both(config, model=halves(), dataset=small(method == "adadps"))
    # Up: the message, and a batch (two tensors) for each step, of which some methods take two; one vector of
    # noise a step. Down: sums once a round, losses and state once a client. 2 rounds.
    vectors_sent, participants = 4, 2 * CLIENTS
    assert traffic.up <= 2 * vectors_sent * 2 + participants * (vectors_sent + STEPS * 2 * (2 + 1 + 1))
    assert traffic.down <= 2 * vectors_sent + participants * (vectors_sent + 2) + 40


MECHANISMS = {
    "noise at the clients": {"privacy.noise_at": "clients"},
    "adaptive clipping": {"privacy.adaptive": {}},
    "a bound for each layer": {"privacy.clip.per": "dim"},
    "normalised updates": {"privacy.clip.mode": "normalize"},
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism(name: str) -> None:
    config = configured("dp-fedavg-client", {"privacy.noise": 1.0, "rounds": 2, **MECHANISMS[name]})
    both(config, model=halves(), dataset=small())


MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"name": "mlp", "hidden": [8]},
    "cnn": {"name": "cnn"},
    "resnet": {"name": "resnet18"},
    "vit": {"name": "vit", "patch": 4, "width": 12, "depth": 2, "heads": 3, "dropout": 0.1},
}


@pytest.mark.parametrize("unit", ["none", "example", "client"])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_family(name: str, unit: str) -> None:
    method = {"none": "fedavg", "example": "dp-fedadamw", "client": "dp-fedavg-client"}[unit]
    options: dict[str, Any] = {"model": MODELS[name], "local.batch": 4, "local.steps": 2, "cohort": 2}
    if unit == "client":
        options["privacy.noise"] = 1.0
    both(configured(method, options), dataset=blobs(24, side=22 if name == "cnn" else 8))


def sayings(labelled: bool = False) -> tacit.Dataset:
    rows = [{"text": text, "who": n % 6, "y": n % 2} for n, text in enumerate(sentences(48))]
    options = {"label": "y"} if labelled else {"task": "language"}
    return tacit.dataset(rows, text="text", user="who", tokenizer="bytes", max_length=16, **options)


TINY = {
    "gpt2": {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32},
    "llama": {
        "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 24, "max_position_embeddings": 32, "tie_word_embeddings": True,
    },
    "bert": {
        "model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 24, "max_position_embeddings": 32,
    },
}  # fmt: skip


def texts(kind: str, unit: str | None, **more: Any) -> Config:
    privacy = {"unit": unit, "noise": 1.0, "clip": 1.0, "delta": 1e-3, "entropy": "seed"}
    values = {
        "rounds": 2,
        "data": {"name": "sayings", "partition": {"kind": "natural"}},
        "model": {"config": TINY[kind]},
        "cohort": 3,
        "local": {"steps": 2, "batch": 4, "lr": 0.1},
        "evaluate": {"every": 2},
        "privacy": privacy if unit else None,
        "engine": {"workers": 0},
    }
    return tacit.load(values, more)


@pytest.mark.parametrize(("model", "unit"), [("gpt2", None), ("llama", "example"), ("llama", "client")])
def test_language_models(model: str, unit: str | None) -> None:
    lora = {"rank": 2, "alpha": 4, "targets": ["q_proj", "v_proj"]}
    more = {"model": {"config": TINY[model], "lora": lora}} if unit == "example" else {}
    both(texts(model, unit, **more), dataset=sayings())


def test_text_classification() -> None:
    both(texts("bert", "example"), dataset=sayings(labelled=True))


def test_speech() -> None:
    model = {"name": "ctc-transformer", "size": "tiny", "depth": 1, "width": 24, "hidden": 32}
    values = {
        "rounds": 2, "data": {"name": "tiny", "partition": {"kind": "natural"}},
        "model": {**model, "dropout": 0.1, "layer_drop": 0.1}, "cohort": 2,
        "local": {"steps": 2, "seconds": 2.0, "lr": 0.1, "clip": 1.0},
        "evaluate": {"every": 2, "batch": 16}, "engine": {"workers": 0},
    }  # fmt: skip
    both(tacit.load(values), dataset=tiny(speakers=3, utterances=4))


@pytest.mark.parametrize("task", ["regression", "multi-label"])
def test_other_tasks(task: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(48, 4)).astype(np.float32)
    label = x[:, 0].tolist() if task == "regression" else [["a"] * bool(r[0] > 0) + ["b"] for r in x]
    rows = [{"x": r.tolist(), "y": y} for r, y in zip(x, label, strict=True)]
    rows = [{**{f"x{i}": v for i, v in enumerate(row["x"])}, "y": row["y"]} for row in rows]
    data = tacit.dataset(rows, features=["x0", "x1", "x2", "x3"], label="y", task=task)
    split = {"name": "own", "partition": {"kind": "iid", "clients": CLIENTS}}
    config = configured("dp-fedavg", {"model": {"name": "mlp", "hidden": [4]}, "data": split})
    both(config, dataset=data)


def test_a_pool_with_a_worker_for_each_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in accel.environment(tmp_path / "device").items():
        monkeypatch.setenv(name, value)
    config = configured("dp-fedavg-client", {"privacy.noise": 1.0, "engine": {"device": [accel.NAME, "cpu"]}})
    pooled = tacit.run(config, "pooled", model=halves(), dataset=small(), progress=False)
    alone = tacit.run(config, "alone", device="cpu", model=halves(), dataset=small(), progress=False)
    assert all(torch.equal(v, vectors(alone.path)[name]) for name, v in vectors(pooled.path).items())
    assert facts(pooled) == facts(alone)


def test_a_run_goes_on_elsewhere_and_is_exported(tmp_path: Path) -> None:
    config, data = texts("llama", "client", rounds=3), sayings()
    whole = tacit.run(config, "whole", device="cpu", dataset=data, progress=False)
    first = config.model_copy(update={"rounds": 2})
    part = tacit.run(first, "part", device=accel.NAME, dataset=data, progress=False)
    rest = tacit.resume(part.path, rounds=3, device="cpu", dataset=data, progress=False)
    assert torch.equal(vectors(whole.path)["state.theta"], vectors(rest.path)["state.theta"])
    assert "device: accel" in (part.path / "config.yaml").read_text()
    assert all(p.device.type == "cpu" for p in rest.model.parameters())


def test_what_is_not_there_is_refused() -> None:
    config = configured("fedavg")
    with pytest.raises(tacit.UserError, match="torch sees no cuda:7 on this machine, but cpu"):
        tacit.run(config, "a", device="cuda:7", model=halves(), dataset=small())
    with pytest.raises(tacit.UserError, match=r"engine.device.*'gpu!' is no device"):
        tacit.load({**config.model_dump(mode="json"), "engine": {"device": "gpu!"}})
    with pytest.raises(tacit.UserError, match="2 devices for one process"):
        InProcessSettings(device=("cpu", "cpu")).one()
    assert devices("auto") == ["cpu"]


def test_auto_takes_every_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices("auto") == ["cuda:0", "cuda:1"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert devices("auto") == ["cuda"]
