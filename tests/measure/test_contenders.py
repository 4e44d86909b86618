"""Interleaving: who runs when, and what is kept of it."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilepipe.measure.contenders import rotation, run_interleaved


@given(st.integers(1, 9), st.integers(0, 50))
def test_each_contender_takes_each_place_equally_often_give_or_take_one(num_names, num_iters):
    names = [f"c{number}" for number in range(num_names)]

    orders = rotation(names, num_iters)

    assert len(orders) == num_iters
    assert all(sorted(order) == names for order in orders)
    for place in range(num_names):
        taken = Counter(order[place] for order in orders)
        counts = [taken[name] for name in names]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("num_names", [2, 3, 4, 5, 6, 7])
def test_each_contender_follows_each_other_equally_often(num_names):
    names = [f"c{number}" for number in range(num_names)]

    orders = rotation(names, 2 * num_names)

    followed = Counter(pair for order in orders for pair in pairwise(order))
    assert len(followed) == num_names * (num_names - 1)
    assert set(followed.values()) == {2}


def test_rotation_of_nothing_is_empty_orders():
    assert rotation([], 2) == [(), ()]


def test_launches_are_numbered_through_and_each_follows_a_barrier():
    events = []

    def contender(name):
        def launch(number):
            events.append((name, number))
            return {"e2e": (10 * number, number + 1), "plan": (10 * number, 1)}

        return launch

    samples = run_interleaved(
        {"a": contender("a"), "b": contender("b")},
        num_warmups=1,
        num_iters=2,
        barrier=lambda: events.append("barrier"),
    )

    assert events[::2] == ["barrier"] * 6
    assert events[1::2] == [("a", 0), ("b", 1), ("b", 2), ("a", 3), ("a", 4), ("b", 5)]
    kept = [(s.contender, s.component, s.iteration, s.start_ns, s.duration_ns) for s in samples]
    assert kept == [
        ("b", "e2e", 0, 20, 3),
        ("b", "plan", 0, 20, 1),
        ("a", "e2e", 0, 30, 4),
        ("a", "plan", 0, 30, 1),
        ("a", "e2e", 1, 40, 5),
        ("a", "plan", 1, 40, 1),
        ("b", "e2e", 1, 50, 6),
        ("b", "plan", 1, 50, 1),
    ]


def test_warm_ups_leave_no_samples():
    samples = run_interleaved(
        {"a": lambda launch: {"stage": (0, launch)}}, num_warmups=3, num_iters=0, barrier=list
    )

    assert samples == ()
