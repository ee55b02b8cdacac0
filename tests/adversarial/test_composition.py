"""Charges belong to data: tries every way to lose a charge between two runs.

A hostile user would split a run in two, start from an earlier model of the same run, move files about, copy a
folder and continue both copies, or change the data between run and resume. Each attempt is either counted in
full or refused.
"""

from __future__ import annotations

import copy
import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tacit
from conftest import blobs
from tacit.api import training
from tacit.config.build import build_job
from tacit.data import Population
from tacit.data.identity import Identity, identify
from tacit.federation.lineage import LINEAGE
from tacit.federation.start import MODEL, save_weights
from tacit.federation.statements import LEDGER
from tacit.privacy import PoissonGaussian, epsilon
from tacit.privacy.ledger import Ledger

CLIENT = {"unit": "client", "clip": 0.5, "noise": 1.0, "delta": 1e-3}
EXAMPLE = {"unit": "example", "clip": 0.5, "noise": 1.0, "delta": 1e-3}
EVENT = PoissonGaussian(5 / 12, 1.0)


def cost(*spends: tuple[PoissonGaussian, int]) -> float:
    return epsilon(dict(spends), 1e-3).value


def start(place: str, public: bool = False) -> dict[str, Any]:
    return {"name": "mlp", "hidden": [8], "start": place, "public": public}


# --- starting from another run ----------------------------------------------------------------------------


def test_a_start_from_a_private_run_takes_its_charges_along(config, dataset) -> None:
    tacit.run(config(rounds=3, privacy=CLIENT), "one", dataset=dataset)
    result = tacit.run(config(rounds=2, privacy=CLIENT, model=start("one")), "two", dataset=dataset)
    assert result.last("epsilon") == tacit.statement("two").epsilon == cost((EVENT, 5))
    assert "3 of earlier runs on the same data" in tacit.statement("two").text()
    other = {**CLIENT, "noise": 2.0}
    result = tacit.run(config(rounds=1, privacy=other, model=start("two")), "three", dataset=dataset)
    assert result.last("epsilon") == cost((EVENT, 5), (PoissonGaussian(5 / 12, 2.0), 1))
    assert tacit.ledger(["one", "two", "three"]).epsilon == result.last("epsilon"), "each counts once"
    assert tacit.ledger(["three"]).epsilon == result.last("epsilon"), "also where the others are not at hand"


class Interrupted:
    """Ctrl-C before the first round."""

    def start(self, *about: Any) -> None:
        raise KeyboardInterrupt


def test_a_resume_with_a_module_that_was_trained_since_is_refused(config, dataset) -> None:
    """A run that was stopped before its first round would begin with what an unprotected one had learnt."""
    fresh = build_job(config(), Path("none"), dataset=dataset).model
    trained = tacit.run(config(rounds=2), "plain", dataset=dataset, model=fresh).model
    private = tacit.run(config(rounds=1, privacy=CLIENT), "private", dataset=dataset, model=fresh).model
    for first, second, told in (
        (fresh, trained, "trained this module"),
        (fresh, private, "trained this module"),
        (fresh, fresh, None),
        (private, private, None),
    ):
        shutil.rmtree("run", ignore_errors=True)
        with pytest.raises(KeyboardInterrupt):
            claim = config(rounds=2, privacy=CLIENT)
            tacit.run(claim, "run", dataset=dataset, model=first, trackers=[Interrupted()])
        if told is None:
            assert tacit.resume("run", dataset=dataset, model=second).finished
        else:
            with pytest.raises(tacit.UserError, match=told):
                tacit.resume("run", dataset=dataset, model=second)
    own = tacit.resume(
        "run", rounds=3, dataset=dataset, model=tacit.trained("run", dataset=dataset, model=fresh)
    )
    assert own.finished and len(own.metrics) == 3, "its own module, as far as it had come"


