"""Chunks of a row: never so small that copies lose their rate."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tilepipe.config.choices import Push
from tilepipe.schedule.settings import MIN_CHUNK_BYTES, PlanSettings, home_chunks_of, num_chunks_of


def chunk_bytes(row_bytes, tile_bytes, num_chunks):
    """Bytes of a row that lie in each chunk, tile by tile."""
    num_n_tiles = -(-row_bytes // tile_bytes)
    settings = PlanSettings(
        num_ranks=1, num_experts=1, num_topk=1, num_n_tiles=num_n_tiles, num_chunks=num_chunks
    )
    sizes = [0] * num_chunks
    for n_tile in range(num_n_tiles):
        tile = min(tile_bytes, row_bytes - n_tile * tile_bytes)
        sizes[settings.chunk_of_n_tile(n_tile)] += tile
    return sizes


@pytest.mark.parametrize(
    ("hidden", "tile_n", "num_chunks"),
    [
        (7168, 256, 4),  # 7 tiles of 512 B each: 3584 B
        # Four chunks of 14 tiles of 1 KiB would leave one with 3 KiB, of 7 of 2 KiB one with 2 KiB.
        (7168, 512, 3),
        (7168, 1024, 3),
        (4096, 256, 2),
        (2880, 256, 1),
        (16, 16, 1),
    ],
)
def test_chunks_of_known_rows(hidden, tile_n, num_chunks):
    assert num_chunks_of(hidden * 2, tile_n * 2) == num_chunks


@given(hidden=st.integers(1, 2000), tile_n=st.integers(1, 64))
@example(hidden=688, tile_n=16)  # the last tile is half a tile
def test_a_row_is_cut_as_often_as_every_chunk_stays_large_enough(hidden, tile_n):
    row_bytes, tile_bytes = hidden * 16, tile_n * 32

    num_chunks = num_chunks_of(row_bytes, tile_bytes)

    assert num_chunks == 1 or min(chunk_bytes(row_bytes, tile_bytes, num_chunks)) >= MIN_CHUNK_BYTES
    for more in range(num_chunks + 1, -(-row_bytes // tile_bytes) + 1):
        if more * MIN_CHUNK_BYTES <= row_bytes:
            assert min(chunk_bytes(row_bytes, tile_bytes, more)) < MIN_CHUNK_BYTES


@pytest.mark.parametrize(
    ("hidden", "tile_n", "num_chunks"),
    [
        (7168, 256, 4),
        (8192, 256, 4),  # 4 KiB each; eight would be too small, five no parts of 32 tiles
        (6144, 256, 3),
        (4096, 256, 2),
        (12_544, 256, 1),  # 49 tiles
        (7160, 256, 1),  # the last tile is narrower
        (2880, 256, 1),
    ],
)
def test_sent_rows_have_equal_chunks(hidden, tile_n, num_chunks):
    assert home_chunks_of(hidden * 2, tile_n * 2, push=Push.epilogue) == num_chunks


@given(hidden=st.integers(1, 4000), tile_n=st.integers(1, 64))
def test_sent_chunks_are_whole_tiles_of_one_size_and_not_too_small(hidden, tile_n):
    row_bytes, tile_bytes = hidden * 16, tile_n * 32

    num_chunks = home_chunks_of(row_bytes, tile_bytes, push=Push.epilogue)

    assert 1 <= num_chunks <= 4
    if num_chunks > 1:
        sizes = chunk_bytes(row_bytes, tile_bytes, num_chunks)
        assert len(set(sizes)) == 1
        assert min(sizes) >= MIN_CHUNK_BYTES
    for push in (Push.ctas, None):
        assert home_chunks_of(row_bytes, tile_bytes, push=push) == num_chunks_of(
            row_bytes, tile_bytes
        )


def test_rows_go_home_by_the_settings_of_the_second_gemm_where_there_are_two():
    one = PlanSettings(num_ranks=2, num_experts=4, num_topk=1, num_n_tiles=6, num_chunks=6)
    two = replace(one, second_gemm=(9, 3))

    home = two.homeward

    assert one.homeward is one
    assert (home.num_n_tiles, home.num_chunks, home.second_gemm) == (9, 3, None)
    assert replace(home, num_n_tiles=6, num_chunks=6) == one
