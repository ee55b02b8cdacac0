"""`engine: {kind: flower}`: clients are other people's machines, reached through a Flower SuperLink."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveFloat

from tacit.engine.contract import Replay, free
from tacit.section import Section

if TYPE_CHECKING:
    from tacit.deploy.keys import PrivateKey
    from tacit.deploy.server import Deployed, Patience, Transport
    from tacit.engine import Job
    from tacit.vector import Vectors


def deployed(job: Job, transport: Transport, key: PrivateKey, log: Path, patience: Patience) -> Deployed:
    """The engine for a job whose clients are real. Under secure aggregation it never sees a single update."""
    from tacit.deploy.masked_sums import MaskedSums
    from tacit.deploy.server import Deployed
    from tacit.privacy import SecureSum

    kind = MaskedSums if isinstance(job.privacy, SecureSum) else Deployed
    return kind(job, transport, key, log, patience)


class FlowerSettings(Section):
    """`engine: {kind: flower, federation: DIR}`; `tacit server init DIR` makes the folder."""

    kind: Literal["flower"] = "flower"
    federation: str
    deadline: Annotated[PositiveFloat, Field(le=6 * 86400)] = 600.0
    """Seconds from a round's orders to the last answer that counts."""
    wait: Annotated[int, Field(ge=1)] = 2
    """Clients that must be there before a round begins."""

    def open(self, job: Job, message: Vectors, cohort: int, before_replay: Replay = free) -> Deployed:
        from tacit.deploy.flower import SuperLinkTransport
        from tacit.deploy.folders import KEY
        from tacit.deploy.keys import read_key
        from tacit.deploy.server import LOG, Patience

        folder = Path(self.federation).expanduser()
        transport = SuperLinkTransport(folder)
        try:
            patience = Patience(self.deadline, min(self.wait, len(job.population)))
            return deployed(job, transport, read_key(folder / KEY), folder / LOG, patience)
        except BaseException:
            transport.close()
            raise