@pytest.mark.parametrize("train", [None, ["head"]])
def test_a_resume_begins_with_the_weights_that_were_paid_for(config, dataset, train) -> None:
    """A run that was killed before its first checkpoint reads `model.start` anew: if that run went on, its
    weights have seen more than was carried over. So they have where only a part is in the checkpoint.
    """
    tacit.run(config(rounds=2, privacy=CLIENT), "one", dataset=dataset)
    begun = {**start("one"), "train": train}
    with pytest.raises(KeyboardInterrupt):
        claim = config(rounds=2, privacy=CLIENT, model=begun)
        tacit.run(claim, "killed", dataset=dataset, trackers=[Interrupted()])
    shutil.copytree("killed", "same")
    assert tacit.resume("same", dataset=dataset).last("epsilon") == cost((EVENT, 4))
    tacit.run(config(rounds=1, privacy=CLIENT, model=begun), "saved", dataset=dataset)
    tacit.resume("one", rounds=5, dataset=dataset)
    with pytest.raises(tacit.UserError, match="one holds other weights than when killed began"):
        tacit.resume("killed", dataset=dataset)
    if train is None:
        assert tacit.resume("saved", rounds=2, dataset=dataset).last("epsilon") == cost((EVENT, 4))
    else:
        with pytest.raises(tacit.UserError, match="one holds other weights than when saved began"):
            tacit.resume("saved", rounds=2, dataset=dataset)


