"""The base of all mechanisms: one object samples, bounds, adds noise, accounts, calibrates and explains.

A run uses it for each of these. Nothing else builds a privacy event, counts a private step or sizes noise, so
the accountant cannot be told anything different from what the program does. An unsound mechanism cannot be
built: the error names the fix.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from tacit.errors import UserError
from tacit.privacy.accountants import check_delta, epsilon
from tacit.privacy.bits import Bits, Ids
from tacit.privacy.calibration import solve_noise
from tacit.privacy.clipping import Clip
from tacit.privacy.events import Relation, Spend
from tacit.privacy.gaussian import SMALLEST_DELTA
from tacit.privacy.groups import group_epsilon
from tacit.privacy.ledger import Charge, Header, Part
from tacit.privacy.mechanisms.contract import Aggregation, Arrivals, Description, Observer, State, Workload
from tacit.privacy.metrics import Metrics, Seen
from tacit.privacy.sampling import FixedSize, OwnSampling, Poisson, Sampling
from tacit.privacy.settings import Entropy, Unit
from tacit.privacy.totals import Profile

__all__ = [
    "COHORT",
    "METRICS",
    "NAMES_KEPT",
    "NOT_COVERED",
    "NO_ROUND_FITS",
    "QUANTILE",
    "RELEASE",
    "Aggregation",
    "Arrivals",
    "Description",
    "Mechanism",
    "NotDue",
    "Observer",
    "State",
    "Unit",
    "Workload",
]

COHORT, RELEASE, QUANTILE, METRICS = 1, 2, 3, 4
"""Purposes of named bits in a simulation."""
NO_ROUND_FITS = "privacy.epsilon: not even one round fits into the budget; raise the noise or the budget"


class NotDue(UserError):
    """The client's earlier charges do not allow it to take part in this round."""


