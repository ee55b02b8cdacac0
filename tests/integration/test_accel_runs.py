"""Runs on the simulated accelerator: the CPU's exact bits, nothing on the wrong device, few copies."""

from __future__ import annotations

from collections.abc import Callable
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
from tacit.engine.device import Compute, devices
from tacit.engine.kinds import AutoSettings
from tacit.models import MODELS
from tacit.privacy import MECHANISMS
from tacit.tasks import TASKS
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
    # Numbers that Python waits for: a few a client, and two for each gradient, of which some take two a step.
    assert traffic.reads <= 16 + participants * (4 + STEPS * 2 * 2)


def test_a_plain_step_waits_for_nothing() -> None:
    """So the host prepares and sends the next batch while a device computes."""
    waits = []
    for steps in (2, 5):
        config = configured("fedavg", {"rounds": 1, "local.steps": steps})
        with accel.counting() as traffic:
            tacit.run(
                config, f"steps-{steps}", device=accel.NAME, model=halves(), dataset=small(), progress=False
            )
        waits.append((traffic.reads, traffic.down))
    assert waits[0] == waits[1]


CLIENT_LEVEL: dict[str, dict[str, Any]] = {
    "client": {},
    "adaptive-clip": {"privacy.adaptive": {}},
    "layered": {"privacy.noise_by_layer": {"*": 0.5}},
    "blt": {"privacy.mechanism": "blt", "cohort": 2},
    "banded": {"privacy.mechanism": {"kind": "banded", "bands": 2}, "cohort": 2},
    "secure": {"privacy.aggregation": "secure"},
    "noise at the clients": {"privacy.noise_at": "clients"},
    "a bound for each layer": {"privacy.clip.per": "dim"},
    "normalised updates": {"privacy.clip.mode": "normalize"},
    "private metrics": {"privacy.metrics": True},
}
"""What a config says for each mechanism of the registry, and for the ways to use one."""


@pytest.mark.parametrize("name", [*MECHANISMS, *(name for name in CLIENT_LEVEL if name not in MECHANISMS)])
def test_every_mechanism(name: str) -> None:
    if name == "example":
        config = configured("dp-fedavg", {"rounds": 2})
    else:
        config = configured("dp-fedavg-client", {"privacy.noise": 1.0, "rounds": 2, **CLIENT_LEVEL[name]})
    both(config, model=halves(), dataset=small())


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
    "roberta": {
        "model_type": "roberta", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 24, "max_position_embeddings": 300,  # positions begin after the padding's number
    },
    "vit": {
        "model_type": "vit", "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3,
        "intermediate_size": 24, "patch_size": 4,
    },
    "swin": {
        "model_type": "swin", "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "patch_size": 2,
        "window_size": 2, "drop_path_rate": 0.1,
    },
}  # fmt: skip
SMALL_VIT = {"name": "vit", "patch": 4, "width": 12, "depth": 2, "heads": 3, "dropout": 0.1}
FAMILIES: dict[str, dict[str, Any] | None] = {
    "cnn": {"name": "cnn"},
    "ctc_transformer": None,
    "logistic": {"name": "logistic"},
    "mlp": {"name": "mlp", "hidden": [8]},
    "resnet18": {"name": "resnet18"},
    "roberta_base": None,
    "swin_base": {"config": TINY["swin"]},
    "swin_tiny": {"config": TINY["swin"]},
    "vit": SMALL_VIT,
    "vit_base": {"config": TINY["vit"]},
    "vit_tiny": SMALL_VIT,
}
"""Each network of the registry at its smallest; None: it reads no pictures, and has a test of its own."""


def test_every_network_of_the_registry_has_its_family_here() -> None:
    assert FAMILIES.keys() == MODELS.keys()


PICTURES = {str(model): name for name, model in FAMILIES.items() if model is not None}
"""Families that are the same at their smallest are tested once."""


