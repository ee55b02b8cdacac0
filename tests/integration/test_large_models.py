"""Models of transformers by name, config and folder; which parts are trained; a run on texts."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tacit
from conftest import blobs
from tacit import models
from tacit.config.build import build_base, build_job, build_model
from tacit.errors import UserError
from tacit.models import hub
from tacit.models.lora import Lora, adapt, train_only
from tacit.privacy import Grid
from tacit.privacy.gaussian import add_rounded_gaussian_
from tacit.vector import Flat, Layout
from texts import GPT2, LORA, QUIET, ROBERTA, VIT, text_config, texts

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")


def roberta(classes: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return hub.from_config(ROBERTA, (9,), classes)


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def test_the_names_have_the_published_sizes() -> None:
    """Counted by hand from the papers' sizes."""

    def layer(e: int) -> int:
        return 4 * (e * e + e) + (4 * e * e + 4 * e) + (4 * e * e + e) + 4 * e

    e = 768
    vit = 12 * layer(e) + (3 * 16 * 16 * e + e) + e + 197 * e + 2 * e + 10 * e + 10
    roberta = 12 * layer(e) + 50265 * e + 514 * e + e + 2 * e + (e * e + e) + (2 * e + 2)

    def swin(e: int, depths: list[int], heads: list[int]) -> int:
        total = (3 * 16 * e + e) + 2 * e
        for stage, (depth, h) in enumerate(zip(depths, heads, strict=True)):
            width = e << stage
            total += depth * (layer(width) + 13 * 13 * h)
            if stage < 3:
                total += 4 * width * 2 * width + 2 * 4 * width
        last = e << 3
        return total + 2 * last + 10 * last + 10

    expected = {
        "vit-base": vit,
        "roberta-base": roberta,
        "swin-tiny": swin(96, [2, 2, 6, 2], [3, 6, 12, 24]),
        "swin-base": swin(128, [2, 2, 18, 2], [4, 8, 16, 32]),
    }
    for name, count in expected.items():
        shape, classes = ((128,), 2) if name == "roberta-base" else ((3, 224, 224), 10)
        with torch.device("meta"):
            model = models.build(name, shape, classes)
        assert sum(p.numel() for p in model.parameters()) == count, name
    assert 124e6 < roberta < 126e6 and 85e6 < vit < 87e6


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: roberta(3), ("classifier",)),
        (lambda: hub.from_config(VIT, (1, 8, 8), 3), ("classifier",)),
        (lambda: hub.from_config(GPT2, (9,), 3), ("score",)),
        (lambda: models.build("mlp", (4,), 3, hidden=[5]), ("head",)),
        (lambda: nn.Sequential(nn.Linear(2, 2)), ()),
    ],
)
def test_output_layers_are_found_by_module(build: Any, expected: tuple[str, ...]) -> None:
    from tacit.vector.layout import output_layers

    assert output_layers(build()) == expected


def test_a_personal_head_is_whatever_the_model_calls_it() -> None:
    layout = Layout.of(roberta(), ("head",))
    personal = [s.name for s in layout.segments if s.offset >= layout.shared]
    assert personal == [f"classifier.{n}.{w}" for n in ("dense", "out_proj") for w in ("weight", "bias")]
    with pytest.raises(UserError, match="'head' matches no parameter"):
        Layout.of(nn.Sequential(nn.Linear(2, 2)), ("head",))


