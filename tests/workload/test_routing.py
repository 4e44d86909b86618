"""Every law of routing: what holds for all of them, what each promises, and how fast they are."""

import itertools
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilepipe.config import routings
from tilepipe.workload import Routing, draw, imbalance, laws

# name -> law for (num_ranks, num_experts, seed); hot choices sit in the middle of the group.
LAWS = {
    "uniform": lambda ranks, experts, seed: routings.UniformRouting(seed=seed),
    "zipf": lambda ranks, experts, seed: routings.ZipfRouting(seed=seed, exponent=1.2),
    "zipf_steep": lambda ranks, experts, seed: routings.ZipfRouting(seed=seed, exponent=10),
    "lognormal": lambda ranks, experts, seed: routings.LognormalRouting(seed=seed, sigma=1.5),
    "hot_expert": lambda ranks, experts, seed: routings.HotExpertRouting(
        seed=seed, hot_expert=experts // 2, hot_share=0.6
    ),
    "hot_rank": lambda ranks, experts, seed: routings.HotRankRouting(
        seed=seed, hot_rank=ranks // 2, hot_share=0.6
    ),
    "all_local": lambda ranks, experts, seed: routings.AllLocalRouting(seed=seed),
    "all_remote": lambda ranks, experts, seed: routings.AllRemoteRouting(seed=seed),
    "masked": lambda ranks, experts, seed: routings.MaskedRouting(seed=seed, masked_share=0.5),
    "ragged": lambda ranks, experts, seed: routings.RaggedRouting(seed=seed, min_share=0.0),
}

PINNED_IDS = {
    "uniform": [[7, 14, 6], [15, 7, 2]],
    "zipf": [[3, 14, 6], [15, 3, 1]],
    "lognormal": [[10, 15, 6], [15, 6, 2]],
}
PINNED_WEIGHTS = [
    [0.19465892016887665, 0.4421428143978119, 0.36319825053215027],
    [0.5154443979263306, 0.20942732691764832, 0.2751282751560211],
]


def topk_limit(name, num_ranks, num_experts):
    """The largest topk a law can serve."""
    num_local = num_experts // num_ranks
    return {"all_local": num_local, "all_remote": num_experts - num_local}.get(name, num_experts)


@st.composite
def cases(draw_value):
    name = draw_value(st.sampled_from(sorted(LAWS)))
    num_ranks = draw_value(st.sampled_from([2, 3, 8] if name == "all_remote" else [1, 2, 3, 8]))
    num_experts = num_ranks * draw_value(st.integers(1, 6))
    num_topk = draw_value(st.integers(1, topk_limit(name, num_ranks, num_experts)))
    num_tokens = draw_value(st.integers(0, 40))
    seed = draw_value(st.integers(0, 2**40))
    law = LAWS[name](num_ranks, num_experts, seed)
    shape = {
        "num_ranks": num_ranks,
        "num_tokens": num_tokens,
        "num_experts": num_experts,
        "num_topk": num_topk,
    }
    return name, law, shape


def check(routing: Routing, name, num_ranks, num_tokens, num_experts, num_topk):
    """What holds for every law."""
    assert len(routing.topk_idx) == len(routing.topk_weights) == num_ranks
    assert routing.num_experts == num_experts
    for rank in range(num_ranks):
        ids, weights = routing.topk_idx[rank], routing.topk_weights[rank]
        expected_tokens = num_tokens
        if name == "ragged" and num_ranks > 1:
            expected_tokens = (2 * num_tokens * rank + num_ranks - 1) // (2 * (num_ranks - 1))
        assert ids.shape == weights.shape == (expected_tokens, num_topk)
        assert ids.dtype == np.int32
        assert ids.flags.c_contiguous
        assert weights.flags.c_contiguous
        assert weights.dtype == np.float32
        assert ids.min(initial=0) >= (-1 if name == "masked" else 0)
        assert ids.max(initial=-1) < num_experts
        ascending = np.sort(ids, axis=1)
        assert not ((ascending[:, 1:] == ascending[:, :-1]) & (ascending[:, 1:] >= 0)).any()
        assert ((weights > 0) == (ids >= 0)).all()
        valid_rows = (ids >= 0).any(axis=1)
        sums = weights.sum(axis=1, dtype=np.float64)
        # Each of topk weights is rounded once to 24 bits.
        assert np.abs(sums[valid_rows] - 1).max(initial=0) < num_topk * 2.0**-24
        assert (sums[~valid_rows] == 0).all()


@given(case=cases())
@settings(max_examples=300, deadline=None)
def test_every_law_draws_distinct_experts_in_range_with_weights_that_sum_to_one(case):
    name, law, shape = case

    routing = draw(law, **shape)

    check(routing, name, **shape)


@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_equal_arguments_give_equal_routing(case):
    _, law, shape = case

    first, second = draw(law, **shape), draw(law, **shape)

    for rank in range(shape["num_ranks"]):
        assert np.array_equal(first.topk_idx[rank], second.topk_idx[rank])
        assert np.array_equal(first.topk_weights[rank], second.topk_weights[rank])


