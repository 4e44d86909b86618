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


def launches(names, duration_ns):
    """Contenders whose durations are told by name and launch, and the order in which they ran."""
    ran = []

    def contender(name):
        def launch(number):
            ran.append(name)
            return {"e2e": (0, duration_ns(name, number)), "plan": (0, number)}

        return launch

    return {name: contender(name) for name in names}, ran


def run_until_sure(contenders, **changed):
    limits = {"num_warmups": 1, "num_iters": 8, "max_iters": 60, "interval": 0.05}
    samples = run_interleaved(contenders, barrier=list, **(limits | changed))
    return max(sample.iteration for sample in samples) + 1


def noisy(name, number):
    return 1000 if number % 2 else 2000


def test_quiet_contenders_end_after_the_least_number_of_iterations():
    contenders, ran = launches("abc", lambda name, number: 1000 + number % 3)

    assert run_until_sure(contenders) == 8
    assert len(ran) == 3 * (1 + 8)


@pytest.mark.parametrize(("num_names", "num_iters"), [(1, 60), (2, 60), (3, 56), (4, 60), (5, 58)])
def test_noisy_contenders_end_at_the_last_whole_rotation_within_the_bound(num_names, num_iters):
    contenders, _ = launches([f"c{number}" for number in range(num_names)], noisy)

    assert run_until_sure(contenders) == num_iters


@pytest.mark.parametrize("num_names", [2, 3, 4, 5])
def test_iterations_beyond_the_least_keep_places_and_neighbours_as_even_as_they_were(num_names):
    contenders, ran = launches([f"c{number}" for number in range(num_names)], noisy)

    run_until_sure(contenders, num_iters=6)

    later = ran[(1 + 6) * num_names :]
    orders = [tuple(later[start : start + num_names]) for start in range(0, len(later), num_names)]
    for place in range(num_names):
        assert len(set(Counter(order[place] for order in orders).values())) == 1
    followed = Counter(pair for order in orders for pair in pairwise(order))
    assert len(set(followed.values())) == 1
    assert len(followed) == num_names * (num_names - 1)


def test_one_noisy_contender_keeps_all_going_until_it_is_sure():
    # 20 launches of the noisy one either side of its median, then the median alone.
    contenders, _ = launches(
        "ab", lambda name, number: 1000 + (number % 3 - 1) * 500 * (name == "b" and number < 40)
    )

    num_iters = run_until_sure(contenders, max_iters=1000)

    assert 20 < num_iters < 200


def test_few_values_are_never_sure_enough():
    contenders, _ = launches("a", lambda name, number: 1000)

    assert run_until_sure(contenders, num_iters=2) == 6


def test_a_contender_without_a_whole_launch_is_judged_by_its_stage():
    quiet = {"a": lambda number: {"stage": (0, 1000)}}
    loud = {"a": lambda number: {"stage": (0, noisy("a", number)), "plan": (0, 1000)}}
    plan_alone = {"a": lambda number: {"e2e": (0, 1000), "stage": (0, noisy("a", number))}}

    assert [run_until_sure(each) for each in (quiet, loud, plan_alone)] == [8, 60, 8]


def test_ranks_stop_together_once_the_last_of_them_wants_to():
    wishes = []

    def agree(wish):
        wishes.append(wish)
        return wish and len(wishes) > 3  # another rank is not sure yet

    contenders, _ = launches("ab", lambda name, number: 1000)

    assert run_until_sure(contenders, agree=agree) == 14
    assert wishes == [True] * 4


def test_a_rank_that_is_not_sure_says_so():
    wishes = []
    contenders, _ = launches("ab", noisy)

    run_until_sure(contenders, agree=lambda wish: wishes.append(wish) or wish)

    assert wishes
    assert not any(wishes)


def test_without_a_bound_nobody_is_asked():
    contenders, ran = launches("ab", noisy)

    run_interleaved(
        contenders, num_warmups=0, num_iters=7, barrier=list, agree=lambda wish: 1 / 0 > 0
    )

    assert len(ran) == 14
