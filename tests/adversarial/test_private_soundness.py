"""Side channels: no client's data may reach the server or another client, except clipped, noised and charged.

Each test opens one such channel on purpose and checks whether anything leaks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tacit
from tacit.algorithms import Algorithm, FedAvg
from tacit.config.build import build_job
from tacit.engine import InProcess, Order, Participant
from tacit.federation.statements import LEDGER
from tacit.gradients import Batch, ClippedGradient
from tacit.tasks import Classification
from tacit.vector import Layout, Vectors, read_values

CLIENT = {"unit": "client", "clip": 0.5, "noise": 1.0, "delta": 1e-3}
EXAMPLE = {"unit": "example", "clip": 0.5, "noise": 1.0, "delta": 1e-3}


class Remembers(nn.Module):
    """A layer that keeps a statistic of what passes, in one kind of buffer."""

    def __init__(self, persistent: bool, used: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)
        self.used = used
        self.register_buffer("seen", torch.zeros(16), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.training:
            with torch.no_grad():
                self.seen += x.detach().sum(0)
        return self.linear(x + self.seen if self.used else x)


# --- buffers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("used", [True, False])
def test_statistics_of_records_are_refused_at_example_level(config, dataset, persistent, used) -> None:
    with pytest.raises(Exception, match=r"remembers them|mixes the records"):
        tacit.run(config(privacy=EXAMPLE), dataset=dataset, model=Remembers(persistent, used))


def test_a_buffer_that_stays_as_it_is_may_stay(config, dataset) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4))
    model.register_buffer("table", torch.arange(3.0))
    for privacy in (CLIENT, EXAMPLE):
        result = tacit.run(config(rounds=2, privacy=privacy), dataset=dataset, model=model)
        assert result.model.state_dict()["table"].tolist() == [0, 1, 2]  # neither noised nor divided


def test_buffers_do_not_leave_a_protected_client(config, dataset) -> None:
    model = Remembers(persistent=True)
    result = tacit.run(config(rounds=2, privacy=CLIENT), dataset=dataset, model=model)
    assert not result.model.seen.any()


def test_one_client_leaves_nothing_for_the_next(config, dataset, tmp_path: Path) -> None:
    """With the clip of one client, another's upload must not change: the bound counts each only once."""

    def upload(participants: list[int]) -> Tensor:
        torch.manual_seed(0)
        settings = config(privacy={**CLIENT, "noise": 0.0, "clip": 1e9})
        job = build_job(settings, tmp_path, Remembers(persistent=False, used=True), dataset, FedAvg())
        engine = InProcess(job)
        message = {"theta": read_values(job.model, job.layout)}
        order = Order(0, 0.1, 1)
        for client in participants:
            total, _ = engine.sum(order, message, [Participant(client)])
        engine.close()
        assert not job.model.seen.any()
        return total["delta"].clone()

    assert torch.equal(upload([3]), upload([1, 2, 3]))


# --- the clipped gradient ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", ["linear", "convolution"])
@pytest.mark.parametrize("gap", [1e-2, 1e-3, 1e-4, 1e-5])
def test_a_record_whose_tokens_cancel_does_not_pass_unclipped(layer: str, gap: float) -> None:
    """Its norm drowns in the rounding of a Gram matrix; what it adds must stay within C all the same."""
    torch.manual_seed(0)
    for scale in (1.0, 1e2, 1e4, 1e6):
        size = 64 if layer == "linear" else 256
        like = torch.randn(1, 1, size)
        tokens = like + gap * torch.randn(2, 4, size)
        signs = scale * torch.tensor([[1.0, -1, 1, -1], [0, 0, 0, 0]])
        model: nn.Module
        if layer == "linear":
            model, x = nn.Linear(size, 64, bias=False), tokens
        else:
            model, x = nn.Conv2d(size, 64, 1, bias=False), tokens.transpose(1, 2).reshape(2, size, 2, 2)
        clipped = ClippedGradient(model)

        def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            y = model(batch["x"])
            each = y.mean(-1) if y.dim() == 3 else y.mean(1).flatten(1)
            return (each * batch["signs"]).sum(1)

        clipped({"x": x, "signs": signs}, losses, 0.1)
        assert float(clipped.flat.grad.double().norm()) <= 0.1


