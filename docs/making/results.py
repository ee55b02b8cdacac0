"""The comparisons of docs/results.md: their runs, and the finished cells that are kept in docs/results/.

    python docs/making/results.py 002              # run what is not finished yet, keep it, write the page
    python docs/making/results.py --collect 002    # keep what has finished meanwhile, write the page
    python docs/making/results.py --collect --quick 002    # the same, but test no client yet

A comparison NAME is docs/results/NAME.yaml (what is claimed, the table, the paper's numbers), its recipe, and
docs/results/NAME.json: a cell for each run that came to its end. A cell that is there is never run again, on
whatever machine it was made; to make it anew, delete it. Runs that are under way, or whose clients are not
tested yet, are written down beside the cells with their curves so far, anew each time.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from results_page import write_page

from tacit import api, test_clients
from tacit.config import load
from tacit.config.sweep import Family, Point, Sweep, read_sweep, slug, without_seed
from tacit.federation.ending import read_ending
from tacit.federation.files import write_atomically
from tacit.report.compare import Run, read_run
from tacit.sweeps import run_sweep
from tacit.system import cores, memory_bytes

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "docs/results"
CLIENTS = "clients.json"
"""Beside a finished run: how each client's own model does on its own records."""
STEADY = ("round", "lr", "check", "seconds", "clients", "examples", "delta", "clipped")
"""What a run records that no page shows."""


@dataclass(frozen=True)
class Comparison:
    """docs/results/NAME.yaml, as far as running it goes."""

    name: str
    sweep: Sweep
    recipe: str
    pretrain: Mapping[str, str] = field(default_factory=dict)
    """Folders under runs/ that its models start from, each with the recipe that makes it."""
    clients: int = 0
    """Clients to test on their own records when a run has ended."""
    start: bool = False
    """Whether clients are tested with the model before any round, too: a cell of 0 rounds for each seed."""
    columns: Sequence[Mapping[str, Any]] = ()
    """Of its table: what their runs have in common (`where`). One is finished before the next."""

    @property
    def cells(self) -> Path:
        return KEPT / f"{self.name}.json"

    @property
    def starts(self) -> list[Point]:
        seeds = dict.fromkeys(point.get("seed", 0) for point in self.sweep.points)
        return [{"rounds": 0, "seed": seed} for seed in seeds] if self.start else []


def comparison(name: str) -> Comparison:
    about = yaml.safe_load((KEPT / f"{name}.yaml").read_text("utf-8"))
    sweep = read_sweep(ROOT / about["recipe"], {})
    assert sweep is not None, f"{about['recipe']} compares nothing"
    more = {key: about[key] for key in ("pretrain", "clients", "start", "columns") if key in about}
    return Comparison(name, sweep, about["recipe"], **more)


def kept(what: Comparison) -> list[dict[str, Any]]:
    """The cells that are finished."""
    return json.loads(what.cells.read_text("utf-8"))["cells"] if what.cells.exists() else []


def remaining(
    sweep: Sweep, cells: Sequence[Mapping[str, Any]], columns: Sequence[Mapping[str, Any]] = ()
) -> list[Sweep]:
    """What is still to run, a sweep for each step: one column of the table after the other, and in each the
    first seed of everything first.

    Settings that are tuned keep their seeds together, unless a kept cell already says what was chosen.
    """
    done = {slug(cell["point"]) for cell in cells}
    chosen = {slug(without_seed(cell["point"])): cell["tuned"] for cell in cells}
    steps: list[tuple[int, int, Family]] = []
    together: dict[str, Family] = {}
    for point in sweep.points:
        if slug(point) in done:
            continue
        name, family = slug(without_seed(point)), sweep.family(point)
        fitting = (n for n, column in enumerate(columns) if column["where"].items() <= point.items())
        order = next(fitting, len(columns)), point.get("seed", 0)
        fixed = {key: [value] for key, value in {**point, **chosen.get(name, {})}.items()}
        if name in chosen or not family.tune:
            steps.append((*order, Family(fixed, {})))
        elif name in together:
            together[name].grid["seed"].append(point["seed"])
        else:
            together[name] = Family(fixed, family.tune)
            steps.append((*order, together[name]))
    return [replace(sweep, families=(family,)) for *_, family in sorted(steps, key=lambda step: step[:2])]


