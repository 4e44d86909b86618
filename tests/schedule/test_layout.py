"""Receive layout, tiles, hand-out and capacity: what holds for every routing, and counted cases."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.schedule.cases import cases, draw_choices, plan_settings, tile_rows
from tilepipe.config.choices import Layout
from tilepipe.schedule.layout import (
    check_capacity,
    count_rows,
    first_rows,
    least_capacity_factor,
    make_handout,
    make_layout,
    row_capacity,
    tile_capacity,
)
from tilepipe.schedule.settings import PlanSettings

# One rank with five experts, two of them with nothing to do; tiles of 4 rows.
FIVE = PlanSettings(num_ranks=1, num_experts=5, num_topk=1, tile_m=4)
FIVE_COUNTS = np.array([[5, 0, 4, 1, 0]], np.int32)


def counts_of(case):
    return np.stack([count_rows(ids, case.settings.num_experts) for ids in case.topk_idx])


def test_count_rows_skips_dropped_slots():
    ids = np.array([[0, 2], [-1, 2], [2, -1], [-1, -1]], np.int32)

    counts = count_rows(ids, 4)

    assert counts.tolist() == [1, 0, 3, 0]
    assert counts.dtype == np.int32


@pytest.mark.parametrize(("bad", "num_experts"), [(-2, 4), (4, 4), (70_000, 4), (-(2**31), 4)])
def test_count_rows_refuses_an_id_out_of_range_with_one_sentence(bad, num_experts):
    ids = np.array([[0, 1], [bad, 3]], np.int32)
    sentence = (
        f"topk_idx holds {bad}: allowed is -1 (dropped) or 0..3; "
        "correct the routing or workload.num_experts"
    )

    with pytest.raises(ValueError, match=re.escape(sentence) + "$"):
        count_rows(ids, num_experts)


def test_count_rows_of_no_tokens_is_zero_everywhere():
    assert count_rows(np.zeros((0, 3), np.int32), 4).tolist() == [0, 0, 0, 0]


def test_padded_layout_by_hand():
    layout = make_layout(0, FIVE_COUNTS, replace(FIVE, layout=Layout.padded))

    assert layout.expert_first_row.tolist() == [0, 8, 8, 12, 16, 16]
    assert layout.tiles.tolist() == [[0, 0, 4], [0, 4, 1], [2, 8, 4], [3, 12, 1]]
    assert layout.expert_first_tile.tolist() == [0, 2, 2, 3, 4, 4]
    assert (layout.num_rows, layout.extent, layout.num_tiles) == (10, 16, 4)


def test_packed_layout_by_hand():
    layout = make_layout(0, FIVE_COUNTS, replace(FIVE, layout=Layout.packed))

    assert layout.expert_first_row.tolist() == [0, 5, 5, 9, 10, 10]
    assert layout.tiles.tolist() == [[0, 0, 4], [0, 4, 1], [2, 5, 4], [3, 9, 1]]
    assert (layout.num_rows, layout.extent) == (10, 10)


@given(case=cases())
@settings(max_examples=80, deadline=None)
def test_padded_starts_at_multiples_of_tile_m_and_packed_leaves_no_gap(case):
    counts, tile_m = counts_of(case), case.settings.tile_m

    for rank in range(case.settings.num_ranks):
        padded = make_layout(rank, counts, replace(case.settings, layout=Layout.padded))
        packed = make_layout(rank, counts, replace(case.settings, layout=Layout.packed))

        here = counts.sum(axis=0).reshape(case.settings.num_ranks, -1)[rank]
        assert padded.expert_rows.tolist() == packed.expert_rows.tolist() == here.tolist()
        assert (padded.expert_first_row % tile_m == 0).all()
        gaps = np.diff(padded.expert_first_row) - here
        assert ((gaps >= 0) & (gaps < tile_m)).all()
        assert packed.expert_first_row.tolist() == [0, *np.cumsum(here)]
        # The layouts differ in where tiles begin, not in what they hold.
        assert padded.tiles[:, [0, 2]].tolist() == packed.tiles[:, [0, 2]].tolist()


@given(case=cases())
@settings(max_examples=80, deadline=None)
def test_tiles_cover_the_rows_of_their_expert_once_and_no_other(case):
    counts, tile_m = counts_of(case), case.settings.tile_m

    for rank in range(case.settings.num_ranks):
        layout = make_layout(rank, counts, case.settings)

        by_expert: dict[int, list[int]] = {}
        for (expert, _, valid), rows in zip(layout.tiles.tolist(), tile_rows(layout), strict=True):
            assert 1 <= valid <= tile_m
            by_expert.setdefault(expert, []).extend(rows)
        for expert, num_rows in enumerate(layout.expert_rows.tolist()):
            first = int(layout.expert_first_row[expert])
            assert by_expert.get(expert, []) == list(range(first, first + num_rows))
            tiles = layout.tiles[slice(*layout.expert_first_tile[expert : expert + 2])]
            assert (tiles[:, 0] == expert).all()
            assert (tiles[:-1, 2] == tile_m).all()
            assert tiles[:, 2].sum() == num_rows


def test_handout_by_hand():
    # Three M tiles of one expert in raster groups of two; chunks of N tiles: 0 1 | 2.
    settings = PlanSettings(
        num_ranks=1, num_experts=1, num_topk=1, tile_m=4, num_n_tiles=3, num_chunks=2, raster_m=2
    )
    layout = make_layout(0, np.array([[12]], np.int32), settings)

    handout = make_handout(layout, settings)

    pairs = ["00", "01", "10", "11", "02", "12", "20", "21", "22"]
    assert handout.tolist() == [[int(m), int(n)] for m, n in pairs]
    assert handout.dtype == np.int32


@given(case=cases())
@settings(max_examples=80, deadline=None)
def test_handout_walks_raster_groups_chunk_by_chunk(case):
    # Every output tile once; groups of one expert; N tiles of a chunk of an M tile back to back.
    wanted = case.settings
    chunks = [
        [n for n in range(wanted.num_n_tiles) if wanted.chunk_of_n_tile(n) == chunk]
        for chunk in range(wanted.num_chunks)
    ]
    for rank in range(wanted.num_ranks):
        layout = make_layout(rank, counts_of(case), wanted)

        handout = make_handout(layout, wanted)

        expected = []
        for first, last in zip(
            layout.expert_first_tile[:-1], layout.expert_first_tile[1:], strict=True
        ):
            for group in range(first, last, wanted.raster_m):
                for chunk in chunks:
                    for m_tile in range(group, min(group + wanted.raster_m, last)):
                        expected += [[m_tile, n_tile] for n_tile in chunk]
        assert handout.tolist() == expected


@given(wanted=plan_settings())
@settings(max_examples=80, deadline=None)
def test_chunks_cut_the_n_tiles_into_nearly_equal_pieces_in_order(wanted):
    chunks = [wanted.chunk_of_n_tile(n) for n in range(wanted.num_n_tiles)]

    assert chunks == sorted(chunks)
    assert sorted(set(chunks)) == list(range(wanted.num_chunks))
    sizes = np.bincount(chunks)
    assert sizes.max() - sizes.min() <= 1


@given(
    wanted=plan_settings(),
    max_tokens=st.integers(0, 40),
    hot=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_the_worst_case_capacity_is_never_exceeded(wanted, max_tokens, hot, seed):
    rng = np.random.default_rng(seed)
    # hot: every token fills rank 0 first, which is the most that one rank can get.
    num_local = wanted.num_experts_per_rank
    popularity = np.where(np.arange(wanted.num_experts) < num_local, 1e6 * hot, 0)
    counts = np.stack(
        [
            count_rows(draw_choices(rng, max_tokens, wanted, popularity), wanted.num_experts)
            for _ in range(wanted.num_ranks)
        ]
    )

    capacity = row_capacity(wanted, num_tokens=max_tokens * wanted.num_ranks, capacity_factor=None)

    check_capacity(counts, wanted, capacity)
    for rank in range(wanted.num_ranks):
        layout = make_layout(rank, counts, wanted)
        assert layout.extent <= capacity
        assert layout.num_tiles <= tile_capacity(wanted, capacity)
        assert layout.num_tiles <= tile_capacity(wanted, layout.extent)
    if hot and wanted.layout is Layout.packed:
        assert make_layout(0, counts, wanted).extent == capacity


def test_tile_capacity_is_reached_when_every_expert_has_a_last_tile_of_one_row():
    settings = PlanSettings(num_ranks=1, num_experts=4, num_topk=1, tile_m=16, layout=Layout.packed)
    layout = make_layout(0, np.array([[17, 1, 1, 13 * 16 + 1]], np.int32), settings)

    # 228 rows make 14 whole tiles, and each of four experts may add one.
    assert layout.num_tiles == 18
    assert tile_capacity(settings, layout.extent) == 18


@pytest.mark.parametrize(
    ("layout", "factor", "rows"),
    [
        # 2 ranks x 10 tokens, at most 2 of 3 local experts each
        (Layout.packed, None, 40),
        # mean 10 x 2 rows a rank
        (Layout.packed, 1.0, 20),
        (Layout.packed, 1.26, 26),
        # never more than the worst case
        (Layout.packed, 100.0, 40),
        # and three experts may each leave 15 rows of their last tile empty
        (Layout.padded, None, 40 + 45),
        (Layout.padded, 1.0, 20 + 45),
    ],
)
def test_row_capacity_by_hand(layout, factor, rows):
    settings = PlanSettings(num_ranks=2, num_experts=6, num_topk=2, tile_m=16, layout=layout)

    assert row_capacity(settings, num_tokens=20, capacity_factor=factor) == rows


@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_check_capacity_accepts_the_extent_and_refuses_one_row_less(case):
    counts = counts_of(case)
    extents = [
        make_layout(rank, counts, case.settings).extent for rank in range(case.settings.num_ranks)
    ]
    worst = max(extents)

    check_capacity(counts, case.settings, worst)

    sentence = (
        f"kernel.capacity_factor gives {worst - 1} receive rows a rank, but rank "
        f"{extents.index(worst)} would receive {worst}; raise it, or type "
        "kernel.capacity_factor=null for the worst case"
    )
    with pytest.raises(ValueError, match=re.escape(sentence) + "$"):
        check_capacity(counts, case.settings, worst - 1)


def test_check_capacity_sees_an_extent_past_31_bits():
    # In 32 bits this sum wraps to 0 and would be let through.
    settings = PlanSettings(num_ranks=4, num_experts=4, num_topk=1, layout=Layout.packed)
    counts = np.zeros((4, 4), np.int32)
    counts[:, 1] = 2**30

    with pytest.raises(ValueError, match=f"rank 1 would receive {2**32};"):
        check_capacity(counts, settings, 1000)


@given(case=cases())
@settings(max_examples=30, deadline=None)
def test_senders_and_receivers_agree_on_first_rows(case):
    counts = counts_of(case)

    firsts = first_rows(counts, case.settings)

    for rank in range(case.settings.num_ranks):
        layout = make_layout(rank, counts, case.settings)
        assert firsts[rank].tolist() == layout.expert_first_row.tolist()


def test_experts_that_do_not_divide_among_ranks_are_refused_with_one_sentence():
    sentence = (
        "workload.num_experts=10: not divisible by launch.num_ranks=4; choose a divisor of it"
    )

    with pytest.raises(ValueError, match=re.escape(sentence) + "$"):
        PlanSettings(num_ranks=4, num_experts=10, num_topk=1)


@given(cases())
def test_the_least_capacity_factor_holds_the_fullest_rank_and_a_smaller_one_does_not(case):
    extents = first_rows(counts_of(case), case.settings)[:, -1]
    num_tokens, rows = sum(len(ids) for ids in case.topk_idx), int(extents.max())
    assume(num_tokens > 0)

    least = least_capacity_factor(case.settings, num_tokens=num_tokens, rows=rows)
    room, less = (
        row_capacity(case.settings, num_tokens=num_tokens, capacity_factor=factor)
        for factor in (least, round(least - 0.001, 3))
    )

    assert room >= rows
    assert least == 0.001 or less < rows


def test_a_factor_that_gives_a_whole_number_of_rows_gives_no_row_more():
    settings = PlanSettings(num_ranks=3, num_experts=6, num_topk=5, layout=Layout.packed)

    # 8 x 5 / 3 rows are a third more than 13, which no float is: 1.125 times that is 15.
    assert row_capacity(settings, num_tokens=8, capacity_factor=1.125) == 15
    assert least_capacity_factor(settings, num_tokens=8, rows=16) == 1.126
