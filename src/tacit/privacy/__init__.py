"""Privacy: mechanisms, events, accountants, the ledger, the statement and planning."""

from tacit.privacy.accountants import Epsilon, epsilon
from tacit.privacy.bits import Bits, Ids
from tacit.privacy.bounding import Bounding
from tacit.privacy.checks import refuse_batch_norm, refuse_weights
from tacit.privacy.clipping import Bound, Clip
from tacit.privacy.events import Event, FixedSizeGaussian, MatrixRow, PoissonGaussian
from tacit.privacy.grid import Grid
from tacit.privacy.ledger import Carried, Charge, Header, Ledger, Part, replay
from tacit.privacy.mechanisms import (
    MECHANISMS,
    AdaptiveClip,
    Aggregation,
    Arrivals,
    BandedNoise,
    BltNoise,
    ClientLevel,
    ExampleLevel,
    Mechanism,
    Observer,
    SecureSum,
    Unprotected,
    Workload,
)
from tacit.privacy.metrics import Metrics, Seen
from tacit.privacy.sampling import FixedSize, Poisson, Sampling
from tacit.privacy.statement import Statement, make_statement

__all__ = [
    "MECHANISMS",
    "AdaptiveClip",
    "Aggregation",
    "Arrivals",
    "BandedNoise",
    "Bits",
    "BltNoise",
    "Bound",
    "Bounding",
    "Carried",
    "Charge",
    "ClientLevel",
    "Clip",
    "Epsilon",
    "Event",
    "ExampleLevel",
    "FixedSize",
    "FixedSizeGaussian",
    "Grid",
    "Header",
    "Ids",
    "Ledger",
    "MatrixRow",
    "Mechanism",
    "Metrics",
    "Observer",
    "Part",
    "Poisson",
    "PoissonGaussian",
    "Sampling",
    "SecureSum",
    "Seen",
    "Statement",
    "Unprotected",
    "Workload",
    "epsilon",
    "make_statement",
    "refuse_batch_norm",
    "refuse_weights",
    "replay",
]
