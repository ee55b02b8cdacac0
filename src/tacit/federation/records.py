"""What is told of a round: its metrics, as plain values by name."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tacit.engine import Report
from tacit.federation.layers import layer_statistics
from tacit.federation.measures import withheld
from tacit.federation.round import Outcome
from tacit.federation.server import Server
from tacit.federation.tracking import Record
from tacit.privacy import Bounding


def record_of(server: Server, outcome: Outcome) -> Record:
    """The record of the round that the server has just finished, before anything is evaluated.

    Exact numbers about its clients are for the researcher; a deployment has private ones in their place.
    """
    told = withheld(server.job.privacy, _exact(server, outcome)) | outcome.measured
    state = server.mechanism_state
    clip = {"clip": state["bound"]} if "bound" in state else {}
    return {"round": server.round, "lr": outcome.order.lr} | told | clip


def _exact(server: Server, outcome: Outcome) -> Record:
    reports, job = outcome.reports, server.job
    finite = [r for r in reports if r.finite]
    record: Record = {"clients": len(finite)}
    if finite:
        # Real clients may keep their losses and norms to themselves (NaN).
        told = [r for r in finite if not math.isnan(r.loss)]
        if told:
            steps = sum(r.steps for r in told)
            record["train_loss"] = sum(r.loss * r.steps for r in told) / max(steps, 1)
        norms = np.array([r.norm for r in finite if not math.isnan(r.norm)])
        if norms.size:
            record |= {"update_norm": float(norms.mean()), "update_norm_std": float(norms.std())}
        record["examples"] = sum(r.examples for r in finite)
        for name in finite[0].notes:
            record[name] = sum(r.notes.get(name, 0.0) for r in finite) / len(finite)
    if job.layers:
        record["layers"] = layer_statistics(server.layout, [r.layers for r in finite])
        record["gradient_layers"] = layer_statistics(server.layout, [r.gradient_layers for r in finite])
        record["clipped_layers"] = layer_statistics(server.layout, [r.clipped_layers for r in finite])
        record["server_layers"] = outcome.server_layers
    if len(finite) < len(reports):
        record["skipped"] = sorted(r.client for r in reports if not r.finite)
    if outcome.absent:
        record["absent"] = outcome.absent
    record["bytes_down"] = 4 * len(reports) * sum(v.numel() for v in outcome.message.values())
    record["bytes_up"] = 4 * len(reports) * sum(job.upload_sizes.values())
    return record | _clipped(reports, outcome.order.bounding)


def _clipped(reports: Sequence[Report], bounding: Bounding | None) -> Record:
    """The share of a round's clients whose upload was longer than the clip; for the researcher, and exact."""
    norms = [report.norm for report in reports if report.finite and not math.isnan(report.norm)]
    if bounding is None or not norms:
        return {}
    return {"clipped": round(sum(norm > bounding.bound.bound for norm in norms) / len(norms), 4)}
