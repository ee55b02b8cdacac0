"""Data: sources, partitions, populations and batches. Knows numpy, and torch only as the form of a batch."""

from tacit.data.batches import epochs, poisson, steps
from tacit.data.dataset import Dataset, check, load, names
from tacit.data.partition import Partition, classes_per_client, dirichlet, iid, natural
from tacit.data.population import Population
from tacit.data.records import ArrayRecords, Batch, Records, Subset

__all__ = [
    "ArrayRecords",
    "Batch",
    "Dataset",
    "Partition",
    "Population",
    "Records",
    "Subset",
    "check",
    "classes_per_client",
    "dirichlet",
    "epochs",
    "iid",
    "load",
    "names",
    "natural",
    "poisson",
    "steps",
]
