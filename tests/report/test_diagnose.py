"""Curvature by block against an explicit Hessian, and drift of clients against a transcription."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import methods_reference as reference
from command import GOOD, tacit
from methods_small import configured, halves, problem, small
from tacit.config.build import build_job
from tacit.report.curvature import by_block, hessian_product, leading
from tacit.report.drift import measure
from tacit.tasks import Classification
from tacit.vector import Layout, read_values
from tacit.vector.blocks import blocks


def dense(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> np.ndarray:
    """The Hessian by torch.func, of a function of the flat vector."""
    names = [name for name, _ in model.named_parameters()]
    sizes = [p.numel() for p in model.parameters()]
    shapes = [p.shape for p in model.parameters()]

    def loss(y: torch.Tensor) -> torch.Tensor:
        parts = dict(
            zip(names, [p.view(s) for p, s in zip(y.split(sizes), shapes, strict=True)], strict=True)
        )
        logits = torch.func.functional_call(model, parts, (batch["x"],))
        return torch.nn.functional.cross_entropy(logits, batch["y"])

    y = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    return torch.func.hessian(loss)(y).double().numpy()


@pytest.mark.parametrize("kind", ["tensor", "architecture"])
def test_eigenvalues_of_blocks_are_those_of_the_hessian(kind: str) -> None:
    model, data = halves(), small()
    batch = data.train.prepare(data.train.take(np.arange(24)))
    layout = Layout.of(model)
    partition = blocks(layout, kind)  # type: ignore[arg-type]
    whole = dense(model, batch)
    product = hessian_product(model, layout, Classification(), batch)
    v = torch.randn(layout.shared)
    np.testing.assert_allclose(product(v).numpy(), whole @ v.double().numpy(), rtol=1e-3, atol=1e-5)
    for number, spectrum in enumerate(by_block(product, partition, steps=100)):
        one = torch.zeros(len(partition))
        one[number] = 1.0
        inside = partition.spread(one).bool().numpy()
        expected = np.linalg.eigvalsh(whole[np.ix_(inside, inside)])
        assert spectrum.size == inside.sum()
        top = sorted(expected, key=abs, reverse=True)[0]
        assert spectrum.eigenvalues[0] == pytest.approx(top, rel=1e-3)
        assert max(spectrum.eigenvalues) <= expected.max() * 1.001 + 1e-6, (
            "Ritz values lie inside the spectrum"
        )
        assert min(spectrum.eigenvalues) >= expected.min() - 1e-5


def test_lanczos_finds_both_ends_of_a_known_spectrum() -> None:
    rng = np.random.default_rng(0)
    q, _ = np.linalg.qr(rng.normal(size=(40, 40)))
    spectrum = np.r_[-30.0, np.linspace(-1, 1, 38), 100.0]
    matrix = torch.from_numpy((q * spectrum) @ q.T).float()
    found = leading(lambda v: matrix @ v, torch.ones(40), steps=15)
    assert found[0] == pytest.approx(100, rel=1e-4)
    assert min(found) == pytest.approx(-30, rel=1e-3)


def test_drift_and_variance_of_v_are_those_of_the_clients_one_by_one() -> None:
    config = configured("fedavg", {"rounds": 1})
    dataset = small()
    job = build_job(config, Path("unused"), halves(), dataset)
    before = read_values(job.model, job.layout).clone()
    found = measure(job, 0, clients=4, adamw_lr=0.1, sgd_lr=0.1, steps=3)
    assert torch.equal(read_values(job.model, job.layout), before), "nothing is trained on"
    sent: dict[str, list[np.ndarray]] = {"v": [], "adamw": [], "sgd": []}
    for client in range(4):
        alone = problem(config)
        alone.cohorts = [[client]]
        state = reference.adamw(alone, starts="v", decay=0.01)[0]
        sent["adamw"].append(state["theta"] - alone.theta)
        sent["v"].append(state["v"])
        sent["sgd"].append(reference.fedavg(alone)[0]["theta"] - alone.theta)
    for name, vectors in sent.items():
        stacked = np.stack(vectors)
        mean = stacked.mean(0)
        spread = getattr(found, name)
        assert spread.mean == pytest.approx(np.linalg.norm(mean), rel=1e-3)
        assert spread.deviation == pytest.approx(np.sqrt(((stacked - mean) ** 2).sum(1).mean()), rel=1e-3)


def test_the_commands_and_their_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*arguments):
        return tacit(*arguments, monkeypatch=monkeypatch, capsys=capsys)

    file = tmp_path / "run.yaml"
    file.write_text(GOOD)
    assert command("run", file, "--out", "r")[0] == 0
    code, out, err = command("drift", "r", "--clients", "3", "--steps", "2", "--picture", "d.png", "--json")
    assert code == 0, err
    assert [d["round"] for d in json.loads(out)["r"]] == [1, 2]
    code, out, err = command(
        "hessian", "r", "--records", "16", "--steps", "3", "--picture", "h.png", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["round"] == 2
    assert Path("d.png").stat().st_size > 5000 and Path("h.png").stat().st_size > 5000
    code, out, _ = command(
        "hessian", "r", "--records", "16", "--steps", "3", "--round", "1", "--picture", "h1.png"
    )
    assert code == 0 and "largest" in out and "Drawn in h1.png" in out
    code, out, _ = command("drift", "r", "--clients", "2", "--steps", "1", "--picture", "d1.png")
    assert code == 0 and "Drawn in d1.png" in out
    for wrong in (["hessian", "r", "--round", "9"], ["drift", "nowhere"], ["hessian", "r", "--kind", "odd"]):
        assert command(*wrong)[0] == 2
    vectors = Path("r/checkpoint/000002/state.safetensors")
    vectors.write_bytes(vectors.read_bytes()[:-1])
    code, _, err = command("drift", "r")
    assert code == 2 and "000002 is damaged" in err

    private = "privacy: {unit: client, clip: 0.2, noise: 1.0, delta: 1.0e-3}\n"
    file.write_text(GOOD + private)
    assert command("run", file, "--out", "p")[0] == 0
    code, _, err = command("drift", "p")
    assert code == 2 and "protects its clients" in err