def finished(what: Comparison, runs: Path) -> Iterator[tuple[Point, Path]]:
    """Points of the comparison whose run in this folder came to its last round, and where that is.

    One that was killed may have no budget left for it: that is an end, but nothing to compare.
    """
    for point in what.sweep.points:
        for place in sorted(runs.glob("*/finished")):
            name, ending = place.parent.name, read_ending(place.parent)
            if ending is not None and ending.stopped:
                continue
            if name == slug(point) or name.startswith(f"{slug(point)},"):  # tuned values come last
                yield point, place.parent


def run(what: Comparison, runs: Path, jobs: int) -> None:
    """Run whatever has no cell yet, `jobs` runs at once; then test the clients of all of it."""
    for folder, recipe in what.pretrain.items():
        if not Path(folder).exists():
            api.run(load(ROOT / recipe), folder)
    steps = remaining(what.sweep, kept(what), what.columns)
    for start in range(0, len(steps), jobs):
        families = [step.families[0] for step in steps[start : start + jobs]]
        run_sweep(replace(what.sweep, families=tuple(families)), runs, jobs)
    for _, place in finished(what, runs):
        tested(what, place)
    there = {slug(one["point"]) for one in kept(what)}
    for point in what.starts:
        if slug(point) not in there:
            started(what, runs, point)


def tested(what: Comparison, place: Path) -> dict[str, dict[str, Any]]:
    """By kind and client: a finished run's clients on their own records; computed once."""
    if not what.clients:
        return {}
    if not (place / CLIENTS).exists():
        _, found = test_clients(place, what.clients)
        write_atomically(place / CLIENTS, json.dumps(found) + "\n")
    return json.loads((place / CLIENTS).read_text("utf-8"))


def started(what: Comparison, runs: Path, point: Point) -> dict[str, dict[str, Any]]:
    """The same of the model that all runs of a seed start from, tuned as the first of them is."""
    file = runs / f"{slug(point)}.json"
    if not file.exists():
        _, found = test_clients(ROOT / what.recipe, what.clients, [f"sweep.seed=[{point['seed']}]"])
        runs.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(found) + "\n")
    return json.loads(file.read_text("utf-8"))


def start_cell(what: Comparison, runs: Path, point: Point) -> dict[str, Any]:
    """What is kept of the model before any round."""
    own = _own(started(what, runs, point))
    made = {"point": point, "tuned": {}, "rounds": 0, "final": {}, "own": own, "curves": {}, "minutes": 0.0}
    seed = f"--set 'sweep.seed=[{point['seed']}]'"
    command = f"tacit test {what.recipe} {seed} --clients {what.clients}"
    return made | _circumstances(command, runs / f"{slug(point)}.json")


def _own(found: Mapping[str, Mapping[str, Any]]) -> dict[str, list[float]]:
    return {
        kind: [_short(one["accuracy"]) for _, one in sorted(each.items(), key=lambda item: int(item[0]))]
        for kind, each in found.items()
    }


def _circumstances(command: str, made: Path) -> dict[str, str]:
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d", time.localtime(made.stat().st_mtime)),
        "machine": f"{cores()} cores, {memory_bytes() / 2**30:.0f} GB",
    }


def cell(what: Comparison, point: Point, place: Path) -> dict[str, Any]:
    """What is kept of a finished run."""
    done: Run = read_run(place)
    names = sorted({name for record in done.metrics for name in record} - {*STEADY})
    tune, last = what.sweep.family(point).tune, done.metrics[-1]
    return {
        "point": point,
        "tuned": {key: _at(done.config, key) for key in tune},
        "rounds": done.rounds_done,
        "final": {name: _short(last[name]) for name in names if isinstance(last.get(name), (int, float))},
        "own": _own(tested(what, place)),
        "curves": _curves(done),
        "minutes": round(sum(float(record.get("seconds", 0.0)) for record in done.metrics) / 60, 1),
        **_circumstances(f"tacit run {what.recipe}", place / "finished"),
    }


