"""A rank that leaves torch's group, or does not come, ends the others in a sentence."""

import os
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.host.ranks import Failed, run_ranks  # noqa: E402
from tilepipe.baselines.host import joined_on_host  # noqa: E402
from tilepipe.fabric.host import ArraySpec, HostHeap  # noqa: E402


def heap_of(rank, place, num_ranks):
    return HostHeap(
        place,
        rank=rank,
        num_ranks=num_ranks,
        specs={"words": ArraySpec(shape=(1,), dtype=np.int64)},
        watchdog_s=5,
        start_limit_s=20,
    )


def rows_from(rank, place, num_ranks, spoil=None):
    heap = heap_of(rank, place, num_ranks)
    with joined_on_host(heap, limit_s=1, start_limit_s=20) as collective:
        if spoil is not None and rank == 1:
            spoil()
        out = torch.full((num_ranks, 2), -1)
        rows = torch.tensor([[rank, peer] for peer in range(num_ranks)])
        collective.exchange(out, rows)
        return out.tolist()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_rank_gets_the_rows_that_the_others_have_for_it(num_ranks):
    found = run_ranks(num_ranks, rows_from, num_ranks)

    assert found == [[[source, rank] for source in range(num_ranks)] for rank in range(num_ranks)]


def alone(rank, place):
    with joined_on_host(heap_of(rank, place, 1), limit_s=1, start_limit_s=20) as collective:
        return collective


def test_a_rank_alone_joins_nobody():
    assert run_ranks(1, alone) == [None]


def test_a_rank_that_dies_ends_the_others_as_ones_that_follow_it():
    first, died = run_ranks(2, rows_from, 2, lambda: os._exit(3))

    assert died == Failed(error="EOFError", text="the process died")
    assert first.error == "PeerAborted"
    assert first.text.startswith("rank 0 stopped because a rank left torch's group: ")


def test_a_rank_that_does_not_come_ends_the_others_at_the_limit_of_a_wait():
    first, _ = run_ranks(2, rows_from, 2, lambda: time.sleep(2.5))

    assert first.error == "WatchdogTimeout"
    assert first.text.splitlines()[0] == (
        "rank 0 waited 1 s (launch.watchdog_ms): role torch all-to-all: a rank has not come; see "
        "its log"
    )


def left_by_error(rank, place):
    heap = heap_of(rank, place, 2)
    try:
        with joined_on_host(heap, limit_s=1, start_limit_s=20):
            raise KeyError("of the block")
    except KeyError:
        return torch.distributed.is_initialized()


def test_the_group_is_left_when_the_block_raises():
    assert run_ranks(2, left_by_error) == [False, False]
