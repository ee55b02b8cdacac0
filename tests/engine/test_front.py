"""The cached outputs of frozen first layers: either they give the same results, or they are not used."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import tacit
from tacit.config.build import build_job
from tacit.data.records import Batch
from tacit.engine import ENGINES, front
from tacit.engine.contract import Order, Participant
from tacit.engine.device import HOST, Compute
from tacit.engine.front import KEPT, Front
from tacit.engine.isolation import Pristine
from tacit.engine.worker import Worker
from tacit.gradients import ClippedGradient
from tacit.models.hub import from_config
from tacit.models.lora import Lora, adapt, train_only
from tacit.models.speech import ctc_transformer
from tacit.tasks.classification import Classification
from tacit.tasks.speech import Speech

pytest.importorskip("transformers")

TASK = Classification()
SMALL = {
    "model_type": "bert", "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 2, "intermediate_size": 32, "pad_token_id": 0, "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _small_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "WORTH", 1)


class Rows:
    """Records that are a batch."""

    labels = users = None

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch["y"])

    def take(self, indices: Any) -> Batch:
        return {name: values[torch.as_tensor(np.asarray(indices))] for name, values in self.batch.items()}

    def prepare(self, batch: Batch) -> Batch:
        return batch


def texts(n: int = 9, width: int = 12, seed: int = 0) -> Rows:
    own = torch.Generator().manual_seed(seed)
    mask = (torch.arange(width) < torch.randint(2, width + 1, (n, 1), generator=own)).long()
    ids = torch.randint(1, 50, (n, width), generator=own) * mask
    return Rows({"input_ids": ids, "attention_mask": mask, "y": torch.randint(0, 3, (n,), generator=own)})


def network(train: tuple[str, ...] = ("head",), **changed: Any) -> nn.Module:
    torch.manual_seed(1)
    model = from_config({**SMALL, **changed}, (12,), 3)
    train_only(model, train)
    return model.train()


def front_of(model: nn.Module, records: Rows | None = None, task: Any = TASK) -> Front:
    found = Front.of(model, task, records or texts(), HOST)
    assert found is not None
    return found


def losses(model: nn.Module, task: Any, batch: Batch) -> Tensor:
    with torch.no_grad():
        found: Tensor = task.losses(model, batch)
    return found


DECODER = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32,
           "vocab_size": 50, "pad_token_id": 0}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "bert": SMALL,
    "roberta": {**SMALL, "model_type": "roberta", "max_position_embeddings": 20},
    "electra": {**SMALL, "model_type": "electra", "embedding_size": 16},
    "llama": {**DECODER, "model_type": "llama", "num_key_value_heads": 2},
    "qwen2": {**DECODER, "model_type": "qwen2", "num_key_value_heads": 2},  # asks layers for their attention
    "gpt2": {"model_type": "gpt2", "n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": 50,
             "pad_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "distilbert": {"model_type": "distilbert", "dim": 16, "hidden_dim": 32, "n_layers": 3, "n_heads": 2,
                   "vocab_size": 50, "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0},
}  # fmt: skip


LAST = {
    "gpt2": "h.2.attn.c_attn",
    "distilbert": "layer.2.attention.q_lin",
    "llama": "layers.2.self_attn.q_proj",
    "qwen2": "layers.2.self_attn.q_proj",
}
"""The query, or what it is a part of, of the last layer."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_alone", [True, False])
def test_losses_and_clipped_gradients_are_those_of_the_whole_network(kind: str, head_alone: bool) -> None:
    """By the whole network in one batch, which is an independent answer; and by the proof."""
    torch.manual_seed(1)
    model = from_config(KINDS[kind], (12,), 3)
    if head_alone:
        train_only(model, ["head"])
    else:
        adapt(model, Lora(rank=2, targets=(LAST.get(kind, "layer.2.attention.self.query"),)))
        for name, p in model.named_parameters():  # a factor that is zero would hide the others' gradients
            if p.requires_grad and "lora_B" in name:
                nn.init.normal_(p, std=0.3)
    found = front_of(model.train())
    assert len(found.task.stand_ins) == (3 if head_alone else 2)
    batch = texts().batch
    whole, resumed = losses(model, TASK, batch), losses(model, found.task, found.extended(batch))
    assert torch.allclose(whole, resumed, rtol=1e-5, atol=1e-6)
    clipped = ClippedGradient(model)
    norms = clipped(batch, TASK.losses, 0.1).norms
    expected = clipped.flat.grad.clone()
    again = clipped(found.extended(batch), found.task.losses, 0.1).norms
    assert torch.allclose(norms, again, rtol=1e-4) and clipped.obstacle is None
    assert float((clipped.flat.grad - expected).norm() / expected.norm()) < 1e-5


