"""A run in five lines of Python: load a config, run it, look at the result.

    import tacit

    config = tacit.load("quickstart.yaml", {"rounds": 10})
    result = tacit.run(config)
    print(result.last("accuracy"), result.path)

Pass your own module, data set, algorithm or task as an object; nothing needs to be registered.
"""

from typing import TYPE_CHECKING

from tacit.lazy import lazily

if TYPE_CHECKING:
    from tacit.api.auditing import audit
    from tacit.api.exporting import export, trained
    from tacit.api.extrapolating import extrapolations
    from tacit.api.fitting import fit
    from tacit.api.folders import RUNS, new_folder
    from tacit.api.inputs import dataset, load
    from tacit.api.planning import plan
    from tacit.api.reading import compare, ledger, page, statement, test, test_clients, verify
    from tacit.api.training import resume, run

__all__ = [
    "RUNS",
    "audit",
    "compare",
    "dataset",
    "export",
    "extrapolations",
    "fit",
    "ledger",
    "load",
    "new_folder",
    "page",
    "plan",
    "resume",
    "run",
    "statement",
    "test",
    "test_clients",
    "trained",
    "verify",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "tacit.api.auditing": "audit",
        "tacit.api.exporting": "export trained",
        "tacit.api.extrapolating": "extrapolations",
        "tacit.api.fitting": "fit",
        "tacit.api.folders": "RUNS new_folder",
        "tacit.api.inputs": "dataset load",
        "tacit.api.planning": "plan",
        "tacit.api.reading": "compare ledger page statement test test_clients verify",
        "tacit.api.training": "resume run",
    },
)
