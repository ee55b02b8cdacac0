"""Data: sources, partitions, populations and batches. Uses numpy; torch only for the tensors of a batch."""

from typing import TYPE_CHECKING

from tacit.lazy import lazily

if TYPE_CHECKING:
    from tacit.data.batches import epochs, steps
    from tacit.data.dataset import Dataset, Tokenisation, check, has_texts, load, names
    from tacit.data.partition import Partition, classes_per_client, dirichlet, iid, natural
    from tacit.data.population import Population
    from tacit.data.records import ArrayRecords, Batch, Records, Subset
    from tacit.data.text import TextRecords, Texts
    from tacit.data.tokens import Tokenizer

__all__ = [
    "ArrayRecords",
    "Batch",
    "Dataset",
    "Partition",
    "Population",
    "Records",
    "Subset",
    "TextRecords",
    "Texts",
    "Tokenisation",
    "Tokenizer",
    "check",
    "classes_per_client",
    "dirichlet",
    "epochs",
    "has_texts",
    "iid",
    "load",
    "names",
    "natural",
    "steps",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "tacit.data.batches": "epochs steps",
        "tacit.data.dataset": "Dataset Tokenisation check has_texts load names",
        "tacit.data.partition": "Partition classes_per_client dirichlet iid natural",
        "tacit.data.population": "Population",
        "tacit.data.records": "ArrayRecords Batch Records Subset",
        "tacit.data.text": "TextRecords Texts",
        "tacit.data.tokens": "Tokenizer",
    },
)
