"""tacit: differentially private federated learning for large models.

The names below are imported when first used, so that a command which needs no network starts at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tacit.algorithms import Algorithm
    from tacit.api import (
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
        trained,
        verify,
    )
    from tacit.config.audit import audit
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
    "trained",
    "verify",
]

_HOME = {
    "Algorithm": "tacit.algorithms",
    "ArrayRecords": "tacit.data",
    "Dataset": "tacit.data",
    "Result": "tacit.federation",
    "Task": "tacit.tasks",
    "Tracker": "tacit.federation",
    "UserError": "tacit.errors",
    "audit": "tacit.config.audit",
    "compare": "tacit.api",
    "dataset": "tacit.api",
    "export": "tacit.api",
    "ledger": "tacit.api",
    "load": "tacit.api",
    "page": "tacit.api",
    "plan": "tacit.api",
    "resume": "tacit.api",
    "run": "tacit.api",
    "statement": "tacit.api",
    "sweep": "tacit.sweeps",
    "test": "tacit.api",
    "trained": "tacit.api",
    "verify": "tacit.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tacit' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