def test_a_start_from_a_run_that_goes_on_meanwhile_pays_for_all_of_it(config, dataset, monkeypatch) -> None:
    """Whatever happens between reading its weights and reading its ledger."""
    tacit.run(config(rounds=2, privacy=CLIENT), "one", dataset=dataset)

    def build(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(training, "build_job", build_job)
        tacit.resume("one", rounds=5, dataset=dataset)
        return build_job(*args, **options)

    monkeypatch.setattr(training, "build_job", build)
    tacit.run(config(rounds=1, privacy=CLIENT, model=start("one")), "two", dataset=dataset)
    assert tacit.statement("two").epsilon == cost((EVENT, 6))


def test_weights_in_a_strangers_folder_are_of_unknown_origin(config, dataset) -> None:
    """A run's folder says what its own weights have seen, and nothing of a file that was put there."""
    tacit.run(config(rounds=3), "bare", dataset=dataset)
    tacit.export("bare", "out", dataset=dataset)
    base = blobs(seed=9)
    users = np.array([f"other-{user}" for user in base.train.users])
    records = tacit.ArrayRecords(base.train.x, base.train.y, users=users)
    others = tacit.Dataset("others", records, base.test, 4, (1, 4, 4))
    tacit.run(config(rounds=1, privacy=CLIENT), "other", dataset=others)
    shutil.copyfile("out/model.safetensors", "other/seed.safetensors")
    Path("mixed").mkdir()
    shutil.copyfile("out/model.safetensors", "mixed/model.safetensors")
    shutil.copyfile(Path("other", LINEAGE), Path("mixed", LINEAGE))
    for place in ("other/seed.safetensors", "mixed", "mixed/model.safetensors"):
        with pytest.raises(tacit.UserError, match="nothing says which data"):
            tacit.run(config(privacy=CLIENT, model=start(place)), "two", dataset=dataset)


def test_weights_under_the_name_of_a_runs_own_are_not_taken_for_them(config, dataset) -> None:
    """A start from a folder reads the weights in it first, which must be what the run there ended with."""
    bare = tacit.run(config(rounds=3), "bare", dataset=dataset)
    base = blobs(seed=9)
    users = np.array([f"other-{user}" for user in base.train.users])
    records = tacit.ArrayRecords(base.train.x, base.train.y, users=users)
    others = tacit.Dataset("others", records, base.test, 4, (1, 4, 4))
    tacit.run(config(rounds=1, privacy=CLIENT), "other", dataset=others)
    network = {"name": "mlp", "hidden": [8]}
    section = {"steps": 2, "lr": 0.5, "batch": 4, "optimizer": "sgd"}
    seed = tacit.load({"data": {"name": "others"}, "model": network, "pretrain": section})
    tacit.run(seed, "seed", dataset=others)

    def attempt(place: str, name: str) -> Any:
        return tacit.run(config(rounds=1, privacy=CLIENT, model=start(place)), name, dataset=dataset)

    assert attempt("seed", "one").finished and attempt("seed/model.safetensors", "two").finished
    for folder in ("other", "seed"):
        save_weights(bare.model, Path(folder, MODEL))
        for place in (folder, f"{folder}/{MODEL}"):
            with pytest.raises(tacit.UserError, match="nothing says which data"):
                attempt(place, "three")
    tacit.resume("seed", dataset=others)
    assert attempt("seed", "four").finished, "written anew"


def test_what_one_run_calls_public_is_not_so_for_those_that_begin_with_it(config, dataset) -> None:
    tacit.run(config(rounds=3, privacy=CLIENT), "one", dataset=dataset)
    base = blobs(seed=9)
    users = np.array([f"other-{user}" for user in base.train.users])
    records = tacit.ArrayRecords(base.train.x, base.train.y, users=users)
    others = tacit.Dataset("others", records, base.test, 4, (1, 4, 4))
    tacit.run(config(rounds=1, model=start("one", public=True)), "between", dataset=others)
    tacit.run(config(rounds=1, privacy=CLIENT, model=start("between")), "two", dataset=dataset)
    assert tacit.statement("two").epsilon == cost((EVENT, 4))
    claim = config(rounds=1, privacy=CLIENT, model=start("between", public=True))
    tacit.run(claim, "declared", dataset=dataset)
    assert tacit.statement("declared").epsilon == cost((EVENT, 1))
    tacit.resume("declared", rounds=2, dataset=dataset)
    assert tacit.statement("declared").epsilon == cost((EVENT, 2))


def test_the_budget_counts_what_was_carried_over(config, dataset) -> None:
    tacit.run(config(rounds=3, privacy=CLIENT), "one", dataset=dataset)
    budget = {**CLIENT, "epsilon": cost((EVENT, 4)) + 1e-9}
    result = tacit.run(config(rounds=4, privacy=budget, model=start("one")), "two", dataset=dataset)
    assert result.stopped is not None and len(result.metrics) == 1


@pytest.mark.parametrize("privacy", [CLIENT, EXAMPLE])
def test_a_start_from_an_unprotected_run_on_the_same_data_is_refused(config, dataset, privacy) -> None:
    tacit.run(config(rounds=1), "bare", dataset=dataset)
    for place in ("bare", "bare/model.safetensors"):
        if not Path(place).exists():
            continue
        with pytest.raises(tacit.UserError, match=r"without a guarantee.*model\.public: true"):
            tacit.run(config(privacy=privacy, model=start(place)), "two", dataset=dataset)
        assert not Path("two").exists()
    result = tacit.run(config(privacy=privacy, model=start("bare", public=True)), "said", dataset=dataset)
    assert result.finished
    # A private run in between does not wash the model.
    tacit.run(config(rounds=1, model=start("bare")), "between", dataset=dataset)
    with pytest.raises(tacit.UserError, match="without a guarantee"):
        tacit.run(config(privacy=privacy, model=start("between")), "late", dataset=dataset)


def test_noise_of_zero_or_from_a_seed_is_no_guarantee_to_start_from(config, dataset) -> None:
    for name, change in (("zero", {"noise": 0.0}), ("seeded", {"entropy": "seed"})):
        tacit.run(config(rounds=1, privacy={**CLIENT, **change}), name, dataset=dataset)
        with pytest.raises(tacit.UserError, match="without a guarantee"):
            tacit.run(config(privacy=CLIENT, model=start(name)), "two", dataset=dataset)


def test_a_part_of_a_trained_module_brings_its_cost_along(config, dataset) -> None:
    """The body of a trained network under a new head, or all of it inside another module."""
    images = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    bare = tacit.run(config(rounds=1), "bare", dataset=dataset, model=images).model
    private = tacit.run(config(rounds=2, privacy=CLIENT), "private", dataset=dataset, model=images).model

    def built(trained: nn.Module, whole: bool) -> nn.Module:
        return nn.Sequential(trained) if whole else nn.Sequential(*list(trained)[:-1], nn.Linear(8, 4))

    for whole in (True, False):
        with pytest.raises(tacit.UserError, match="without a guarantee"):
            tacit.run(config(privacy=CLIENT), "two", dataset=dataset, model=built(bare, whole))
        settings, name = config(rounds=1, privacy=CLIENT), f"three-{whole}"
        result = tacit.run(settings, name, dataset=dataset, model=built(copy.deepcopy(private), whole))
        assert result.last("epsilon") == cost((EVENT, 3))
    both = nn.Sequential(private[0], private[1], nn.Tanh(), bare[3])
    with pytest.raises(tacit.UserError, match="without a guarantee"):
        tacit.run(config(privacy=CLIENT), "two", dataset=dataset, model=both)


def test_weights_that_stand_alone_are_of_unknown_origin(config, dataset, tmp_path: Path) -> None:
    """Copied away from their run, weights no longer tell what they were trained on."""
    tacit.run(config(rounds=1), "bare", dataset=dataset)
    tacit.export("bare", "out", dataset=dataset)
    alone = tmp_path / "elsewhere" / "weights.safetensors"
    alone.parent.mkdir()
    shutil.copyfile("out/model.safetensors", alone)
    with pytest.raises(tacit.UserError, match="nothing says which data"):
        tacit.run(config(privacy=CLIENT, model=start(str(alone))), "two", dataset=dataset)
    with pytest.raises(tacit.UserError, match="nothing says which data"):
        tacit.run(config(privacy=CLIENT, model=start("out")), "two", dataset=dataset)
    assert tacit.run(config(model=start(str(alone))), "plain", dataset=dataset).finished
    with pytest.raises(tacit.UserError, match="nothing says which data"):
        tacit.run(config(privacy=CLIENT, model=start("plain")), "three", dataset=dataset)


def test_other_people_owe_nothing(config, dataset) -> None:
    tacit.run(config(rounds=3), "bare", dataset=dataset)
    base = blobs(seed=9)
    users = np.array([f"other-{user}" for user in base.train.users])
    strangers = tacit.Dataset(
        "strangers", tacit.ArrayRecords(base.train.x, base.train.y, users=users), base.test, 4, (1, 4, 4)
    )
    result = tacit.run(config(rounds=2, privacy=CLIENT, model=start("bare")), "two", dataset=strangers)
    assert result.last("epsilon") == cost((EVENT, 2))


@pytest.mark.parametrize("change", ["renamed", "shortened", "extended", "shuffled"])
def test_the_same_records_are_recognised_in_other_clothes(config, change: str) -> None:
    """Without users, by the records themselves: under another name, with some left out, added or moved."""
    base = blobs(400)

    def data(name: str, x: Any, y: Any) -> tacit.Dataset:
        return tacit.Dataset(name, tacit.ArrayRecords(x, y), base.test, 4, (1, 4, 4))

    x, y = base.train.x, base.train.y
    tacit.run(config(rounds=1), "bare", dataset=data("mine", x, y))
    if change == "shortened":
        x, y = x[:100], y[:100]
    elif change == "extended":
        more = blobs(800, seed=5).train
        x, y = np.concatenate([more.x, x[:200]]), np.concatenate([more.y, y[:200]])
    elif change == "shuffled":
        order = np.random.default_rng(0).permutation(len(x))
        x, y = x[order], y[order]
    with pytest.raises(tacit.UserError, match="without a guarantee"):
        tacit.run(
            config(privacy=CLIENT, model=start("bare"), data__name="other"),
            "two",
            dataset=data("other", x, y),
        )


def test_a_handful_of_records_out_of_a_large_set_is_recognised(config) -> None:
    """A private run on 60 of the 40,000 records that its model was trained on without protection.

    By the smallest hashes that goes unnoticed once in 4·10¹⁰ times, (1 − 60/40,000)^16,384.
    """
    base = blobs(40_000)
    x, y = base.train.x, base.train.y
    few = np.sort(np.random.default_rng(3).choice(len(x), 60, replace=False))
    other = blobs(60, seed=8).train

    def data(x: Any, y: Any) -> Identity:
        return identify(
            f"{len(x)}", Population(tacit.ArrayRecords(x, y), np.array([0, len(x)]), np.arange(len(x)))
        )

    everyone, some = data(x, y), data(x[few], y[few])
    strangers = replace(data(other.x, other.y), name="strangers")
    assert everyone.overlaps(some) and some.overlaps(everyone) and not everyone.overlaps(strangers)


def test_clients_of_another_partition_are_not_the_same_clients(config, dataset) -> None:
    """What a model spent on each of many small clients is many times that for a client that holds what they
    held. Another partition, or another seed of one, is refused; people stay people however they are drawn.
    """
    small = config(rounds=2, cohort=12, privacy=CLIENT, data__partition={"kind": "iid", "clients": 120})
    tacit.run(small, "small", dataset=dataset)
    for clients, cohort, seed in ((4, 2, 0), (120, 12, 7)):
        change = {"data__partition": {"kind": "iid", "clients": clients}, "cohort": cohort, "seed": seed}
        settings = config(rounds=1, privacy=CLIENT, model=start("small"), **change)
        with pytest.raises(tacit.UserError, match="clients that hold other records"):
            tacit.run(settings, "large", dataset=dataset)
        assert not Path("large").exists()
        tacit.run(config(rounds=1, privacy=CLIENT, **change), f"alone-{clients}", dataset=dataset)
        with pytest.raises(tacit.UserError, match="a client of one may be several of the other"):
            tacit.ledger(["small", f"alone-{clients}"])
    people = {"data__partition": {"kind": "natural"}, "cohort": 5, "privacy": CLIENT}
    tacit.run(config(rounds=2, **people), "people", dataset=dataset)
    some = {**people, "data__partition": {"kind": "natural", "share": 0.9}, "seed": 4}
    result = tacit.run(config(rounds=1, model=start("people"), **some), "again", dataset=dataset)
    assert result.last("epsilon") == cost((EVENT, 2), (PoissonGaussian(5 / 11, 1.0), 1))
    assert tacit.ledger(["people", "again"]).epsilon == result.last("epsilon")


def test_people_by_another_column_are_other_people(config) -> None:
    """Wards and doctors are both numbered from 0: that the names agree does not make a ward a doctor."""
    base = blobs()
    wards, doctors = np.arange(240) % 12, np.arange(240) // 20

    def by(users: Any) -> tacit.Dataset:
        return tacit.Dataset(
            "clinic", tacit.ArrayRecords(base.train.x, base.train.y, users=users), base.test, 4, (1, 4, 4)
        )

    settings = {"privacy": CLIENT, "data__partition": {"kind": "natural"}}
    tacit.run(config(rounds=1, **settings), "wards", dataset=by(wards))
    with pytest.raises(tacit.UserError, match="clients that hold other records"):
        tacit.run(config(rounds=1, model=start("wards"), **settings), "doctors", dataset=by(doctors))
    for merged in (
        np.where(wards < 4, 0, wards),
        np.where(wards < 2, 20, wards),
        np.where(wards == 1, 0, wards),
    ):
        # Most people stay who they were, but one is now several: as many times what each of them spent.
        with pytest.raises(tacit.UserError, match="clients that hold other records"):
            tacit.run(config(rounds=1, model=start("wards"), **settings), "merged", dataset=by(merged))
    some = base.train.x.copy()
    some[25] = some[0]  # a picture that ward 0 had then, and ward 1 has now
    fewer = tacit.ArrayRecords(some[20:], base.train.y[20:], users=wards[20:])
    data = tacit.Dataset("clinic", fewer, base.test, 4, (1, 4, 4))
    tacit.run(config(rounds=1, model=start("wards"), **settings), "fewer", dataset=data)
    assert tacit.statement("fewer").carried == 1


def test_records_that_one_run_called_public_are_not_protected_by_the_next(config, dataset) -> None:
    """`data.public` is the data's own, whatever the seed; under a smaller share some are somebody's."""
    local = {"steps": 1, "batch": 4, "lr": 0.1}
    settings = {"privacy": EXAMPLE, "local": local, "data__public": 0.3, "method": "adadps"}
    for privacy in (EXAMPLE, None):
        name = f"one-{privacy is None}"
        tacit.run(config(rounds=1, seed=1, **settings | {"privacy": privacy}), name, dataset=dataset)
        with pytest.raises(tacit.UserError, match="used records as public"):
            fewer = settings | {"data__public": 0.2}
            tacit.run(config(rounds=1, seed=1, model=start(name), **fewer), "two", dataset=dataset)
        assert not Path("two").exists()
    assert tacit.run(config(rounds=1, seed=2, model=start("one-False"), **settings), "same", dataset=dataset)
    tacit.run(config(rounds=1, seed=1, **settings | {"data__public": 0.2}), "other", dataset=dataset)
    with pytest.raises(tacit.UserError, match="for these nothing holds"):
        tacit.ledger(["one-False", "other"])


def test_an_export_tells_nobody_who_was_there(config, dataset) -> None:
    """It is made to be given away: no names, and no hash by which somebody could look for a record."""
    settings = config(rounds=1, privacy=CLIENT, cohort=4, data__partition={"kind": "natural"})
    tacit.run(settings, "run", dataset=dataset)
    tacit.export("run", "out", dataset=dataset)
    data = Identity.from_json(json.loads(Path("run", LINEAGE).read_text())["data"])
    secrets = [*data.sketch, data.content, data.clients, data.fingerprint]
    assert len(data.sketch) == 240 and Path("out", "statement.json").exists()
    for file in Path("out").rglob("*"):
        told = file.read_bytes() if file.is_file() else b""
        assert not any(secret.encode() in told for secret in secrets), file
        assert b'"people"' not in told and b'"clients": [' not in told, file


def test_units_that_do_not_add_up_are_refused(config, dataset) -> None:
    tacit.run(config(rounds=1, privacy=CLIENT), "clients", dataset=dataset)
    with pytest.raises(tacit.UserError, match="do not add up"):
        tacit.run(config(privacy=EXAMPLE, model=start("clients")), "two", dataset=dataset)
    tacit.run(config(rounds=1, privacy=EXAMPLE), "examples", dataset=dataset)
    with pytest.raises(tacit.UserError, match="do not add up"):
        tacit.ledger(["clients", "examples"])


def test_example_charges_of_another_partition_fall_on_everyone(config, dataset) -> None:
    """Clients that are numbered otherwise: whoever paid most before, everyone pays as much now."""
    local = {"steps": 2, "batch": 6, "lr": 0.1}
    first = {"kind": "iid", "clients": 12}
    settings = config(rounds=2, cohort=12, local=local, privacy=EXAMPLE, data__partition=first)
    one = tacit.run(settings, "one", dataset=dataset)
    second = {"kind": "iid", "clients": 6}
    settings = config(
        rounds=1, cohort=6, local=local, privacy=EXAMPLE, data__partition=second, model=start("one")
    )
    two = tacit.run(settings, "two", dataset=dataset)
    assert two.last("epsilon") == cost((PoissonGaussian(6 / 20, 1.0), 4), (PoissonGaussian(6 / 40, 1.0), 2))
    assert two.last("epsilon") > one.last("epsilon")


# --- resuming ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("privacy", [CLIENT, EXAMPLE])
@pytest.mark.parametrize("change", ["user deleted", "label", "pixel", "moved", "renamed"])
def test_a_resume_on_other_data_is_refused(config, privacy, change: str) -> None:
    """A deleted user would shift which client a charge belongs to."""
    data = blobs()
    settings = config(rounds=2, privacy=privacy, cohort=4, data__partition={"kind": "natural"})
    tacit.run(settings, "run", dataset=data)
    x, y, users = data.train.x.copy(), data.train.y.copy(), np.array(data.train.users)
    if change == "user deleted":
        kept = users != users[0]
        x, y, users = x[kept], y[kept], users[kept]
    elif change == "label":
        y[17] = (y[17] + 1) % 4
    elif change == "pixel":
        x[101, 0, 2, 3] += 0.001
    elif change == "moved":
        users[5], users[6] = users[6], users[5]
    else:
        users[users == users[0]] = 77
    other = tacit.Dataset("blobs", tacit.ArrayRecords(x, y, users=users), data.test, 4, (1, 4, 4))
    before = Path("run", LEDGER).read_bytes()
    with pytest.raises(tacit.UserError, match=r"protects other data|other records"):
        tacit.resume("run", dataset=other, rounds=5)
    assert Path("run", LEDGER).read_bytes() == before
    assert len(tacit.resume("run", dataset=data, rounds=5).metrics) == 5


# --- copies -----------------------------------------------------------------------------------------------


def test_copies_that_both_went_on_are_noticed_and_both_count(config, dataset) -> None:
    tacit.run(config(rounds=2, privacy=CLIENT), "run", dataset=dataset)
    shutil.copytree("run", "copy")
    assert tacit.ledger(["run", "copy"]).epsilon == cost((EVENT, 2)), "as far as they agree, they are one"
    for folder in ("run", "copy"):
        tacit.resume(folder, dataset=dataset, rounds=5)
    found = tacit.ledger(["run", "copy"])
    assert found.epsilon == cost((EVENT, 2 + 3 + 3))
    assert any("both went on" in note for note in found.notes)
    # The other copy's ledger, as long as this one's own, is not this run's.
    shutil.copyfile(Path("copy", LEDGER), Path("run", LEDGER))
    for look in (tacit.statement, lambda folder: tacit.resume(folder, dataset=dataset)):
        with pytest.raises(tacit.UserError, match="is not the ledger that the checkpoint was saved with"):
            look("run")


class StopAfter:
    """A tracker that asks its run to stop, as a person would, once a round is done."""

    def __init__(self, round: int) -> None:
        self._round = round

    def start(self, round: int, rounds: int, facts: object) -> None: ...

    def clients(self, done: int, cohort: int) -> None: ...

    def round(self, record: dict[str, Any]) -> None:
        if record["round"] == self._round:
            signal.raise_signal(signal.SIGTERM)

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("mechanism", "cohort"),
    [
        ("blt", 1),
        ({"kind": "banded", "bands": 2}, 1),
        ({"kind": "banded", "bands": 12}, {"size": 1, "sampling": "poisson"}),
    ],
)
def test_copies_under_correlated_noise_cost_those_whose_turn_came_after_the_fork(
    config, dataset, mechanism: Any, cohort: Any
) -> None:
    """A turn of all groups is paid for by rounds at its beginning, and whoever is asked later in it pays
    nothing more. In five copies made in between, the client of round 6 takes part five times.
    """
    privacy = {**CLIENT, "noise": 4.0, "mechanism": mechanism}
    settings = config(rounds=12, privacy=privacy, cohort=cohort, local={"steps": 1, "batch": 4, "lr": 0.1})
    tacit.run(settings, "run", dataset=dataset, trackers=[StopAfter(3)])
    copies = ["run", *(f"copy-{i}" for i in range(4))]
    for copied in copies[1:]:
        shutil.copytree("run", copied)
    for folder in copies:
        assert tacit.resume(folder, dataset=dataset).finished
    assert tacit.ledger(copies).epsilon >= cost((PoissonGaussian(1.0, 4.0), 5))