def _curves(run: Run) -> dict[str, list[Any]]:
    names = sorted({name for record in run.metrics for name in record})
    shown = [name for name in names if "accuracy" in name or name in ("wer", "cer", "epsilon")]
    return {name: _thinned([[round, _short(value)] for round, value in run.series(name)]) for name in shown}


def _at(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value[part]
    return value


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _thinned(series: list[Any], most: int = 50) -> list[Any]:
    """At most so many points of a curve, evenly, with its last."""
    step = -(-len(series) // most)
    return series[::-1][::step][::-1]


def under_way(what: Comparison, runs: Path, cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Runs of the comparison that are begun and no cell yet: how far they are, and their curves."""
    there = {slug(one["point"]) for one in cells}
    found = []
    for point in what.sweep.points:
        places = [runs / slug(point), *sorted(runs.glob(f"{slug(point)},*"))]
        begun = [place for place in places if (place / "metrics.jsonl").exists()]
        if slug(point) in there or not begun:
            continue
        now: Run = read_run(begun[0])
        if now.metrics:
            facts = {
                "point": point,
                "rounds": now.rounds_done,
                "planned": now.planned,
                "curves": _curves(now),
            }
            found.append({**facts, "own": {}, "final": {}})
    return found


def collect(what: Comparison, runs: Path, quick: bool = False) -> int:
    """Keep every run that has ended and is not kept yet; how many. `quick`: but for those whose clients are
    still to be tested.
    """
    cells = kept(what)
    there = {slug(one["point"]) for one in cells}
    ended = [(point, place) for point, place in finished(what, runs) if slug(point) not in there]
    ready = [(p, place) for p, place in ended if not quick or not what.clients or (place / CLIENTS).exists()]
    new = [cell(what, point, place) for point, place in ready]
    starts = [point for point in what.starts if slug(point) not in there]
    new += [start_cell(what, runs, point) for point in starts if (runs / f"{slug(point)}.json").exists()]
    order = {slug(point): number for number, point in enumerate([*what.starts, *what.sweep.points])}
    cells = sorted([*cells, *new], key=lambda one: order[slug(one["point"])])
    write(what, cells, under_way(what, runs, cells))
    return len(new)


def write(what: Comparison, cells: Sequence[Mapping[str, Any]], begun: Sequence[Mapping[str, Any]]) -> None:
    """The comparison's file: a line for each run."""
    if not cells and not begun:
        return
    parts = {
        name: ",\n".join(json.dumps(one, ensure_ascii=False) for one in listed)
        for name, listed in (("cells", cells), ("under way", begun))
    }
    text = ", ".join(f'"{name}": [\n{lines}\n]' for name, lines in parts.items())
    write_atomically(what.cells, f'{{"recipe": "{what.recipe}", {text}}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="comparisons; all of them if none is named")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are (default: runs)")
    parser.add_argument("--jobs", type=int, default=cores(), help="runs at once")
    parser.add_argument("--collect", action="store_true", help="run nothing")
    parser.add_argument("--quick", action="store_true", help="test no clients; that is left for later")
    parser.add_argument("--no-page", action="store_true", help="keep nothing and write no page; only run")
    given = parser.parse_args()
    for name in given.names or sorted(file.stem for file in KEPT.glob("*.yaml")):
        what = comparison(name)
        runs = given.runs / what.sweep.name
        if not given.collect:
            run(what, runs, given.jobs)
        if not given.no_page:
            new = collect(what, runs, given.quick) if runs.exists() else 0
            there = sum(one["rounds"] > 0 for one in kept(what))
            print(f"{name}: {new} new cells; {there} of {len(what.sweep.points)} runs are kept")
    if not given.no_page:
        write_page(KEPT, ROOT / "docs/results.md")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