def test_what_is_kept_of_a_record_does_not_depend_on_its_neighbours_nor_on_what_is_kept() -> None:
    model, records = network(), texts(20)
    whole = front_of(model).extended(records.batch)[KEPT]
    for chosen in ([3], [3, 4], [19, 3, 0], list(range(20))[::-1]):
        fresh, none = front_of(model), front_of(model)
        none.outputs.room = 0
        for found in (fresh, none, fresh, none):
            assert torch.equal(found.extended(records.take(chosen))[KEPT], whole[chosen])
        assert not none.outputs.found and len(fresh.outputs.found) == len(chosen)


def test_a_record_is_computed_once_and_no_more_is_kept_than_there_is_room_for() -> None:
    model, records = network(), texts(6)
    found, asked = front_of(model), []
    model.bert.encoder.layer[0].register_forward_hook(lambda *_: asked.append(1))
    one = found.extended(records.take([0]))[KEPT]
    found.outputs.room = 2 * one.nbytes
    for _ in range(3):
        found.extended(records.take([0, 1, 2, 3]))
    assert len(found.outputs.found) == 3 and found.outputs.room == 0
    assert len(asked) == 1 + 3 + 1 + 1, "the last of them, which has no room, every time"


def test_training_and_judging_are_kept_apart_and_draws_go_on_as_if_nothing_had_been_computed() -> None:
    """A layer behind the front may draw: whether a record was met before does not show in its masks."""
    model, records = network(classifier_dropout=0.5), texts(4)
    found = front_of(model)
    assert model.training
    torch.manual_seed(3)
    first = losses(model, found.task, found.extended(records.batch))
    torch.manual_seed(3)
    assert torch.equal(losses(model, found.task, found.extended(records.batch)), first)
    model.eval()
    judged = found.task.evaluate(model, found.extended(records.batch, TASK.evaluate))
    assert len(found.outputs.found) == 8
    expected = TASK.evaluate(model, records.batch)
    assert all(torch.allclose(judged[name], expected[name]) for name in expected)


def test_the_network_is_itself_again_after_every_pass_also_after_one_that_fails() -> None:
    model, records = network(), texts(4)
    found, layers = front_of(model), model.bert.encoder.layer
    before, names = list(layers), list(model.state_dict())
    batch = found.extended(records.batch)
    found.task.losses(model, batch)
    with pytest.raises(RuntimeError):
        found.task.losses(model, {**batch, "y": batch["y"].float()})
    assert [a is b for a, b in zip(layers, before, strict=True)] == [True] * 3
    assert list(model.state_dict()) == names and not any(s.value is not None for s in found.task.stand_ins)


def test_a_run_goes_on_with_what_the_one_before_kept_where_the_frozen_numbers_are_the_same() -> None:
    """Whatever else outputs depend on makes another network of it: its numbers, its settings, who asks."""
    records, asked = texts(6), []

    def continued(task: Any = TASK, scale: float = 1.0, head: float = 1.0, **changed: Any) -> Tensor:
        model = network(**changed)
        with torch.no_grad():
            model.bert.encoder.layer[1].output.dense.weight[3, 3] *= scale
            model.classifier.weight *= head
        found = front_of(model, task=task).continued()
        model.bert.encoder.layer[0].register_forward_hook(lambda *_: asked.append(1))
        return found.extended(records.batch)[KEPT]

    def computed(**given: Any) -> int:
        asked.clear()
        kept = continued(**given)
        answers = len(asked)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(front, "_latest", {})
            assert torch.equal(kept, continued(**given)), "as if nothing had been kept"
        return answers

    class Own(Classification):
        """Nobody knows what it does."""

    assert computed() == 6
    assert computed(head=2.0) == 0, "the output layer is trained: it has no part in what is kept"
    assert computed(scale=1.001) == 6
    assert computed() == 6, "one network at a time"
    assert computed(layer_norm_eps=1e-3) == 6
    assert computed(hidden_act="relu") == 6
    assert computed(task=Classification(("f1",))) == 6
    assert computed(task=Own()) == 6
    assert computed(task=Own()) == 6


