"""Sensitivity by brute force, for every rule and both units; identities of the rules."""

import math
from collections.abc import Callable
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tacit.errors import UserError
from tacit.gradients import ClippedGradient
from tacit.privacy import Clip, Grid
from tacit.privacy.clipping import Mode, Per
from tacit.vector import Layout, Vectors

LAYOUT = Layout.of(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2), nn.Linear(2, 3)), personal=("2.*",))
SIZES = {"delta": LAYOUT.shared, "c": LAYOUT.shared, "v": 3}
RULES: list[tuple[Per, Mode]] = list(product(("global", "uniform", "dim"), ("clip", "normalize")))  # type: ignore[arg-type]
C = 0.7


def exact_norm(uploads: Vectors) -> float:
    return math.sqrt(math.fsum(float(x) ** 2 for v in uploads.values() for x in v.double()))


def fresh(seed: int, scale: float = 1.0) -> Vectors:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(size, generator=generator) for name, size in SIZES.items()}


def one_layer_only(scale: float) -> Vectors:
    uploads = {name: torch.zeros(size) for name, size in SIZES.items()}
    uploads["delta"][:20] = scale
    return uploads


def one_coordinate(value: float) -> Vectors:
    uploads = {name: torch.zeros(size) for name, size in SIZES.items()}
    uploads["v"][1] = value
    return uploads


def with_value(value: float) -> Vectors:
    uploads = fresh(3)
    uploads["c"][7] = value
    return uploads


ADVERSARIES: dict[str, Callable[[], Vectors]] = {
    "random": lambda: fresh(0),
    "small": lambda: fresh(1, 1e-3),
    "huge": lambda: fresh(2, 1e30),
    "float32's largest": lambda: {name: torch.full((n,), 3.4e38) for name, n in SIZES.items()},
    "subnormal": lambda: {name: torch.full((n,), 1e-44) for name, n in SIZES.items()},
    "zeros": lambda: {name: torch.zeros(n) for name, n in SIZES.items()},
    "one layer": lambda: one_layer_only(5.0),
    "one coordinate": lambda: one_coordinate(-9.0),
    "exactly C": lambda: one_coordinate(C),
    "just above C": lambda: one_coordinate(float(np.nextafter(np.float32(C), np.float32(1)))),
    "nan": lambda: with_value(math.nan),
    "inf": lambda: with_value(math.inf),
    "-inf": lambda: with_value(-math.inf),
}


@pytest.mark.parametrize(("per", "mode"), RULES)
@pytest.mark.parametrize("name", ADVERSARIES)
def test_one_client_moves_the_sum_by_at_most_c(name: str, per: Per, mode: Mode) -> None:
    """Adding or removing the adversary's upload moves a sum of others by no more than C; replacing it, 2C."""
    bound = Clip(C, per, mode).bind(SIZES, LAYOUT)
    others = [fresh(10 + i) for i in range(3)]
    uploads = ADVERSARIES[name]()
    for upload in [*others, uploads]:
        upload.update(bound.apply(upload)[0])
    without = {k: sum(o[k].double() for o in others) for k in SIZES}
    moved = {k: without[k] + uploads[k].double() - without[k] for k in SIZES}
    assert exact_norm(uploads) <= C
    assert exact_norm(moved) <= C * (1 + 1e-12)
    replaced = {k: uploads[k].double() - others[0][k].double() for k in SIZES}
    assert exact_norm(replaced) <= 2 * C


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.floats(width=32, allow_nan=True, allow_infinity=True),
        min_size=LAYOUT.shared + 3,
        max_size=LAYOUT.shared + 3,
    ),
    st.sampled_from(RULES),
    st.floats(1e-6, 1e6),
)
def test_norm_is_at_most_c_for_any_floats(values: list[float], rule: tuple[Per, Mode], c: float) -> None:
    flat = torch.tensor(values, dtype=torch.float32)
    uploads = {"delta": flat[:-3].clone(), "v": flat[-3:].clone()}
    finite = bool(flat.isfinite().all())
    bounded, norm = Clip(c, *rule).bind({"delta": LAYOUT.shared, "v": 3}, LAYOUT).apply(uploads)
    assert exact_norm(bounded) <= c
    assert math.isfinite(norm) == finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("per", "mode"), RULES)
