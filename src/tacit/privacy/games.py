"""Audits the mechanism itself: worst-case canaries through the code that a run uses, many at a time.

A canary is a client (or a record) that is present by a fair coin. Each has its own coordinate in every layer
of every upload, and sends a value there as large as floats allow, so only the clip bounds it. Canaries do not
share coordinates, so one release gives as many independent trials as there are canaries. Everything goes
through the mechanism's own `sample`, `bounding(…).add_` and `release`; at example level through `batches`,
`ClippedGradient` and `privatize_`.

>>> from tacit.privacy import ClientLevel, Clip, Poisson
>>> mechanism = ClientLevel(0.25, 1e-3, Clip(0.5), Poisson(1.0))
>>> found = audit_mechanism(mechanism, trials=1024, confidence=1 - 1e-7)
>>> found.refuted, 1 < found.lower < found.claimed < 20
(False, True)

A round charged as an event is claimed to be private along the event's whole curve, for every δ. So the claim
is tested at the statement's δ, which gives the reported bound, and at the most doubtful point of the curve.

What the guesser uses (one half of the trials chooses the best, the other half evaluates it):

- *the output* at the canary's place, in each layer of each upload, and all of them together;
- the same minus *another release* without any client: the next round's, a second attempt's, and a repetition
  of this very call with the clock stopped and all generators of Python, NumPy and torch restored. This
  exposes noise that is used twice, or that comes from a name, a seed or the time;
- the same for canaries that *a second draw of the cohort*, under the same circumstances, expects to be
  present: if sampling is not secret, this tests the whole mechanism without amplification;
- *the strength of the noise* where nobody sends anything: it must not reveal how many took part.

Where noise differs by layer, the game's own layers get the smallest and the largest of it.

What it cannot detect: a leak beside the release (metrics, files, time), or outside these functions.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from tacit.errors import UserError
from tacit.gradients import ClippedGradient
from tacit.privacy.accountants import epsilon
from tacit.privacy.audit import Audit, Bools, Floats, against_curve, from_scores
from tacit.privacy.bits import Ids
from tacit.privacy.clipping import layers_of
from tacit.privacy.ledger import replay
from tacit.privacy.mechanisms.base import Arrivals, Mechanism, State, Workload
from tacit.privacy.mechanisms.example import ExampleLevel
from tacit.privacy.mechanisms.layered import LayeredNoise, by_layer
from tacit.privacy.sampling import FixedSize
from tacit.vector import Flat, Layout, Vectors

CANARIES = 256
"""Canaries in one release, unless the mechanism asks for more clients."""
QUIET = 128
"""Coordinates of each upload in which nobody sends anything."""
HUGE = 1e6
"""How much a canary sends, in clipping norms."""
DELTAS = (0.4, 0.2, 0.1, 0.05, 0.02, 0.01, 0.003, 0.001)
"""Other δ on the claimed curve at which a claim is tested."""
AGREED = "everything, where a second draw agrees"
"""The trials that a second draw keeps are chosen without looking at their coins, and secret sampling is
independent of a second draw: the claim holds for them as for all trials.
"""
STATE = "state"
"""A second upload besides the update, such as a control variate."""

Scores = dict[str, Floats]


def audit_mechanism(
    mechanism: Mechanism,
    trials: int = 20_000,
    confidence: float = 0.95,
    population: int | None = None,
    rate: float = 0.5,
) -> Audit:
    """A lower bound on ε of one round (at example level, one step) of a mechanism, beside what is charged.

    `population`: clients. `rate`: the share of a client's records in a batch (example level).

    A simulation is audited as what it simulates: with the operating system's entropy.
    """
    if not mechanism.noise:
        raise UserError("privacy.noise is 0: nothing is claimed, so there is nothing to audit")
    if mechanism.clip.weights:  # these weights are for layers that the game does not have
        mechanism = replace(mechanism, clip=replace(mechanism.clip, weights={}))
    if mechanism.simulated:
        mechanism = replace(mechanism, entropy="os")
    start = time.perf_counter()
    game: _ClientGame | _RecordGame
    game = (
        _RecordGame(mechanism, rate)
        if isinstance(mechanism, ExampleLevel)
        else _ClientGame(mechanism, population)
    )
    played: list[tuple[Bools, Scores]] = []
    while sum(len(coins) for coins, _ in played) < trials:
        played.append(game.play(len(played)))
    inside = np.concatenate([coins for coins, _ in played])
    tests = [(inside, {name: _joined([scores[name] for _, scores in played]) for name in played[0][1]})]
    if isinstance(game, _ClientGame):
        tests.append(game.energies(min(max(64, trials // 4), 2000)))
    # Several tests of the same claim, at δ and along the curve: each gets its share of the error probability.
    level = 1 - (1 - confidence) / len(tests) / 2
    lower, attack = max(from_scores(coins, scores, mechanism.delta, level) for coins, scores in tests)
    points = [against_curve(coins, scores, game.curve, level) for coins, scores in tests]
    point = max(points, key=lambda found: found.lower - found.claimed)
    what = "one step, example level" if mechanism.unit == "example" else "one round, client level"
    made, seconds = sum(len(coins) for coins, _ in tests), time.perf_counter() - start
    claimed = game.curve[mechanism.delta]
    return Audit(what, claimed, lower, mechanism.delta, confidence, made, attack, seconds, curve=point)


def _joined(parts: list[Floats]) -> Floats:
    mask = np.concatenate([np.ma.getmaskarray(part) for part in parts])
    return np.ma.masked_array(np.concatenate([np.ma.getdata(part) for part in parts]), mask)


class _ClientGame:
    """Whole clients as canaries."""

    def __init__(self, mechanism: Mechanism, population: int | None) -> None:
        # A fixed cohort out of very many clients becomes the same share of fewer. Poisson cohorts need no
        # change.
        wanted = min(population or CANARIES, 4096)
        sampling = mechanism.sampling
        if isinstance(sampling, FixedSize):
            population = max(population or sampling.size, sampling.size)
            wanted = min(population, 4096)
            size = max(1, round(sampling.size * wanted / population))
            mechanism = replace(mechanism, sampling=FixedSize(size))
        self.workload = Workload(max(wanted, 8), seed=1)
        self.replaces = mechanism.relation == "replace-one"
        self.model = nn.Sequential(
            *(nn.Linear(self.workload.population + QUIET, 1, bias=False) for _ in range(2))
        )
        self.layout = Layout.of(self.model)
        self.width = self.workload.population + QUIET
        self.sizes = {"delta": self.layout.shared, STATE: self.width}
        self.pieces = [("delta", 0), ("delta", self.width), (STATE, 0)]
        self.mechanism = mechanism = _fitted(mechanism, self.sizes, self.layout)
        cohort = mechanism.sample(0, 0, self.workload)
        charges = [mechanism.charge(0, cohort, self.workload)]
        totals = replay(charges)
        self.curve = {d: totals.worst(d).epsilon.value for d in (mechanism.delta, *DELTAS)}

    def play(self, number: int) -> tuple[Bools, Scores]:
        """One release with every client a canary; returns coins, and each attack's score for each canary."""
        n = self.workload.population
        coins = np.random.default_rng().random(n) < 0.5
        with _same_circumstances():
            cohort = self.mechanism.sample(0, number, self.workload)
        with _same_circumstances():
            expected = self.mechanism.sample(0, number, self.workload)
        with _same_circumstances():
            seen = self._released(cohort, coins, 0, number)
        nobody = np.empty(0, np.int64)
        with _same_circumstances():
            again = self._released(nobody, coins, 0, number)
        others = {
            "": None,
            " minus the next release": self._released(nobody, coins, 1, number),
            " minus a second attempt": self._released(nobody, coins, 0, number + 10**6),
            " minus a repetition": again,
        }
        guessed = np.isin(np.arange(n), expected)
        scores: Scores = {}
        for name, other in others.items():
            values = seen if other is None else [a - b for a, b in zip(seen, other, strict=True)]
            where = [f"layer {i + 1}" for i in range(2)] + ["the second upload"]
            scores |= {f"{place}{name}": v for place, v in zip(where, values, strict=True)}
            scores[f"everything{name}"] = np.sum(values, axis=0)
            if not name and len(expected) < n:
                scores[AGREED] = np.ma.masked_array(np.sum(values, axis=0), ~guessed)
        return coins, scores

    def _released(self, cohort: Ids, coins: Bools, round: int, attempt: int) -> list[Floats]:
        """The release at each canary's place, for each piece of the uploads."""
        mechanism, workload = self.mechanism, self.workload
        state = _state_of(mechanism, self.sizes, round, workload)
        bounding = mechanism.bounding(state, self.sizes, self.layout, len(cohort))
        assert bounding is not None
        total: Vectors = {name: torch.zeros(size, dtype=torch.int64) for name, size in self.sizes.items()}
        arrived = 0
        for client in cohort:
            if not coins[client] and not self.replaces:
                continue
            sign = 1.0 if coins[client] else -1.0
            bits = mechanism.bits(workload.seed, round, attempt, int(client), 1) if bounding.share else None
            bounding.add_(self._upload(int(client), sign), total, bits)
            arrived += 1
        drawn = len(cohort) if self.replaces else arrived
        mean, _ = mechanism.release(total, Arrivals(drawn, arrived), state, round, attempt, workload)
        assert mean is not None
        n = workload.population
        return [mean[name][start : start + n].double().numpy() for name, start in self.pieces]

    def _upload(self, client: int, sign: float) -> Vectors:
        upload = {name: torch.zeros(size) for name, size in self.sizes.items()}
        for name, start in self.pieces:
            upload[name][start + client] = sign * HUGE * min(self.mechanism.clip.bound, 1e20)
        return upload

    def energies(self, trials: int) -> tuple[Bools, Scores]:
        """The strength of the noise, in trials with one other client and a canary that sends zeros or is
        absent (its upload is not finite, under the replace relation).
        """
        workload, sizes = self.workload, {"delta": QUIET}
        coins = np.random.default_rng().random(trials) < 0.5
        layout = Layout.of(nn.Linear(QUIET, 1, bias=False))
        mechanism = _fitted(self.mechanism, sizes, layout)
        found = np.zeros(trials)
        for trial, coin in enumerate(coins):
            here = mechanism.sample(0, trial, workload)
            there = [int(client) for client in here if client < 1 or (client < 2 and (coin or self.replaces))]
            state = _state_of(mechanism, sizes, 0, workload)
            bounding = mechanism.bounding(state, sizes, layout, len(there))
            assert bounding is not None
            total: Vectors = {"delta": torch.zeros(QUIET, dtype=torch.int64)}
            arrived = 0
            for client in there:
                value = math.inf if client == 1 and not coin else 0.0
                bits = mechanism.bits(workload.seed, 0, trial, client, 1) if bounding.share else None
                arrived += math.isfinite(bounding.add_({"delta": torch.full((QUIET,), value)}, total, bits))
            mean, _ = mechanism.release(total, Arrivals(len(there), arrived), state, 0, trial, workload)
            assert mean is not None
            found[trial] = math.log(float(mean["delta"].double().abs().mean()) + 1e-300)
        return coins, {"how strong the noise is": found}


