"""Real clients: messages, keys, rosters, and the two ends of a federation whose records stay with their
owners.

Nothing here but `tacit.deploy.flower` knows how messages travel.
"""

from tacit.deploy.policy import Allow
from tacit.deploy.roster import Looks, Owners, Roster, alone
from tacit.deploy.settings import FlowerSettings

__all__ = ["Allow", "FlowerSettings", "Looks", "Owners", "Roster", "alone"]
