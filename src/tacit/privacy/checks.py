"""What needs to see how uploads are weighted to be refused.

>>> refuse_weights(weighted=False, unit="client")
"""

from __future__ import annotations

from tacit.errors import UserError
from tacit.privacy.mechanisms.base import Unit


def refuse_weights(weighted: bool, unit: Unit) -> None:
    """A client's number of examples is private, and a weight multiplies what it can change."""
    if weighted and unit == "client":
        raise UserError(
            "weights by number of examples under client-level privacy: the number is private and the weight "
            "raises the sensitivity; set uniform weights (weights: uniform)"
        )
