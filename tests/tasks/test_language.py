"""The language task against a token-by-token loop, against transformers' own loss, and in a run."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tacit import Dataset, api
from tacit.config import Config, load
from tacit.data import TextRecords, Texts
from tacit.data.tokens import Bytes
from tacit.tasks import Language, build
from text_helpers import sentences

VOCABULARY = 11
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}


class Fixed(torch.nn.Module):
    """Logits that were made before."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.logits


def made() -> tuple[Fixed, dict[str, torch.Tensor], list[int]]:
    torch.manual_seed(0)
    lengths = [7, 1, 0, 4, 2]
    ids = torch.randint(0, VOCABULARY, (5, 7))
    mask = (torch.arange(7) < torch.tensor(lengths).unsqueeze(1)).long()
    return Fixed(torch.randn(5, 7, VOCABULARY)), {"input_ids": ids, "attention_mask": mask}, lengths


def test_against_a_loop_over_tokens() -> None:
    model, batch, lengths = made()
    losses = Language().losses(model, batch)
    total, right, tokens = 0.0, 0, 0
    for i, length in enumerate(lengths):
        own = []
        for t in range(length - 1):
            logits, target = model.logits[i, t].detach(), int(batch["input_ids"][i, t + 1])
            own.append(float(torch.logsumexp(logits, 0) - logits[target]))
            right += int(logits.argmax() == target)
        assert float(losses[i].detach()) == pytest.approx(sum(own) / max(len(own), 1), abs=1e-5)
        total, tokens = total + sum(own), tokens + len(own)
    sums = {name: float(value.detach()) for name, value in Language().evaluate(model, batch).items()}
    assert sums == pytest.approx({"loss": total, "correct": right, "tokens": tokens, "count": 5}, rel=1e-5)
    metrics = Language().summarise(sums)
    assert metrics["perplexity"] == pytest.approx(math.exp(total / tokens))
    assert metrics["bits"] == pytest.approx(math.log2(metrics["perplexity"]))


def test_a_record_s_loss_sends_gradients_to_that_record_alone() -> None:
    model, batch, _ = made()
    for i in range(5):
        model.zero_grad()
        Language().losses(model, batch)[i].backward()
        assert model.logits.grad is not None
        touched = model.logits.grad.abs().sum((1, 2)) > 0
        assert touched.tolist() == [j == i and i in (0, 3, 4) for j in range(5)]


@pytest.mark.slow
def test_transformers_own_loss_agrees() -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=259, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    model = transformers.GPT2LMHeadModel(config).eval()
    records = TextRecords(Texts.of(["hello", "good morning to you"]), Bytes(), 32)
    together = Language().losses(model, records.prepare(records.take(np.arange(2))))
    for i, text in enumerate(("hello", "good morning to you")):
        ids = torch.tensor([Bytes()([text], None, 32)[0].ids])
        torch.testing.assert_close(together[i], model(ids, labels=ids).loss)


def test_nothing_counted_is_no_number() -> None:
    metrics = build("language").summarise({"loss": 0.0, "correct": 0.0, "tokens": 0.0, "count": 0.0})
    assert all(math.isnan(value) for value in metrics.values())


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["client", "example"])
def test_a_private_language_model_of_natural_users(unit: str, tmp_path: Path) -> None:
    lines = sentences(60)
    users = [f"u{i % 12}" for i in range(60)]
    records = TextRecords(Texts.of(lines), Bytes(), 32, users=users)
    data = Dataset("lines", records, records, 0, (32,), task="language", tokenizer=Bytes())
    values = {
        "rounds": 2,
        "data": {"name": "fashion-mnist-slice", "partition": {"kind": "natural"}},
        "model": {"config": GPT2},
        "cohort": 4, "local": {"steps": 2, "batch": 4, "lr": 0.5}, "engine": {"workers": 0},
        "privacy": {"unit": unit, "noise": 0.0, "clip": 10.0, "delta": 1e-3, "entropy": "seed"},
    }  # fmt: skip
    result = api.run(load(values, {"rounds": 6}), tmp_path / "run", dataset=data)
    first, last = (record["bits"] for record in (result.metrics[0], result.metrics[-1]))
    assert last < first < 8.3  # 259 bytes are 8.02 bits before anything is learned
    assert {"perplexity", "accuracy", "loss"} <= result.metrics[-1].keys()


def chats(judges: list[str]) -> Dataset:
    """Six users who write, and those who judge."""
    lines = sentences(48)
    train = TextRecords(Texts.of(lines), Bytes(), 32, users=[f"u{i % 6}" for i in range(48)])
    test = TextRecords(Texts.of(lines[:24]), Bytes(), 32, users=[judges[i % len(judges)] for i in range(24)])
    return Dataset("lines", train, test, 0, (32,), task="language", tokenizer=Bytes())


def chat_config(unit: str | None, entropy: str = "os") -> Config:
    privacy = {"unit": unit, "noise": 1.0, "clip": 1.0, "delta": 1e-3, "entropy": entropy}
    values = {
        "rounds": 1,
        "data": {"name": "lines", "partition": {"kind": "natural"}},
        "model": {"config": GPT2},
        "cohort": 3, "local": {"steps": 1, "batch": 4, "lr": 0.1}, "engine": {"workers": 0},
        "privacy": privacy if unit else None,
    }  # fmt: skip
    return load(values)


def test_perplexity_by_user_is_that_of_the_user_s_own_tokens(tmp_path: Path) -> None:
    data = chats(["v", "w", "x"])
    result = api.run(chat_config("client"), tmp_path / "run", dataset=data)
    found = api.test(tmp_path / "run", dataset=data)
    assert found.withheld is None and set(found.users) == {"v", "w", "x"}
    model, whole = result.model.eval(), [0.0, 0]
    for user, own in found.users.items():
        total, tokens = 0.0, 0
        for i in np.flatnonzero(np.array(data.test.users) == user):
            batch = data.test.prepare(data.test.take(np.array([i])))
            ids = batch["input_ids"][0, : int(batch["attention_mask"].sum())]
            log_p = model(ids.unsqueeze(0)).logits[0].log_softmax(1)
            total -= float(log_p[:-1].gather(1, ids[1:, None]).sum().detach())
            tokens += len(ids) - 1
        assert own["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-4)
        whole = [whole[0] + total, whole[1] + tokens]
    assert found.whole["perplexity"] == pytest.approx(math.exp(whole[0] / whole[1]), rel=1e-4)
    values = sorted(own["perplexity"] for own in found.users.values())
    assert [found.spread[name] for name in ("best", "median", "worst")] == values


@pytest.mark.parametrize(
    ("unit", "entropy", "judges", "told"),
    [
        ("client", "os", ["u1", "new"], False),
        ("client", "os", ["new"], True),
        ("client", "seed", ["u1"], True),
        ("example", "os", ["u1"], True),
        (None, "os", ["u1"], True),
    ],
)
def test_nothing_exact_is_told_of_single_users_whom_a_run_protects(
    unit: str | None, entropy: str, judges: list[str], told: bool, tmp_path: Path
) -> None:
    data = chats(judges)
    api.run(chat_config(unit, entropy), tmp_path / "run", dataset=data)
    found = api.test(tmp_path / "run", dataset=data)
    assert bool(found.users) == bool(found.spread) == told
    assert told == (found.withheld is None) and math.isfinite(found.whole["perplexity"])