@pytest.mark.parametrize("unit", ["none", "example", "client"])
@pytest.mark.parametrize("name", PICTURES.values())
def test_every_model_family(name: str, unit: str) -> None:
    method = {"none": "fedavg", "example": "dp-fedadamw", "client": "dp-fedavg-client"}[unit]
    # One round: what is kept from round to round on a device, every method and mechanism shows above.
    options: dict[str, Any] = {"model": FAMILIES[name], "local.batch": 4, "local.steps": 2, "cohort": 2}
    options["rounds"] = 1
    if unit == "client":
        options["privacy.noise"] = 1.0
    both(configured(method, options), dataset=blobs(24, side=22 if name == "cnn" else 8))


def sayings(labelled: bool = False) -> tacit.Dataset:
    rows = [{"text": text, "who": n % 6, "y": n % 2} for n, text in enumerate(sentences(48))]
    options = {"label": "y"} if labelled else {"task": "language"}
    return tacit.dataset(rows, text="text", user="who", tokenizer="bytes", max_length=16, **options)


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


@pytest.mark.parametrize("model", ["bert", "roberta"])
def test_text_classification(model: str) -> None:
    both(texts(model, "example"), dataset=sayings(labelled=True))


def tagged() -> tacit.Dataset:
    rows = [
        {"words": text.split(), "tags": ["AB"[len(w) % 2] for w in text.split()]} for text in sentences(24)
    ]
    options = {"text": "words", "label": "tags", "task": "token-classification"}
    return tacit.dataset(rows, tokenizer="bytes", max_length=32, **options)


def table(task: str) -> tacit.Dataset:
    x = np.random.default_rng(0).normal(size=(48, 4)).astype(np.float32)
    label = x[:, 0].tolist() if task == "regression" else [["a"] * bool(r[0] > 0) + ["b"] for r in x]
    rows = [{**{f"x{i}": v for i, v in enumerate(r.tolist())}, "y": y} for r, y in zip(x, label, strict=True)]
    return tacit.dataset(rows, features=["x0", "x1", "x2", "x3"], label="y", task=task)


def speech() -> Config:
    model = {"name": "ctc-transformer", "size": "tiny", "depth": 1, "width": 24, "hidden": 32}
    values = {
        "rounds": 2, "data": {"name": "tiny", "partition": {"kind": "natural"}},
        "model": {**model, "dropout": 0.1, "layer_drop": 0.1}, "cohort": 2,
        "local": {"steps": 2, "seconds": 2.0, "lr": 0.1, "clip": 1.0},
        "evaluate": {"every": 2, "batch": 16}, "engine": {"workers": 0},
    }  # fmt: skip
    return tacit.load(values)


IID = {"name": "own", "partition": {"kind": "iid", "clients": CLIENTS}}


def perceptron() -> Config:
    return configured("dp-fedavg", {"model": {"name": "mlp", "hidden": [4]}, "data": IID})


TRAINED: dict[str, Callable[[], tuple[Config, tacit.Dataset]]] = {
    "classification": lambda: (texts("bert", None), sayings(labelled=True)),
    "language": lambda: (texts("gpt2", None), sayings()),
    "multi-label": lambda: (perceptron(), table("multi-label")),
    "regression": lambda: (perceptron(), table("regression")),
    "speech": lambda: (speech(), tiny(speakers=3, utterances=4)),
    "token-classification": lambda: (texts("bert", "example", data=IID), tagged()),
}


@pytest.mark.parametrize("task", TASKS)
def test_every_task(task: str) -> None:
    config, data = TRAINED[task]()
    both(config, dataset=data)


def test_a_pool_with_a_worker_for_each_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in accel.environment(tmp_path / "device").items():
        monkeypatch.setenv(name, value)
    config = configured("dp-fedavg-client", {"privacy.noise": 1.0, "engine": {"device": [accel.NAME, "cpu"]}})
    pooled = tacit.run(config, "pooled", model=halves(), dataset=small(), progress=False)
    alone = tacit.run(config, "alone", device="cpu", model=halves(), dataset=small(), progress=False)
    assert all(torch.equal(v, vectors(alone.path)[name]) for name, v in vectors(pooled.path).items())
    assert facts(pooled) == facts(alone)


