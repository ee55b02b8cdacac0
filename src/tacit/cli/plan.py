"""`tacit plan`: what a run would cost in privacy before it is run, or what it takes to stay within ε."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from click.core import ParameterSource

from tacit.errors import UserError


class NoiseOn(StrEnum):
    """What a noise multiplier is stated on."""

    sum = "sum"
    average = "average"
    client = "client"


def _option(text: str, panel: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False)


_RUN, _SCALE, _EXAMPLE, _OUTPUT = "The run", "Scale", "Example level: single records", "Output"


def plan(
    ctx: typer.Context,
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
    given = {name for name in ctx.params if ctx.get_parameter_source(name) != ParameterSource.DEFAULT}
    if file is not None:
        if given - {"file", "overrides", "as_json", "trials"}:
            raise UserError(
                f"{file} has the settings; change them with --set, and leave the other options out"
            )
        from tacit.cli.plan_config import plan_config

        plan_config(file, overrides, as_json, trials)
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

        if axes or given - {"mechanism", "population", "cohort", "rounds", "delta", "epsilon", "as_json"}:
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

        if given & {"metrics", "trials", "dropout", "at", "table", "compare_closed_form"}:
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
    from tacit.cli.plan_one import show_one

    show_one(question, metrics, trials, table, at, dropout, parameters, clip, compare_closed_form, as_json)


def _on_sum(
    noise: float | None, stated: NoiseOn, cohort: int | None, rate: float | None, population: int | None
) -> float | None:
    """The multiplier on the sum, which is what is accounted."""
    from tacit.privacy.conventions import to_sum

    if stated == NoiseOn.sum:
        return noise
    if noise is None:
        raise UserError(f"--noise-on {stated}: give --noise too; what is asked for is told on the sum")
    clients = cohort if cohort is not None else rate * population if rate and population else None
    if clients is None:
        raise UserError(f"--noise-on {stated}: give --cohort too, the expected number of clients a round")
    return to_sum(noise, stated, clients)