@pytest.mark.parametrize("layer", ["linear", "convolution"])
@pytest.mark.parametrize("width", [256, 768, 3072, 8192])
def test_a_record_made_for_the_rounding_of_wide_products_does_not_pass_unclipped(
    layer: str, width: int
) -> None:
    """Two tokens, alike in many small numbers, opposite in a few large ones: a product that begins with the
    large ones loses every small one after them, and the gradient is made of the small ones alone.
    """
    model: nn.Module = nn.Linear(width, 10, bias=False)
    if layer == "convolution":
        model = nn.Conv2d(width, 64, 1, bias=False)
    clipped = ClippedGradient(model)

    def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        y = model(x).sum(1) if layer == "linear" else model(x.transpose(1, 2).unsqueeze(3)).sum((2, 3))
        return nn.functional.cross_entropy(y, batch["y"], reduction="none")

    torch.manual_seed(0)
    others, labels = torch.randn(7, 2, width), torch.arange(8)
    for large in (width // 512, width // 64):
        for lost in (24.01, 25):
            first = torch.where(torch.arange(width) < max(1, large), 1.0, 2 ** (-lost / 2))
            second = torch.where(first == 1, -1.0, first)
            x = torch.cat([others, 1e4 * torch.stack([first, second])[None]])
            clipped({"x": x, "y": labels}, losses, 0.1)
            with_it = clipped.flat.grad.double()
            clipped({"x": others, "y": labels[:7]}, losses, 0.1)
            assert clipped.obstacle is None
            assert float((with_it - clipped.flat.grad.double()).norm()) <= 0.1 * (1 + 2**-9)


def test_dropout_at_example_level_is_secret(config, dataset, tmp_path: Path) -> None:
    """Known masks would show a record's place in the batch in the gradients of all those after it."""

    def uploads(entropy: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 4))
        settings = config(
            privacy={**EXAMPLE, "noise": 0.0, "entropy": entropy},
            local={"steps": 1, "batch": 100, "lr": 0.1},  # everyone's whole data: no coins but the masks
        )
        job = build_job(settings, tmp_path, model, dataset, FedAvg())
        engine = InProcess(job)
        message = {"theta": read_values(job.model, job.layout)}
        return [engine.sum(Order(0, 0.1, 1), message, [Participant(0)])[0]["delta"].clone() for _ in "ab"]

    first, second = uploads("os")
    assert not torch.equal(first, second)
    first, second = uploads("seed")
    assert torch.equal(first, second)


# --- what the server computes by itself -------------------------------------------------------------------


@dataclass(frozen=True)
class AllExplode(Algorithm):
    def client(self, msg: Vectors, memory: Vectors, work) -> tuple[Vectors, Vectors]:
        return {"delta": torch.full_like(msg["theta"], float("nan"))}, {}


class Unbounded(Classification):
    """Likelihoods of densities have such losses: ∞ for one record, −∞ for another."""

    def losses(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        beyond = torch.full((len(batch["y"]),), torch.inf)
        beyond[::2] *= -1
        return super().losses(model, batch) + beyond


def test_losses_beyond_all_numbers_do_not_stop_a_protected_run(config, dataset) -> None:
    result = tacit.run(config(rounds=2, privacy=CLIENT), "run", dataset=dataset, task=Unbounded())
    assert len(result.metrics) == 2 and tacit.statement("run").rounds == 2


def test_clients_that_send_nonsense_do_not_stop_a_protected_run(config, dataset) -> None:
    """To stop would be an exact answer about their data, and an uncharged one."""
    result = tacit.run(config(rounds=3, privacy=CLIENT), "run", dataset=dataset, algorithm=AllExplode())
    assert len(result.metrics) == 3
    assert tacit.statement("run").rounds == 3
    assert torch.isfinite(read_values(result.model, Layout.of(result.model))).all()


@pytest.mark.parametrize("method", ["fedcm", "fedadamw", "fedlada", "fedadamw-alg3"])
def test_the_average_clients_steps_are_no_part_of_a_protected_update(config, dataset, method) -> None:
    with pytest.raises(tacit.UserError, match=r"local\.epochs: .* set local\.steps instead"):
        tacit.run(config(method=method, privacy=CLIENT), "refused", dataset=dataset)
    assert not Path("refused", "ledger.jsonl").exists(), "refused before anything is charged"
    settings = config(method=method, privacy=CLIENT, local={"steps": 2, "batch": 6, "lr": 0.1})
    assert tacit.run(settings, dataset=dataset).finished


def test_an_interrupted_run_leaves_the_servers_model_behind(config, dataset) -> None:
    """Who starts again with the same object must not start from what a client has learnt."""

    class Fails(FedAvg):
        def client(self, msg, memory, work):
            super().client(msg, memory, work)
            raise KeyboardInterrupt

    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4))
    before = read_values(model, Layout.of(model)).clone()
    with pytest.raises(KeyboardInterrupt):
        tacit.run(config(privacy=CLIENT), dataset=dataset, model=model, algorithm=Fails())
    assert torch.equal(read_values(model, Layout.of(model)), before)