def test_half_precision_uploads_stay_within_c(dtype: torch.dtype, per: Per, mode: Mode) -> None:
    uploads = {name: vector.to(dtype) for name, vector in fresh(5, 100.0).items()}
    uploads, _ = Clip(C, per, mode).bind(SIZES, LAYOUT).apply(uploads)
    assert all(vector.dtype == torch.float32 for vector in uploads.values())
    assert 0.9999 * C <= exact_norm(uploads) <= C


def test_what_is_within_the_bound_is_left_alone_bit_for_bit() -> None:
    for per, mode in RULES:
        uploads = fresh(6, 1e-4)
        bounded, _ = Clip(C, per, mode).bind(SIZES, LAYOUT).apply(uploads)
        assert all(torch.equal(bounded[name], uploads[name]) for name in SIZES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("grid", [False, True])
def test_a_clients_own_vectors_are_never_written_to(grid: bool, dtype: torch.dtype) -> None:
    """Two uploads that share one memory would otherwise be scaled twice, and a message's vector once."""
    shared = torch.full((LAYOUT.shared,), 1e6, dtype=dtype)
    uploads = {"delta": shared, "c": shared, "v": torch.zeros(3, dtype=dtype)}
    bound = Clip(C, "uniform", "normalize").bind(SIZES, LAYOUT)
    if grid:
        bound.add_rounded_(uploads, Grid.fit(C, bound.dimension, 1.0), zeros())
    else:
        assert exact_norm(bound.apply(uploads)[0]) <= C
    assert bool((shared == 1e6).all())


def zeros() -> Vectors:
    return {name: torch.zeros(size, dtype=torch.int64) for name, size in SIZES.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("per", "mode"), RULES)
@pytest.mark.parametrize("name", ADVERSARIES)
def test_one_client_moves_the_whole_numbers_by_at_most_the_radius(
    name: str, per: Per, mode: Mode, dtype: torch.dtype
) -> None:
    """In whole numbers, exactly: Σk² ≤ 2²ᵇ for every adversary; and what is added is what was clipped."""
    bound = Clip(C, per, mode).bind(SIZES, LAYOUT)
    grid = Grid.fit(C, bound.dimension, 1.0)
    into = zeros()
    others = {k: torch.randint(-(2**40), 2**40, (n,)) for k, n in SIZES.items()}
    for k in SIZES:
        into[k] += others[k]
    uploads = {k: vector.to(dtype) for k, vector in ADVERSARIES[name]().items()}
    norm = bound.add_rounded_(uploads, grid, into)
    moved = [int(x) for k in SIZES for x in into[k] - others[k]]
    assert sum(k * k for k in moved) <= grid.radius**2
    bounded, same = bound.apply(uploads)
    assert norm == same
    for k in SIZES:
        off = (into[k] - others[k]).double() * grid.unit - bounded[k].double()
        assert off.abs().max() <= grid.unit * (0.5 + 1e-6) + C * 2.0**-23


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(width=32), min_size=LAYOUT.shared + 3, max_size=LAYOUT.shared + 3),
    st.sampled_from(RULES),
    st.floats(1e-6, 1e6),
    st.floats(1e-3, 1e4),
)
def test_whole_numbers_are_within_the_radius_for_any_floats(
    values: list[float], rule: tuple[Per, Mode], c: float, noise: float
) -> None:
    flat = torch.tensor(values, dtype=torch.float32)
    sizes = {"delta": LAYOUT.shared, "v": 3}
    bound = Clip(c, *rule).bind(sizes, LAYOUT)
    grid = Grid.fit(c, bound.dimension, noise)
    into = {name: torch.zeros(size, dtype=torch.int64) for name, size in sizes.items()}
    bound.add_rounded_({"delta": flat[:-3], "v": flat[-3:]}, grid, into)
    assert sum(int(k) ** 2 for vector in into.values() for k in vector) <= grid.radius**2


