"""Privacy: units, sampling, clipping, noise, accounting, the ledger, the statement and planning."""

from tacit.privacy.accounting import Epsilon, epsilon
from tacit.privacy.adaptive import Adaptive
from tacit.privacy.checks import refuse_batch_norm, refuse_weights
from tacit.privacy.clipping import Bound, Clip
from tacit.privacy.events import Event, FixedSizeGaussian, PoissonGaussian
from tacit.privacy.ledger import Charge, Header, Ledger, Part, replay
from tacit.privacy.mechanism import Privacy, batch_sampling
from tacit.privacy.noise import Noise, OsNoise, SeededNoise
from tacit.privacy.sampling import FixedSize, Poisson, Sampling, secret_rng
from tacit.privacy.statement import Observer, Statement, make_statement

__all__ = [
    "Adaptive",
    "Bound",
    "Charge",
    "Clip",
    "Epsilon",
    "Event",
    "FixedSize",
    "FixedSizeGaussian",
    "Header",
    "Ledger",
    "Noise",
    "Observer",
    "OsNoise",
    "Part",
    "Poisson",
    "PoissonGaussian",
    "Privacy",
    "Sampling",
    "SeededNoise",
    "Statement",
    "batch_sampling",
    "epsilon",
    "make_statement",
    "refuse_batch_norm",
    "refuse_weights",
    "replay",
    "secret_rng",
]
