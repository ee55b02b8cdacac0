"""Large models: a private federated round compared with a bare fine-tuning loop, and the server's needs.

    python bench/large.py                 everything; about ten minutes on two quiet cores
    python bench/large.py --only speed --rounds 9
    python bench/large.py --only server

Speed: RoBERTa-base from its config with LoRA (rank 16, query and value), 16 texts of 128 tokens. Ours is a
whole run with example-level privacy (DP-FedAdamW: Poisson batches, clipping, secret noise, ledger, release,
checkpoint). The other is the usual loop with transformers, peft and AdamW, without privacy. Both use the
model's dropout. They take turns in one process, and the best round of each counts.
Memory: the peak of resident memory, each in its own process.
Server: one round of a full RoBERTa-base without its clients, in vectors of the model's size, including the
model itself; and a LAMB step at the size of paper 003's speech model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import tacit
from gradients import machine, status
from tacit.config.build import build_job, build_settings
from tacit.config.parts import build_sampling
from tacit.data import Batch
from tacit.engine import Job, Order, Participant, Report, Tune
from tacit.federation import Federation
from tacit.optimizers.server import ServerOptimizer
from tacit.vector import Layout, Vectors

TEXTS, TOKENS, STEPS = 16, 128, 4
SPEED_GOAL, MEMORY_GOAL, SERVER_GOAL = 0.92, 1.1, 6.0
SPEECH = 255_800_864
"""Parameters of the CTC transformer of paper 003."""


class RandomTexts:
    """Texts that need no tokenizer."""

    def __init__(self, count: int) -> None:
        rng = np.random.default_rng(0)
        self.tokens = rng.integers(3, 50_000, (count, TOKENS))
        self.labels, self.users = rng.integers(0, 2, count), None

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Any) -> Batch:
        tokens = torch.from_numpy(self.tokens[indices])
        return {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "y": torch.from_numpy(self.labels[indices]),
        }

    def prepare(self, batch: Batch) -> Batch:
        return batch


def federation(folder: Path, rounds: int, trackers: Sequence[Any] = (), **changes: Any) -> Federation:
    """A run with one client of 16 texts a round: every batch holds them all, as the bare loop's do."""
    data = RandomTexts(2 * TEXTS)
    dataset = tacit.Dataset("random texts", data, RandomTexts(2), 2, (TOKENS,))
    values = {
        "rounds": rounds,
        "data": {"name": "fashion-mnist-slice", "partition": {"kind": "iid", "clients": 2}},
        "model": {"name": "roberta-base", "lora": {"rank": 16, "alpha": 32, "dropout": 0.1}},
        "method": "dp-fedadamw",
        "cohort": 1,
        "local": {"steps": STEPS, "batch": TEXTS, "lr": 1e-4},
        "evaluate": {"every": 1_000_000},
        "engine": {"workers": 0, "threads": torch.get_num_threads()},
    }
    config = tacit.load({**values, **changes})
    job = build_job(config, folder, dataset=dataset)
    sampling = build_sampling(config, len(job.population))
    return Federation(job, build_settings(config), sampling, folder, trackers)


class BareLoop:
    """Fine-tuning as one would write it: transformers, peft, AdamW."""

    def __init__(self) -> None:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(
            r=16,
            lora_alpha=32,
            lora_dropout=0.1,
            target_modules=["query", "value"],
            modules_to_save=["classifier"],
        )
        self.model: nn.Module = get_peft_model(tacit.models.build("roberta-base", (TOKENS,), 2), lora).train()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, 1e-4)
        self.batch = RandomTexts(TEXTS).take(np.arange(TEXTS))

    def __call__(self) -> None:
        batch = self.batch
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            F.cross_entropy(logits, batch["y"]).backward()
            self.optimizer.step()


class TakingTurns:
    """A tracker that times our rounds, and between them a turn of another loop."""

    def __init__(self, other: BareLoop) -> None:
        self.other, self.ours, self.theirs = other, [], []  # type: ignore[var-annotated]
        self._since: float | None = None

    def start(self, round: int, rounds: int, facts: Mapping[str, Any]) -> None:
        self._since = time.perf_counter()

    def clients(self, done: int, cohort: int) -> None:
        pass

    def round(self, record: Mapping[str, Any]) -> None:
        assert self._since is not None
        middle = time.perf_counter()
        self.ours.append(middle - self._since)
        self.other()
        self._since = time.perf_counter()
        self.theirs.append(self._since - middle)

    def close(self) -> None:
        pass


def speed(rounds: int) -> tuple[float, float]:
    """Best seconds a step: ours (with the saving of the round before), and the bare loop's."""
    turns = TakingTurns(BareLoop())
    with tempfile.TemporaryDirectory() as folder:
        federation(Path(folder), rounds, [turns]).run()
    return min(turns.ours) / STEPS, min(turns.theirs) / STEPS


