"""CTAs that join those that multiply: when each of them begins, on a clock of our own."""

from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.kernels.warp import lane_functions

TEXT = Path(__file__).resolve().parents[2] / "tilepipe/kernels/overlap/joining.py"
RASTER_M = 8
TILE_NS, APART_NS = 78_000, 3_000  # a tile, and by how much claims of a round lie apart
NUM_K_TILES = 112
LIMIT_NS, ROUND_NS, LOOK_NS = 112 * 2_200, 112 * 180, 200
QUEUE = object()


class Rank:
    """Clusters that take tiles in step, and some that join them."""

    def __init__(self, num_gemm, num_joining, *, num_tickets, joined_ns):
        self.now_ns, self.queue, self.num_tickets = 0, 0, num_tickets
        self.claims = []  # (time, cluster, ticket)
        self.done = []  # (time, cluster) at which one that joins went on
        self._coming, self._numbers = [], count()
        clock = SimpleNamespace(Scope=SimpleNamespace(gpu="gpu"), Int32=int, Boolean=bool)
        given_names = vars(clock) | {
            "load_relaxed": lambda word, dtype, scope: self.queue if word is QUEUE else None,
            "now_ns": lambda: self.now_ns,
            "cutlass": None,
            "cute": None,
        }
        self._join = lane_functions(TEXT.read_text("utf-8"), given_names, ("rest",))["join_in_step"]
        for cluster in range(num_gemm):
            self._at(cluster * APART_NS // max(num_gemm, 1), self._claim, cluster)
        for turn in range(num_joining):
            joining = self._join(
                *(QUEUE, num_tickets, turn, num_joining, num_gemm + num_joining),
                *(RASTER_M, NUM_K_TILES),
            )
            self._at(joined_ns + turn, self._look, num_gemm + turn, joining)

    def _at(self, time_ns, act, *arguments):
        heappush(self._coming, (time_ns, next(self._numbers), act, arguments))

    def _claim(self, cluster):
        ticket, self.queue = self.queue, self.queue + 1
        self.claims.append((self.now_ns, cluster, ticket))
        if ticket < self.num_tickets:
            self._at(self.now_ns + TILE_NS, self._claim, cluster)

    def _look(self, cluster, joining):
        try:
            *_, time_ns = next(joining)
        except StopIteration:
            self.done.append((self.now_ns, cluster))
            self._claim(cluster)
        else:
            self._at(self.now_ns + time_ns, self._look, cluster, joining)

    def run(self):
        while self._coming:
            self.now_ns, _, act, arguments = heappop(self._coming)
            act(*arguments)
        return self

    def rounds(self):
        """Claims of tickets by round of the clusters that were there from the first on."""
        found = []
        for time_ns, _, ticket in self.claims:
            if ticket < self.num_tickets:
                number = time_ns // TILE_NS
                found += [[] for _ in range(number + 1 - len(found))]
                found[number].append((time_ns, ticket))
        return found


@given(
    num_joining=st.integers(1, 15),
    joined_ns=st.integers(TILE_NS // 3, 20 * TILE_NS),
)
@example(num_joining=9, joined_ns=5 * TILE_NS + 20_000)
def test_who_joins_begins_when_the_others_do(num_joining, joined_ns):
    rank = Rank(16 - num_joining, num_joining, num_tickets=16 * 40, joined_ns=joined_ns).run()

    assert len(rank.done) == num_joining
    if num_joining < RASTER_M - 1:  # too few to end a round with a column: nobody stays back
        assert max(time_ns for time_ns, _ in rank.done) - joined_ns <= TILE_NS + APART_NS
    for time_ns, _ in rank.done:
        assert time_ns - joined_ns <= LIMIT_NS + ROUND_NS + LOOK_NS
        if time_ns - joined_ns < LIMIT_NS:
            assert time_ns % TILE_NS <= APART_NS + LOOK_NS
    tickets = sorted(ticket for _, _, ticket in rank.claims)
    assert tickets == list(range(len(tickets))), "each ticket once"


@given(num_joining=st.integers(7, 15), begun_ns=st.integers(0, 20), within=st.floats(0.2, 0.8))
def test_rounds_of_all_begin_with_a_column_once_enough_have_joined(num_joining, begun_ns, within):
    joined_ns = round((begun_ns + within) * TILE_NS)
    rank = Rank(16 - num_joining, num_joining, num_tickets=16 * 60, joined_ns=joined_ns).run()

    rounds = [found for found in rank.rounds() if found and found[0][0] > joined_ns]
    # That of the joining and, where some stay back, the one behind it.
    for found in rounds[2:-1]:
        assert min(ticket for _, ticket in found) % RASTER_M == 0
        assert len(found) == 16


@pytest.mark.parametrize("left", [0, 1, 5])
def test_who_finds_no_tile_left_waits_for_none(left):
    # The others have claimed all but a few, and will find none when they come back.
    rank = Rank(13, 3, num_tickets=13 * 4 + left, joined_ns=3 * TILE_NS + 10_000).run()

    assert max(time_ns for time_ns, _ in rank.done) <= 4 * TILE_NS + APART_NS + ROUND_NS + LOOK_NS


def test_who_waits_for_others_that_claim_nothing_begins_after_the_limit():
    rank = Rank(0, 3, num_tickets=100, joined_ns=1_000).run()

    assert [time_ns - 1_000 for time_ns, _ in rank.done] == pytest.approx([LIMIT_NS] * 3, rel=0.01)
