"""Lower bounds on ε from how well an attacker guesses: an audit can refute a claim, but never prove it.

A claimed (ε, δ) bounds how well anyone can distinguish two neighbouring data sets. An attacker who does
better has shown that the claim is false. All results here hold with a stated confidence over the audit's own
coins, without any assumption about the shape of the noise.

- `from_rates`: many independent trials of two worlds, and a guess for each. With the true and false positive
  rates bounded by Clopper and Pearson (1934), ε ≥ ln((TPR − δ)/FPR).
- `against_curve`: the same against the whole claim. For an event, an accountant claims an ε for every δ, and
  a claim of ε = 0.3 at δ = 0.1 takes far fewer trials to refute than the one at a statement's δ = 10⁻⁵:
  halved noise shows in the middle of a Gaussian before it shows in its tails.
- `from_one_run`: many canaries in a single run, each present by its own fair coin, and guesses for those of
  which the guesser is surest (Steinke, Nasr and Jagielski 2023, arXiv:2305.08846, theorem 5.2, with its exact
  p-value).

>>> round(from_rates(true=900, trials_in=1000, false=50, trials_out=1000, delta=1e-5, confidence=0.95), 2)
2.6
>>> round(from_one_run(canaries=1000, guesses=100, correct=97, delta=1e-5, confidence=0.95), 2)
2.49
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit.privacy.rounding import rounded_down, rounded_up

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Point:
    """One point of a claimed privacy curve, and the bound shown there."""

    delta: float
    claimed: float
    lower: float
    attack: str

    @property
    def refuted(self) -> bool:
        return self.lower > self.claimed


@dataclass(frozen=True)
class Audit:
    """The claimed ε, and the lower bound that was shown."""

    what: str
    claimed: float
    lower: float
    """ε is at least this, with `confidence`."""
    delta: float
    confidence: float
    trials: int
    """The number of coins that were guessed."""
    attack: str
    """The attack that made the guesses."""
    seconds: float
    estimate: float | None = None
    """ε if the scores were Gaussian: not a bound, for comparison (Andrew et al. 2024, arXiv:2302.03098)."""
    curve: Point | None = None
    """The most doubtful point of the whole claimed curve; `confidence` covers it and `lower` together."""

    @property
    def refuted(self) -> bool:
        """Whether the claim was shown to be false, at δ or at the tested point of the curve."""
        return self.lower > self.claimed or (self.curve is not None and self.curve.refuted)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an infinite ε becomes None."""
        plain = asdict(self) | {"refuted": self.refuted}
        return {k: None if isinstance(v, float) and math.isinf(v) else v for k, v in plain.items()}

    def text(self) -> str:
        """The same for a person."""
        verdict = "REFUTED: more leaks than is claimed" if self.refuted else "not refuted"
        about = "" if self.estimate is None else f"; as a Gaussian it would be {self.estimate:.3g}"
        if self.curve is not None:
            there = f"{rounded_up(self.curve.claimed)} is claimed and {rounded_down(self.curve.lower)} shown"
            by = f" by {self.curve.attack}" if self.curve.attack != self.attack else ""
            about += f"; at δ = {self.curve.delta:.2g}, {there}{by}"
        return (
            f"{self.what}: claimed ε = {rounded_up(self.claimed)}, audited ε ≥ {rounded_down(self.lower)} "
            f"at δ = {self.delta:g} with {percent(self.confidence)} confidence{about}: {verdict} "
            f"({self.trials:,} trials by {self.attack}, {self.seconds:.1f} s)."
        )


@dataclass(frozen=True)
class AuditReport:
    """Both audits of a config, and what the guesser of the run saw."""

    mechanism: Audit
    run: Audit | None
    inside: Bools | None = None
    scores: Floats | None = None

    @property
    def refuted(self) -> bool:
        """Whether either claim was shown to be false."""
        return self.mechanism.refuted or (self.run is not None and self.run.refuted)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        run = None if self.run is None else self.run.to_dict()
        return {"mechanism": self.mechanism.to_dict(), "run": run, "refuted": self.refuted}

    def text(self) -> str:
        """The same for a person."""
        lines = [f"The mechanism, {self.mechanism.text()}"]
        if self.run is not None:
            lines.append(f"The run, {self.run.text()}")
        return "\n".join(lines)


def percent(confidence: float) -> str:
    """A confidence as text, never rounded up to certainty."""
    return f"{100 * confidence:.10g} %"