def _fitted(mechanism: Mechanism, sizes: dict[str, int], layout: Layout) -> Mechanism:
    """The mechanism for the layers in the game: with noise by layer, the first gets the least and the others
    the most.
    """
    if not isinstance(mechanism, LayeredNoise):
        return mechanism
    given = [factor for _, places in mechanism.groups for *_, factor in places]
    factors = {layers_of(sizes, layout)[0][0]: min(given), "*": max(given)}
    groups = by_layer(factors, mechanism.clip, sizes, layout)
    return replace(mechanism, factors=factors, groups=groups)


class _RecordGame:
    """Single records of one client as canaries."""

    def __init__(self, mechanism: ExampleLevel, rate: float) -> None:
        self.mechanism = mechanism
        self.workload = Workload(1, sizes=np.array([CANARIES]), batch=max(1, round(CANARIES * rate)))
        self.flat = Flat(_Lookup(CANARIES))
        self.clipped = ClippedGradient(self.flat)
        charge = mechanism.charge(0, np.array([0]), self.workload)
        spend = {charge.parts[0].event: 1}
        self.curve = {d: epsilon(spend, d).value for d in (mechanism.delta, *DELTAS)}

    def play(self, number: int) -> tuple[Bools, Scores]:
        """One step on canaries; returns coins, and each attack's score for each canary."""
        mechanism, name = self.mechanism, (1, 0, number, 0)
        coins = np.random.default_rng().random(CANARIES) < 0.5
        with _same_circumstances():
            batch = next(iter(mechanism.batches(CANARIES, self.workload, mechanism.bits(*name, 0))))
        with _same_circumstances():
            expected = next(iter(mechanism.batches(CANARIES, self.workload, mechanism.bits(*name, 0))))
        with _same_circumstances():
            seen = self._gradient(batch[coins[batch]], *name)
        nobody = np.empty(0, np.int64)
        with _same_circumstances():
            again = self._gradient(nobody, *name)
        other = self._gradient(nobody, 1, 1, number, 0)
        guessed = np.isin(np.arange(CANARIES), expected)
        scores: Scores = {}
        for label, hidden in (("", 0.0), (" minus the next step", other), (" minus a repetition", again)):
            values = seen - hidden
            scores |= {f"layer {i + 1}{label}": values[i] for i in range(2)}
            scores[f"everything{label}"] = values.sum(axis=0)
        scores[AGREED] = np.ma.masked_array(seen.sum(axis=0), ~guessed)
        return coins, scores

    def _gradient(self, rows: Ids, *name: int) -> Floats:
        """The private gradient of these records, at each canary's place in each layer."""
        mechanism, flat, clip = self.mechanism, self.flat, self.mechanism.clip
        noise = mechanism.bits(*name, 1)
        bound = clip.bound if clip.per == "global" else clip.groups(flat.layout)
        if len(rows):
            self.clipped({"x": torch.from_numpy(rows)}, _huge_losses(clip.bound), bound)
        else:
            flat.grad.zero_()
        expected = mechanism.expected_batch(CANARIES, self.workload)
        mechanism.privatize_(flat.grad, noise, expected)
        return (flat.grad.double().numpy() * expected).reshape(2, CANARIES).copy()


