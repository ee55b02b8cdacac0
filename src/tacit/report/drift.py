"""How far clients diverge in one round: the variance of AdamW's v over them, and the drift of their updates.

Paper 004's Figure 2. From the server's model in a checkpoint, some clients each train for one round of Local
AdamW and one of Local SGD; the server's model does not change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tacit import randomness
from tacit.algorithms import Algorithm, FedAdamW, FedAvg
from tacit.engine import Job, Order, Participant
from tacit.engine.states import NONE
from tacit.engine.worker import Worker
from tacit.errors import UserError
from tacit.vector import Vectors, read_buffers, read_values


@dataclass(frozen=True)
class ClientSpread:
    """Statistics over clients of vectors x_i: √mean‖x_i − x̄‖² and ‖x̄‖."""

    deviation: float
    mean: float

    @property
    def relative(self) -> float:
        return self.deviation / self.mean if self.mean else math.inf


@dataclass(frozen=True)
class Drift:
    """The results of one checkpoint."""

    round: int
    v: ClientSpread
    """AdamW's second moments after one round of local steps."""
    adamw: ClientSpread
    """Updates of Local AdamW."""
    sgd: ClientSpread
    """Updates of Local SGD."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def measure(job: Job, round: int, clients: int, adamw_lr: float, sgd_lr: float, steps: int) -> Drift:
    """Train `clients` of the job's clients, always the same ones, from `job.model`, without privacy."""
    rng = randomness.generator(job.seed, "drift")
    chosen = np.sort(rng.choice(len(job.population), min(clients, len(job.population)), replace=False))
    # With v starting at zero in round 0, "aggregate v" is Local AdamW that also reports its v.
    adamw = FedAdamW(aggregate="v", alpha=0.0)
    local = _spreads(job, adamw, chosen.tolist(), adamw_lr, steps)
    return Drift(
        round, local["v"], local["delta"], _spreads(job, FedAvg(), chosen.tolist(), sgd_lr, steps)["delta"]
    )


def _spreads(
    job: Job, algorithm: Algorithm, clients: Sequence[int], lr: float, steps: int
) -> dict[str, ClientSpread]:
    plain = replace(
        job, algorithm=algorithm, privacy=None, local=replace(job.local, steps=steps, epochs=None)
    )
    worker = Worker(plain)
    state = algorithm.init(read_values(plain.model, plain.layout).float(), plain.layout)
    message: Vectors = {name: vector.clone() for name, vector in algorithm.message(state).items()}
    message |= read_buffers(plain.model)
    means: dict[str, Tensor] = {}
    squares: dict[str, float] = {}
    for number, client in enumerate(clients, start=1):
        into = plain.empty_sums()
        worker.sum(Order(0, lr, steps), message, [Participant(client, NONE)], into)
        for name in ("delta", "v"):  # Welford: one pass, no list of clients' vectors
            if name in into:
                x = into[name].double()
                mean = means.setdefault(name, torch.zeros_like(x))
                before = x - mean
                mean += before / number
                squares[name] = squares.get(name, 0.0) + float(before @ (x - mean))
    worker.load(message)  # the model as it was
    return {
        name: ClientSpread(math.sqrt(squares[name] / len(clients)), float(torch.linalg.vector_norm(mean)))
        for name, mean in means.items()
    }


def draw(runs: dict[str, list[Drift]], file: Path) -> None:
    """Two panels over rounds: relative deviation of v over clients, and relative drift of both optimizers."""
    from matplotlib.figure import Figure  # slow to import, and only needed here
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for n, (name, drifts) in enumerate(runs.items()):
        rounds, color = [d.round for d in drifts], f"C{n % 10}"
        left.plot(rounds, [d.v.relative for d in drifts], marker="o", color=color, label=name)
        adamw, sgd = [d.adamw.relative for d in drifts], [d.sgd.relative for d in drifts]
        right.plot(rounds, adamw, marker="o", color=color, label=f"{name}, Local AdamW")
        right.plot(rounds, sgd, "--", marker="x", color=color, label=f"{name}, Local SGD")
    left.set_title("v: deviation over clients ÷ mean")
    right.set_title("updates: deviation over clients ÷ mean")
    for axes in (left, right):
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: the picture cannot be written ({error})") from None
