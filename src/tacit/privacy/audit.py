"""Lower bounds on ε from how well somebody guesses: an audit can say no, and never yes.

A claimed (ε, δ) bounds how well anyone can tell two neighbouring data sets apart. So whoever tells them apart
better than that has shown that the claim is false. Everything here holds with a stated confidence over the
audit's own coins, and without any assumption about the shape of the noise.

- `from_rates`: many independent trials of two worlds, and a guess for each. With the rates of true and false
  positives bounded by Clopper and Pearson (1934), ε ≥ ln((TPR − δ)/FPR).
- `from_one_run`: many canaries in a single run, each there by a fair coin of its own, and guesses for those
  the guesser is surest of (Steinke, Nasr and Jagielski 2023, arXiv:2305.08846, theorem 5.2, with its exact
  p-value).

>>> round(from_rates(true=900, trials_in=1000, false=50, trials_out=1000, delta=1e-5, confidence=0.95), 2)
2.6
>>> round(from_one_run(canaries=1000, guesses=100, correct=97, delta=1e-5, confidence=0.95), 2)
2.49
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Audit:
    """What is claimed, and what was shown to be at least true."""

    what: str
    claimed: float
    lower: float
    """ε is at least this, with `confidence`."""
    delta: float
    confidence: float
    trials: int
    """Coins that were guessed at."""
    attack: str
    """What the guesses were made by."""
    seconds: float
    estimate: float | None = None
    """ε if scores were Gaussian: no bound, for comparison (Andrew et al. 2024, arXiv:2302.03098)."""

    @property
    def refuted(self) -> bool:
        """Whether the claim was shown to be false."""
        return self.lower > self.claimed

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an infinite ε becomes None."""
        plain = asdict(self) | {"refuted": self.refuted}
        return {k: None if isinstance(v, float) and math.isinf(v) else v for k, v in plain.items()}

    def text(self) -> str:
        """The same for a person."""
        verdict = "REFUTED: more leaks than is claimed" if self.refuted else "not refuted"
        about = "" if self.estimate is None else f"; as a Gaussian it would be {self.estimate:.3g}"
        return (
            f"{self.what}: claimed ε = {self.claimed:.3g}, audited ε ≥ {self.lower:.3g} at δ = "
            f"{self.delta:g} with {self.confidence:.0%} confidence{about}: {verdict} ({self.trials:,} trials "
            f"by {self.attack}, {self.seconds:.1f} s)."
        )


def from_rates(
    true: int, trials_in: int, false: int, trials_out: int, delta: float, confidence: float
) -> float:
    """ε that holds at least, by one fixed guess: `true` of `trials_in` and `false` of `trials_out` were
    guessed to be in.
    """
    from scipy.stats import beta

    share = (1 - confidence) / 2
    least = float(beta.ppf(share, true, trials_in - true + 1)) if true else 0.0
    most = float(beta.ppf(1 - share, false + 1, trials_out - false)) if false < trials_out else 1.0
    return math.log((least - delta) / most) if least - delta > most else 0.0


def from_scores(
    inside: Bools, scores: Mapping[str, Floats], delta: float, confidence: float
) -> tuple[float, str]:
    """ε that holds at least, and the best attack, from each trial's coin and scores by several attacks.

    The first half of the trials chooses attack, direction and threshold; the other half, of which the choice
    knows nothing, is the evidence. A score that is not a number is a guess that was not made: it counts as
    the lowest.
    """
    half = len(inside) // 2
    best, chosen = -1.0, None
    for name, values in scores.items():
        for sign in (1.0, -1.0):
            signed = np.nan_to_num(sign * values, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
            threshold, reached = _best_threshold(signed[:half], inside[:half], delta)
            if reached > best:
                best, chosen = reached, (name, signed, threshold)
    assert chosen is not None
    name, signed, threshold = chosen
    said, truth = signed[half:] >= threshold, inside[half:]
    true, false = int((said & truth).sum()), int((said & ~truth).sum())
    lower = from_rates(true, int(truth.sum()), false, int((~truth).sum()), delta, confidence)
    return lower, name


def _best_threshold(scores: Floats, inside: Bools, delta: float) -> tuple[float, float]:
    """The threshold above which guesses show most, as far as these trials can tell."""
    ins, outs = np.sort(scores[inside]), np.sort(scores[~inside])
    candidates = np.unique(scores[np.isfinite(scores)])
    if not len(candidates) or not len(ins) or not len(outs):
        return math.inf, 0.0
    true = len(ins) - np.searchsorted(ins, candidates)
    false = len(outs) - np.searchsorted(outs, candidates)
    # Clopper and Pearson's bound, nearly: only the choice depends on it. Three deviations, since the best of
    # many thresholds owes something to chance.
    least = np.maximum(true - 3 * np.sqrt(true), 0) / len(ins) - delta
    most = (false + 3 * np.sqrt(false) + 3) / len(outs)
    shown = np.log(np.maximum(least, 1e-300) / most)
    best = int(np.argmax(shown))
    return float(candidates[best]), max(0.0, float(shown[best]))


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """How likely so many correct guesses are, at most, if (ε, δ) holds: Steinke et al. 2023, theorem 5.2.

    With δ = 0 the correct guesses are no more than a binomial with probability eᵉ/(eᵉ + 1). δ adds, for each
    number i by which it may fall short, its probability of i or fewer ÷ i, at most, times 2·δ·canaries.
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
    """ε that holds at least, if of `canaries` with fair coins `correct` of `guesses` were guessed right."""
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
"""How many of the canaries are guessed to be in, those with the highest scores, and out, with the lowest.
Where most are seldom drawn, a high score tells much and a low one little."""


def from_canaries(inside: Bools, scores: Floats, delta: float, confidence: float) -> tuple[float, int]:
    """ε that holds at least by one run's canaries, and how many guesses showed it.

    Each way to guess of `SHARES` is tried; the risk of being wrong is divided among them.
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
    """ε of a Gaussian mechanism whose two worlds' scores are as far apart as these: an estimate, no bound."""
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
