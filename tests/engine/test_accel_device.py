"""The simulated device: it computes as the CPU does, bit for bit, and refuses what a real one would."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import accel
from tacit.models.vit import vit


def gradients(model: nn.Module, x: Tensor, y: Tensor, device: str) -> list[Tensor]:
    torch.manual_seed(1)
    model = copy.deepcopy(model).to(device)
    loss = F.cross_entropy(model(x.to(device)), y.to(device))
    loss.backward()
    return [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]


NETWORKS = {
    "convolutions and group norm": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.3)
    ),
    "batch norm": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(2)),
    "transformer": lambda: vit((3, 8, 8), 3, patch=4, width=12, depth=2, heads=3, dropout=0.1),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_have_the_cpus_very_bits(name: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])
    model = NETWORKS[name]()
    if name != "transformer":
        model = nn.Sequential(model, nn.Flatten(), nn.LazyLinear(3))
        model(x)
    ours, theirs = (gradients(model, x, y, device) for device in (accel.NAME, "cpu"))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("masked", [None, "numbers", "bool", "causal"])
def test_attention_has_the_cpus_very_bits(masked: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(2, 3, 5, 4, generator=generator) for _ in range(3)]
    allowed = torch.ones(5, 5).tril().bool()
    mask = {"bool": allowed, "numbers": torch.zeros(5, 5).masked_fill(~allowed, -torch.inf)}.get(masked or "")
    found = {}
    for device in ("cpu", accel.NAME):
        own = [t.to(device).requires_grad_() for t in qkv]
        there = None if mask is None else mask.to(device)
        out = F.scaled_dot_product_attention(*own, attn_mask=there, is_causal=masked == "causal")
        found[device] = [t.detach().cpu() for t in (out, *torch.autograd.grad(out.square().sum(), own))]
    assert all(torch.equal(a, b) for a, b in zip(found["cpu"], found[accel.NAME], strict=True))


def test_views_share_memory_and_outlive_their_base() -> None:
    base = torch.zeros(4, 3, device=accel.NAME)
    row = base[1].view(3, 1)
    row.add_(torch.ones(3, 1, device=accel.NAME))
    assert base.cpu().sum(1).tolist() == [0, 3, 0, 0]
    assert base._version == row._version == 1
    del base
    gc.collect()
    junk = [torch.full((4, 3), 7.0) for _ in range(100)]
    assert row.cpu().flatten().tolist() == [1, 1, 1]
    assert junk


@pytest.mark.parametrize(
    "mix",
    [
        lambda here, host: here + host,
        lambda here, host: torch.mm(here, host),
        lambda here, host: here.index_select(0, torch.tensor([0])),
        lambda here, host: here[torch.tensor([0, 1])],
        lambda here, host: torch.cat([here, host]),
        lambda here, host: host.add_(here),
        lambda here, host: F.cross_entropy(here, torch.tensor([0, 1])),
    ],
)
def test_a_tensor_of_the_host_is_refused(mix: object) -> None:
    with pytest.raises(RuntimeError, match=r"two devices|move it first"):
        mix(torch.ones(2, 2, device=accel.NAME), torch.ones(2, 2))


def test_copies_and_reads_are_counted() -> None:
    with accel.counting() as traffic:
        x = torch.ones(5).to(accel.NAME)
        y = torch.empty(5).copy_(x * 2)
        assert bool((x > 0).all()) and y.sum() == 10
    assert (traffic.up, traffic.down, traffic.reads) == (1, 1, 1)
    assert (traffic.bytes_up, traffic.bytes_down) == (20, 20)


def test_other_processes_find_the_device_by_themselves(tmp_path: Path) -> None:
    code = "import torch; print(torch.ones(2, device='accel').sum().item())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=accel.environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "2.0"