def test_lora_trains_its_factors_and_the_classifier() -> None:
    model = roberta()
    before = {name: p.clone() for name, p in model.named_parameters()}
    adapt(model, Lora(2, 4.0, ("query", "value"), 0.1))
    names = list(trainable(model))
    assert len([n for n in names if "lora_" in n]) == 2 * 2 * 2
    assert [n for n in names if "lora_" not in n] == [n for n in before if n.startswith("classifier")]
    assert Flat(model).layout.size == 2 * 2 * 2 * (2 * 16) + (16 * 16 + 16 + 2 * 16 + 2)
    kept = {n.replace(".base_layer", ""): p for n, p in model.named_parameters()}
    assert all(torch.equal(kept[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    ("config", "shape", "targets", "layers"),
    [
        (VIT, (1, 8, 8), ("query", "value"), 2),
        (ROBERTA, (9,), ("q_proj", "k", "value"), 6),
        (GPT2, (9,), ("query", "value"), 1),  # one fused matrix
        (
            ROBERTA,
            (9,),
            ("dense",),
            6,
        ),  # attention output, up and down of two layers; not the classifier's own
    ],
)
def test_targets_are_found_under_the_models_own_names(
    config: dict[str, Any], shape: tuple[int, ...], targets: tuple[str, ...], layers: int
) -> None:
    model = hub.from_config(config, shape, 2)
    adapt(model, Lora(2, 4.0, targets))
    assert len([n for n in trainable(model) if "lora_A" in n]) == layers
    assert not [n for n in trainable(model) if "lora_" in n and n.startswith(("classifier", "score"))]


def test_a_language_model_keeps_its_tied_output() -> None:
    model = hub.from_config(GPT2, (9,), 40, language=True)
    assert type(model).__name__ == "GPT2LMHeadModel" and not model.config.use_cache
    adapt(model, Lora(2, 4.0))
    assert all("lora_" in name for name in trainable(model))


def test_only_chosen_parameters_are_trained() -> None:
    model = roberta()
    train_only(model, ["head", "*.layer.1.*"])
    assert {n.split(".")[0] for n in trainable(model)} == {"roberta", "classifier"}
    assert all(n.startswith("classifier") or ".layer.1." in n for n in trainable(model))
    model = roberta()
    adapt(model, Lora(2, 4.0))
    factors = len(trainable(model))
    train_only(model, ["*LayerNorm*"], adapted=True)
    assert len(trainable(model)) == factors + 2 * (1 + 2 * 2)
    with pytest.raises(UserError, match=r"model\.train: 'nothing' matches no parameter"):
        train_only(model, ["nothing"])


def test_a_folder_gives_its_weights_and_a_new_classifier(tmp_path: Path) -> None:
    source = roberta(5)
    source.save_pretrained(tmp_path / "model")
    torch.manual_seed(1)
    model = hub.from_hub(str(tmp_path / "model"), (9,), 3)
    old, new = dict(source.named_parameters()), dict(model.named_parameters())
    assert new["classifier.out_proj.weight"].shape == (3, 16)
    assert all(torch.equal(old[n], p) for n, p in new.items() if n.startswith("roberta"))
    torch.manual_seed(1)
    again = hub.from_hub(str(tmp_path / "model"), (9,), 3)
    assert torch.equal(again.classifier.out_proj.weight, model.classifier.out_proj.weight)


def test_a_config_file_gives_the_same_network(tmp_path: Path) -> None:
    roberta(5).config.save_pretrained(tmp_path)
    for where in (tmp_path, tmp_path / "config.json"):
        model = hub.from_config(str(where), (9,), 3)
        assert model.classifier.out_proj.weight.shape == (3, 16)


def test_half_precision_weights_become_floats(tmp_path: Path) -> None:
    roberta().half().save_pretrained(tmp_path / "model")
    model = hub.from_hub(str(tmp_path / "model"), (9,), 2)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("config", "shape", "message"),
    [
        ({"hidden_size": 8}, (9,), "say which architecture as model_type"),
        ({"model_type": "robberta"}, (9,), "no model_type 'robberta'; did you mean 'roberta'"),
        ({**ROBERTA, "hidden_sise": 8}, (9,), "has no 'hidden_sise'; did you mean 'hidden_size'"),
        (ROBERTA, (3, 32, 32), "no roberta that classifies pictures"),
        (VIT, (9,), "no vit that classifies texts"),
        ({**VIT, "patch_size": 5}, (1, 8, 8), "cannot be cut into patches of 5"),
        ({**VIT, "image_size": 16}, (1, 8, 8), "set data.size: 16"),
        ({**ROBERTA, "num_attention_heads": 3}, (9,), r"model\.config: no roberta can be built"),
        ("nowhere.json", (9,), "nowhere.json cannot be read"),
    ],
)
def test_mistakes_in_a_config_are_named(config: Any, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        hub.from_config(config, shape, 2)


def test_mistakes_with_a_folder_are_named(tmp_path: Path) -> None:
    vit = hub.from_config(VIT, (3, 16, 16), 2)
    vit.save_pretrained(tmp_path / "vit")
    with pytest.raises(UserError, match=r"16 × 16 pixels, and the data set's are 8 × 8; set data\.size: 16"):
        hub.from_hub(str(tmp_path / "vit"), (3, 8, 8), 2)
    with pytest.raises(UserError, match="reads pictures of 3 channels, and the data set's have 1"):
        hub.from_hub(str(tmp_path / "vit"), (1, 16, 16), 2)
    roberta().save_pretrained(tmp_path / "text")
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    (tmp_path / "text" / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    with pytest.raises(UserError, match="its weights belong to another kind of model"):
        hub.from_hub(str(tmp_path / "text"), (9,), 2)
    (tmp_path / "vit" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="cannot be loaded"):
        hub.from_hub(str(tmp_path / "vit"), (3, 16, 16), 2)


def test_dropout_beside_hub_is_for_all_that_the_models_config_calls_so(tmp_path: Path) -> None:
    from torch import nn

    own = hub.from_config({**ROBERTA, "attention_probs_dropout_prob": 0.2}, (9,), 2)
    own.save_pretrained(tmp_path / "model")

    def dropouts(**options: Any) -> set[float]:
        model = hub.from_hub(str(tmp_path / "model"), (9,), 2, **options)
        config = model.config.to_dict()
        return {config["hidden_dropout_prob"], config["attention_probs_dropout_prob"]} | {
            part.p for part in model.modules() if isinstance(part, nn.Dropout)
        }

    assert dropouts() == {0.1, 0.2}
    for share in (0.0, 0.3):
        assert dropouts(dropout=share) == dropouts(dropout=share, frozen="empty") == {share}
    config = text_config(hub=str(tmp_path / "model"), dropout=0.0)
    assert config.model.hub_dropout == 0.0 and config.model.options == {"dropout": 0.0}
    assert text_config(name="vit", dropout=0.5).model.hub_dropout is None, "an option of that network"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"lora": {"rank": 4}}, "model: give one of name, hub and config .none is given"),
        ({"name": "mlp", "hub": "minilm"}, "not name and hub together"),
        ({"hub": "minilm", "rank": 4}, "unknown key 'rank'; known keys are name, hub, config"),
        ({"hub": "minilm", "lora": {"rnk": 4}}, r"model\.lora\.rnk: unknown key; did you mean 'rank'"),
        ({"hub": "minilm", "lora": {"rank": 0}}, r"model\.lora\.rank: must be greater than 0"),
        ({"hub": "minilm", "dropout": 1.0}, "dropout: give a share from 0 to below 1 .got 1.0"),
        ({"config": {"model_type": "bert"}, "dropout": 0.0}, "unknown key 'dropout'; known keys are name"),
    ],
)
def test_mistakes_in_the_section_are_named(model: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        text_config(**model)


def test_names_work_as_before_and_take_lora_too() -> None:
    assert text_config(name="mlp", hidden=[4]).model.options == {"hidden": [4]}
    config = text_config(name="vit", patch=2, width=8, depth=1, heads=2, lora={"rank": 2, "targets": ["qkv"]})
    model = build_model(config, blobs())
    assert sum("lora_" in n for n in trainable(model)) == 2
    with pytest.raises(UserError, match=r"model\.lora\.targets: the model has no layer 'query'"):
        build_model(text_config(name="mlp", lora={}), blobs())


@pytest.mark.parametrize(("missing", "what"), [("transformers", "transformers"), ("peft", "peft")])
def test_a_missing_extra_is_named(missing: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UserError, match=rf"needs {what}; `pip install 'tacit\[transformers\]'`"):
        build_model(text_config(), texts())


def test_missing_weights_are_told_before_anything_starts(tmp_path: Path) -> None:
    config = text_config({"data.offline": True}, hub="someone/nothing")
    with pytest.raises(UserError, match="no files for model 'someone/nothing'"):
        tacit.run(config, tmp_path / "run", dataset=texts())
    assert not (tmp_path / "run").exists()


def test_a_run_on_local_files_asks_nobody(
    tmp_path: Path, no_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    roberta().save_pretrained(tmp_path / "model")
    config = text_config({"rounds": 1}, hub=str(tmp_path / "model"), lora=LORA)
    tacit.run(config, tmp_path / "run", dataset=texts())
    tacit.export(tmp_path / "run", tmp_path / "export", dataset=texts())


PRIVATE = {"privacy": {"unit": "example", "clip": 1.0, "noise": 0.5, "delta": 1e-3, "entropy": "seed"}}


@pytest.mark.parametrize(
    ("workers", "private"), [(0, False), (0, True), pytest.param(2, True, marks=pytest.mark.slow)]
)
def test_texts_are_learnt_and_the_base_stays(tmp_path: Path, workers: int, private: bool) -> None:
    changes: dict[str, Any] = {"engine.workers": workers, "rounds": 3, **(PRIVATE if private else {})}
    config = text_config(changes, config={**ROBERTA, **QUIET}, lora={**LORA, "alpha": 16})
    data = texts()
    model = build_model(config, data)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    moving = set(trainable(model))
    result = tacit.run(config, tmp_path / "run", model=model, dataset=data)
    assert math.isfinite(result.last("loss"))
    for name, parameter in result.model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in moving), name


@pytest.mark.parametrize("method", ["dp-fedadamw", "dp2-fedsam", "scaffold", "dp-fedlamb"])
def test_methods_run_on_an_adapted_model(tmp_path: Path, method: str) -> None:
    changes: dict[str, Any] = {"method": method, "rounds": 1}
    if method != "scaffold":
        changes["privacy.entropy"] = "seed"
    result = tacit.run(text_config(changes), tmp_path / "run", dataset=texts())
    assert math.isfinite(result.last("loss"))


def test_a_private_round_is_the_loop_one_would_write_with_peft(tmp_path: Path) -> None:
    """Adapters and classifier of plain peft, one backward pass for each record, clipped by the textbook."""
    import peft

    privacy = {"unit": "example", "clip": 0.5, "noise": 0.7, "delta": 1e-3, "entropy": "seed"}
    changes: dict[str, Any] = {"privacy": privacy, "rounds": 1, "cohort": 6, "local.lr": 0.3}
    config = text_config(changes, config={**ROBERTA, **QUIET}, lora={**LORA, "alpha": 16})
    data = texts()
    adapters = peft.LoraConfig(
        r=2, lora_alpha=16, target_modules=["query", "value"], modules_to_save=["classifier"]
    )
    theirs = peft.get_peft_model(build_base(config, data), adapters)
    ours = build_model(config, data)

    def plain_name(name: str) -> str:
        return name.replace("base_model.model.", "").replace("modules_to_save.default.", "")

    moving = {plain_name(n): p for n, p in theirs.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in trainable(ours).items():
            moving[name].copy_(parameter)
    start = {name: p.detach().clone() for name, p in moving.items()}
    job = build_job(config, tmp_path / "other", model=ours, dataset=data)
    assert job.privacy is not None
    total = {name: torch.zeros_like(p) for name, p in moving.items()}
    for client in range(6):
        with torch.no_grad():
            for name, p in moving.items():
                p.copy_(start[name])
        mine = job.population.train(client)
        coins, noise = (job.privacy.bits(0, 0, 0, client, purpose) for purpose in (0, 1))
        for _ in range(2):
            drawn = mine[coins.words(len(mine)) < np.uint64(8 / len(mine) * 2.0**64)]
            gradient = torch.zeros(sum(p.numel() for p in moving.values()))
            for record in drawn:
                batch = data.train.take([record])
                logits = theirs(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
                loss = nn.functional.cross_entropy(logits, batch["y"])
                g = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(moving.values()))])
                gradient += g * min(1.0, 0.5 / float(g.norm()))
            std, whole = job.privacy.std(len(gradient), 8), torch.zeros(len(gradient), dtype=torch.int64)
            assert 0.7 * 0.5 < std < 0.7 * 0.5 * 1.005  # a little for float32 and the grid
            unit = Grid.fit(0.5, len(gradient), 0.7).unit
            add_rounded_gaussian_(whole, std / unit, noise)
            gradient += whole * unit
            with torch.no_grad():
                parts = gradient.split([p.numel() for p in moving.values()])
                for p, part in zip(moving.values(), parts, strict=True):
                    p.sub_(part.view_as(p) / 8, alpha=0.3)
        for name, p in moving.items():
            total[name] += (p.detach() - start[name]) / 6
    result = tacit.run(config, tmp_path / "run", model=ours, dataset=data)
    for name, parameter in trainable(result.model).items():
        torch.testing.assert_close(parameter.detach(), start[name] + total[name], rtol=1e-4, atol=1e-6)
