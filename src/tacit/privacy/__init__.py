"""Privacy: mechanisms, events, accountants, the ledger, the statement and planning.

The names below are imported when first used: planning needs no torch.
"""

from typing import TYPE_CHECKING

from tacit.lazy import lazily

if TYPE_CHECKING:
    from tacit.privacy.accountants import Epsilon, epsilon
    from tacit.privacy.bits import Bits, Ids
    from tacit.privacy.bounding import Bounding
    from tacit.privacy.checks import refuse_weights
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
        LayeredNoise,
        Mechanism,
        Observer,
        SecureSum,
        Unprotected,
        Workload,
    )
    from tacit.privacy.metrics import Metrics, Seen
    from tacit.privacy.sampling import FixedSize, OwnSampling, Poisson, Sampler, Sampling, as_sampling
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
    "LayeredNoise",
    "Ledger",
    "MatrixRow",
    "Mechanism",
    "Metrics",
    "Observer",
    "OwnSampling",
    "Part",
    "Poisson",
    "PoissonGaussian",
    "Sampler",
    "Sampling",
    "SecureSum",
    "Seen",
    "Statement",
    "Unprotected",
    "Workload",
    "as_sampling",
    "epsilon",
    "make_statement",
    "refuse_weights",
    "replay",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "tacit.privacy.accountants": "Epsilon epsilon",
        "tacit.privacy.bits": "Bits Ids",
        "tacit.privacy.bounding": "Bounding",
        "tacit.privacy.checks": "refuse_weights",
        "tacit.privacy.clipping": "Bound Clip",
        "tacit.privacy.events": "Event FixedSizeGaussian MatrixRow PoissonGaussian",
        "tacit.privacy.grid": "Grid",
        "tacit.privacy.ledger": "Carried Charge Header Ledger Part replay",
        "tacit.privacy.mechanisms": (
            "MECHANISMS AdaptiveClip Aggregation Arrivals BandedNoise BltNoise ClientLevel ExampleLevel "
            "LayeredNoise Mechanism Observer SecureSum Unprotected Workload"
        ),
        "tacit.privacy.metrics": "Metrics Seen",
        "tacit.privacy.sampling": "FixedSize OwnSampling Poisson Sampler Sampling as_sampling",
        "tacit.privacy.statement": "Statement make_statement",
    },
)
