"""`tacit plan`: what a run would cost in privacy before it is run, or what it takes to stay within ε."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tacit.cli.options import naming_options
from tacit.errors import UserError

if TYPE_CHECKING:
    from tacit.privacy.accountants import Epsilon
    from tacit.privacy.answers import Answer, Question
    from tacit.privacy.conventions import Scale


class NoiseOn(StrEnum):
    """What a noise multiplier is stated on."""

    sum = "sum"
    average = "average"
    client = "client"


def _option(text: str, panel: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False)


_RUN, _SCALE, _EXAMPLE, _OUTPUT = "The run", "Scale", "Example level: single records", "Output"


def plan(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE.yaml]", help="A config, instead of all the options below.")
    ] = None,
    overrides: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the config.")
    ] = [],  # noqa: B006
    rate: Annotated[float | None, _option("Probability that a client joins a round.", _RUN)] = None,
    noise: Annotated[
        str | None, _option("Noise multiplier: std ÷ clipping bound; or a list, 0.5,1,2.", _RUN)
    ] = None,
    noise_on: Annotated[
        NoiseOn, _option("What --noise is stated on: `sum`, `average` (003's σ_DP), `client`.", _RUN)
    ] = NoiseOn.sum,
    rounds: Annotated[str | None, _option("Rounds to run; or a list.", _RUN)] = None,
    delta: Annotated[float | None, _option("δ; take it below 1 ÷ population.", _RUN)] = None,
    epsilon: Annotated[
        str | None, _option("Target: solves for the one setting that is left out; or a list.", _RUN)
    ] = None,
    population: Annotated[str | None, _option("How many clients there are; or a list.", _SCALE)] = None,
    cohort: Annotated[
        str | None, _option("Expected clients a round (÷ population = rate); or a list.", _SCALE)
    ] = None,
    sampling: Annotated[
        str,
        _option(
            "poisson; fixed (RDP only); blt, banded: no sampling, clients take turns; or a list.", _SCALE
        ),
    ] = "poisson",
    dropout: Annotated[
        float | None,
        _option("Share of devices that vanish once drawn; shows who must add which noise.", _SCALE),
    ] = None,
    dimension: Annotated[
        str | None, _option("Parameters that are trained: for signal to noise.", _SCALE)
    ] = None,
    clip: Annotated[float | None, _option("Clipping norm, with --dimension.", _SCALE)] = None,
    at: Annotated[
        list[str], _option("POPULATION:COHORT to extrapolate ε to, at the same noise on average.", _SCALE)
    ] = [],  # noqa: B006
    examples: Annotated[int | None, _option("Records of the client.", _EXAMPLE)] = None,
    batch: Annotated[int | None, _option("Expected batch (÷ examples = rate).", _EXAMPLE)] = None,
    local_steps: Annotated[int | None, _option("Steps in a round.", _EXAMPLE)] = None,
    participations: Annotated[int | None, _option("Rounds the client takes part in.", _EXAMPLE)] = None,
    queries: Annotated[int, _option("Gradients on each batch: 2 for SAM and FAFED.", _EXAMPLE)] = 1,
    mechanism: Annotated[
        str | None, _option("`blt` or `banded`: compare correlated noise with independent noise.", _SCALE)
    ] = None,
    metrics: Annotated[
        float | None,
        _option("Share of each round's privacy that private metrics take, such as 0.05.", _SCALE),
    ] = None,
    trials: Annotated[
        float | None, _option("Also the best of a random number of such runs, of this mean.", _RUN)
    ] = None,
    table: Annotated[bool, _option("A grid of ε around the answer.", _OUTPUT, "--table")] = False,
    csv: Annotated[Path | None, _option("Also write the table of a list there.", _OUTPUT)] = None,
    picture: Annotated[Path | None, _option("Also draw it there: PNG, SVG or PDF.", _OUTPUT)] = None,
    compare_closed_form: Annotated[
        bool,
        _option("Noise by DP²-FedSAM's formula: no guarantee.", _OUTPUT, "--compare-closed-form"),
    ] = False,
    as_json: Annotated[bool, _option("One JSON object.", _OUTPUT, "--json")] = False,
) -> None:
    """Plan the privacy of a run: its ε, or the setting that keeps ε within a target.

    What a config will cost, before it runs:

    - `tacit plan quickstart.yaml --set rounds=100`

    ε of a run:

    - `tacit plan --rate 0.029465 --noise 1.536 --rounds 2006 --delta 1e-9`

    The least noise, the most rounds, or the largest cohort for ε ≤ 1:

    - `tacit plan --epsilon 1 --rate 0.05 --rounds 200 --delta 1e-3`

    - `tacit plan --epsilon 1 --rate 0.05 --noise 2 --delta 1e-3`

    - `tacit plan --epsilon 1 --population 70000000 --noise 1 --rounds 2000 --delta 1e-9`

    A row of paper 003, noise stated on the average, and two larger populations (no claim of that run):

    - `tacit plan --population 34753 --cohort 1024 --noise 3e-5 --noise-on average --rounds 2006 --delta 1e-9
      --at 1737650:51200 --at 3475300:102400`

    Single records of a client with 1000 of them:

    - `tacit plan --examples 1000 --batch 16 --local-steps 20 --participations 10 --noise 1 --delta 1e-5`

    A fleet whose clients take turns, with noise that later rounds take back in part:

    - `tacit plan --mechanism blt --population 100000 --cohort 1000 --rounds 1000 --epsilon 2 --delta 1e-6`

    Tables, over any two of noise, cohort, rounds, population, ε and sampling:

    - `tacit plan --population 1e6 --cohort 1e3,5e3,2e4 --noise 0.6,0.8,1 --rounds 2000 --delta 1e-8
      --csv t.csv`

    - `tacit plan --population 1e5 --cohort 1e3 --epsilon 1,2,4 --sampling poisson,fixed,blt --rounds 1000
      --delta 1e-6`

    A fifth of the devices vanish after they were drawn; a million parameters:

    - `tacit plan --population 1e6 --cohort 5e3 --epsilon 2 --rounds 2000 --delta 1e-8 --dropout 0.2
      --dimension 1e6 --clip 0.5`

    Both accountants are shown: PLD (privacy-loss distributions, the tighter one) and RDP (Rényi).
    """
    if file is not None:
        given = (rate, noise, rounds, delta, epsilon, population, cohort, dropout, dimension, clip, mechanism)
        if any(value is not None for value in (*given, csv, picture)) or table or at:
            raise UserError(
                f"{file} has the settings; change them with --set, and leave the other options out"
            )
        _of_config(file, overrides, as_json, trials)
        return
    if overrides:
        raise UserError("--set changes a config's settings; give its file, or the options by name")
    from tacit.cli.plan_table import numbers
    from tacit.privacy.answers import Question
    from tacit.privacy.tables import SAMPLINGS, TURNS

    asked: dict[str, list[Any]] = {
        name: numbers(text, name, whole)
        for name, text, whole in (
            ("population", population, True),
            ("cohort", cohort, True),
            ("rounds", rounds, True),
            ("noise", noise, False),
            ("epsilon", epsilon, False),
        )
        if text is not None
    }
    drawn = [name.strip() for name in sampling.split(",")]
    for name in drawn:
        if name not in SAMPLINGS or drawn.count(name) > 1:
            raise UserError(f"--sampling {sampling}: choose among {', '.join(SAMPLINGS)}, each once")
    axes = {name: values for name, values in (asked | {"sampling": drawn}).items() if len(values) > 1}
    one = {name: values[0] for name, values in asked.items() if len(values) == 1}
    parameters = None if dimension is None else numbers(dimension, "dimension", whole=True)[0]
    if parameters is not None and parameters < 1:
        raise UserError(f"--dimension {dimension}: give how many parameters are trained")
    if clip is not None and (parameters is None or not 0 < clip < math.inf):
        raise UserError("--clip: give a norm > 0, and --dimension with it")
    if mechanism is not None:
        from tacit.cli.fleet import show_fleet

        others = (
            rate,
            noise,
            examples,
            batch,
            local_steps,
            participations,
            metrics,
            trials,
            dropout,
            csv,
            picture,
        )
        if any(value is not None for value in others) or axes or at or table or compare_closed_form:
            raise UserError(
                "--mechanism takes --population, --cohort, --rounds, --delta and --epsilon, one number each; "
                "leave the others out"
            )
        fleet = (one.get("population"), one.get("cohort"), one.get("rounds"))
        show_fleet(mechanism, *fleet, delta, one.get("epsilon"), as_json)
        return
    if delta is None:
        raise UserError("give --delta, the probability that the guarantee fails, e.g. --delta 1e-6")
    several = bool(axes) or drawn[0] in TURNS
    question = Question(
        delta=delta,
        noise=one.get("noise")
        if several
        else _on_sum(one.get("noise"), noise_on, one.get("cohort"), rate, one.get("population")),
        rate=rate,
        rounds=one.get("rounds"),
        target=one.get("epsilon"),
        population=one.get("population"),
        cohort=one.get("cohort"),
        fixed=drawn == ["fixed"],
        examples=examples,
        batch=batch,
        local_steps=local_steps,
        participations=participations,
        queries=queries,
    )
    if several:
        from tacit.cli.plan_table import show_table

        if (
            any(value is not None for value in (metrics, trials, dropout))
            or at
            or table
            or compare_closed_form
        ):
            raise UserError(
                "--metrics, --trials, --dropout, --at, --table and --compare-closed-form are for one plan; "
                "give one value of each setting"
            )
        show_table(
            question, axes or {"sampling": drawn}, str(noise_on), parameters, clip, csv, picture, as_json
        )
        return
    if csv is not None or picture is not None:
        raise UserError("--csv and --picture are of a table: give a list, such as --cohort 1e3,5e3")
    _one(question, metrics, trials, table, at, dropout, parameters, clip, compare_closed_form, as_json)


def _one(
    question: Question,
    metrics: float | None,
    trials: float | None,
    table: bool,
    at: list[str],
    dropout: float | None,
    parameters: int | None,
    clip: float | None,
    compare_closed_form: bool,
    as_json: bool,
) -> None:
    """One plan, and whatever else was asked about it."""
    from tacit.privacy.answers import answer, around
    from tacit.privacy.conventions import from_sum
    from tacit.privacy.tuning import tuned_epsilon

    with naming_options():
        found = answer(question)
    split = _split(found, metrics)
    tuned = None if trials is None else tuned_epsilon({found.event: found.times}, question.delta, trials)
    grid = around(found) if table else None
    larger = _larger(found, at)
    vanished = _vanished(found, dropout)
    felt = _felt(found, parameters, clip)
    if as_json:
        plain = found.to_dict() | felt | vanished
        if compare_closed_form:
            plain["closed_form_noise"] = found.closed_form()
        if grid:
            plain["table"] = grid
        if found.unit == "client" and found.question.cohort:
            plain["noise_on"] = dict(from_sum(found.noise, found.question.cohort))
        plain |= split | ({} if tuned is None else {"tuned": asdict(tuned)})
        if larger:
            plain["extrapolations"] = [
                {"population": scale.population, "cohort": scale.cohort, "noise": scaled} | asdict(there)
                for scale, scaled, there in larger
            ]
        print(json.dumps(plain))
        return
    console = Console(highlight=False, width=min(80, Console().width))
    _show(console, found, compare_closed_form)
    if tuned is not None:
        console.print(tuned.text())
    if split:
        console.print(
            f"Of that, noise {split['update_noise']:.4g} on the update and {split['metrics_noise']:.4g} on "
            "private metrics: together they cost the above."
        )
    for scale, scaled, there in larger:
        console.print(scale.text(there, scaled, found.times))
    if felt:
        shown = "the mean update over the noise on it, at most"
        console.print(
            f"Signal to noise {felt['signal_to_noise']:.3g}: {shown}, for {parameters:,} parameters."
        )
        if clip is not None:
            console.print(f"At clip {clip:g} the noise on the mean is {felt['noise_length']:.3g} long.")
    if vanished:
        _show_vanished(console, found, vanished)
    if grid:
        _show_grid(console, found, grid)


def _felt(found: Answer, dimension: int | None, clip: float | None) -> dict[str, float]:
    """What training feels of the noise."""
    if dimension is None:
        return {}
    from tacit.privacy.tables import signal_to_noise

    cohort = found.question.cohort
    if found.unit != "client" or cohort is None:
        raise UserError(
            "--dimension: signal to noise is of the mean over a cohort; give --population and --cohort"
        )
    strength = signal_to_noise(found.noise, cohort, dimension)
    return {"signal_to_noise": strength} | ({} if clip is None else {"noise_length": clip / strength})


@naming_options()
def _vanished(found: Answer, dropout: float | None) -> dict[str, Any]:
    """Who adds what if a share of the devices vanish, and what drawing more of them instead would cost."""
    if dropout is None:
        return {}
    from tacit.privacy.answers import answer
    from tacit.privacy.tables import shares

    q = found.question
    if found.unit != "client" or q.cohort is None:
        raise UserError("--dropout is about a cohort's devices; give --population and --cohort")
    made = [asdict(share) for share in shares(found.noise, q.cohort, dropout)]
    more = math.ceil(q.cohort / (1 - dropout))
    again = None
    if q.population is not None and more <= q.population:
        solve = found.solved == "noise"
        wider = replace(
            q, cohort=more, rate=None, noise=None if solve else q.noise, target=q.target if solve else None
        )
        there = answer(wider)
        again = {"cohort": more, "noise": there.noise, "epsilon": there.epsilon.value}
    return {"dropout": dropout, "shares": made, "drawing_more": again}


def _show_vanished(console: Console, found: Answer, vanished: dict[str, Any]) -> None:
    share, cohort = vanished["dropout"], found.question.cohort or 0
    grid = Table(title=f"{share:.0%} of {cohort:,} devices vanish: noise in clipping norms")
    for name in ("made by", "a device", "server adds", "published", "signal", "relies on"):
        grid.add_column(name, justify="left" if name in ("made by", "relies on") else "right")
    for row in vanished["shares"]:
        amounts = (f"{row[name]:.3g}" if row[name] else "–" for name in ("client", "server", "published"))
        grid.add_row(row["who"], *amounts, f"× {row['signal']:.2f}", row["trust"])
    console.print(grid)
    if (more := vanished["drawing_more"]) is not None:
        console.print(
            f"To have {cohort:,} left, draw {more['cohort']:,}: noise {more['noise']:g}, ε = "
            f"{more['epsilon']:.4g}. Who vanishes counts as if they had come: only the draw is chance."
        )


def _split(found: Answer, share: float | None) -> dict[str, float]:
    """How the noise is divided between updates and private metrics."""
    if share is None:
        return {}
    from tacit.privacy import Metrics

    if found.unit != "client":
        raise UserError("--metrics: at example level private metrics cost nothing; leave it out")
    try:
        rule = Metrics(share)
    except ValueError:
        raise UserError(f"--metrics {share:g}: give a share from 0.0001 to 0.9, such as 0.05") from None
    return {"update_noise": rule.rest(found.noise), "metrics_noise": rule.noise(found.noise)}


def _of_config(file: Path, overrides: list[str], as_json: bool, trials: float | None) -> None:
    """What a config will cost: of a sweep, its first run."""
    from tacit import api
    from tacit.config import parse_overrides
    from tacit.config.sweep import load_one
    from tacit.privacy.statement import rounded_up
    from tacit.privacy.tuning import Tuned

    found = api.plan(load_one(file, parse_overrides(overrides)), trials=trials)
    if as_json:
        print(json.dumps(found))
        return
    console = Console(highlight=False, width=min(80, Console().width))
    rows = Table.grid(padding=(0, 2))
    whom = "whole clients" if found["unit"] == "client" else "single records"
    simulated = " (a simulation: nothing is claimed)" if found["simulation"] else ""
    budget = "" if found["budget"] is None else f", within the budget of {found['budget']:g}"
    rows.add_row("ε", f"[bold]{rounded_up(found['epsilon'])}[/bold] for {whom}{budget}{simulated}")
    rows.add_row("δ", f"{found['delta']:g}")
    worth = "" if found["worth"] is None else f"; by layer, worth {found['worth']:.4g} everywhere"
    rows.add_row("noise", f"{found['noise']:g} × the clipping bound{worth}")
    rows.add_row("rounds", f"{found['rounds']:,}")
    when = ", on average" if found["sampling"] == "poisson" else ""
    rows.add_row("clients", f"{found['cohort']:g} of {found['clients']:,} a round{when}")
    if found["metrics"] is not None:
        told = found["metrics"]
        alone = rounded_up(told["epsilon_without"])
        own = f"noise {told['noise']:.4g}, and {told['update_noise']:.4g} on the update"
        rows.add_row("metrics", f"{told['share']:g} of each round: {own}; without them ε = {alone}")
    if found["signal_to_noise"] is not None:
        told = f"{found['signal_to_noise']:.3g} at most: the mean update over the noise on it"
        rows.add_row("signal", f"{told}, for {found['parameters']:,} parameters")
    console.print(rows)
    if found["tuned"] is not None:
        console.print(Tuned(**found["tuned"]).text())
    for warning in found["warnings"]:
        console.print(f"[yellow]warning:[/yellow] {warning}")


def _on_sum(
    noise: float | None, stated: NoiseOn, cohort: int | None, rate: float | None, population: int | None
) -> float | None:
    """The multiplier on the sum, which is what is accounted."""
    from tacit.privacy.conventions import to_sum

    if noise is None or stated == NoiseOn.sum:
        return noise
    clients = cohort if cohort is not None else rate * population if rate and population else None
    if clients is None:
        raise UserError(f"--noise-on {stated}: give --cohort too, the expected number of clients a round")
    return to_sum(noise, stated, clients)


def _larger(found: Answer, at: list[str]) -> list[tuple[Scale, float, Epsilon]]:
    from tacit.privacy.conventions import Scale

    q = found.question
    if at and (found.unit != "client" or q.fixed or q.cohort is None):
        raise UserError("--at extrapolates a client-level run with Poisson cohorts; give --cohort")
    scales = [Scale.parse(text) for text in at]
    cohort = float(q.cohort or 1)
    return [
        (scale, scale.noise(found.noise, cohort), scale.cost(found.noise, cohort, found.times, q.delta))
        for scale in scales
    ]


def _show(console: Console, found: Answer, closed_form: bool) -> None:
    from tacit.privacy.conventions import from_sum

    q, epsilon = found.question, found.epsilon
    if found.solved:
        value = {"noise": q.noise, "rounds": q.rounds, "cohort": q.cohort}.get(found.solved, q.participations)
        console.print(f"[bold]{found.solved} {value:,}[/bold] keeps ε ≤ {q.target:g}")
    rows = Table.grid(padding=(0, 2))
    pld = "no bound at hand" if epsilon.pld is None else f"[bold]{epsilon.pld:.4g}[/bold]"
    rows.add_row("ε", f"{pld}  by PLD")
    rows.add_row("", f"{epsilon.rdp:.4g}  by RDP, order {epsilon.order:g}")
    rows.add_row("δ", f"{epsilon.delta:g}")
    rows.add_row("noise", f"{q.noise:g} × the clipping bound (standard deviation)")
    if found.unit == "client" and q.cohort:
        on = from_sum(found.noise, q.cohort)
        rows.add_row("", f"= {on['average']:.4g} on the average = {on['client']:.4g} on each client")
    if found.unit == "client":
        scale = f" ({q.cohort:,} of {q.population:,} clients)" if q.cohort and q.population else ""
        rows.add_row("rate", f"{found.event.rate:g} per client and round{scale}")
        rows.add_row("rounds", f"{found.times:,}")
        protects = "whole clients, " + ("one replaced by another" if q.fixed else "each there or not there")
    else:
        rows.add_row(
            "rate", f"{found.event.rate:g} per record and step ({q.batch:,} of {q.examples:,} records)"
        )
        asked = f", {q.queries} gradients each" if q.queries > 1 else ""
        rows.add_row(
            "steps",
            f"{found.times:,} ({q.participations:,} participations × {q.local_steps:,} local steps{asked})",
        )
        protects = "single records of this client, each there or not there"
    rows.add_row("protects", protects)
    if closed_form:
        rows.add_row("compare", f"noise {found.closed_form():.3g} by DP²-FedSAM's closed form (no guarantee)")
    console.print(rows)
    for warning in found.warnings():
        console.print(f"[yellow]warning:[/yellow] {warning}")


def _show_grid(console: Console, found: Answer, cells: list[dict[str, float]]) -> None:
    lengths = sorted({cell["rounds"] for cell in cells})
    unit = "rounds" if found.unit == "client" else "steps"
    grid = Table(title=f"ε by noise and {unit}, at δ = {found.epsilon.delta:g}")
    grid.add_column("noise", justify="right")
    for length in lengths:
        grid.add_column(f"{length:,.0f} {unit}", justify="right")
    for noise in sorted({cell["noise"] for cell in cells}):
        row = {cell["rounds"]: cell["epsilon"] for cell in cells if cell["noise"] == noise}
        grid.add_row(f"{noise:.3g}", *(f"{row[length]:.3g}" for length in lengths))
    console.print(grid)