def test_a_run_goes_on_elsewhere_and_back_and_is_exported(tmp_path: Path) -> None:
    config, data = texts("llama", "client", rounds=3), sayings()
    whole = tacit.run(config, "whole", device="cpu", dataset=data, progress=False)
    tacit.export(whole.path, tmp_path / "exported" / "whole", dataset=data)
    expected, exported = vectors(whole.path), load_file(tmp_path / "exported" / "whole" / "model.safetensors")
    for places in ([accel.NAME, "cpu", accel.NAME], ["cpu", accel.NAME, "cpu"]):
        name = "-".join(places)
        first = config.model_copy(update={"rounds": 1})
        part = tacit.run(first, name, device=places[0], dataset=data, progress=False)
        assert f"device: {places[0]}" in (part.path / "config.yaml").read_text()
        for rounds, place in enumerate(places[1:], 2):
            part = tacit.resume(part.path, rounds=rounds, device=place, dataset=data, progress=False)
        assert all(torch.equal(vector, expected[key]) for key, vector in vectors(part.path).items())
        assert facts(part)[-1] == facts(whole)[-1]  # the end of each part is tested, too
        assert all(p.device.type == "cpu" for p in part.model.parameters())
        assert tacit.test(part.path, dataset=data).whole == tacit.test(whole.path, dataset=data).whole
        tacit.export(part.path, tmp_path / "exported" / name, dataset=data)
        again = load_file(tmp_path / "exported" / name / "model.safetensors")
        assert all(torch.equal(tensor, again[key]) for key, tensor in exported.items())


def test_what_is_not_there_is_refused() -> None:
    config = configured("fedavg")
    with pytest.raises(tacit.UserError, match="torch sees no cuda:7 on this machine, but cpu"):
        tacit.run(config, "a", device="cuda:7", model=halves(), dataset=small())
    with pytest.raises(tacit.UserError, match=r"engine.device.*'gpu!' is no device"):
        tacit.load({**config.model_dump(mode="json"), "engine": {"device": "gpu!"}})
    with pytest.raises(tacit.UserError, match="2 devices for one process"):
        InProcessSettings(device=("cpu", "cpu")).one()
    for device, what in {
        "cpu:3": "'cpu:3' is no device", 0: "0 is no device", "CUDA": "'CUDA' is no device",
        ("cpu", "auto"): "auto is for itself", (("cpu",),): "is no device",
    }.items():  # fmt: skip
        with pytest.raises(tacit.UserError, match=what) as told:
            tacit.load({**config.model_dump(mode="json"), "engine": {"device": device}})
        assert "more)" not in str(told.value)
    for workers in (0, 1):
        with pytest.raises(tacit.UserError, match=f"engine.workers: {workers} for a list of 2 devices"):
            AutoSettings(workers=workers, device=("cpu", "cpu")).computes()
    assert devices("auto") == ["cpu"]


def test_auto_takes_every_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices("auto") == ["cuda:0", "cuda:1"]
    assert devices(["cuda:0", "cuda:1"]) == ["cuda:0", "cuda:1"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert devices("auto") == ["cuda"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    assert devices("auto") == devices("mps") == ["mps"]
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 3)
    assert devices("auto") == ["xpu:0", "xpu:1", "xpu:2"] and devices("xpu:2") == ["xpu:2"]


def test_sums_of_a_device_without_float64_are_the_host_s() -> None:
    assert Compute("mps").sums == "cpu" and Compute("cuda:1").sums == "cuda:1"


class Pinned:
    """What a batch's tensor is asked for on its way to a GPU."""

    def __init__(self, told: list[object]) -> None:
        self.told = told

    def pin_memory(self) -> Pinned:
        self.told.append("pinned")
        return self

    def to(self, device: str, non_blocking: bool = False) -> Pinned:
        self.told.append((device, non_blocking))
        return self


def test_a_batch_reaches_a_gpu_from_pinned_memory_while_it_computes() -> None:
    told: list[object] = []
    Compute("cuda:1").batch({"x": Pinned(told)})  # type: ignore[dict-item]
    assert told == ["pinned", ("cuda:1", True)]