def test_copies_that_both_went_on_count_twice_for_those_that_began_with_them(config, dataset) -> None:
    """One run begins with each copy; the copies themselves are no longer there."""
    tacit.run(config(rounds=2, privacy=CLIENT), "run", dataset=dataset)
    shutil.copytree("run", "copy")
    for folder in ("run", "copy"):
        tacit.resume(folder, dataset=dataset, rounds=5)
        settings = config(rounds=1, privacy=CLIENT, model=start(folder))
        tacit.run(settings, f"after-{folder}", dataset=dataset)
    exact = tacit.ledger(["run", "copy", "after-run", "after-copy"]).epsilon
    assert exact == cost((EVENT, 2 + 3 + 3 + 1 + 1))
    found = tacit.ledger(["after-run", "after-copy"])
    assert found.epsilon == cost((EVENT, 5 + 5 + 1 + 1)) > exact, "what the copies share cannot be told apart"
    assert any("all of them count" in note for note in found.notes)


def test_an_older_ledger_put_back_is_noticed_by_every_command(config, dataset) -> None:
    tacit.run(config(rounds=4, privacy=CLIENT), "run", dataset=dataset)
    file = Path("run", LEDGER)
    whole = file.read_bytes()
    file.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]))
    for look in (tacit.statement, lambda folder: tacit.resume(folder, dataset=dataset),
                 lambda folder: tacit.ledger([folder])):  # fmt: skip
        with pytest.raises(tacit.UserError, match="holds 2 charges where the checkpoint knows of 4"):
            look("run")
    with pytest.raises(tacit.UserError, match="holds 2 charges"):
        tacit.run(config(privacy=CLIENT, model=start("run")), "two", dataset=dataset)


