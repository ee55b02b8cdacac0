"""tacit: differentially private federated learning for large models.

The names below are imported on first use, so a command that needs no neural network starts at once.
"""

from typing import TYPE_CHECKING

from tacit.lazy import lazily

if TYPE_CHECKING:
    from tacit.algorithms import Algorithm
    from tacit.api import (
        audit,
        compare,
        dataset,
        export,
        ledger,
        load,
        page,
        plan,
        resume,
        run,
        statement,
        test,
        test_clients,
        trained,
        verify,
    )
    from tacit.data import ArrayRecords, Dataset
    from tacit.errors import UserError
    from tacit.federation import Result, Tracker
    from tacit.sweeps import sweep
    from tacit.tasks import Task

__version__ = "0.1.0"
__all__ = [
    "Algorithm",
    "ArrayRecords",
    "Dataset",
    "Result",
    "Task",
    "Tracker",
    "UserError",
    "audit",
    "compare",
    "dataset",
    "export",
    "ledger",
    "load",
    "page",
    "plan",
    "resume",
    "run",
    "statement",
    "sweep",
    "test",
    "test_clients",
    "trained",
    "verify",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "tacit.algorithms": "Algorithm",
        "tacit.api": (
            "audit compare dataset export ledger load page plan resume run statement test test_clients "
            "trained verify"
        ),
        "tacit.data": "ArrayRecords Dataset",
        "tacit.errors": "UserError",
        "tacit.federation": "Result Tracker",
        "tacit.sweeps": "sweep",
        "tacit.tasks": "Task",
    },
    "__version__",
)
