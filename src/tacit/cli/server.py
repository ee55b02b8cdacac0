"""`tacit server`: the operator's side of a federation of real clients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tacit.cli.common import Json, print_json

server = typer.Typer(
    help="Run a federation whose records stay with their owners.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The federation's folder.")]


@server.command()
def init(
    folder: Folder,
    host: Annotated[
        list[str], typer.Option(help="Name or address under which clients reach this machine. Repeatable.")
    ],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the public door.")] = 8443,
    listen: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
) -> None:
    """Make a federation: its certificate authority, certificate, key and (empty) roster.

    Give `DIR/invitation.json` to the owners; it holds nothing secret.

    - `tacit server init hospital --host federation.example.org`
    """
    from tacit.deploy.folders import INVITATION, init_server

    invitation = init_server(folder, host, listen, port)
    print(f"A federation at {invitation.server}.")
    print(f"Give {folder / INVITATION} to the owners of the records,")
    print(f"take their cards in with `tacit server add {folder} CARD`,")
    print(f"and open with `tacit server start {folder}`.")


@server.command()
def add(
    folder: Folder,
    cards: Annotated[list[Path], typer.Argument(metavar="CARD…", help="What `tacit client check` wrote.")],
) -> None:
    """Take clients in, by the cards that their owners gave you; a running server lets them in at once.

    - `tacit server add hospital clinic/card.json`
    """
    from tacit.deploy.roster import Roster, card_of

    roster = Roster.read(folder)
    for file in cards:
        roster = roster.with_member(card_of(file))
    roster.write(folder)
    for number, member in list(enumerate(roster.members))[-len(cards) :]:
        print(f"client {number}: {member.name}, key {member.who[:16]}…")


@server.command()
def remove(folder: Folder, name: Annotated[str, typer.Argument(help="The client's name.")]) -> None:
    """Put a client out, at once: its number stays, it counts as absent, and its key opens nothing more."""
    from tacit.deploy.roster import Roster

    Roster.read(folder).without(name).write(folder)
    print(f"{name} is out")


@server.command()
def start(
    folder: Folder,
    unit: Annotated[bool, typer.Option("--unit", help="Print a systemd unit instead.")] = False,
) -> None:
    """Open the federation's doors, until Ctrl-C. `tacit run` with `engine: {kind: flower}` then trains.

    - `tacit server start hospital`
    """
    from tacit.deploy.folders import Door
    from tacit.deploy.folders import unit as systemd

    if unit:
        print(systemd("server", folder), end="")
        return
    from tacit.deploy.flower import serve

    door = Door.read(folder)
    serve(folder, door.listen, door.port, lambda: print(f"open at {door.listen}:{door.port}", flush=True))


@server.command()
def clients(
    folder: Folder,
    as_json: Json = False,
) -> None:
    """List the clients: number, name, key, records that they told of, and who is there now."""
    from tacit.deploy.flower import SOCKET, online
    from tacit.deploy.roster import Roster

    members = Roster.read(folder).members
    there = online(folder) if (folder / SOCKET).exists() else None
    rows = [
        {
            "number": number,
            "name": member.name,
            "key": member.who,
            "records": member.records or None,
            "state": "out" if member.revoked else "unknown" if there is None
            else "there" if member.who in there else "away",
        }
        for number, member in enumerate(members)
    ]  # fmt: skip
    if as_json:
        print_json(rows)
        return
    table = Table(box=None)
    for column in ("client", "name", "key", "records", "state"):
        table.add_column(column)
    for row in rows:
        records = "" if row["records"] is None else f"{row['records']:,}"
        table.add_row(
            str(row["number"]), str(row["name"]), f"{str(row['key'])[:16]}…", records, str(row["state"])
        )
    Console(highlight=False).print(table)
    if there is None:
        print(f"The server is not running: tacit server start {folder}")
