"""Is everything in a run's folder as it was written, and if not, what can still be used?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tacit.engine.url_states import states_of
from tacit.errors import UserError
from tacit.federation import checkpoint
from tacit.federation.checkpoint import CONFIG, LINEAGE
from tacit.federation.ending import RESULT, read_ending
from tacit.federation.files import unsealed_text
from tacit.federation.lineage import read_lineage
from tacit.federation.passed import OBJECTS, read_passed
from tacit.federation.start import MODEL, read_weights
from tacit.federation.statements import LEDGER, SEEN, STATEMENT, read_ledger, read_statement
from tacit.federation.tracking import METRICS, metrics_lines
from tacit.reading import read_text


@dataclass(frozen=True)
class Finding:
    """One file (or checkpoint): what is wrong with it, and what that means for the run."""

    name: str
    problem: str | None = None
    """None: it is as it was written."""
    advice: str = ""


def refuse_changed_config(run: Path) -> None:
    """Refuse a config that was changed after its run began: it would not be that run's any more."""
    file = run / CONFIG
    try:
        unsealed_text(read_text(file))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} was changed after the run began ({error}); restore it. `tacit resume --rounds N` makes "
            "a run longer; for other settings start a new one"
        ) from None


def examine(run: Path) -> list[Finding]:
    """A finding on each file of a run that anything relies on."""
    found = [_config(run), _lineage(run), _objects(run)]
    if (run / LEDGER).exists() or (run / STATEMENT).exists():
        found += [_ledger(run, LEDGER), _statement(run)]
    if (run / SEEN).exists():
        found.append(_ledger(run, SEEN))
    found += [*_checkpoints(run), *_best(run)]
    if (run / METRICS).exists():
        found.append(_metrics(run))
    if (run / RESULT).exists():
        found.append(_ending(run))
    if (run / MODEL).exists():
        found.append(_model(run))
    return found


def _config(run: Path) -> Finding:
    try:
        refuse_changed_config(run)
    except UserError as error:
        return Finding(
            CONFIG, str(error), "the run cannot go on without it; its model can be taken out by hand"
        )
    return Finding(CONFIG)


def _lineage(run: Path) -> Finding:
    try:
        read_lineage(run)
    except UserError as error:
        return Finding(LINEAGE, str(error), "the run cannot go on, nor a private run start from it")
    return Finding(LINEAGE)


def _objects(run: Path) -> Finding:
    try:
        read_passed(run)
    except UserError as error:
        return Finding(OBJECTS, str(error), "the run cannot go on without it")
    return Finding(OBJECTS)


def _ledger(run: Path, name: str) -> Finding:
    try:
        contents = read_ledger(run, name)
    except UserError as error:
        return Finding(name, str(error), "nothing can be said about ε, and the run cannot go on")
    if contents.charges and contents.charges[-1].truncated:
        return Finding(name, None, "its last line was cut off by a kill; it counts as a charge")
    return Finding(name)


def _statement(run: Path) -> Finding:
    if not (run / STATEMENT).exists():
        return Finding(STATEMENT, None, "not written yet")
    try:
        read_statement(run)
    except UserError as error:
        return Finding(STATEMENT, str(error), "the next checkpoint of the run writes it anew")
    return Finding(STATEMENT)


def _checkpoints(run: Path) -> list[Finding]:
    found, store, usable = [], states_of(run), False
    for place in checkpoint.finished(run / "checkpoint"):
        name = f"checkpoint/{place.name}"
        try:
            facts = checkpoint.sound_facts(place)
            checkpoint.check_states(store, facts)
            checkpoint.refuse_other_files(run, facts)
        except (OSError, ValueError, KeyError, TypeError, UserError) as error:
            found.append(Finding(name, str(error)))
        else:
            usable = True
            found.append(Finding(name))
    if found and not usable:
        found[0] = Finding(found[0].name, found[0].problem, "no checkpoint is sound: the run cannot go on")
    elif any(finding.problem for finding in found):
        newest = next(finding.name for finding in found if not finding.problem)
        found = [
            Finding(f.name, f.problem, f"resume goes on from {newest} instead") if f.problem else f
            for f in found
        ]
    return found


def _best(run: Path) -> list[Finding]:
    named = [facts["best"] for facts in checkpoint.kept_facts(run / "checkpoint") if facts.get("best")]
    found = {}
    for best in named:
        name = str(checkpoint.best_place(run, best["round"]).relative_to(run))
        try:
            checkpoint.refuse_other_files(run, checkpoint.refuse_other_best(run, best))
            found[name] = Finding(name)
        except (OSError, ValueError, KeyError, TypeError, UserError) as error:
            found[name] = Finding(
                name, str(error), "the run can go on, but its best model so far is lost; restore it"
            )
    return list(found.values())


def _metrics(run: Path) -> Finding:
    try:
        lines = metrics_lines(run / METRICS)
    except UserError as error:
        return Finding(METRICS, str(error), "put it away: resume goes on without it")
    damaged = [str(number) for number, record in enumerate(lines, start=1) if record is None]
    if damaged:
        some = ", ".join(damaged[:5]) + (", …" if len(damaged) > 5 else "")
        return Finding(
            METRICS,
            f"line {some} of {len(lines)} is damaged",
            "resume sets it aside and keeps the sound lines",
        )
    for facts in checkpoint.kept_facts(run / "checkpoint")[:1]:
        if "metrics" in facts and not checkpoint.metrics_match(run / METRICS, facts):
            return Finding(
                METRICS,
                "its lines are not those that the newest checkpoint was saved with",
                "resume sets it aside and keeps the sound lines",
            )
    return Finding(METRICS)


def _ending(run: Path) -> Finding:
    try:
        read_ending(run)
    except UserError as error:
        return Finding(RESULT, str(error), "the next resume writes it anew")
    return Finding(RESULT)


def _model(run: Path) -> Finding:
    try:
        read_weights(run / MODEL)
    except UserError as error:
        return Finding(MODEL, str(error), "resume the finished run to have it written anew")
    return Finding(MODEL)
