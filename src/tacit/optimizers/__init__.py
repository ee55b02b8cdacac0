"""How the server applies an average update: any torch optimizer, LAMB or LARS, and a schedule."""

from typing import TYPE_CHECKING

from tacit.lazy import lazily
from tacit.optimizers.schedules import Constant, Cosine, Exponential, PerRound, Schedule, Step, Within

if TYPE_CHECKING:
    from tacit.optimizers.lamb import Lamb
    from tacit.optimizers.lars import Lars
    from tacit.optimizers.server import ServerOptimizer

__all__ = [
    "Constant",
    "Cosine",
    "Exponential",
    "Lamb",
    "Lars",
    "PerRound",
    "Schedule",
    "ServerOptimizer",
    "Step",
    "Within",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "tacit.optimizers.lamb": "Lamb",
        "tacit.optimizers.lars": "Lars",
        "tacit.optimizers.server": "ServerOptimizer",
    },
    *__all__,
)
