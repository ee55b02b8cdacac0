"""Commands start fast: none imports a large library that it does not use."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import tacit
import tacit.config
import tacit.data
import tacit.data.speech
import tacit.engine
import tacit.federation
import tacit.models
import tacit.optimizers
import tacit.privacy
from tacit.config.methods import METHODS
from tacit.config.traffic import measured, stored

QUICKSTART = Path(tacit.__file__).parents[2] / "recipes" / "quickstart.yaml"
LARGE = [
    *["torch", "transformers", "datasets", "scipy", "peft", "dp_accounting", "matplotlib", "pandas"],
    *["scipy.optimize", "scipy.signal", "scipy.stats"],
]
LATE = [tacit, tacit.config, tacit.data, tacit.data.speech, tacit.engine, tacit.federation, tacit.models]
LATE += [tacit.optimizers, tacit.privacy]
CODE = """
import json, sys
sys.argv = ["tacit", *json.loads(sys.argv[1])]
from tacit.cli import main
try:
    main()
finally:
    print("\\n" + json.dumps([name for name in json.loads(sys.stdin.read()) if name in sys.modules]))
"""


def imported(*command: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(command)],
        input=json.dumps(LARGE),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "command", ["--help", "--version", "run --help", "plan --help", "methods", "recipes"]
)
def test_no_large_library_is_imported(command: str) -> None:
    assert not imported(*command.split())


@pytest.mark.parametrize("asked", ["--noise 1", "--epsilon 2"])
def test_a_plan_needs_the_accountants_and_neither_torch_nor_the_slow_parts_of_scipy(asked: str) -> None:
    used = imported(*f"plan --rate 0.1 {asked} --rounds 10 --delta 1e-5".split())
    assert used == {"scipy", "dp_accounting"}


@pytest.mark.parametrize("unit", ["client", "example"])
def test_a_plan_of_a_config_needs_no_torch_before_the_network(unit: str) -> None:
    """ε, noise and warnings come first."""
    code = (
        "import sys, tacit; from tacit.api.planning import RunPlan;"
        "plan = RunPlan(tacit.load(sys.argv[1], {'privacy.unit': sys.argv[2]}));"
        "assert plan.costs['epsilon'] <= 5 and 'torch' not in sys.modules;"
        "assert plan.signal['parameters'] == 50_890 and 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(QUICKSTART), unit], check=True)


def test_workers_do_not_import_what_their_job_does_not_need() -> None:
    code = "import sys, tacit.engine.pool_worker; print([m for m in sys.argv[1:] if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code, *LARGE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['torch']"


def test_the_stored_traffic_is_what_is_measured() -> None:
    assert measured(METHODS) == stored()


def test_reading_a_config_needs_no_large_library() -> None:
    code = "import sys, tacit.config.schema; print([m for m in sys.argv[1:] if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code, *LARGE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("package", LATE)
def test_names_that_are_imported_late_are_there_all_the_same(package: ModuleType) -> None:
    names = package.__all__
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert not modules & {name for name in names if not isinstance(getattr(package, name), ModuleType)}, (
        "a module would take the place of the name once it is imported"
    )
    assert all(getattr(package, name) is not None for name in names)
    assert set(names) <= set(dir(package))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018