class Stopped:
    """A kill without warning after some rounds, as far as files can tell."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def start(self, *about: Any) -> None: ...

    def round(self, record: dict[str, Any]) -> None:
        if record["round"] == self.rounds:
            shutil.copytree("run", "killed")

    def close(self) -> None: ...


@pytest.mark.parametrize("left", [0, 1, 4])
def test_charges_that_no_checkpoint_knows_of_are_missed_too(config, dataset, left: int) -> None:
    """Rounds after the newest checkpoint: a run's metrics tell of five, and its ledger of `left`."""
    claim = config(rounds=6, privacy=CLIENT, checkpoint={"every": 3 if left > 3 else 6})
    tacit.run(claim, "run", dataset=dataset, trackers=[Stopped(5)])
    file = Path("killed", LEDGER)
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 6, "its head, and five rounds"
    if left:
        file.write_bytes(b"".join(lines[: 1 + left]))
        for look in (tacit.statement, lambda folder: tacit.resume(folder, dataset=dataset)):
            with pytest.raises(tacit.UserError, match=f"ends with round {left}, .* tells of 5"):
                look("killed")
    else:
        file.unlink()
        with pytest.raises(tacit.UserError, match="is gone, and with it what was spent"):
            tacit.resume("killed", dataset=dataset)
    file.write_bytes(b"".join(lines))
    assert tacit.resume("killed", dataset=dataset).finished