@dataclass(frozen=True)
class Mechanism(Aggregation):
    """Base class of private mechanisms. A subclass is one file in this folder and one line in its registry.

    Guarantee: (ε, δ)-differential privacy (Dwork and Roth 2014) of everything that `release` and `measure`
    return, for the `unit` and the adjacency `relation` of the mechanism. ε is the accountants' replay of the
    charges that `charge` returned. The guarantee holds if sampling, clipping and noise all come from this
    object.
    """

    noise: float
    """Noise multiplier z: standard deviation of the noise on the sum ÷ the clipping norm."""
    delta: float
    clip: Clip
    sampling: Sampling
    """How cohorts are drawn from the population of clients."""
    epsilon: float | None = None
    """The budget: a round that would take ε beyond it is not run."""
    entropy: Entropy = "os"
    """Where sampling and noise come from; "seed" makes the run a repeatable simulation without a claim."""
    metrics: Metrics | None = None
    """The private metrics of each round; None: metrics are exact, and outside the guarantee."""

    unit: ClassVar[Unit]
    kind: ClassVar[str]
    """Its name in the registry and in a saved statement."""

    def __post_init__(self) -> None:
        check_delta(self.delta)
        if type(self.sampling) not in (Poisson, FixedSize, OwnSampling):
            raise UserError(
                f"sampling: what {type(self.sampling).__name__} amplifies is not known; give it to "
                "tacit.privacy.sampling.as_sampling, which claims nothing for it"
            )
        if self.delta < SMALLEST_DELTA:
            raise UserError(
                f"δ = {self.delta:g} is below what a cipher with a 256-bit key can be trusted for; "
                f"choose δ ≥ {SMALLEST_DELTA:.0e}"
            )
        if not 0 <= self.noise < math.inf:
            raise UserError(f"privacy.noise {self.noise}: choose a multiplier ≥ 0, such as 1.0")
        if self.noise > 0 and math.isinf(self.clip.bound):
            raise UserError("privacy.clip is infinite, so no noise is enough; set a clip, or noise to 0")
        if self.epsilon is not None and not 0 < self.epsilon < math.inf:
            raise UserError(f"privacy.epsilon {self.epsilon}: choose a budget > 0, or leave it out for none")
        if self.epsilon is not None and self.noise == 0:
            raise UserError(
                "privacy.noise is 0 and privacy.epsilon sets a budget, which not one round can keep; "
                "set the noise (`tacit plan --epsilon …` finds it) or drop the budget"
            )

    @property
    def sums_integers(self) -> bool:
        """Whether uploads are summed as integers on a grid."""
        raise NotImplementedError

    # --- what is claimed --------------------------------------------------------------------------------

    @property
    def relation(self) -> Relation:
        """Which data sets are neighbours."""
        raise NotImplementedError

    @property
    def simulated(self) -> bool:
        """Whether the run is a simulation: anyone who knows the seed can repeat it, so nothing is claimed."""
        return self.entropy == "seed"

    @property
    def forgetful_clients(self) -> bool:
        """Whether ε is proved only for clients that keep no state from round to round.

        With fixed-size cohorts, one client's draw reveals something about the others'. State that clients
        kept from earlier cohorts would reveal those draws. Given everything that was released, a round's
        cohort would then no longer be a fresh secret. Poisson draws are independent, so the other clients'
        draws reveal nothing.
        """
        return self.relation == "replace-one" and self.noise > 0 and not self.simulated

    def expected(self, population: int) -> float:
        """The expected cohort size: the constant that sums are divided by.

        Args:
            population: clients in all.
        """
        return self.sampling.expected(population)

    def bits(self, *name: int) -> Bits:
        """The stream for one draw or release.

        Args:
            name: numbers that name the stream in a simulation, such as seed, round, attempt and purpose.

        Returns:
            Secret bits, whatever the name; in a simulation, bits that the name determines.
        """
        return Bits.named(*name) if self.simulated else Bits.secret()

    # --- what the accountant is told --------------------------------------------------------------------

    def charge(self, round: int, cohort: Ids, workload: Workload, attempt: int = 0) -> Charge:
        """What a round with this cohort costs.

        Args:
            round: its number, from 0.
            cohort: the clients that were drawn.
            workload: what of the run decides its cost.
            attempt: how often this round was charged before.

        Returns:
            A charge, made from the same numbers that sampling and noise use.
        """
        raise NotImplementedError

    def costliest(self, workload: Workload) -> Part:
        """A part that is at least as expensive as any charge of such a run, for any unit.

        Args:
            workload: what of the run decides its cost.
        """
        raise NotImplementedError

    def planned(self, workload: Workload, rounds: int, noise: float) -> Sequence[Spend]:
        """The cost of a run after a number of rounds.

        Args:
            workload: what of the run decides its cost.
            rounds: how many are run.
            noise: the noise multiplier.

        Returns:
            Events and their counts, for each client that may have the largest ε.
        """
        raise NotImplementedError

    def cost_to(self, client: int, workload: Workload) -> Part:
        """What a round costs a participating client, by the client's own accounting.

        Args:
            client: which one.
            workload: what of the run decides its cost.

        Raises:
            UserError: a client cannot compute this by itself.
        """
        raise UserError(f"a client cannot count the cost of {self.kind} noise by itself yet")

    def due(self, client: int, round: int, before: Sequence[int], workload: Workload) -> tuple[Part, ...]:
        """What a client with its own ledger pays for one more round.

        Args:
            client: which one.
            round: the round that it is asked to take part in.
            before: the rounds of the same run that it has paid for, in order.
            workload: what of the run decides its cost.

        Raises:
            NotDue: the client must not take part in this round.
            UserError: a client cannot compute this by itself.
        """
        return (self.cost_to(client, workload),)

    def header(self, workload: Workload, data: str) -> Header:
        """The first line of the run's ledger.

        Args:
            workload: what of the run decides its cost.
            data: a fingerprint of the protected data.
        """
        return Header(self.unit, self.delta, self.costliest(workload), data, self.simulated)

    def calibrated(self, workload: Workload, rounds: int) -> Self:
        """The same mechanism with the least three-digit noise that keeps a run within its budget.

        Args:
            workload: what of the run decides its cost.
            rounds: how many are to be run.

        Raises:
            UserError: no noise is enough.
        """
        assert self.epsilon is not None
        noise = solve_noise(lambda z: self.planned(workload, rounds, z), self.epsilon, self.delta)
        return replace(self, noise=noise)

    def most_rounds(self, workload: Workload, rounds: int) -> int:
        """The number of rounds that the budget has room for, at most `rounds`.

        Args:
            workload: what of the run decides its cost.
            rounds: how many are to be run.
        """

        def exceeds(count: int) -> bool:
            assert self.epsilon is not None
            spends = self.planned(workload, count, self.noise)
            return any(epsilon(spend, self.delta).value > self.epsilon for spend in spends)

        return rounds if self.epsilon is None else bisect_left(range(1, rounds + 1), True, key=exceeds)

    def group_epsilon(self, spent: Profile, size: int) -> float:
        """ε for several units together.

        Args:
            spent: what each of them has spent.
            size: how many units.
        """
        return group_epsilon(dict(spent), self.delta, size)

    # --- what an honest-but-curious server may learn ----------------------------------------------------

    def seen_header(self, data: str) -> Header | None:
        """The first line of a second ledger, for what the server sees; None if nothing is claimed against it.

        Args:
            data: a fingerprint of the protected data.
        """
        return None

    def seen_by_server(self, round: int, cohort: Ids) -> Charge | None:
        """What a round costs against the server.

        Args:
            round: its number, from 0.
            cohort: the clients that were drawn, which the server knows.
        """
        return None

    def against_server(self, epsilon: float | None) -> Observer | None:
        """The statement's line about the server; None if `describe` covers it.

        Args:
            epsilon: ε by the second ledger.
        """
        return None

    # --- what a user is told ----------------------------------------------------------------------------

    @property
    def withholds(self) -> bool:
        """Whether nobody may see exact numbers about protected data: metrics are private, or withheld."""
        return self.metrics is not None and not self.simulated

    def measure(
        self,
        cohort: Sequence[Seen],
        tests: Sequence[float],
        state: State,
        round: int,
        attempt: int,
        workload: Workload,
    ) -> dict[str, float]:
        """A round's private metrics, for its record; the round's charge covers them.

        Args:
            cohort: what each client reported.
            tests: accuracies of clients of the cohort on their own test records.
            state: the mechanism's, as it was when the round's clients clipped.
            round: its number, from 0.
            attempt: how often this round was charged before.
            workload: what of the run decides its cost.

        Returns:
            Metrics by name; empty unless the mechanism has private metrics.
        """
        return {}

    def without_metrics(self) -> Self:
        """The same mechanism and noise without private metrics; the difference in ε is their cost."""
        return replace(self, metrics=None)

    @property
    def _not_covered(self) -> tuple[str, ...]:
        exact = "metrics for the researcher (losses, accuracies, norms, which clients failed): they are exact"
        return NOT_COVERED if self.withholds else (exact, *NOT_COVERED)

    def describe(self, population: int, epsilon: float, worst: Profile) -> Description:
        """The statement's sentences.

        Args:
            population: clients in all.
            epsilon: ε of the worst client.
            worst: events and counts of the worst client.
        """
        raise NotImplementedError

    def warnings(self, workload: Workload) -> list[str]:
        """Warnings about settings that are allowed but probably not intended.

        Args:
            workload: what of the run decides its cost.
        """
        raise NotImplementedError

    def _loose_delta(self, units: int, what: str) -> list[str]:
        if self.delta < 1 / units:
            return []
        return [
            f"δ = {self.delta:g} is not below 1 ÷ {units:,} {what}: publishing one of them at random "
            f"would pass; choose one well below that, such as {0.1 / units:.1g}"
        ]

    def _cohort(self, population: int) -> str:
        """How clients are drawn, for a statement."""
        match self.sampling:
            case Poisson(rate):
                return f"each of {population:,} clients with probability {rate:g}, every round"
            case FixedSize(size):
                return f"{size:,} of {population:,} clients, without replacement, every round"
            case OwnSampling(name):
                return f"by {name}, out of {population:,} clients"

    @property
    def _source(self) -> str:
        return (
            "a name that can be repeated"
            if self.simulated
            else "a cipher keyed by the operating system's entropy"
        )