def from_rates(
    true: int, trials_in: int, false: int, trials_out: int, delta: float, confidence: float
) -> float:
    """A lower bound on ε from one fixed guess: `true` of `trials_in` and `false` of `trials_out` were guessed
    to be in.
    """
    from scipy.stats import beta

    share = (1 - confidence) / 2
    least = float(beta.ppf(share, true, trials_in - true + 1)) if true else 0.0
    most = float(beta.ppf(1 - share, false + 1, trials_out - false)) if false < trials_out else 1.0
    return math.log((least - delta) / most) if least - delta > most else 0.0


def from_scores(
    inside: Bools, scores: Mapping[str, Floats], delta: float, confidence: float
) -> tuple[float, str]:
    """A lower bound on ε, and the best attack, from each trial's coin and its scores by several attacks.

    The first half of the trials chooses attack, direction and threshold. The other half, which the choice has
    not seen, is the evidence. A NaN score counts as lower than any other. Masked trials of a masked array are
    left out: the mask must not depend on the coins.
    """
    best, chosen = -1.0, None
    for name, trials in _attacks(inside, scores):
        threshold, reached = _best_threshold(trials, delta)
        if reached > best:
            best, chosen = reached, (name, trials, threshold)
    if chosen is None:
        return 0.0, "nothing"
    name, trials, threshold = chosen
    return trials.shown(threshold, delta, confidence), name


def against_curve(
    inside: Bools, scores: Mapping[str, Floats], curve: Mapping[float, float], confidence: float
) -> Point:
    """The most doubtful point of a claimed `curve` (δ to ε), and the lower bound on ε at that δ.

    The first half of the trials chooses attack, direction, threshold and point: those where the claim TPR ≤
    e^ε·FPR + δ fails by the most standard deviations. The other half is the evidence.
    """
    best, chosen = -math.inf, None
    for name, trials in _attacks(inside, scores):
        for delta, claimed in curve.items():
            threshold, doubt = _most_doubtful(trials, delta, claimed)
            if doubt > best:
                best, chosen = doubt, (name, trials, threshold, delta)
    if chosen is None:
        delta, claimed = next(iter(curve.items()))
        return Point(delta, claimed, 0.0, "nothing")
    name, trials, threshold, delta = chosen
    return Point(delta, curve[delta], trials.shown(threshold, delta, confidence), name)


@dataclass(frozen=True)
class _Trials:
    """Scores of one attack, in one direction: rates in the half that chooses, and the other half's scores."""

    thresholds: Floats
    true: Floats
    """How many of the `n` trials that were in reach each threshold."""
    false: Floats
    """How many of the `m` trials that were out reach it."""
    n: int
    m: int
    later_ins: Floats
    later_outs: Floats

    def shown(self, threshold: float, delta: float, confidence: float) -> float:
        """The lower bound on ε at this threshold, from the other half."""
        ins, outs = self.later_ins, self.later_outs
        true, false = int((ins >= threshold).sum()), int((outs >= threshold).sum())
        return from_rates(true, len(ins), false, len(outs), delta, confidence)


def _attacks(inside: Bools, scores: Mapping[str, Floats]) -> Iterator[tuple[str, _Trials]]:
    for name, values in scores.items():
        kept = ~np.ma.getmaskarray(values)
        truth, half = inside[kept], int(kept.sum()) // 2
        told = np.nan_to_num(np.ma.getdata(values)[kept], nan=-np.inf, posinf=np.inf, neginf=-np.inf)
        for signed in (told, -told):
            first, coins = signed[:half], truth[:half]
            later, later_coins = signed[half:], truth[half:]
            thresholds = _thinned(np.unique(first[first > -np.inf]))
            if len(thresholds) and coins.any() and not coins.all():
                ins, outs = np.sort(first[coins]), np.sort(first[~coins])
                true = len(ins) - np.searchsorted(ins, thresholds)
                false = len(outs) - np.searchsorted(outs, thresholds)
                yield (
                    name,
                    _Trials(
                        thresholds,
                        true.astype(np.float64),
                        false.astype(np.float64),
                        len(ins),
                        len(outs),
                        later[later_coins],
                        later[~later_coins],
                    ),
                )


def _thinned(thresholds: Floats, most: int = 300) -> Floats:
    """The highest thresholds, and this many of all: trying a hundred thousand is unnecessary."""
    if len(thresholds) <= 2 * most:
        return thresholds
    spread = np.linspace(0, len(thresholds) - most - 1, most).astype(np.int64)
    return np.concatenate([thresholds[spread], thresholds[-most:]])


