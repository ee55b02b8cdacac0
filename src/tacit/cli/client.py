"""`tacit client`: an owner's side of a federation of real clients."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from tacit.cli.common import Json, narrow, print_json
from tacit.errors import UserError

client = typer.Typer(
    help="Take part in a federation with records of your own, which stay here.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The client's folder.")]

TEMPLATE = """# What this client has, and what may be done with it. Paths are from this folder.
name: {name}
server: {server}

# Your records, as the `data` section of any config has them. They never leave.
data: {data}

# What you allow, over all runs. This client refuses everything else, whatever the server says.
allow:
  unit: example       # each record, by noise made here; `client` trusts the server with it; `none`: nothing
  epsilon: 4          # the budget of all runs together, by this client's own ledger
  delta: 1e-6
  methods: [dp-fedadamw]
  send: [examples]    # exact numbers that may leave: examples, loss, metrics, seconds
"""


@client.command()
def init(
    folder: Folder,
    invitation: Annotated[Path, typer.Option(help="The server's `invitation.json`.")],
    name: Annotated[str, typer.Option(help="This client's name: letters, digits, dots and dashes.")],
) -> None:
    """Make a client's folder: a key of its own, the server's certificate, and `client.yaml` to fill in.

    - `tacit client init clinic --invitation invitation.json --name clinic`
    """
    from tacit.deploy.folders import Invitation, init_client
    from tacit.deploy.roster import is_name

    if not is_name(name):
        raise UserError(f"--name {name}: a name is letters, digits, dots and dashes, 60 at most")
    found = Invitation.read(invitation)
    data = "{name: table, path: records.csv, features: [age, dose], label: outcome}"
    init_client(folder, found, TEMPLATE.format(name=name, server=found.server, data=data))
    print(f"Now say in {folder / 'client.yaml'}")
    print("where your records are and what you allow; then")
    print(f"`tacit client check {folder}`")
    print("reads them and writes the card for the server's operator.")


@client.command()
def check(folder: Folder) -> None:
    """Read the records, write the card (a name, a key, perhaps a number), and knock at the server's door."""
    from tacit.config.owner import OwnRecords, read_owner
    from tacit.deploy.folders import CARD
    from tacit.deploy.keys import fingerprint, read_key
    from tacit.deploy.roster import card
    from tacit.federation.files import write_atomically

    owner = read_owner(folder)
    count = OwnRecords(_from(owner, folder)).count()
    key = read_key(folder / owner.key).public_key()
    told = count if "examples" in owner.allow.send else 0
    write_atomically(folder / CARD, card(owner.name, key, told))
    print(f"{count:,} records to train on; key {fingerprint(key)[:16]}…")
    print(f"Card for the server's operator: {folder / CARD} ({'with' if told else 'without'} their number)")
    print(f"{owner.server}: {_knock(owner.server, folder / owner.ca)}")


@client.command()
def trust(
    folder: Folder,
    cards: Annotated[
        list[Path] | None, typer.Argument(metavar="CARD…", help="Other owners' `card.json`.")
    ] = None,
) -> None:
    """Take other owners' clients into the roster that this client holds, and show it.

    Under secure aggregation a client hides its update among those of clients that it knows. Get the cards
    from their owners, or compare the keys that are printed with them; not with the server.

    - `tacit client trust clinic bank.json school.json`
    """
    from tacit.deploy.roster import held, taken_in

    peers = taken_in(held(folder), cards or [])
    if cards:
        peers.write(folder)
    for member in peers.members:
        print(f"{member.name}: key {member.who}")


@client.command()
def start(
    folder: Folder,
    unit: Annotated[bool, typer.Option("--unit", help="Print a systemd unit instead.")] = False,
) -> None:
    """Carry out the federation's orders, as far as `client.yaml` allows, until Ctrl-C.

    - `tacit client start clinic`
    """
    if unit:
        from tacit.config.owner import read_owner
        from tacit.deploy.folders import unit as systemd

        shared = _ledgers(read_owner(folder), folder)
        others = [] if shared is None else [shared]
        for other in others:  # a unit starts only where all that it may write to is there
            other.mkdir(mode=0o700, parents=True, exist_ok=True)
        print(systemd("client", folder, *others), end="")
        return
    import torch

    from tacit.config.owner import OwnRecords, read_owner
    from tacit.deploy.client import Client
    from tacit.deploy.flower import HOME, attend
    from tacit.deploy.keys import read_key, read_public_file
    from tacit.deploy.roster import held
    from tacit.federation.lock import locked

    torch.set_num_threads(1)
    owner = read_owner(folder)
    records = OwnRecords(_from(owner, folder))
    key = read_key(folder / owner.key)
    server = read_public_file(folder / owner.server_key)
    state, stop = folder / owner.state, threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with locked(state, create=True):
        one = Client(
            state, key, server, owner.allow, records.prepare,
            peers=lambda: [member.public_key for member in held(folder).members],
            ledgers=_ledgers(owner, folder),
        )  # fmt: skip
        try:
            attend(
                owner.server, folder / owner.ca, key, one.answer, stop, state / HOME,
                lambda text: print(text, flush=True),
            )  # fmt: skip
        finally:
            one.close()


@client.command()
def ledger(
    folder: Folder,
    as_json: Json = False,
) -> None:
    """Say what the records here have paid over all runs, by this client's own ledger, and against whom."""
    from tacit.config.owner import read_owner
    from tacit.deploy.statement import own_statement

    owner = read_owner(folder)
    said = own_statement(folder / owner.state, owner.allow, _ledgers(owner, folder))
    if as_json:
        print_json(said.to_dict())
    else:
        narrow().print(said.text(), markup=False)


def _ledgers(owner: Any, folder: Path) -> Path | None:
    return None if owner.ledgers is None else folder / Path(owner.ledgers).expanduser()


def _from(owner: Any, folder: Path) -> Any:
    """The same with the paths of its data section taken from its folder."""
    data = dict(owner.data)
    for key in ("path", "test"):
        if isinstance(data.get(key), str):
            data[key] = str(folder.resolve() / Path(data[key]).expanduser())
    return owner.model_copy(update={"data": data})


def _knock(server: str, authority: Path) -> str:
    """Whether the server's public door is there, and is the server's."""
    import http.client
    import ssl

    try:
        connection = http.client.HTTPSConnection(
            server, timeout=5, context=ssl.create_default_context(cafile=str(authority))
        )
        connection.request("GET", "/")
        return (
            "its door is there"
            if connection.getresponse().status == 404
            else "answers, but not as a gate would"
        )
    except ssl.SSLError as error:
        return f"its certificate is not the federation's ({error.reason})"
    except (OSError, OverflowError, UnicodeError, http.client.HTTPException) as error:
        return f"cannot be reached ({error})"
