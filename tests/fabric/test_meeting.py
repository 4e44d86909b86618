"""Processes that meet: nobody passes early, all decide alike, who waits hears of a failure."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from tests.launch import entries  # noqa: E402
from tests.launch.points import compose_point  # noqa: E402
from tilepipe.fabric import meeting as meeting_module  # noqa: E402
from tilepipe.fabric.meeting import Meeting  # noqa: E402
from tilepipe.fabric.watch import PeerAborted  # noqa: E402
from tilepipe.launch.ranks import start_ranks  # noqa: E402
from tilepipe.stopping import Stopping  # noqa: E402

RANKS = 4


def together(body, *, num_ranks=RANKS, limit_s=20.0):
    """What `body(meeting)` returns or raises on each rank; ranks are threads over one store."""
    store = torch.distributed.HashStore()

    def run(rank):
        try:
            return body(Meeting(store, rank=rank, num_ranks=num_ranks, limit_s=limit_s))
        except (PeerAborted, TimeoutError) as error:
            return error

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))


def test_nobody_passes_a_barrier_before_all_have_come():
    entered, lock = [0] * 20, threading.Lock()

    def body(meeting):
        for number in range(20):
            time.sleep(0.001 * ((meeting.rank + number) % RANKS))
            with lock:
                entered[number] += 1
            meeting.barrier()
            assert entered[number] == RANKS
        return "through"

    assert together(body) == ["through"] * RANKS


def test_a_vote_is_won_only_where_all_say_yes_and_all_learn_the_same():
    def body(meeting):
        return [meeting.all_agree(number % (RANKS + 1) != meeting.rank) for number in range(15)]

    # Question i is refused by rank i % 5; where that is 4, by nobody.
    assert together(body) == [[number % 5 == 4 for number in range(15)]] * RANKS


def test_what_rank_0_makes_is_told_to_all_and_made_once():
    made = []

    def body(meeting):
        return [meeting.told_by_first(lambda: made.append(1) or f"word {len(made)}") for _ in "ab"]

    assert together(body) == [["word 1", "word 2"]] * RANKS


@pytest.mark.parametrize("waits", ["barrier", "told_by_first"])
def test_who_waits_for_a_rank_that_fails_is_told_soon(waits):
    def body(meeting):
        if meeting.rank == 0:
            time.sleep(0.1)
            meeting.fail()
            return None
        arguments = [lambda: "word"] if waits == "told_by_first" else []
        return getattr(meeting, waits)(*arguments)

    begin = time.monotonic()
    _, *others = together(body)

    assert [str(error) for error in others] == [
        f"rank {rank} stopped because another rank gave up" for rank in range(1, RANKS)
    ]
    assert time.monotonic() - begin < 5


def test_a_rank_that_never_comes_is_missed_at_the_limit():
    def body(meeting):
        return None if meeting.rank == 1 else meeting.barrier()

    late, absent, *_ = together(body, limit_s=0.2)

    assert absent is None
    assert str(late) == (
        "rank 0 waited 0.2 s (launch.time_limit_s) for barrier 1 of 4 ranks: a rank has not come; "
        "see its log"
    )


def test_ranks_leave_together_where_all_are_fine():
    def body(meeting):
        time.sleep(0.05 * meeting.rank)
        return meeting.leave(fine=True)

    assert together(body) == [True] * RANKS


def test_nobody_makes_collective_calls_where_one_cannot():
    assert together(lambda meeting: meeting.leave(fine=meeting.rank != 2)) == [False] * RANKS


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.2])
def test_after_a_failure_those_who_do_not_come_are_not_waited_for_and_all_know(
    delay_s, monkeypatch
):
    monkeypatch.setattr(meeting_module, "_LEAVE_S", 0.1)

    def body(meeting):
        if meeting.rank == 1:
            meeting.fail()
        if meeting.rank == 3:
            time.sleep(delay_s)
        return meeting.leave(fine=True)

    found = together(body)

    # Late by a hair, it may be either way, but the same for all.
    assert len(set(found)) == 1
    if delay_s != 0.05:
        assert found[0] == (delay_s == 0.0)


def test_processes_of_the_launcher_meet_in_its_store(tmp_path):
    point = compose_point("hardware=h200_x2", "kernel=dispatch", "launch.num_ranks=3")
    point.config["workload"]["num_experts"] = 9
    logs = tmp_path / "logs"
    logs.mkdir()

    records = start_ranks(
        point, log_dir=logs, spill_dir=tmp_path, stopping=Stopping(), entry=entries.meets
    )

    assert [record.rank for record in records] == [0, 1, 2]
    agreed = {"word": 77, "all_of_three": 1, "all_but_rank_1": 0, "left": 1}
    assert [record.counts for record in records] == [agreed] * 3