def _best_threshold(trials: _Trials, delta: float) -> tuple[float, float]:
    """The threshold with the strongest evidence, as far as these trials show."""
    true, false = trials.true, trials.false
    # Approximately Clopper and Pearson's bound: only the choice depends on it. Three deviations, since the
    # best of many thresholds is partly due to chance.
    least = np.maximum(true - 3 * np.sqrt(true), 0) / trials.n - delta
    most = (false + 3 * np.sqrt(false) + 3) / trials.m
    shown = np.log(np.maximum(least, 1e-300) / most)
    best = int(np.argmax(shown))
    return float(trials.thresholds[best]), max(0.0, float(shown[best]))


def _most_doubtful(trials: _Trials, delta: float, claimed: float) -> tuple[float, float]:
    """The threshold at which TPR exceeds e^ε·FPR + δ by the most standard deviations, and that number."""
    ratio = math.exp(min(claimed, 300.0))
    # Add one on either side: an observed rate of 0 or 1 is not known exactly.
    t, f = (trials.true + 1) / (trials.n + 2), (trials.false + 1) / (trials.m + 2)
    deviation = np.sqrt(t * (1 - t) / trials.n + ratio**2 * f * (1 - f) / trials.m)
    doubt = (t - ratio * f - delta) / deviation
    best = int(np.argmax(doubt))
    return float(trials.thresholds[best]), float(doubt[best])


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """The largest probability of this many correct guesses if (ε, δ) holds: Steinke et al. 2023, theorem 5.2.

    With δ = 0, the number of correct guesses is at most a binomial with probability eᵉ/(eᵉ + 1). δ adds
    2·δ·canaries times the largest, over i ≥ 1, of the probability of falling short of `correct` by 1 to i,
    divided by i.
    """
    from scipy.stats import binom

    probability = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, probability))
    if not correct:
        return 1.0
    short = np.cumsum(binom.pmf(np.arange(correct - 1, -1, -1), guesses, probability))
    worst = float(np.max(short / np.arange(1, correct + 1)))
    return min(1.0, tail + worst * 2 * delta * canaries)


def from_one_run(canaries: int, guesses: int, correct: int, delta: float, confidence: float) -> float:
    """A lower bound on ε, if of `canaries` with fair coins `correct` of `guesses` were guessed right."""
    low, high = 0.0, 30.0
    if p_value(canaries, guesses, correct, low, delta) > 1 - confidence:
        return 0.0
    for _ in range(50):
        middle = (low + high) / 2
        if p_value(canaries, guesses, correct, middle, delta) <= 1 - confidence:
            low = middle
        else:
            high = middle
    return low


SHARES = ((0.5, 0.5), (0.25, 0.25), (0.1, 0.1), (0.25, 0.0), (0.1, 0.0))
"""The shares of canaries guessed to be in (those with the highest scores) and out (those with the lowest). If
most are seldom drawn, a high score is informative and a low one is not.
"""


def from_canaries(inside: Bools, scores: Floats, delta: float, confidence: float) -> tuple[float, int]:
    """A lower bound on ε from one run's canaries, and the number of guesses that showed it.

    Each pair in `SHARES` is tried; the error probability is divided among them.
    """
    order = np.argsort(scores, kind="stable")
    level = 1 - (1 - confidence) / len(SHARES)
    best, made = 0.0, 0
    for high, low in SHARES:
        ins, outs = order[len(order) - int(len(order) * high) :], order[: int(len(order) * low)]
        correct, guesses = int(inside[ins].sum() + (~inside[outs]).sum()), len(ins) + len(outs)
        shown = from_one_run(len(order), guesses, correct, delta, level)
        if shown > best or not made:
            best, made = shown, guesses
    return best, made


def gaussian_estimate(inside: Bools, scores: Floats, delta: float) -> float | None:
    """ε of a Gaussian mechanism whose two worlds' scores are this far apart: an estimate, not a bound."""
    from tacit.privacy.accountants import epsilon
    from tacit.privacy.events import PoissonGaussian

    ins, outs = scores[inside], scores[~inside]
    if min(len(ins), len(outs)) < 2:
        return None
    spread = math.sqrt((float(ins.var()) + float(outs.var())) / 2)
    apart = abs(float(ins.mean() - outs.mean()))
    if not apart or not spread:
        return math.inf if apart else 0.0
    return epsilon({PoissonGaussian(1.0, spread / apart): 1}, delta).value
