"""The folders of a federation: what the server's operator and each owner have on disk.

The server's folder holds its authority and certificates (`ca.*`, `tls.*`), its key (`server`), `roster.json`,
and `invitation.json`, which holds no secret and is all that an owner needs to join.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path

from tacit.deploy.keys import new_authority, new_certificate, new_key, public_text, read_public, write_new
from tacit.deploy.roster import Roster
from tacit.errors import UserError
from tacit.federation.files import sealed, unsealed
from tacit.reading import from_json, read_text

KEY = "server"
"""The server's own key, in the federation's folder."""
HOST = r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_-]{1,63})*"
"""A machine's name."""
ADDRESS = r"[\w.:\[\]-]+:\d{1,5}"
"""HOST:PORT, as written in `client.yaml`."""
INVITATION, SERVER, CARD = "invitation.json", "server.json", "card.json"


@dataclass(frozen=True)
class Invitation:
    """Where a federation is, how to recognize its machine (TLS), and whose orders are genuine."""

    server: str
    ca: str
    key: str

    @staticmethod
    def read(file: Path) -> Invitation:
        try:
            plain = from_json(read_text(file))
            found = Invitation(**{name: str(value) for name, value in plain.items()})
            read_public(found.key)
            if not re.fullmatch(ADDRESS, found.server):  # it becomes a line in the owner's settings
                raise ValueError("its server is no HOST:PORT")
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{file} is no invitation ({error}); `tacit server init` writes one") from None
        return found


@dataclass(frozen=True)
class Door:
    """The address of the public door."""

    listen: str
    port: int

    @staticmethod
    def read(folder: Path) -> Door:
        try:
            plain = unsealed(read_text(folder / SERVER))
            return Door(str(plain["listen"]), int(plain["port"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder} holds no federation ({error}); `tacit server init {folder}`") from None


def init_server(folder: Path, hosts: list[str], listen: str, port: int) -> Invitation:
    """Create a federation's folder: authority, certificate, key, empty roster, invitation."""
    for host in hosts:
        if not re.fullmatch(HOST, host) and not _is_address(host):
            raise UserError(f"--host {host}: give a name such as federation.example.org, or an IP address")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; choose another folder")
    folder.chmod(0o700)
    authority = folder / "ca.key", folder / "ca.crt"
    new_authority(*authority)
    new_certificate(folder, hosts, authority, "tls")
    key = new_key(folder / KEY)
    Roster().write(folder)
    write_new(folder / SERVER, sealed(asdict(Door(listen, port))).encode(), 0o600)
    host = f"[{hosts[0]}]" if ":" in hosts[0] else hosts[0]
    ca = (folder / "ca.crt").read_text(encoding="utf-8")
    invitation = Invitation(f"{host}:{port}", ca, public_text(key.public_key()))
    write_new(folder / INVITATION, (json.dumps(asdict(invitation), indent=1) + "\n").encode())
    return invitation


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def init_client(folder: Path, invitation: Invitation, text: str) -> None:
    """Create an owner's folder; `text` is its `client.yaml`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; choose another folder")
    folder.chmod(0o700)
    write_new(folder / "ca.crt", invitation.ca.encode())
    write_new(folder / "server.pub", f"{invitation.key}\n".encode())
    new_key(folder / "key")
    write_new(folder / "client.yaml", text.encode(), 0o600)


def unit(kind: str, folder: Path, *others: Path) -> str:
    """A systemd unit that runs `tacit server start` or `tacit client start`, and restarts it if it ends.

    The service may write to its folder and to `others`; it keeps its downloads in its folder too.
    """
    place = folder.resolve()
    writes = " ".join(str(path.resolve()) for path in (folder, *others))
    return f"""[Unit]
Description=tacit {kind} of {place.name}
After=network-online.target
Wants=network-online.target

[Service]
ExecStart={sys.executable} -m tacit {kind} start {place}
WorkingDirectory={place}
Restart=always
RestartSec=10
UMask=0077
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=strict
ReadWritePaths={writes}
Environment=TACIT_CACHE={place}/cache

[Install]
WantedBy=default.target
"""