def test_networks_of_the_same_numbers_that_compute_something_else_do_not_share() -> None:
    """Heads, and the scale of adapters, are attributes: no parameter, config or name of a layer has them."""

    def adapted(alpha: float) -> nn.Module:
        torch.manual_seed(1)
        model = from_config(SMALL, (12,), 3)
        adapt(model, Lora(rank=2, alpha=alpha, targets=("query",)))
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=3.0)
        train_only(model, ["head"])
        return model.train()

    def heard(heads: int) -> nn.Module:
        torch.manual_seed(1)
        still = {"dropout": 0.0, "layer_drop": 0.0, "augment": False, "shift": 0.0}
        model = ctc_transformer((8,), 5, "tiny", heads=heads, **still)
        train_only(model, ["head"])
        return model.train()

    frames, sound = torch.full((3,), 30), torch.randn(3, 30, 8)
    said = {"tokens": torch.full((3, 2), 3), "lengths": torch.full((3,), 2), "y": frames}
    speech = Rows({"x": sound, "frames": frames, **said})
    for task, records, networks in (
        (TASK, texts(3), [adapted(4.0), adapted(64.0)]),
        (Speech(), speech, [heard(4), heard(2)]),
    ):
        for model in networks:
            found = front_of(model, records, task).continued()
            alone = front_of(model, records, task)
            kept = found.extended(records.batch)[KEPT]
            assert found._name() is not None
            assert torch.equal(kept, alone.extended(records.batch)[KEPT])


SWITCHES = {
    **SMALL, "model_type": "big_bird", "block_size": 4, "num_random_blocks": 1, "max_position_embeddings": 64,
    "initializer_range": 0.5,
    "vocab_size": 300,
}  # fmt: skip
"""Its attention is sparse, and full from the first text of at most 28 tokens on, for longer ones too."""


def of_length(width: int) -> Rows:
    ids = torch.randint(1, 50, (1, width), generator=torch.Generator().manual_seed(width))
    return Rows({"input_ids": ids, "attention_mask": torch.ones_like(ids), "y": torch.zeros(1).long()})


def test_nothing_is_kept_of_a_network_that_remembers_who_was_there() -> None:
    """One client's texts must not be in what another, who has some of the same, goes on with."""
    short, long = of_length(12).batch, of_length(48).batch
    model = network(**SWITCHES)
    first = Pristine({"model": model})
    found = front_of(model, of_length(48))
    first.restore()
    alone = found.extended(long)[KEPT]
    found.outputs.found.clear()
    losses(model, found.task, found.extended(short))
    assert KEPT not in found.extended(long) and not found.outputs.found
    first.restore()
    assert torch.equal(found.extended(long)[KEPT], alone)


def sent_by_bob(folder: Path, others: list[str], own: list[str]) -> Tensor:
    """What the last client adds to a sum, in whole numbers; before it another trains on `others`."""
    rows = [{"text": text, "y": 0, "who": "ann"} for text in others]
    rows += [{"text": text, "y": int(text > "d"), "who": "bob"} for text in own]
    data = tacit.dataset(
        rows, test=[{"text": "e", "y": 1, "who": "eve"}], text="text", label="y", user="who",
        classes=["0", "1"], tokenizer="bytes", max_length=64,
    )  # fmt: skip
    config = tacit.load({
        "rounds": 1,
        "data": {"name": "said", "partition": {"kind": "natural"}, "holdout": 0.0},
        "model": {"config": SWITCHES, "train": ["head"]},
        "cohort": 1, "local": {"epochs": 3, "batch": len(own) // 2, "lr": 0.5},
        "privacy": PRIVATE["client"] | {"clip": 1.0},
        "engine": {"kind": "in-process"},
    })  # fmt: skip
    torch.manual_seed(0)
    one = build_job(config, folder, None, data)
    assert one.privacy is not None
    worker, sums = Worker(one), one.empty_sums()
    bounding = one.privacy.bounding({}, one.upload_sizes, one.layout, 1)
    message = {"theta": worker.flat.shared.clone()}
    for client in range(len(one.population)):
        worker.sum(Order(0, 0.5, None, bounding=bounding), message, [Participant(client)], sums)
    return sums["delta"]


@pytest.mark.parametrize("before", [["b" * 10, "a" * 50], ["c" * 60, *["b" * 10] * 6, "a" * 50]])
def test_what_a_client_sends_does_not_tell_of_the_texts_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: list[str]
) -> None:
    """Of who has the same texts."""
    sent = []
    for others in ([], before):
        monkeypatch.setattr(front, "_latest", {})
        sent.append(sent_by_bob(tmp_path, others, ["a" * 50] * 2))
    assert sent[0].any() and torch.equal(*sent)


