"""Which runs real clients can take part in, and which settings they are sent."""

from __future__ import annotations

from pathlib import Path

import yaml

from tacit.deploy.owners import Owners
from tacit.deploy.policy import SENT, SHARED
from tacit.engine import Job
from tacit.errors import UserError
from tacit.federation.files import unsealed_text
from tacit.privacy import ClientLevel, FixedSize, LayeredNoise
from tacit.privacy.mechanisms.correlated import Correlated


def refuse_undeployable(job: Job) -> None:
    """Refuse runs that real clients cannot take part in, or not yet."""
    privacy = job.privacy
    if isinstance(privacy, Correlated) and not isinstance(privacy.sampling, FixedSize):
        raise UserError(
            "cohort.sampling: who takes part is no secret between real clients, and correlated noise with "
            "Poisson cohorts counts on it; leave it out, so that clients take turns"
        )
    if privacy is not None and privacy.metrics is not None:
        raise UserError("privacy.metrics: real clients do not tell the numbers it is made of; leave it out")
    if isinstance(privacy, LayeredNoise):
        raise UserError("privacy.noise_by_layer: real clients cannot count its cost yet; leave it out")
    if isinstance(privacy, ClientLevel) and privacy.noise_at == "clients":
        raise UserError(
            "privacy.noise_at: a client's share of the noise hides nothing from a server that sees its "
            "upload; let the server make the noise, or protect single records (unit: example)"
        )
    if isinstance(job.population, Owners) and (privacy is not None and privacy.unit == "example"):
        silent = [m.name for m in job.population.roster.members if not m.records]
        if silent:
            raise UserError(
                f"privacy.unit: at example level the number of records is public; {', '.join(silent)} did "
                "not tell it; `allow.send: [examples]` puts it on a client's card"
            )
    if job.layers or len(job.probe) or len(job.public):
        raise UserError(
            "evaluate.layers, evaluate.train and data.public need records that the server does not have"
        )


def sent_config(file: Path, whole: bool) -> str:
    """The run's settings as sent to clients: nothing about the server's own paths.

    `whole`: every parameter is trained, so the message contains the initial weights.
    """
    full = yaml.safe_load(unsealed_text(file.read_text(encoding="utf-8")))
    data = {key: full["data"][key] for key in SHARED if full["data"].get(key) is not None}
    plain = {key: full[key] for key in SENT if full.get(key) is not None}
    if whole and plain["model"].get("start") is not None:
        plain["model"] = {k: v for k, v in plain["model"].items() if k not in ("start", "public")}
    plain["data"] = {"name": "owners", "partition": full["data"]["partition"], **data}
    return yaml.safe_dump(plain, sort_keys=True)


def trains_everything(job: Job) -> bool:
    return not job.algorithm.personal_part and all(p.requires_grad for p in job.model.parameters())
