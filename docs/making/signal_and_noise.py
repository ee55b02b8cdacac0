"""How long what a private step learns is beside its noise: paper 000's setting, and ours (docs/results.md).

    python docs/making/signal_and_noise.py

The mean of clipped gradients over the records of all clients, in the output layer and in LoRA's factors, at
the start and after some steps of AdamW without privacy, beside the noise of a private step. A squared length
is the product of the means of two halves of 320 records that trained nothing, which is right on average; the
length of one mean would count its records' spread as well.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from tacit.config import load
from tacit.config.build import build_job
from tacit.data.batches import gather, gather_apart
from tacit.engine import Job
from tacit.gradients import ClippedGradient
from tacit.privacy import ExampleLevel
from tacit.vector import Flat

RECIPE = Path(__file__).parents[2] / "recipes/results/000.yaml"
PAPER: Mapping[str, Any] = {
    "data": {
        "name": "rotten-tomatoes",
        "max_length": 32,
        "partition": {"kind": "dirichlet", "clients": 4, "alpha": 0.8},
    },
    "model": {
        "hub": "minilm",
        "lora": {"rank": 16, "alpha": 32, "targets": ["query", "value"], "dropout": 0.1},
    },
    "cohort": 4,
    "local": {"steps": 20, "batch": 16, "lr": 0.001},
    "privacy": {"unit": "example", "clip": 0.1, "noise": 1.0, "delta": 1e-5, "entropy": "seed"},
}
"""Its Table 19, but for the network and the sentences."""
STEPS, BATCH, RATE = 80, 16, 1e-3
"""Without privacy, before the second look."""
HELD_OUT, AT_ONCE = 320, 32


def mean_clipped(clipped: ClippedGradient, job: Job, bound: float, own: NDArray[np.int64]) -> torch.Tensor:
    """(1/n) Σ_j clip_C(g_j) over these records."""
    total = torch.zeros_like(clipped.flat.grad)
    rows = np.array_split(np.arange(len(own)), len(own) // AT_ONCE)
    for parts in gather_apart(job.population.records, own, rows):
        for part in parts:
            clipped(part, job.task.losses, bound)
            total += clipped.flat.grad
    return total / len(own)


def tell(when: str, clipped: ClippedGradient, job: Job, held_out: NDArray[np.int64]) -> None:
    privacy, batch, clients = job.privacy, job.local.batch, len(job.population)
    assert isinstance(privacy, ExampleLevel)
    one, two = (mean_clipped(clipped, job, privacy.clip.bound, half) for half in np.split(held_out, 2))
    head = torch.zeros_like(one, dtype=torch.bool)
    for segment in clipped.flat.layout.segments:
        head[segment.slice] = "classifier" in segment.name
    for name, where in (("output layer", head), ("LoRA", ~head)):
        size = int(where.sum())
        signal = float((one * two)[where].sum().clamp(min=0).sqrt())
        noise = privacy.std(len(where), batch) / batch * size**0.5
        # Of k steps the signals add up to k of them, the noises, averaged over clients, to √(k / clients).
        steps = (noise / signal) ** 2 / clients if signal else float("inf")
        print(f"  {when}, {name} ({size:,} numbers): signal {signal:.4f}, noise {noise:.3f};")
        print(f"    as long as all the noise so far after {steps:,.0f} steps of each client", flush=True)


def look(values: Mapping[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        job = build_job(load({"rounds": 8, **values, "method": "dp-fedadamw"}), Path(folder))
        flat, rng = Flat(job.model), np.random.default_rng(0)
        clipped, train = ClippedGradient(flat), flat.module.train
        everybody = np.concatenate([job.population.train(c) for c in range(len(job.population))])
        held_out, rest = np.split(rng.permutation(everybody), [HELD_OUT])
        train()
        tell("at the start", clipped, job, held_out)
        optimizer = torch.optim.AdamW((p for p in flat.module.parameters() if p.requires_grad), lr=RATE)
        rows = np.split(np.arange(STEPS * BATCH), STEPS)
        for batch in gather(job.population.records, rest, rows):
            optimizer.zero_grad(set_to_none=False)
            job.task.losses(flat.module, batch).mean().backward()
            optimizer.step()
        train(False)
        with torch.no_grad():
            parts = gather(job.population.records, held_out, np.split(np.arange(HELD_OUT), 5))
            losses = torch.cat([job.task.losses(flat.module, batch) for batch in parts])
        train()
        right = float((losses < np.log(2)).float().mean())
        tell(f"after {STEPS} steps without privacy ({right:.0%} right)", clipped, job, held_out)


def main() -> None:
    print("The paper's setting:")
    look(PAPER)
    print("recipes/results/000.yaml:")
    ours = yaml.safe_load(RECIPE.read_text("utf-8"))
    look({key: value for key, value in ours.items() if key != "sweep"})


if __name__ == "__main__":
    main()