# --- public records ---------------------------------------------------------------------------------------


def test_public_records_are_of_nobody_who_is_protected(config, dataset) -> None:
    settings = config(data__public=0.2, data__partition={"kind": "natural"}, privacy=CLIENT, cohort=4)
    job = build_job(settings, Path("x"), dataset=dataset)
    users = dataset.train.users
    public, private = set(users[job.public]), set(users[job.population.indices])
    assert public and private and public.isdisjoint(private)
    for kind in ({"kind": "iid", "clients": 6}, {"kind": "dirichlet", "clients": 6, "alpha": 0.5}):
        job = build_job(
            config(data__public=0.2, data__partition=kind, privacy=EXAMPLE), Path("x"), dataset=dataset
        )
        assert set(job.public.tolist()).isdisjoint(job.population.indices.tolist()) and len(job.public)
    with pytest.raises(tacit.UserError, match="takes all of the 12 users"):
        build_job(config(data__public=0.99, data__partition={"kind": "natural"}), Path("x"), dataset=dataset)


# --- the file ---------------------------------------------------------------------------------------------


def test_lineage_is_for_its_owner_alone_and_names_the_ledgers_data(config, dataset) -> None:
    tacit.run(config(rounds=1, privacy=CLIENT), "run", dataset=dataset)
    file = Path("run", LINEAGE)
    assert file.stat().st_mode & 0o077 == 0, "it names people"
    data = Identity.from_json(json.loads(file.read_text())["data"])
    assert data.fingerprint == Ledger.read(Path("run", LEDGER)).header.data


