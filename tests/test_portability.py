"""Windows can import, plan and run in one process, and says in a line what it lacks; macOS can do everything.

Neither system is available here, so a process without their missing features stands in for them
(`support/systems.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

SUPPORT = Path(__file__).parent / "support"
RUN = """
    import numpy as np
    import tacit
    from tacit.errors import UserError
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 4)).astype("float32")
    data = tacit.dataset((x, (x[:, 0] > 0).astype("int64")), name="mine")
    sections = {
        "rounds": 2, "data": {"name": "mine", "partition": {"kind": "iid", "clients": 8}}, "model": "mlp",
        "cohort": 4, "local": {"steps": 2, "batch": 5, "lr": 0.1}, "method": "scaffold",
        "privacy": {"unit": "client", "delta": 1e-3, "clip": 1.0, "noise": 1.0, "entropy": "seed"},
    }
    print(tacit.plan(tacit.load(sections), dataset=data)["epsilon"])
"""


def script(body: str, folder: Path, *path: Path) -> list[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)], cwd=folder, env=env, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_windows_imports_plans_and_runs_in_one_process(tmp_path: Path) -> None:
    before = "import asyncio, multiprocessing.connection, subprocess, typer, rich.progress, torch, pydantic\n"
    before += "import safetensors.torch, dp_accounting.pld, dp_accounting.rdp, cryptography.fernet\n"
    before += "import systems; systems.windows()\n"
    after = """
    result = tacit.run(tacit.load(sections), "run", dataset=data, progress=False)
    tacit.resume("run", dataset=data, rounds=3, progress=False)
    assert tacit.statement("run").epsilon > 0 and not [f for f in tacit.verify("run") if f.problem]
    for odd in ({"engine": {"workers": 2}}, {"engine": {"kind": "pool"}}):
        try:
            folder = odd["engine"].get("kind", "two")
            tacit.run(tacit.load(sections | odd), folder, dataset=data, progress=False)
        except UserError as error:
            print(error)
    from tacit.federation.lock import locked
    from pathlib import Path
    with locked(Path("run")):
        try:
            tacit.resume("run", dataset=data, rounds=4, progress=False)
        except UserError as error:
            print(error)
    import sys
    from tacit.cli import main
    sys.argv = "tacit plan --population 1000 --cohort 100 --rounds 10 --noise 1.0 --delta 1e-4".split()
    main()
    """
    said = script(before + textwrap.dedent(RUN) + textwrap.dedent(after), tmp_path, SUPPORT)
    assert float(said[0]) > 0
    assert said[1] == said[2] and "worker processes need Linux or macOS" in said[1]
    assert "is in use by another process" in said[3]
    assert any("ε" in line for line in said[4:]), said


def test_macos_runs_with_worker_processes(tmp_path: Path) -> None:
    """The same model as here, by workers that have lost the same things."""
    here = tmp_path / "site"
    here.mkdir()
    (here / "sitecustomize.py").write_text("import systems\nsystems.macos()\n")
    after = """
    for folder, engine in (("one", {"workers": 0}), ("two", {"kind": "pool", "workers": 1})):
        config = tacit.load(sections | {"engine": engine})
        print(tacit.run(config, folder, dataset=data, progress=False).last("loss"))
    """
    _, one, two = script(textwrap.dedent(RUN) + textwrap.dedent(after), tmp_path, SUPPORT, here)
    assert one == two
