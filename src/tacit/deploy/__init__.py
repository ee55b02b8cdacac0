"""Real clients: messages, keys, rosters, and the two ends of a federation whose records stay with their
owners.

Only `tacit.deploy.flower` knows how messages travel.
"""

from typing import TYPE_CHECKING

from tacit.lazy import lazily

if TYPE_CHECKING:
    from tacit.deploy.owners import Looks, Owners, alone
    from tacit.deploy.policy import Allow
    from tacit.deploy.roster import Roster
    from tacit.deploy.settings import FlowerSettings

__all__ = ["Allow", "FlowerSettings", "Looks", "Owners", "Roster", "alone"]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "tacit.deploy.owners": "Looks Owners alone",
        "tacit.deploy.policy": "Allow",
        "tacit.deploy.roster": "Roster",
        "tacit.deploy.settings": "FlowerSettings",
    },
)
