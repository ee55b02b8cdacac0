"""`tacit methods` and `tacit blocks`: what there is to choose from, measured rather than claimed."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

PAPERS = {"000": "DP-FedAdamW", "002": "DP²-FedSAM", "003": "user-level DP for speech", "004": "FedAdamW"}
"""The papers by the numbers that `paper` has."""
MEASURED = Path(__file__).with_name("methods.json")
"""What `measure` found, for each method; `write` writes it anew."""


@dataclass(frozen=True)
class MethodTraffic:
    """What one client sends, receives and keeps, in multiples of the model."""

    up: float
    down: float
    keeps: dict[str, float]


def methods(as_json: Annotated[bool, typer.Option("--json", help="For a program to read.")] = False) -> None:
    """List every method: its paper, its privacy unit, its traffic and what a client keeps.

    Traffic is measured: each method trains one client of a small transformer. 1× is the model, FedAvg's own.
    Choose one with `method: NAME` in a config or `--set method=NAME`:

    - `tacit run quickstart.yaml --set method=scaffold --set privacy=null`
    """
    from tacit.config.methods import METHODS

    measured = known()
    new = {name: method for name, method in METHODS.items() if name not in measured}
    if new:
        measured |= measure({name: method.algorithm(**method.options) for name, method in new.items()})
    if as_json:
        rows: list[dict[str, Any]] = []
        for name, method in METHODS.items():
            found = measured[name]
            rows.append(
                {
                    "method": name,
                    "summary": method.summary,
                    "paper": method.paper,
                    "unit": method.unit,
                    "up": found.up,
                    "down": found.down,
                    "keeps": found.keeps,
                }
            )
        print(json.dumps(rows))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for title, justify in (("method", "left"), ("paper", "left"), ("unit", "left"), ("up", "right"),
                           ("down", "right"), ("keeps", "left"), ("", "left")):  # fmt: skip
        table.add_column(title, justify=justify, no_wrap=title != "")  # type: ignore[arg-type]
    for name, method in METHODS.items():
        found = measured[name]
        keeps = " ".join(found.keeps) or "–"
        table.add_row(
            name, method.paper, method.unit, f"{found.up:.1f}×", f"{found.down:.1f}×", keeps, method.summary
        )
    console = Console(highlight=False, width=min(80, Console().width))
    console.print(table)
    console.print(" · ".join(f"{number} {name}" for number, name in PAPERS.items()))


def known() -> dict[str, MethodTraffic]:
    """What was measured before: to do it again takes torch and seconds. A test does."""
    return {name: MethodTraffic(**found) for name, found in json.loads(MEASURED.read_text()).items()}


def measure(algorithms: dict[str, Any]) -> dict[str, MethodTraffic]:
    """Let each algorithm train one client of a small vision transformer."""
    import numpy as np
    import torch

    from tacit.data import ArrayRecords, Population
    from tacit.engine import InProcess, Job, Local, Order, Participant
    from tacit.engine.states import NONE, DirectoryStates
    from tacit.models import vit
    from tacit.tasks import Classification
    from tacit.vector import read_values

    rng = np.random.default_rng(0)
    records = ArrayRecords(rng.normal(size=(8, 1, 8, 8)).astype(np.float32), rng.integers(0, 4, 8))
    population = Population(records, np.array([0, 8]), np.arange(8))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, algorithm in algorithms.items():
            torch.manual_seed(0)
            model = vit((1, 8, 8), 4, patch=4, width=48, depth=1, heads=2)
            states = DirectoryStates(Path(folder) / name)
            job = Job(
                model, Classification(), population, records, algorithm, Local(4, steps=1), 0, states,
                public=np.arange(4),
            )  # fmt: skip
            engine = InProcess(job)
            size = job.layout.size
            message = algorithm.message(
                algorithm.init(read_values(model, job.layout)[: job.layout.shared], job.layout)
            )
            total, reports = engine.sum(Order(0, 0.1), message, [Participant(0)])
            kept = states.load(0, reports[0].state or NONE)
            engine.close()
            found[name] = MethodTraffic(
                up=sum(v.numel() for v in total.values()) / size,
                down=sum(v.numel() for v in message.values()) / size,
                keeps={k: v.numel() / size for k, v in kept.items()},
            )
    return found


def blocks(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="The config whose model to cut.")],
    overrides: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a key.")] = [],  # noqa: B006
    kind: Annotated[
        str, typer.Option(help="architecture (DP-FedAdamW's), fine (FedAdamW's), or one for each tensor.")
    ] = "architecture",
    limit: Annotated[int, typer.Option(min=1, help="Blocks to list.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="For a program to read.")] = False,
) -> None:
    """Show the blocks of a config's model: the groups of parameters that share one second moment.

    FedAdamW and DP-FedAdamW send one number a block instead of one for each coordinate.

    - `tacit blocks quickstart.yaml --set model=vit-tiny`

    - `tacit blocks quickstart.yaml --set model=vit-tiny --kind fine --limit 5`
    """
    from tacit import config
    from tacit.config.build import build_dataset, build_model
    from tacit.config.sweep import load_one
    from tacit.errors import UserError
    from tacit.vector import Layout
    from tacit.vector.blocks import blocks as cut

    resolved = load_one(file, config.parse_overrides(overrides))
    if kind not in ("architecture", "fine", "tensor"):
        raise UserError(f"--kind {kind}: choose architecture, fine or tensor")
    layout = Layout.of(build_model(resolved, build_dataset(resolved)))
    parts = cut(layout, kind)
    sizes = parts.sizes.tolist()
    if as_json:
        print(
            json.dumps(
                {
                    "kind": kind,
                    "parameters": layout.size,
                    "blocks": dict(zip(parts.names, sizes, strict=True)),
                }
            )
        )
        return
    console = Console(highlight=False, width=min(80, Console().width))
    share = len(parts) / layout.size
    console.print(f"{len(parts):,} blocks ({kind}) of {layout.size:,} parameters: {share:.2%} more traffic")
    table = Table(box=None, pad_edge=False)
    table.add_column("block")
    table.add_column("parameters", justify="right")
    for name, size in list(zip(parts.names, sizes, strict=True))[:limit]:
        table.add_row(name, f"{size:,}")
    if len(parts) > limit:
        table.add_row(f"… and {len(parts) - limit:,} more (--limit)", "")
    console.print(table)


def write() -> None:
    """Measure every method and keep what was found."""
    from tacit.config.methods import METHODS

    found = measure({name: method.algorithm(**method.options) for name, method in METHODS.items()})
    lines = [f"{json.dumps(name)}: {json.dumps(asdict(traffic))}" for name, traffic in found.items()]
    MEASURED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