@pytest.mark.parametrize("name", sorted(LAWS))
def test_seed_and_rank_change_ids_and_weights(name):
    shape = {"num_ranks": 2, "num_tokens": 64, "num_experts": 16, "num_topk": 4}

    one, other = (draw(LAWS[name](2, 16, seed), **shape) for seed in (1, 2))

    assert not np.array_equal(one.topk_idx[1], other.topk_idx[1])
    assert not np.array_equal(one.topk_weights[1], other.topk_weights[1])
    if name != "ragged":  # there rank 0 is empty
        assert not np.array_equal(one.topk_idx[0], one.topk_idx[1])
        assert not np.array_equal(one.topk_weights[0], one.topk_weights[1])


GROUPS = [
    (num_ranks, num_experts)
    for num_experts in (8, 160, 384, 512)
    for num_ranks in (1, 2, 3, 8)
    if num_experts % num_ranks == 0
]


@pytest.mark.parametrize(("num_ranks", "num_experts"), GROUPS)
@pytest.mark.parametrize("name", sorted(LAWS))
def test_conformance_shapes(name, num_ranks, num_experts):
    limit = topk_limit(name, num_ranks, num_experts)
    for num_tokens, num_topk in itertools.product((0, 1, 127, 129), (1, 2, 6, 16)):
        if num_topk > limit:
            continue
        shape = {
            "num_ranks": num_ranks,
            "num_tokens": num_tokens,
            "num_experts": num_experts,
            "num_topk": num_topk,
        }
        check(draw(LAWS[name](num_ranks, num_experts, 5), **shape), name, **shape)


@pytest.mark.parametrize("num_experts", [8, 160, 384, 512])
@pytest.mark.parametrize("name", ["uniform", "zipf_steep", "lognormal", "hot_expert", "hot_rank"])
def test_topk_equal_to_the_number_of_experts_takes_every_expert(name, num_experts):
    routing = draw(
        LAWS[name](2, num_experts, 0),
        num_ranks=2,
        num_tokens=3,
        num_experts=num_experts,
        num_topk=num_experts,
    )

    everyone = np.tile(np.arange(num_experts), (3, 1))
    for ids in routing.topk_idx:
        assert np.array_equal(np.sort(ids, axis=1), everyone)


def test_draws_are_these_numbers_on_every_machine():
    # Written down once: a NumPy whose random() changed, or a law that reads its stream in another
    # order, would make old results incomparable without a word.
    laws_by_name = {name: LAWS[name](2, 16, 7) for name in ("uniform", "zipf", "lognormal")}

    drawn = {
        name: draw(law, num_ranks=2, num_tokens=2, num_experts=16, num_topk=3)
        for name, law in laws_by_name.items()
    }

    assert {name: routing.topk_idx[1].tolist() for name, routing in drawn.items()} == PINNED_IDS
    assert drawn["uniform"].topk_weights[0].tolist() == PINNED_WEIGHTS


def test_uniform_uses_every_expert_equally_in_every_slot():
    routing = draw(
        routings.UniformRouting(), num_ranks=1, num_tokens=20_000, num_experts=10, num_topk=3
    )

    for slot_idx in range(3):
        rows = np.bincount(routing.topk_idx[0][:, slot_idx], minlength=10)
        # 2 000 +- 42 (one sigma) each.
        assert np.abs(rows - 2000).max() < 5 * 43


def test_choosing_without_replacement_follows_the_shares_of_those_left():
    rng = np.random.Generator(np.random.PCG64(3))
    shares = np.array([4, 2, 1, 1])

    chosen = laws.choose(rng, shares, num_tokens=80_000, num_topk=2)

    pairs = Counter(map(tuple, chosen.tolist()))
    for first in range(4):
        for second in set(range(4)) - {first}:
            expected = 80_000 * shares[first] / 8 * shares[second] / (8 - shares[first])
            assert abs(pairs[first, second] - expected) < 5 * expected**0.5


def test_zipf_popularity_falls_as_the_power_of_its_place():
    routing = draw(
        routings.ZipfRouting(exponent=1.0),
        num_ranks=1,
        num_tokens=100_000,
        num_experts=8,
        num_topk=1,
    )

    shares = np.sort(np.bincount(routing.topk_idx[0][:, 0], minlength=8))[::-1] / 100_000
    expected = 1 / np.arange(1, 9) / sum(1 / place for place in range(1, 9))
    assert np.abs(shares - expected).max() < 0.006  # 4 sigma of the largest


def test_all_ranks_share_one_popularity_order():
    routing = draw(
        routings.ZipfRouting(exponent=2.0, seed=4),
        num_ranks=4,
        num_tokens=2_000,
        num_experts=32,
        num_topk=1,
    )

    favourites = {int(np.bincount(ids[:, 0]).argmax()) for ids in routing.topk_idx}
    assert len(favourites) == 1


