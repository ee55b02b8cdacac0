"""Augmentation: single pictures change as they would in a batch, only in training, and reproducibly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from tacit import Dataset, api
from tacit.config import load
from tacit.data import ArrayRecords, Batch
from tacit.data.augment import Augment
from tacit.data.dataset import load as load_data
from tacit.errors import UserError
from tacit.randomness import key, scattered

PICTURES = torch.from_numpy(np.random.default_rng(0).integers(1, 256, (12, 3, 7, 9), np.uint8))


def literal(picture: np.ndarray, row: int, step: int, secret: int, crop: int, flip: bool) -> np.ndarray:
    """One picture: a black frame, a window, a mirror; coins as the batch's own."""
    down, right, mirrored = (int(scattered(secret, step, purpose, row)[0] >> 1) for purpose in range(3))
    channels, height, width = picture.shape
    framed = np.zeros((channels, height + 2 * crop, width + 2 * crop), np.uint8)
    framed[:, crop : crop + height, crop : crop + width] = picture
    top, left = down % (2 * crop + 1), right % (2 * crop + 1)
    window = framed[:, top : top + height, left : left + width]
    return window[:, :, ::-1] if flip and mirrored % 2 else window


@pytest.mark.parametrize(("crop", "flip"), [(0, True), (2, False), (4, True), (9, True)])
def test_a_batch_is_changed_as_its_pictures_one_by_one(crop: int, flip: bool) -> None:
    rows = np.array([5, 0, 3, 11, 7])
    changed = Augment(crop, flip)({"x": PICTURES[rows], "y": torch.arange(5)}, rows, 6, key=99)
    expected = [literal(PICTURES[r].numpy(), r, 6, 99, crop, flip) for r in rows]
    assert changed["x"].dtype == torch.uint8 and changed["y"].tolist() == [0, 1, 2, 3, 4]
    assert np.array_equal(changed["x"].numpy(), np.stack(expected))


def test_who_else_is_in_the_batch_changes_nothing() -> None:
    augment = Augment(3, True)
    together = augment({"x": PICTURES}, np.arange(12), 2, key=5)["x"]
    for rows in (np.array([4]), np.array([9, 4, 1]), np.arange(3, 12)):
        assert torch.equal(augment({"x": PICTURES[rows]}, rows, 2, key=5)["x"], together[rows])
    nobody = augment({"x": PICTURES[:0]}, np.empty(0, np.int64), 2, key=5)["x"]
    assert nobody.shape == (0, 3, 7, 9)


def test_coins_are_fair_and_differ_between_steps_rows_and_keys() -> None:
    """Chi-square of offsets and flips over 20,000 pictures; the bounds fail one honest run in a million."""
    n, crop = 20_000, 2
    blank = torch.zeros(n, 1, 1, 2, dtype=torch.uint8)
    blank[..., 0], blank[..., 1] = 1, 2
    flipped = Augment(0, True)({"x": blank}, np.arange(n), 0, key=1)["x"][:, 0, 0, 0] == 2
    assert abs(int(flipped.sum()) - n / 2) < 5 * (n / 4) ** 0.5
    pixel = torch.zeros(n, 1, 5, 5, dtype=torch.uint8)
    pixel[:, 0, 2, 2] = 1
    places = Augment(crop)({"x": pixel}, np.arange(n), 0, key=1)["x"].flatten(1).float().argmax(1)
    counts = torch.bincount(places, minlength=25).double()
    assert float(((counts - n / 25).square() / (n / 25)).sum()) < 24 + 6 * 48**0.5
    base = Augment(crop)({"x": pixel}, np.arange(n), 0, key=1)["x"]
    for step, secret in ((1, 1), (0, 2)):
        other = Augment(crop)({"x": pixel}, np.arange(n), step, key=secret)["x"]
        same = int((other == base).flatten(1).all(1).sum())
        assert abs(same - n / 25) < 5 * (n / 25) ** 0.5


class Watched(ArrayRecords):
    """Records that remember every batch that was prepared."""

    seen: list[Batch]
    most: int

    def prepare(self, batch: Batch) -> Batch:
        self.seen.append(batch)
        if len(self.seen) > self.most:
            raise RuntimeError("power cut")
        return super().prepare(batch)


