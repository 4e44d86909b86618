"""Cluster tiles and tickets of the grouped GEMM, against the hand-out order of the Plan."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilepipe.config.choices import Layout, Walk
from tilepipe.kernels.gemm.tiles import (
    RECORD_WORDS,
    TileWord,
    num_to_cut,
    pack_cluster_tiles,
    place_of_ticket,
)
from tilepipe.schedule.layout import make_handout, make_layout
from tilepipe.schedule.settings import PlanSettings

TILE_M = 16

ROWS = st.lists(
    st.integers(0, 3 * TILE_M) | st.sampled_from([0, 1, TILE_M - 1, TILE_M, TILE_M + 1, 200]),
    min_size=1,
    max_size=7,
)


def layout_of(rows, layout=Layout.padded, **settings):
    chosen = PlanSettings(
        num_ranks=1,
        num_experts=len(rows),
        num_topk=1,
        tile_m=TILE_M,
        layout=layout,
        **settings,
    )
    return make_layout(0, np.array([rows], np.int32), chosen), chosen


def records_of(layout, *, cluster_m=1, raster_m=8, tile_m=TILE_M, num_cut=0, walk=Walk.expert):
    return pack_cluster_tiles(
        layout,
        tile_m=tile_m,
        cluster_m=cluster_m,
        raster_m=raster_m,
        plan_tile_m=TILE_M,
        num_cut=num_cut,
        walk=walk,
    )


def handed_out(records, *, num_n_tiles, num_chunks):
    """What the device makes of every ticket, in order."""
    places = []
    for ticket in range(len(records) * num_n_tiles):
        own = records[ticket // num_n_tiles].tolist()
        there = place_of_ticket(
            ticket,
            own[TileWord.group_place],
            own[TileWord.group_size],
            num_n_tiles=num_n_tiles,
            num_chunks=num_chunks,
        )
        places.append((there.cluster_tile, there.n_tile))
    return places


@given(
    rows=ROWS,
    layout=st.sampled_from(list(Layout)),
    raster_m=st.integers(1, 5),
    num_n_tiles=st.integers(1, 6),
    data=st.data(),
)
def test_tickets_are_the_hand_out_order_of_the_plan(rows, layout, raster_m, num_n_tiles, data):
    num_chunks = data.draw(st.integers(1, num_n_tiles))
    received, settings = layout_of(
        rows, layout, raster_m=raster_m, num_n_tiles=num_n_tiles, num_chunks=num_chunks
    )
    records = records_of(received, raster_m=raster_m)

    places = handed_out(records, num_n_tiles=num_n_tiles, num_chunks=num_chunks)

    assert places == [tuple(place) for place in make_handout(received, settings).tolist()]


@given(
    rows=ROWS,
    cluster_m=st.sampled_from([1, 2]),
    raster_m=st.integers(1, 5),
    num_n_tiles=st.integers(1, 6),
    data=st.data(),
)
def test_every_output_tile_of_every_cluster_is_handed_out_once_chunks_back_to_back(
    rows, cluster_m, raster_m, num_n_tiles, data
):
    num_chunks = data.draw(st.integers(1, num_n_tiles))
    received, settings = layout_of(rows, num_n_tiles=num_n_tiles, num_chunks=num_chunks)
    records = records_of(received, cluster_m=cluster_m, raster_m=raster_m)

    places = handed_out(records, num_n_tiles=num_n_tiles, num_chunks=num_chunks)

    everything = {(tile, n) for tile in range(len(records)) for n in range(num_n_tiles)}
    assert len(places) == len(everything)
    assert set(places) == everything
    chunks = [(tile, settings.chunk_of_n_tile(n)) for tile, n in places]
    changes = sum(a != b for a, b in pairwise(chunks))
    assert changes == max(len(set(chunks)) - 1, 0), "tiles of a chunk do not lie back to back"


@given(
    rows=ROWS,
    cluster_m=st.sampled_from([1, 2]),
    num_n_tiles=st.integers(1, 6),
    data=st.data(),
)
def test_chunk_by_chunk_all_experts_take_a_chunk_before_any_takes_the_next(
    rows, cluster_m, num_n_tiles, data
):
    num_chunks = data.draw(st.integers(1, num_n_tiles))
    received, settings = layout_of(rows, num_n_tiles=num_n_tiles, num_chunks=num_chunks)
    records = records_of(received, cluster_m=cluster_m, walk=Walk.chunk)

    places = handed_out(records, num_n_tiles=num_n_tiles, num_chunks=num_chunks)

    in_order = [
        (tile, n)
        for chunk in range(num_chunks)
        for tile in range(len(records))
        for n in range(num_n_tiles)
        if settings.chunk_of_n_tile(n) == chunk
    ]
    assert places == in_order


@given(
    rows=ROWS,
    layout=st.sampled_from(list(Layout)),
    cluster_m=st.sampled_from([1, 2]),
    tile_m=st.sampled_from([TILE_M // 2, TILE_M, 2 * TILE_M]),
)
def test_records_cover_every_row_once_and_no_tile_leaves_its_expert(
    rows, layout, cluster_m, tile_m
):
    received, _ = layout_of(rows, layout)
    records = records_of(received, cluster_m=cluster_m, tile_m=tile_m)

    assert records.shape == (len(records), RECORD_WORDS)
    covered = []
    for record in records.tolist():
        first, valid, expert = (
            record[word] for word in (TileWord.first_row, TileWord.valid, TileWord.expert)
        )
        end = received.expert_first_row[expert] + rows[expert]
        assert 1 <= valid <= cluster_m * tile_m
        assert received.expert_first_row[expert] <= first
        assert first + valid <= end == record[TileWord.group_end]
        # Only the last tile of an expert is short, and CTAs behind its rows have a null tile.
        assert valid == cluster_m * tile_m or first + valid == end
        covered += range(first, first + valid)
    _, held = received.held_rows()
    assert covered == held.tolist()


@given(rows=ROWS, layout=st.sampled_from(list(Layout)), cluster_m=st.sampled_from([1, 2]))
def test_m_tiles_are_counted_as_the_plan_counts_them(rows, layout, cluster_m):
    received, _ = layout_of(rows, layout)
    records = records_of(received, cluster_m=cluster_m)

    counted = []
    for record in records.tolist():
        for cta in range(cluster_m):
            valid = min(record[TileWord.valid] - cta * TILE_M, TILE_M)
            if valid > 0:
                first = record[TileWord.first_row] + cta * TILE_M
                counted.append((record[TileWord.m_tile] + cta, record[TileWord.expert], first))
    tiles = received.tiles.tolist()
    assert counted == [(number, *tile[:2]) for number, tile in enumerate(tiles)]


def test_a_cluster_of_two_takes_tiles_side_by_side_and_an_odd_last_one_alone():
    received, _ = layout_of([TILE_M * 3, 5])

    records = records_of(received, cluster_m=2)

    words = [TileWord.first_row, TileWord.valid, TileWord.expert, TileWord.m_tile]
    assert records[:, words].tolist() == [
        [0, 2 * TILE_M, 0, 0],
        [2 * TILE_M, TILE_M, 0, 2],
        [3 * TILE_M, 5, 1, 3],
    ]


# Halves at the end.


@given(
    rows=ROWS,
    layout=st.sampled_from(list(Layout)),
    raster_m=st.integers(1, 5),
    num_cut=st.integers(1, 20),
    num_n_tiles=st.integers(1, 6),
)
def test_the_last_tiles_are_handed_out_in_halves_and_all_others_whole(
    rows, layout, raster_m, num_cut, num_n_tiles
):
    received, _ = layout_of(rows, layout)
    half = TILE_M // 2

    records = records_of(received, raster_m=raster_m, num_cut=num_cut)

    whole = records_of(received, raster_m=raster_m)
    words = [TileWord.first_row, TileWord.valid, TileWord.expert, TileWord.m_tile]
    words += [TileWord.group_end]
    expected, left = [], num_cut
    for first, valid, *others in whole[::-1, words].tolist():
        if valid > half and left:
            expected += [[first + half, valid - half, *others], [first, half, *others]]
            left -= 1
        else:
            expected.append([first, valid, *others])
    assert records[:, words].tolist() == expected[::-1]
    # They walk along N together as any other tiles do.
    places = handed_out(records, num_n_tiles=num_n_tiles, num_chunks=num_n_tiles)
    assert sorted(places) == [(tile, n) for tile in range(len(records)) for n in range(num_n_tiles)]


def rounds_of(records, *, num_n_tiles, num_clusters):
    """Half tiles that the busiest of equal clusters multiplies, tickets taken in turn."""
    busy = [0] * num_clusters
    for tile, _ in handed_out(records, num_n_tiles=num_n_tiles, num_chunks=num_n_tiles):
        free = busy.index(min(busy))
        busy[free] += -(-int(records[tile, TileWord.valid]) // (TILE_M // 2))
    return max(busy)


@given(
    rows=st.lists(st.integers(0, 6 * TILE_M), min_size=1, max_size=5),
    raster_m=st.integers(1, 5),
    num_n_tiles=st.integers(1, 5),
    num_clusters=st.integers(1, 9),
)
def test_as_many_tiles_are_cut_as_end_the_launch_first_and_no_more(
    rows, raster_m, num_n_tiles, num_clusters
):
    received, _ = layout_of(rows)
    sizes = {"num_n_tiles": num_n_tiles, "num_clusters": num_clusters}

    num_cut = num_to_cut(
        received, tile_m=TILE_M, raster_m=raster_m, num_chunks=num_n_tiles, **sizes
    )

    # The halves of half a round of tiles are a round by themselves: more are not weighed.
    times = [
        rounds_of(records_of(received, raster_m=raster_m, num_cut=number), **sizes)
        for number in range(-(-num_clusters // (2 * num_n_tiles)) + 1)
    ]
    assert times[num_cut] == min(times)
    assert num_cut == times.index(min(times))


@pytest.mark.parametrize(
    ("rows", "num_clusters", "num_cut"),
    [
        # Four tiles and one more for four clusters: its halves take half as long.
        ([5 * TILE_M], 4, 1),
        ([4 * TILE_M], 4, 0),
        # The last one is short as it is.
        ([TILE_M, TILE_M, TILE_M // 2], 2, 0),
        # Short ones bring clusters apart by half a tile; whether they meet again is for the order.
        ([TILE_M // 2, TILE_M, TILE_M // 2, TILE_M, TILE_M], 2, 0),
        ([TILE_M // 2, TILE_M, TILE_M, TILE_M, TILE_M // 2, TILE_M], 2, 1),
    ],
)
def test_tiles_are_cut_where_the_launch_ends_sooner_for_it(rows, num_clusters, num_cut):
    received, _ = layout_of(rows)

    sizes = {"raster_m": 8, "num_n_tiles": 1, "num_chunks": 1, "num_clusters": num_clusters}
    found = num_to_cut(received, tile_m=TILE_M, **sizes)

    assert found == num_cut