def test_no_record_decides_by_its_length_how_those_of_others_are_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial in the first record's shape would fail if that is short, and then nothing would be kept of
    anybody's: in batches of several, another way to round.
    """
    sent = []
    for first in ("b" * 50, "b" * 10):
        monkeypatch.setattr(front, "_latest", {})
        sent.append(sent_by_bob(tmp_path, [first, "a" * 50], [letter * 50 for letter in "acegikmo"]))
    assert sent[0].any() and torch.equal(*sent)


def test_under_a_guarantee_records_that_cannot_say_their_shape_have_no_front() -> None:
    class Sized(Rows):
        def blank(self) -> Batch:
            return texts(1, width=8).batch

    class Otherwise(Sized):
        def prepare(self, batch: Batch) -> Batch:
            return batch

    for kind, told in ((Rows, False), (Sized, True), (Otherwise, False)):
        records = kind(texts().batch)
        assert Front.of(network(), TASK, records, HOST) is not None
        assert (Front.of(network(), TASK, records, HOST, protected=True) is not None) == told


class Mixing(nn.Module):
    """Not library code: it might do anything with what it is not shown."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **given: Tensor) -> Any:
        return self.inner(**given)


def hooked(model: nn.Module) -> nn.Module:
    """A loss of what the first layer gave, behind the network's back."""
    seen: list[Tensor] = [torch.zeros(1)]
    model.bert.encoder.layer[0].register_forward_hook(lambda _, args, output: seen.append(output))
    model.classifier.register_forward_hook(lambda _, args, output: output + seen[-1].sum())
    return model


@pytest.mark.parametrize(
    "model",
    [
        lambda: network(hidden_dropout_prob=0.1),
        lambda: network(attention_probs_dropout_prob=0.1),
        lambda: network(("head", "bert.embeddings.word_embeddings.weight")),
        lambda: network(("head", "bert.encoder.layer.0.*")),
        lambda: Mixing(network()),
        lambda: hooked(network()),
    ],
    ids=["dropout", "attention's dropout", "embeddings", "first layer", "a stranger's", "hooked"],
)
def test_a_network_that_is_trained_random_or_strange_before_is_computed_whole(model: Any) -> None:
    assert Front.of(model(), TASK, texts(), HOST) is None


class Layers(nn.Module):
    """Layers one behind the other; what is made of them is up to `end`."""

    def __init__(self, end: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))
        self.head, self.end = nn.Linear(4, 3), end

    def forward(self, x: Tensor) -> Tensor:
        given = [x]
        for layer in self.layers:
            given.append(layer(given[-1]))
        logits: Tensor = self.head(self.end(self, given))
        return logits


def counts(model: Layers, given: list[Tensor]) -> Tensor:
    model.seen.add_(1)
    return given[-1]


@pytest.mark.parametrize(
    ("end", "kept"),
    [
        (lambda model, given: given[-1], True),
        (lambda model, given: given[-1] + given[0], True),  # what comes before all layers is always computed
        (lambda model, given: given[-1] + given[1], False),
        (lambda model, given: torch.stack(given).mean(0), False),
        (lambda model, given: model.layers[2](given[-1]), False),
        (lambda model, given: given[-1] if len(given[1]) else given[2].nan_to_num(), True),
        (counts, False),
        (lambda model, given: given[-1] * (1 + random.random()) * np.random.rand(), True),  # noqa: NPY002
    ],
    ids=["last", "skip", "second", "mean", "twice", "not taken", "buffer", "drawn after"],
)
def test_what_else_is_used_of_skipped_layers_shows(
    monkeypatch: pytest.MonkeyPatch, end: Any, kept: bool
) -> None:
    monkeypatch.setattr(front, "_TRUSTED", (*front._TRUSTED, f"{__name__}."))
    rows = Rows({"x": torch.randn(5, 4), "y": torch.zeros(5, dtype=torch.int64)})
    model = Layers(end)
    found = Front.of(model, TASK, rows, HOST)
    assert (found is not None) == kept
    if found is not None:
        random.seed(0), np.random.seed(0)  # noqa: NPY002
        resumed = losses(model, found.task, found.extended(rows.batch))
        random.seed(0), np.random.seed(0)  # noqa: NPY002
        assert torch.allclose(resumed, losses(model, TASK, rows.batch))


class Tossed(nn.Linear):
    """A layer that Python's or NumPy's generator has a part in."""

    def __init__(self, toss: Callable[[], float]) -> None:
        super().__init__(4, 4)
        self.toss = toss

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0 * self.toss())