def peak_of(what: str) -> float:
    """MB that a process has at most when it does nothing else."""
    if what == "bare":
        loop = BareLoop()
        for _ in range(2):
            loop()
    else:
        with tempfile.TemporaryDirectory() as folder:
            federation(Path(folder), 2).run()
    return status("VmHWM")


class NoClients:
    """An engine whose clients are elsewhere: what is left is the server."""

    def __init__(self, sums: Vectors) -> None:
        self._total = sums

    def sum(
        self, order: Order, message: Vectors, participants: Sequence[Participant], progress: Any = None
    ) -> tuple[Vectors, list[Report]]:
        for vector in self._total.values():
            vector.fill_(1e-6 if vector.is_floating_point() else 1)
        reports = [Report(v.client, 1.0, TEXTS, STEPS, 0.0, 1.0, True, None, {}, 0.0) for v in participants]
        return self._total, reports

    def evaluate(self, message: Vectors) -> dict[str, float]:
        return {}

    def evaluate_clients(
        self, message: Vectors, participants: Sequence[Participant], tune: Tune | None = None
    ) -> list[dict[str, float]]:
        return []

    def close(self) -> None:
        pass


class Elsewhere:
    """Settings of that engine."""

    def open(self, job: Job, message: Vectors, cohort: int, before_replay: Any = None) -> NoClients:
        return NoClients(job.empty_sums())


def server(method: str, optimizer: str) -> tuple[float, float]:
    """Vectors that three rounds of a full RoBERTa-base take on the server at most, and its parameters."""
    before = status("VmRSS")
    changes: dict[str, Any] = {"model": "roberta-base", "method": method, "cohort": 2}
    if optimizer != "sgd":
        changes["server"] = {"optimizer": optimizer, "lr": 1e-3}
    with tempfile.TemporaryDirectory() as folder:
        run = federation(Path(folder), 3, **changes)
        run.settings = replace(run.settings, engine=Elsewhere())
        run.run()
        size = run.server.layout.size
    return (status("VmHWM") - before) / (4 * size / 2**20), float(size)


def lamb() -> tuple[float, float]:
    """Seconds of a LAMB step of 255 M parameters in 36 layers, and the process's peak in GB."""
    width = SPEECH // 36 // 768
    with torch.device("meta"):
        layers = nn.ModuleList(nn.Linear(768, width, bias=False) for _ in range(36))
    layers.append(nn.Linear(SPEECH - 36 * 768 * width, 1, bias=False, device="meta"))
    layout = Layout.of(layers)
    optimizer = ServerOptimizer("lamb", torch.randn(SPEECH), layout, 2e-3)
    delta = torch.randn(SPEECH)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        optimizer.step(delta)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:]), status("VmHWM") / 1024


def elsewhere(*what: str) -> list[float]:
    """A measurement in a process of its own."""
    command = [sys.executable, __file__, "--measure", *what, "--threads", str(torch.get_num_threads())]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(what: str, *more: str) -> list[float]:
    if what == "peak":
        return [peak_of(*more)]
    return list(server(*more)) if what == "server" else list(lamb())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["speed", "memory", "server", "lamb"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(given.threads)
    if given.measure:
        print(json.dumps(measure(*given.measure)))
        return
    print(f"{machine()}; {given.threads} threads\n")
    if given.only in (None, "speed"):
        ours, theirs = speed(given.rounds)
        print(
            f"RoBERTa-base + LoRA, {TEXTS} × {TOKENS}: private federated {1 / ours:.3f} steps/s, "
            f"bare peft loop {1 / theirs:.3f}; ratio {theirs / ours:.3f} (goal {SPEED_GOAL})",
            flush=True,
        )
    if given.only in (None, "memory"):
        (ours,), (theirs,) = elsewhere("peak", "tacit"), elsewhere("peak", "bare")
        print(
            f"peak memory: {ours:.0f} MB against {theirs:.0f} MB; ratio {ours / theirs:.3f} "
            f"(goal {MEMORY_GOAL})",
            flush=True,
        )
    if given.only in (None, "server"):
        for method, optimizer in (("dp-fedavg-client", "sgd"), ("fedavg", "sgd"), ("dp-fedlamb", "lamb")):
            vectors, size = elsewhere("server", method, optimizer)
            print(
                f"server of a full RoBERTa-base ({size / 1e6:.0f} M), {method} with {optimizer}: "
                f"{vectors:.2f} vectors (goal {SERVER_GOAL:g})",
                flush=True,
            )
    if given.only in (None, "lamb"):
        seconds, gigabytes = elsewhere("lamb")
        print(f"LAMB step of {SPEECH / 1e6:.1f} M parameters: {seconds:.2f} s, {gigabytes:.1f} GB (of 24)")


if __name__ == "__main__":
    main()