def layers_by_hand() -> list[list[tuple[str, int, int]]]:
    """Two shared layers (weight and bias) in each of the long vectors; the short vector is a layer."""
    return [
        [("delta", 0, 24)],
        [("delta", 24, 34)],
        [("c", 0, 24)],
        [("c", 24, 34)],
        [("v", 0, 3)],
    ]


@pytest.mark.parametrize("mode", ["clip", "normalize"])
@pytest.mark.parametrize("per", ["uniform", "dim"])
def test_per_layer_rules_against_a_transcription(per: Per, mode: Mode) -> None:
    uploads = fresh(7, 0.3)
    uploads["delta"][24:34] *= 1e-3  # a layer within its bound
    reference = {name: vector.numpy().astype(np.float64) for name, vector in uploads.items()}
    layers = layers_by_hand()
    sizes = [sum(stop - start for _, start, stop in layer) for layer in layers]
    whole = math.sqrt(sum((v**2).sum() for v in reference.values()))
    for layer, size in zip(layers, sizes, strict=True):
        c_h = C / math.sqrt(5) if per == "uniform" else C * math.sqrt(size / sum(sizes))
        norm = math.sqrt(sum((reference[n][a:b] ** 2).sum() for n, a, b in layer))
        factor = min(1.0, c_h / norm) if mode == "clip" else (c_h / norm if whole > C else 1.0)
        for name, start, stop in layer:
            reference[name][start:stop] *= factor
    uploads, norm = Clip(C, per, mode).bind(SIZES, LAYOUT).apply(uploads)
    assert norm == pytest.approx(whole, rel=1e-6)
    for name, vector in uploads.items():
        np.testing.assert_allclose(vector.numpy(), reference[name], rtol=2e-6)


@pytest.mark.parametrize("per", ["uniform", "dim"])
def test_layer_bounds_add_up_to_c(per: Per) -> None:
    bound = Clip(C, per).bind(SIZES, LAYOUT)
    assert math.sqrt(sum(group.bound**2 for group in bound.groups)) == pytest.approx(C, rel=1e-12)
    records = Clip(C, per).groups(LAYOUT)
    assert math.sqrt(sum(c_h**2 for _, c_h in records)) == pytest.approx(C, rel=1e-12)
    covered = sorted((s.start, s.stop) for slices, _ in records for s in slices)
    assert covered[0][0] == 0 and covered[-1][1] == LAYOUT.size
    assert all(a[1] == b[0] for a, b in pairwise(covered))


@pytest.mark.parametrize("per", ["uniform", "dim"])
def test_weights_move_the_bound_between_layers_and_leave_its_length(per: Per) -> None:
    """C_i = C·√(α_i d_i / Σ α_h d_h): the paper's H.5, 003 line 1497; for whole clients and for records."""
    layers = [name for name, _ in LAYOUT.layer_slices()]
    rule = Clip(C, per, weights={layers[0]: 3.0, "*": 0.5})
    sizes = {name: sum(p.stop - p.start for p in parts) for name, parts in LAYOUT.layer_slices()}
    shares = {
        name: (3.0 if name == layers[0] else 0.5) * (size if per == "dim" else 1)
        for name, size in sizes.items()
    }
    bound = rule.bind({"delta": LAYOUT.shared}, LAYOUT)
    for group, share in zip(bound.groups, shares.values(), strict=True):
        assert group.bound == pytest.approx(C * math.sqrt(share / sum(shares.values())), rel=1e-12)
    for found in ([g.bound for g in bound.groups], [c_h for _, c_h in rule.groups(LAYOUT)]):
        assert math.sqrt(sum(c_h**2 for c_h in found)) == pytest.approx(C, rel=1e-12)
    huge, _ = bound.apply({"delta": torch.full((LAYOUT.shared,), 1e20)})
    assert math.sqrt(float(huge["delta"].double().square().sum())) <= C