def test_lognormal_popularity_spreads_with_sigma():
    rng = np.random.Generator(np.random.PCG64(0))

    shares = laws.lognormal_shares(rng, 20_000, sigma=0.5)

    logs = np.log(shares.astype(np.float64))
    assert abs((logs - logs.mean()).std() - 0.5) < 0.0125  # 5 sigma of the standard deviation
    assert abs(((logs - logs.mean()) ** 3).mean()) < 5 * 0.125 * (15 / 20_000) ** 0.5


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_hot_expert_is_taken_by_its_share_of_the_tokens_and_the_rest_is_uniform(share):
    routing = draw(
        routings.HotExpertRouting(hot_expert=5, hot_share=share),
        num_ranks=1,
        num_tokens=20_000,
        num_experts=9,
        num_topk=3,
    )

    ids = routing.topk_idx[0]
    is_hot = (ids == 5).any(axis=1)
    assert abs(is_hot.mean() - share) <= 5 * (share * (1 - share) / 20_000) ** 0.5
    rest = np.bincount(ids[ids != 5], minlength=9)
    assert rest[5] == 0
    expected = (60_000 - is_hot.sum()) / 8
    assert np.abs(np.delete(rest, 5) - expected).max() < 5 * expected**0.5


def test_hot_rank_gets_its_share_of_the_slots():
    routing = draw(
        routings.HotRankRouting(hot_rank=2, hot_share=0.7),
        num_ranks=4,
        num_tokens=10_000,
        num_experts=64,
        num_topk=2,
    )

    for ids in routing.topk_idx:
        share = (ids // 16 == 2).mean()
        assert abs(share - 0.7) < 5 * (0.21 / 20_000) ** 0.5


def test_hot_rank_with_few_experts_gives_them_all_and_the_other_slots_go_elsewhere():
    routing = draw(
        routings.HotRankRouting(hot_rank=1, hot_share=1.0),
        num_ranks=4,
        num_tokens=50,
        num_experts=12,
        num_topk=5,
    )

    for ids in routing.topk_idx:
        assert ((ids // 3 == 1).sum(axis=1) == 3).all()


def test_all_local_stays_and_all_remote_leaves():
    shape = {"num_ranks": 4, "num_tokens": 200, "num_experts": 16, "num_topk": 4}

    local = draw(routings.AllLocalRouting(), **shape)
    remote = draw(routings.AllRemoteRouting(), **shape)

    for rank in range(4):
        assert (local.topk_idx[rank] // 4 == rank).all()
        assert (remote.topk_idx[rank] // 4 != rank).all()
        others = sorted(set(range(16)) - set(range(4 * rank, 4 * rank + 4)))
        assert np.unique(remote.topk_idx[rank]).tolist() == others


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_masked_drops_exactly_its_share_of_each_ranks_slots(share):
    routing = draw(
        routings.MaskedRouting(masked_share=share),
        num_ranks=2,
        num_tokens=33,
        num_experts=8,
        num_topk=2,
    )

    # 16.5 slots are rounded up.
    expected = {0.0: 0, 0.25: 17, 0.5: 33, 1.0: 66}[share]
    assert [int((ids == -1).sum()) for ids in routing.topk_idx] == [expected, expected]


@pytest.mark.parametrize(
    ("min_share", "num_ranks", "expected"),
    [
        (0.0, 4, [0, 40, 80, 120]),
        (0.5, 4, [60, 80, 100, 120]),
        (1.0, 2, [120, 120]),
        (0.0, 1, [120]),
    ],
)
def test_ragged_token_counts_rise_evenly(min_share, num_ranks, expected):
    routing = draw(
        routings.RaggedRouting(min_share=min_share),
        num_ranks=num_ranks,
        num_tokens=120,
        num_experts=8,
        num_topk=2,
    )

    assert [len(ids) for ids in routing.topk_idx] == expected


def test_imbalance_of_a_counted_case():
    # Rows per expert 3, 1, 0, 2: mean 1.5; per rank 4, 2: mean 3.
    ids = (np.array([[0, 1], [0, 3]], np.int32), np.array([[0, 3], [-1, -1]], np.int32))
    routing = Routing(ids, tuple(np.ones_like(part, np.float32) for part in ids), 4)

    measured = imbalance(routing, 2)

    assert (measured.expert_max_over_mean, measured.rank_max_over_mean) == (3 / 1.5, 4 / 3)


def test_imbalance_without_rows_is_not_measured():
    routing = draw(
        routings.MaskedRouting(masked_share=1.0),
        num_ranks=2,
        num_tokens=3,
        num_experts=4,
        num_topk=2,
    )

    measured = imbalance(routing, 2)

    assert (measured.expert_max_over_mean, measured.rank_max_over_mean) == (None, None)


@pytest.mark.parametrize("name", sorted(LAWS))
def test_a_large_group_is_drawn_quickly(name):
    start_s = time.process_time()

    draw(LAWS[name](8, 256, 0), num_ranks=8, num_tokens=16_384, num_experts=256, num_topk=8)

    # 0.1 to 0.2 s on an idle core.
    assert time.process_time() - start_s < 1.0
