"""What each method lets a client send, receive and keep: measured once, and stored beside this file."""

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
    """What `write` found: to measure it again takes torch and seconds. A test does."""
    found: dict[str, ClientTraffic] = json.loads(STORED.read_text())
    return found


def of_methods() -> dict[str, ClientTraffic]:
    """The traffic of every method; of those that nobody has measured yet, it is measured now."""
    found = stored()
    new = METHODS.keys() - found.keys()
    return found | measured(new) if new else found


def measured(names: Iterable[str]) -> dict[str, ClientTraffic]:
    """Each of these methods, measured."""
    from tacit.federation.traffic import measure

    return measure({name: METHODS[name].algorithm(**METHODS[name].options) for name in names})


def write() -> None:
    """Measure every method and store what was found."""
    lines = [f"{json.dumps(name)}: {json.dumps(found)}" for name, found in measured(METHODS).items()]
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