def run(folder: Path, most: int = 1000, **changes: Any) -> tuple[list[Batch], list[Batch], torch.Tensor]:
    """What was trained on, what was tested on, and the model that came out."""
    rng = np.random.default_rng(0)
    parts = []
    for n in (24, 8):
        part = Watched(rng.integers(0, 256, (n, 1, 8, 8), np.uint8), np.arange(n) % 2)
        part.seen, part.most, part.joint = [], most, False
        parts.append(part)
    values = {
        "rounds": 2,
        "data": {"name": "fashion-mnist-slice", "partition": {"kind": "iid", "clients": 4},
                 "augment": {"crop": 2, "flip": True}},
        "model": "logistic", "cohort": 2, "local": {"steps": 3, "batch": 4, "lr": 0.1},
        "engine": {"workers": 0},
    }  # fmt: skip
    data = Dataset("made", parts[0], parts[1], 2, (1, 8, 8))
    if (folder / "config.yaml").exists():
        result = api.resume(folder, dataset=data)
    else:
        result = api.run(load(values, changes), folder, dataset=data)
    weights = torch.cat([p.detach().flatten() for p in result.model.parameters()])
    return parts[0].seen, parts[1].seen, weights


def test_training_pictures_change_and_test_pictures_do_not(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", **{"data.augment": None})
    changed = run(tmp_path / "changed")
    assert len(plain[0]) == len(changed[0]) == 2 * 2 * 3
    assert all(torch.equal(a["y"], b["y"]) for a, b in zip(plain[0], changed[0], strict=True))
    assert not any(torch.equal(a["x"], b["x"]) for a, b in zip(plain[0], changed[0], strict=True))
    assert all(torch.equal(a["x"], b["x"]) for a, b in zip(plain[1], changed[1], strict=True))


@pytest.mark.slow
def test_the_same_run_changes_pictures_the_same_way_whatever_the_engine(tmp_path: Path) -> None:
    first, again = run(tmp_path / "a"), run(tmp_path / "b")
    assert all(torch.equal(a["x"], b["x"]) for a, b in zip(first[0], again[0], strict=True))
    elsewhere = run(tmp_path / "c", **{"engine.workers": 2})
    assert torch.equal(first[2], elsewhere[2])


def test_a_run_that_breaks_off_goes_on_with_the_same_changes(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="power cut"):
        run(tmp_path / "broken", most=8)  # in the second of two rounds of six batches
    rest = run(tmp_path / "broken")
    assert torch.equal(rest[2], whole[2])
    assert all(torch.equal(a["x"], b["x"]) for a, b in zip(rest[0], whole[0][6:], strict=True))


def test_a_guarantee_for_examples_keeps_its_coins_secret(tmp_path: Path) -> None:
    guarantee = {"unit": "example", "noise": 1.0, "clip": 0.1, "delta": 1e-4}
    private = {"method": "dp-fedavg", "privacy": guarantee}
    seeded = {**private, "privacy": {**guarantee, "entropy": "seed"}}
    once, twice = (run(tmp_path / name, **seeded)[0] for name in "ab")
    assert all(torch.equal(a["x"], b["x"]) for a, b in zip(once, twice, strict=True))
    secret = [torch.cat([b["x"].flatten() for b in run(tmp_path / name, **private)[0]]) for name in "cd"]
    assert secret[0].shape != secret[1].shape or not torch.equal(*secret)


@pytest.mark.parametrize("size", [4, 16, 21])
def test_resizing_a_batch_is_resizing_each_picture_after_normalising_it(size: int) -> None:
    x = PICTURES[:, :, :, :7]
    records = ArrayRecords(x, np.arange(12), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), size=size)
    ready = records.prepare(records.take(np.arange(12)))["x"]
    assert ready.shape == (12, 3, size, size)
    centre, deviation = (torch.tensor(v).view(3, 1, 1) for v in ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)))
    for picture, result in zip(x, ready, strict=True):
        normal = (picture.float() / 255 - centre) / deviation
        alone = functional.interpolate(normal[None], (size, size), mode="bilinear", antialias=size < 7)[0]
        torch.testing.assert_close(result, alone, rtol=1e-4, atol=1e-5)
    assert records.prepare(records.take(np.empty(0, np.int64)))["x"].shape == (0, 3, size, size)


def test_size_and_constants_by_name() -> None:
    data = load_data("fashion-mnist-slice", size=32, mean=[0.5], std=[0.25])
    assert data.shape == (1, 32, 32)
    batch = data.test.prepare(data.test.take(np.arange(3)))["x"]
    assert batch.shape == (3, 1, 32, 32) and float(batch.min()) < -1.9
    with pytest.raises(UserError, match="1 channels, not 3"):
        load_data("fashion-mnist-slice", mean=[0.5, 0.5, 0.5], std=[1.0])


def test_keys_are_named_by_round_and_client() -> None:
    assert len({key(0, "augment", r, c) for r in range(3) for c in range(3)}) == 9
