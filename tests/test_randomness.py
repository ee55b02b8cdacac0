"""Streams differ if any part of their names differs."""

from __future__ import annotations

from itertools import product

from tacit import randomness


def test_keys_differ_for_every_name_order_and_type() -> None:
    names = [(), ("a",), ("b",), ("a", 1), (1, "a"), ("a", "1"), ("a1",), ("a", 1, 0), ("a", 10)]
    keys = {randomness.key(seed, *n) for seed, n in product((0, 1), names)}
    assert len(keys) == 2 * len(names)


def test_a_stream_repeats_and_is_uniform() -> None:
    draws = [randomness.generator(7, "x", i).random() for i in range(2000)]
    assert draws == [randomness.generator(7, "x", i).random() for i in range(2000)]
    # The mean of 2000 uniforms has deviation 0.0065; five of them is a false alarm in 1.7 million runs.
    assert abs(sum(draws) / 2000 - 0.5) < 5 * 0.0065
