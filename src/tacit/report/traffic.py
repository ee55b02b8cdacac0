"""What a client sends and receives in a round, compared with the cost of the whole model.

Frozen parameters are never sent, so a large model with small adapters moves little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from tacit.federation import Record


@dataclass(frozen=True)
class Traffic:
    """One client's bytes in one round, and how much of the model is trained.

    >>> print(Traffic(parameters=22_700_000, trained=150_000, down=600_000, up=600_000).text())
    A client's round moves 1.2 MB (0.6 down, 0.6 up): 0.66 % of what the whole model would take.
    """

    parameters: int
    trained: int
    down: int
    up: int

    @property
    def share(self) -> float:
        """The trained share of the model, which is the part that is sent."""
        return self.trained / self.parameters

    def text(self) -> str:
        whole = self.down + self.up
        unit, size, digits = (
            ("MB", 1e6, 1) if whole >= 1e5 else ("kB", 1e3, 1) if whole >= 1e3 else ("bytes", 1, 0)
        )
        total, down, up = (f"{part / size:.{digits}f}" for part in (whole, self.down, self.up))
        moves = f"A client's round moves {total} {unit} ({down} down, {up} up)"
        if self.trained == self.parameters:
            return f"{moves}."
        return f"{moves}: {100 * self.share:.2g} % of what the whole model would take."

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def traffic(model: nn.Module, metrics: Sequence[Record]) -> Traffic | None:
    """The traffic of the last round that had clients; None if there was none."""
    for record in reversed(metrics):
        clients = record.get("clients", 0) + len(record.get("skipped", ()))
        if clients and "bytes_up" in record:
            sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
            return Traffic(
                parameters=sum(size for size, _ in sizes),
                trained=sum(size for size, grad in sizes if grad),
                down=record["bytes_down"] // clients,
                up=record["bytes_up"] // clients,
            )
    return None