def test_the_size_of_a_cohort_is_told_only_to_those_who_need_it(config, dataset, tmp_path: Path) -> None:
    """What clients are sent may depend on the cohort only where they make the noise."""
    for place in ("server", "clients"):
        job = build_job(config(privacy={**CLIENT, "noise_at": place}), tmp_path / place, dataset=dataset)
        three, four = (job.privacy.bounding({}, job.upload_sizes, job.layout, drawn) for drawn in (3, 4))
        assert (three == four) == (place == "server")


# --- the ledger -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("privacy", [CLIENT, EXAMPLE])
def test_a_ledger_that_knows_less_than_the_checkpoint_is_refused(config, dataset, privacy) -> None:
    tacit.run(config(rounds=4, privacy=privacy), "run", dataset=dataset)
    ledger = Path("run") / LEDGER
    whole = ledger.read_bytes()
    ledger.unlink()
    with pytest.raises(tacit.UserError, match="is gone"):
        tacit.resume("run", dataset=dataset, rounds=6)
    assert not ledger.exists()
    ledger.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]))
    with pytest.raises(tacit.UserError, match="holds 2 charges where the checkpoint knows of 4"):
        tacit.resume("run", dataset=dataset, rounds=6)
    ledger.write_bytes(whole)
    assert tacit.resume("run", dataset=dataset, rounds=6).finished
    assert tacit.statement("run").rounds == 6


def test_a_private_run_is_not_judged_by_its_clients_records_afterwards(config, dataset) -> None:
    """`tacit test` tells exact numbers, user by user: of the test set, never of the clients' own shares."""
    shares = {"data__validation": 0.2, "evaluate__split": "validation"}
    for name, entropy in (("secret", "os"), ("seeded", "seed")):
        privacy = {"unit": "client", "clip": 0.5, "noise": 1.0, "delta": 1e-3, "entropy": entropy}
        tacit.run(config(rounds=1, privacy=privacy, **shares), name, dataset=dataset)
    for laid_over in ([], ["privacy.entropy=seed"], ["privacy=null"]):
        with pytest.raises(tacit.UserError, match="the validation records are theirs"):
            tacit.test("secret", laid_over, dataset=dataset)
    assert tacit.test("secret", ["evaluate.split=test"], dataset=dataset).whole["count"] == len(dataset.test)
    assert tacit.test("seeded", dataset=dataset).whole["count"] < len(dataset.train)


def test_single_clients_of_a_private_run_are_not_tested_whatever_is_laid_over_it(config, dataset) -> None:
    for name, entropy in (("secret", "os"), ("seeded", "seed")):
        privacy = {"unit": "client", "clip": 0.5, "noise": 1.0, "delta": 1e-3, "entropy": entropy}
        tacit.run(config(rounds=1, privacy=privacy, data__holdout=0.3), name, dataset=dataset)
    for laid_over in ([], ["privacy.entropy=seed"], ["privacy=null"]):
        with pytest.raises(tacit.UserError, match="claims to protect its clients"):
            tacit.test_clients("secret", 3, laid_over, dataset=dataset)
    assert len(tacit.test_clients("seeded", 3, dataset=dataset)[1]["personal"]) == 3
