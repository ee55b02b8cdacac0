"""A frozen base: shared by processes, absent from messages and checkpoints, and the same on a resume."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tacit
from tacit.config.build import build_model
from tacit.engine import shared
from tacit.errors import UserError
from tacit.vector import frozen_hash
from texts import ROBERTA, text_config, texts

pytest.importorskip("peft")


def small() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    model[1].weight.requires_grad_(False)
    model[2].weight = nn.Parameter(model[0].weight.detach().t().contiguous(), requires_grad=False)
    return model


def test_the_hash_sees_frozen_values_names_and_shapes_alone() -> None:
    model = small()
    first = frozen_hash(model)
    with torch.no_grad():
        model[1].bias.add_(1)
    assert frozen_hash(model) == first
    model[2].bias.requires_grad_(False)
    assert frozen_hash(model) != first
    model = small()
    with torch.no_grad():
        model[0].weight[0, 0] += 1e-6
    assert frozen_hash(model) != first
    assert frozen_hash(nn.Linear(2, 2)) is None


def test_frozen_parameters_are_mapped_and_survive_the_descriptor() -> None:
    model = small()
    tied = nn.ModuleDict({"a": model[1], "b": model[1], "all": model})
    before = {name: p.detach().clone() for name, p in tied.named_parameters()}
    body, place = shared.dump(tied)
    copy = shared.load(body, place)
    place.close()
    for loaded in (copy, tied):
        found = dict(loaded.named_parameters())
        assert all(torch.equal(found[name], value) for name, value in before.items())
        assert {n for n, p in found.items() if p.requires_grad} == {"a.bias", "all.2.bias"}
        assert loaded["a"].weight is loaded["b"].weight
    with torch.no_grad():
        copy["a"].weight.zero_()  # a reader's own pages
    assert torch.equal(tied["a"].weight, before["a.weight"])


MEMORY = """
import resource, sys, time
from pathlib import Path
from tacit.engine import shared

def private():  # kB of this process that no other shares
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(l.split()[1]) for l in lines if l.startswith("Private"))

before = private()
model = shared.load(Path(sys.argv[1]).read_bytes(), shared.Place(int(sys.argv[2]), int(sys.argv[3])))
total = sum(float(p.sum()) for p in model.parameters())  # touch every page
print(private() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux tells memory by process")
def test_a_worker_takes_no_memory_of_its_own_for_the_base(tmp_path: Path) -> None:
    model = nn.Linear(4096, 4096, bias=False).requires_grad_(False)  # 64 MB
    body, place = shared.dump(model)
    (tmp_path / "body").write_bytes(body)
    assert len(body) < 100_000
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "body"), str(place.fd), str(place.size)]
    # The maker has it mapped as well, so its pages are not private to the reader.
    model.weight.sum()
    done = subprocess.run(command, capture_output=True, text=True, check=True, pass_fds=[place.fd])
    place.close()
    assert int(done.stdout) < 16_000, f"{done.stdout} kB of 65,536"


def test_messages_and_checkpoints_hold_what_is_trained_alone(tmp_path: Path) -> None:
    config = text_config()
    result = tacit.run(config, tmp_path / "run", dataset=texts())
    trained = sum(p.numel() for p in result.model.parameters() if p.requires_grad)
    assert trained < sum(p.numel() for p in result.model.parameters()) / 3
    record = result.metrics[-1]
    assert record["bytes_down"] == record["bytes_up"] == 3 * 4 * trained
    saved = load_file(tmp_path / "run" / "checkpoint" / "000002" / "state.safetensors")
    assert {name: v.numel() for name, v in saved.items()} == {"theta": trained}


def test_a_resume_on_another_base_is_refused(tmp_path: Path) -> None:
    from tacit.config.build import build_job
    from tacit.federation.past import load_round
    from tacit.models import hub

    folders = [tmp_path / "a", tmp_path / "b"]
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        hub.from_config(ROBERTA, (9,), 2).save_pretrained(folder)
    base = tmp_path / "base"
    folders[0].rename(base)
    config = text_config({"rounds": 3}, hub=str(base), lora={"rank": 2})
    whole = tacit.run(config, tmp_path / "whole", dataset=texts())
    half = text_config({"rounds": 1}, hub=str(base), lora={"rank": 2})
    tacit.run(half, tmp_path / "run", dataset=texts())
    base.rename(folders[0])
    folders[1].rename(base)
    with pytest.raises(UserError, match="the frozen weights are not those that this run was trained on"):
        tacit.resume(tmp_path / "run", dataset=texts(), rounds=3)
    job = build_job(half, tmp_path / "run", dataset=texts())
    with pytest.raises(UserError, match="the frozen weights are not those that this run was trained on"):
        load_round(job, tmp_path / "run", 1)  # as `tacit hessian` and `tacit drift` do
    base.rename(folders[1])
    folders[0].rename(base)
    resumed = tacit.resume(tmp_path / "run", dataset=texts(), rounds=3)
    for (name, ours), (_, theirs) in zip(
        resumed.model.named_parameters(), whole.model.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_dropout_differs_between_clients_and_repeats_on_resume(tmp_path: Path) -> None:
    """Every client has the same records, so only its masks can make its update another one."""
    from dataclasses import replace

    from tacit.config.build import build_job
    from tacit.engine import InProcess, Order, Participant
    from tacit.vector import read_values

    data = texts(6)
    config = text_config(
        {"local": {"epochs": 1, "batch": 8, "lr": 0.5}},
        config={**ROBERTA, "hidden_dropout_prob": 0.3},
        lora={"rank": 2, "dropout": 0.3},
    )
    job = build_job(config, tmp_path / "run", dataset=data)
    indices = job.population.indices.copy()
    indices[:] = indices[0]
    population = type(job.population)(job.population.records, job.population.offsets, indices)
    job = replace(job, population=population)
    theta = read_values(job.model, job.layout)

    def updates() -> list[torch.Tensor]:
        engine = InProcess(replace(job, model=build_model(config, data)))
        rounds = [(0, 0), (0, 1), (1, 0)]
        found = []
        for round, client in rounds:
            total, _ = engine.sum(Order(round, 0.5), {"theta": theta}, [Participant(client)])
            found.append(total["delta"].clone())
        engine.close()
        return found

    first, second, later = updates()
    assert not torch.equal(first, second) and not torch.equal(first, later)
    assert all(torch.equal(a, b) for a, b in zip(updates(), (first, second, later), strict=True))


def test_the_command_line_says_what_travels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from tacit.cli.run import _finish

    result = tacit.run(text_config(), tmp_path / "run", dataset=texts())
    _finish(result, Console(width=200), as_json=False)
    assert "of what the whole model would take" in capsys.readouterr().out
    _finish(result, Console(width=200), as_json=True)
    moved = json.loads(capsys.readouterr().out)["traffic"]
    trained = sum(p.numel() for p in result.model.parameters() if p.requires_grad)
    assert moved["trained"] == trained and moved["up"] == moved["down"] == 4 * trained
    assert moved["parameters"] == sum(p.numel() for p in result.model.parameters())
