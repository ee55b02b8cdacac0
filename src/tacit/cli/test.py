"""`tacit test`: a model on the test set, all together and by user."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from tacit.cli.common import Json, Overrides, narrow, print_json, working

if TYPE_CHECKING:
    from tacit.federation.testing import Metrics


def test(
    place: Annotated[
        Path,
        typer.Argument(metavar="RUN|FILE.yaml", help="A run, or a config: then the model it starts from."),
    ],
    overrides: Overrides = [],  # noqa: B006 (typer reads the default and never changes it)
    limit: Annotated[int, typer.Option(min=1, help="Users to list, the worst first.")] = 20,
    clients: Annotated[
        int | None,
        typer.Option(min=1, help="Instead, test so many clients, each on its own held-out records."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Test a model on the common test set, all together and by user (in speech: by speaker).

    Of a run, the newest saved model; of a config, the model that it would start from, before any training.

    Numbers are exact, so none is given of single users where these are clients whom the run claims to
    protect (`privacy.entropy: seed`, a simulation, claims nothing).

    - `tacit test runs/small-003-20261115-214047`

    - `tacit init small/003/table-1`, then `tacit test table-1.yaml --set model.start=runs/seed`

    - `tacit test runs/personal --clients 1000`: each with its own part of the model and, where the config has
    `evaluate.tune`, after it has tuned for itself
    """
    if clients is not None:
        with working("testing the clients"):
            from tacit import api

            told = api.test_clients(place, clients, overrides)
        _clients(*told, as_json)
        return
    with working("testing the model"):
        from tacit import api
        from tacit.tasks import headline

        found = api.test(place, overrides)
    whole, each = found.whole, found.users
    if as_json:
        facts = {"round": found.round, "all": whole, "spread": found.spread, "users": each}
        notes = {"withheld": found.withheld, "untrained": list(found.untrained)}
        print_json(facts | {name: note for name, note in notes.items() if note})
        return
    console = Console(highlight=False)
    metric, shown = headline(whole), [name for name in whole if name != "count"]
    when = f"after round {found.round:,}" if found.round else "before training"
    console.print(f"{when}: " + ", ".join(f"{name} {whole[name]:.3g}" for name in shown))
    if found.untrained:
        console.print(
            f"Clients keep {', '.join(found.untrained)} to themselves: this is with the initial one, which "
            "nobody trains. --clients N tests their own models, where the run claims no guarantee.",
            style="yellow",
        )
    if found.withheld is not None:
        console.print(f"Not by user: {found.withheld}.", style="yellow")
    if not each:
        return
    if parts := ", ".join(f"{name} {value:.3g}" for name, value in found.spread.items()):
        console.print(f"{metric.title} over {len(each):,} users: {parts}")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("user", "records", *shown):
        table.add_column(title, justify="left" if title == "user" else "right")
    judged = metric.name in whole
    worst = sorted(each, key=lambda user: metric.score(each[user][metric.name]) if judged else 0.0)
    for user in worst[:limit]:
        own: Metrics = each[user]
        table.add_row(user, f"{own['count']:,.0f}", *(f"{own[name]:.3g}" for name in shown))
    console.print(table)
    if len(each) > limit:
        console.print(f"… and {len(each) - limit:,} more; --limit shows them")


def _clients(round: int, found: dict[str, dict[int, Metrics]], as_json: bool) -> None:
    if as_json:
        print_json({"round": round, **found})
        return
    for kind, each in found.items():
        names = next(iter(each.values()), {})
        means = (f"{name} {sum(own[name] for own in each.values()) / len(each):.3g}" for name in names)
        narrow().print(f"{kind}, mean over {len(each):,} clients: {', '.join(means)}")
