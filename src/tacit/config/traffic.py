"""What a client sends, receives and keeps under each method: measured once, and stored beside this file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tacit.config.methods import METHODS

if TYPE_CHECKING:
    from tacit.federation.traffic import ClientTraffic

STORED = Path(__file__).with_name("methods.json")


def stored() -> dict[str, ClientTraffic]:
    """The stored measurements: measuring again takes torch and seconds. A test does it."""
    found: dict[str, ClientTraffic] = json.loads(STORED.read_text())
    return found


def of_methods() -> dict[str, ClientTraffic]:
    """The traffic of every method; methods without a stored measurement are measured now."""
    found = stored()
    new = METHODS.keys() - found.keys()
    return found | measured(new) if new else found


def measured(names: Iterable[str]) -> dict[str, ClientTraffic]:
    """Each of these methods, measured."""
    from tacit.federation.traffic import measure

    return measure({name: METHODS[name].algorithm(**METHODS[name].options) for name in names})


def write() -> None:
    """Measure every method and store the results."""
    lines = [f"{json.dumps(name)}: {json.dumps(found)}" for name, found in measured(METHODS).items()]
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