def test_weights_of_nothing_are_refused() -> None:
    with pytest.raises(UserError, match="no layer matches 'mlp'; there are"):
        Clip(C, "dim", weights={"mlp": 2.0}).bind(SIZES, LAYOUT)
    with pytest.raises(UserError, match=r"privacy.clip.weights: .*set per: dim"):
        Clip(C, weights={"*": 2.0})
    with pytest.raises(UserError, match="greater than 0"):
        Clip(C, "dim", weights={"*": 0.0})
    with pytest.raises(UserError, match="finite number"):
        Clip(C, "dim", weights={"*": math.inf})


def test_clip_never_grows_and_normalize_does() -> None:
    for mode, grows in (("clip", False), ("normalize", True)):
        uploads = one_layer_only(5.0)
        uploads["v"][0] = 1e-6
        bounded, _ = Clip(C, "uniform", mode).bind(SIZES, LAYOUT).apply(uploads)  # type: ignore[arg-type]
        assert (float(bounded["v"][0]) > 1e-5) == grows


def test_an_upload_the_rule_does_not_know_is_refused() -> None:
    bound = Clip(C).bind({"delta": 3})
    for bad in (
        {"delta": torch.zeros(3), "extra": torch.zeros(1)},
        {"delta": torch.zeros(4)},
        {},
    ):
        with pytest.raises(UserError, match="escape"):
            bound.apply(bad)


def test_the_bound_in_force_overrides_the_first_one() -> None:
    uploads, _ = Clip(C).bind(SIZES, LAYOUT, bound=0.01).apply(fresh(8))
    assert 0.0099999 <= exact_norm(uploads) <= 0.01


def test_large_vectors_are_summed_accurately() -> None:
    """A float32 sum of squares over this many coordinates would be off by 1e-5 and let the norm exceed C."""
    uploads = {"delta": torch.full((3_000_001,), 0.1)}
    uploads, norm = Clip(1.0).bind({"delta": 3_000_001}).apply(uploads)
    assert norm == pytest.approx(float(np.float32(0.1)) * math.sqrt(3_000_001), rel=1e-12)
    after = math.sqrt(float(uploads["delta"].double().square().sum()))
    assert 1 - 1e-6 <= after <= 1


# --- example level ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("per", ["global", "uniform", "dim"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_one_record_moves_the_sum_of_gradients_by_at_most_c(per: Per, scale: float) -> None:
    torch.manual_seed(0)
    clipped = ClippedGradient(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)))
    groups = Clip(C, per).groups(clipped.flat.layout)
    records = {"x": scale * torch.randn(6, 5), "y": scale * torch.randn(6, 1)}

    def losses(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (module(batch["x"]) - batch["y"]).square().flatten()

    clipped(records, losses, groups)
    whole = clipped.flat.grad.double().clone()
    for gone in range(6):
        kept = [i for i in range(6) if i != gone]
        clipped({name: values[kept] for name, values in records.items()}, losses, groups)
        moved = (whole - clipped.flat.grad.double()).norm().item()
        assert moved <= C * (1 + 1e-5)  # a sum of six in float32


@pytest.mark.parametrize("mode", ["clip", "normalize"])
@pytest.mark.parametrize("size", [1e200, 1e154, 1.34e154, 2.7e-162, 1e-161, 5e-324])
def test_whatever_float64_holds_is_bounded_or_left_out(mode: Mode, size: float) -> None:
    """Its square may be beyond float64, or have next to no digits there; neither is a reason to fail."""
    sizes = {"delta": 3, "c": 1}
    bound, grid = Clip(0.5, "uniform", mode).bind(sizes), Grid.fit(0.5, 4, 1.0)
    uploads = {"delta": torch.ones(3, dtype=torch.float64), "c": torch.full((1,), size, dtype=torch.float64)}
    sums = {name: torch.zeros(n, dtype=torch.int64) for name, n in sizes.items()}
    norm = bound.add_rounded_(uploads, grid, sums)
    assert norm > 1 and sum(int((k * k).sum()) for k in sums.values()) <= grid.radius**2
    assert any(bool(k.any()) for k in sums.values()) == math.isfinite(norm)
