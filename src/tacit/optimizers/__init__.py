"""What the server does with an average update: any optimizer of torch, LAMB or LARS, and a schedule."""

from tacit.optimizers.lamb import Lamb
from tacit.optimizers.lars import Lars
from tacit.optimizers.schedules import Constant, Cosine, Exponential, PerRound, Schedule, Within
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
    "Within",
]