def test_an_identity_does_not_depend_on_how_records_are_prepared() -> None:
    base = blobs()

    def identity(**options: Any) -> Any:
        records = tacit.ArrayRecords(base.train.x, base.train.y, **options)
        return identify("x", Population(records, np.array([0, 120, 240]), np.arange(240)))

    assert identity() == identity(mean=0.5, std=2.0)
    assert identity().fingerprint != identity(users=np.arange(240)).fingerprint


class Bare:
    """Records of one's own with just what is asked for: no `raw`."""

    users = None

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.labels = x, y

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        return {"x": torch.from_numpy(self.x[indices]), "y": torch.from_numpy(self.labels[indices])}

    def prepare(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return batch


def test_records_of_ones_own_are_known_again_in_another_order_under_another_name() -> None:
    """Or what was spent on them, or that nothing protected them, would be forgotten."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20_000, 4)).astype(np.float32), rng.integers(0, 2, 20_000)

    def identity(name: str, x: np.ndarray, y: np.ndarray) -> Identity:
        return identify(name, Population(Bare(x, y), np.array([0, len(y)]), np.arange(len(y))))  # type: ignore[arg-type]

    before, order = identity("monday", x, y), rng.permutation(len(y))
    assert before.overlaps(identity("tuesday", x[order], y[order]))
    assert not before.overlaps(identity("tuesday", x + 1, y))
