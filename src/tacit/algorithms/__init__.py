"""Federated algorithms, one file each: pure functions on flat vectors, like the papers' pseudo-code."""

from tacit.algorithms.adadps import AdaDPS
from tacit.algorithms.base import Algorithm, Round, Work
from tacit.algorithms.fafed import FAFED
from tacit.algorithms.fedadamw import FedAdamW, FedAdamWTheory
from tacit.algorithms.fedavg import FedAvg
from tacit.algorithms.fedcm import FedCM
from tacit.algorithms.fedlada import FedLADA
from tacit.algorithms.fedopt import FedOpt
from tacit.algorithms.fedprox import FedProx
from tacit.algorithms.fedsam import FedSAM
from tacit.algorithms.layerwise import FedLayerwise
from tacit.algorithms.personal import DP2FedSAM
from tacit.algorithms.scaffold import Scaffold
from tacit.algorithms.smoothing import FedAvgLS

__all__ = [
    "FAFED",
    "AdaDPS",
    "Algorithm",
    "DP2FedSAM",
    "FedAdamW",
    "FedAdamWTheory",
    "FedAvg",
    "FedAvgLS",
    "FedCM",
    "FedLADA",
    "FedLayerwise",
    "FedOpt",
    "FedProx",
    "FedSAM",
    "Round",
    "Scaffold",
    "Work",
]