NAMES_KEPT = "the server's own ledger, which names who took part in which round: it is for the server alone"
"""Not covered where a run keeps a server's ledger: with real clients, and under secure aggregation."""
NOT_COVERED = (
    "what the data look like: the classes and their names, the shape of a record, whether all pictures have "
    "one size; they count as public, also where they were read off the records",
    "the common test set: what is told of it has no noise, so its records count as public, whosever they are",
    "how records were dealt out where clients are not the data's own users, and, where single records are "
    "protected, which of them are held out; and which single records are public (data.public): all of it "
    "counts as given",
    "what the model's first weights were trained on, where no run's folder says it: a module that was given, "
    "model.hub (an export of a run, too), or what model.public calls public; and that the data of an earlier "
    "run are the same, where its records had other labels or features and no users",
    "choosing hyper-parameters, the clipping norm or a checkpoint by looking at private data",
    "ending the run earlier, or later, because of what it has let out: ε is of rounds whose number, or whose "
    "budget, was settled before",
    "what the run's folder holds beside the model: clients' own states, which clients wrote one when, in "
    "lineage.json the names of users and hashes of their records, by which anyone can ask whether a record "
    "was there, and hashes of all records in the ledger and in objects.json; an export has none of these",
    "a client's code that failed, or took its process with it: that it did is seen, whatever data it was on",
    "how long anything takes, and what the log says of why gradients are computed record by record",
)
"""What no mechanism here covers. The model's starting point is in the ledger: see its carried charges."""