class _Lookup(nn.Module):
    """Two linear layers of one-hot inputs: a record's gradient is its own coordinate in each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.first, self.second = nn.Linear(width, 1, bias=False), nn.Linear(width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hot = nn.functional.one_hot(x, self.width).to(self.first.weight.dtype)
        together: Tensor = self.first(hot) + self.second(hot)
        return together.squeeze(1)


def _huge_losses(bound: float) -> Callable[[nn.Module, dict[str, Tensor]], Tensor]:
    scale = HUGE * min(bound, 1e20)
    return lambda model, batch: model(batch["x"]) * scale


def _state_of(mechanism: Mechanism, sizes: dict[str, int], round: int, workload: Workload) -> State:
    """The mechanism's state before a round, if nobody has sent anything so far."""
    state = mechanism.init()
    for earlier in range(round):
        empty: Vectors = {name: torch.zeros(size, dtype=torch.int64) for name, size in sizes.items()}
        _, state = mechanism.release(empty, Arrivals(0, 0), state, earlier, 0, workload)
    return state


@contextmanager
def _same_circumstances() -> Iterator[None]:
    """Inside this context, all that others can know or set is the same each time: the clock, and every
    generator except the operating system's.
    """
    saved = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    with ExitStack() as stack:
        for name, value in (("time", 1.8e9), ("monotonic", 1e5), ("perf_counter", 1e5)):
            stack.enter_context(mock.patch(f"time.{name}", lambda value=value: value))
            stack.enter_context(mock.patch(f"time.{name}_ns", lambda value=value: int(value * 1e9)))
        try:
            yield
        finally:
            random.setstate(saved[0])
            np.random.set_state(saved[1])  # noqa: NPY002
            torch.set_rng_state(saved[2])