@pytest.mark.parametrize("toss", [random.random, np.random.rand, lambda: float(torch.rand(()))])
def test_numbers_drawn_before_by_whatever_generator_leave_nothing_to_keep(
    monkeypatch: pytest.MonkeyPatch, toss: Callable[[], float]
) -> None:
    monkeypatch.setattr(front, "_TRUSTED", (*front._TRUSTED, f"{__name__}."))
    rows = Rows({"x": torch.randn(5, 4), "y": torch.zeros(5, dtype=torch.int64)})
    model = Layers(lambda model, given: given[-1])
    assert Front.of(model, TASK, rows, HOST) is not None
    model.layers[1] = Tossed(toss).requires_grad_(False)
    assert Front.of(model, TASK, rows, HOST) is None
    model.layers[1] = Tossed(lambda: np.random.seed(3) or toss()).requires_grad_(False)  # noqa: NPY002
    assert (Front.of(model, TASK, rows, HOST) is not None) == (toss is np.random.rand), "the same for ever"


def test_outputs_of_other_layers_of_the_same_network_are_not_taken_for_these() -> None:
    model = network(("head", "bert.encoder.layer.2.*"))
    found = front_of(model)
    fewer = replace(found, task=replace(found.task, stand_ins=found.task.stand_ins[:1]))
    same = replace(found, task=replace(found.task))
    elsewhere = replace(found, task=replace(found.task, layers=nn.ModuleList(found.task.layers)))
    names = [each._name() for each in (found, same, fewer, elsewhere)]
    assert None not in names and names[0] == names[1] and len(set(names)) == 3


def test_elsewhere_or_in_other_precision_nothing_is_kept() -> None:
    for compute in (Compute("cuda"), Compute(precision="bf16"), Compute(activation_checkpointing=True)):
        assert Front.of(network(), TASK, texts(), compute) is None
    assert Front.of(network(), TASK, Rows({"y": torch.zeros(0)}), HOST) is None


def test_small_fronts_are_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "WORTH", 1_000_000)
    assert Front.of(network(), TASK, texts(), HOST) is None


PRIVATE = {
    "example": {"unit": "example", "noise": 1.0, "delta": 1e-3, "clip": 0.1, "entropy": "seed"},
    "client": {"unit": "client", "noise": 1.0, "delta": 1e-3, "clip": 0.1, "entropy": "seed"},
    "none": None,
}


@pytest.mark.slow
@pytest.mark.parametrize("unit", PRIVATE)
def test_a_run_is_the_same_with_and_without_room_in_a_pool_and_after_a_break(unit: str) -> None:
    """Every road to the same bits; that the front is used at all is counted."""
    words = ["a", "few", "plain", "words", "of", "nothing", "but", "who", "said", "them"]
    rng = np.random.default_rng(0)
    rows = [
        {"text": " ".join(rng.choice(words, rng.integers(1, 6))), "y": int(n % 2), "who": n % 4}
        for n in range(48)
    ]
    data = tacit.dataset(rows, text="text", label="y", user="who", tokenizer="bytes", max_length=24)
    # Wide enough to be worth it by itself: a pool's workers know of no patch.
    wide = {
        **SMALL,
        "hidden_size": 64,
        "intermediate_size": 4096,
        "vocab_size": 300,
        "max_position_embeddings": 24,
    }
    config = tacit.load({
        "rounds": 3,
        "data": {"name": "said", "partition": {"kind": "natural"}},
        "model": {"config": wide, "train": ["head"]},
        "method": "fedavg", "cohort": 2, "local": {"steps": 2, "batch": 4, "lr": 0.5},
        "privacy": PRIVATE[unit],
        "engine": {"kind": "in-process"},
        "checkpoint": {"every": 1},
    })  # fmt: skip

    def played(name: str, **options: Any) -> dict[str, Tensor]:
        tacit.run(config, name, dataset=data, **options)
        state: dict[str, Tensor] = load_file(Path(name) / "checkpoint/000003/state.safetensors")
        return state

    met: list[int] = []
    extended = Front.extended

    def counting(self: Front, batch: Batch, call: Any = None) -> Batch:
        met.append(len(batch["y"]))
        return extended(self, batch, call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Front, "extended", counting)
        first = played("kept")
        assert sum(met) > 24, "in training and in evaluation"
        patch.setattr(front, "ROOM", 0)
        second = played("no room")
    assert first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)
    if unit == "example":
        third = played("pool", engine=ENGINES["pool"](workers=2))
        assert all(torch.equal(first[k], third[k]) for k in first)
    tacit.run(config.model_copy(update={"rounds": 1}), "broken", dataset=data)
    tacit.resume("broken", rounds=3, dataset=data)
    fourth = load_file(Path("broken/checkpoint/000003/state.safetensors"))
    assert all(torch.equal(first[k], fourth[k]) for k in first)
