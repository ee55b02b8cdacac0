"""Federated algorithms, one file each: pure functions on flat vectors, like the papers' pseudo-code."""

from tacit.algorithms.base import Algorithm, Round, Work
from tacit.algorithms.fedavg import FedAvg
from tacit.algorithms.fedprox import FedProx

__all__ = ["Algorithm", "FedAvg", "FedProx", "Round", "Work"]
