"""Dispatch on the host: the sending loop, and what a consumer waits for.

Knows nothing of GEMM or combine.
"""

import threading

import numpy as np
from numpy.typing import NDArray

from tilepipe.config.choices import Granularity
from tilepipe.fabric.watch import Watch
from tilepipe.host.buffers import DispatchTarget, pack_home
from tilepipe.host.delays import Delays, pause
from tilepipe.host.recorder import NoLane
from tilepipe.records import SpanKind
from tilepipe.schedule.plan import RankPlan

__all__ = ["Arrivals", "EarlyTiles", "send_rows"]


def send_rows(
    plan: RankPlan,
    x: NDArray[np.uint16],  # (num_tokens, hidden) bf16 bits
    target: DispatchTarget,
    watch: Watch,
    *,
    epoch: int,
    num_experts_per_rank: int,
    delays: Delays,
    lane: NoLane,
    first_tile_computed: threading.Event | None = None,
) -> None:
    """Push every row of this rank, ticket by ticket in plan order, and raise its flag."""
    lane.lap(SpanKind.idle)
    words = pack_home(plan.rank, plan.row_token, plan.row_slot)
    tickets = plan.tickets
    fields = (tickets.peer, tickets.first_row, tickets.source_start, tickets.num_rows)
    columns = [values.tolist() for values in (*fields, tickets.tile, tickets.expert)]
    lane.lap(SpanKind.plan)
    for number, (peer, first, start, rows, tile, expert) in enumerate(zip(*columns, strict=True)):
        if number == len(tickets) // 2:
            pause(delays.mid_send_ms)
        if delays.hold_last_send and first_tile_computed and number == len(tickets) - 1:
            watch.until(first_tile_computed.is_set, lambda: "role send, held ticket: no tile yet")
        pause(delays.send_ms)
        if target.x[peer].shape[1]:
            # mode="clip" lets numpy write straight into peer memory instead of a temporary
            source = plan.row_token[start : start + rows]
            np.take(x, source, axis=0, out=target.x[peer][first : first + rows], mode="clip")
        target.row_home[peer][first : first + rows] = words[start : start + rows]
        target.raise_ready(
            peer,
            first_row=first,
            num_rows=rows,
            tile=tile,
            local_expert=expert % num_experts_per_rank,
            epoch=epoch,
        )
        lane.lap(SpanKind.send, number, num_rows=rows)
        if number % 64 == 0:
            watch.check_peers()


class Arrivals:
    """Rows of one launch as they come in at this rank."""

    def __init__(
        self,
        plan: RankPlan,
        target: DispatchTarget,
        watch: Watch,
        *,
        epoch: int,
        delays: Delays,
        lane: NoLane,
    ) -> None:
        self._plan, self._target, self._watch = plan, target, watch
        self._epoch, self._delays, self._lane = epoch, delays, lane
        self._flag = target.row_flag[plan.rank]

    def preset(self) -> None:
        """Write thresholds where counters would grow, so that no wait ever blocks (rule 6)."""
        if self._target.granularity is Granularity.token:
            self._flag[: self._plan.layout.extent] = self._epoch
        else:
            expected = self._plan.readiness.expected
            self._target.ready()[: len(expected), self._plan.rank] = expected

    def wait_tile(self, tile: int) -> None:
        """Return once every row of M tile `tile` is here; one look at the flags costs one delay."""
        pause(self._delays.check_ms)
        if self._target.granularity is Granularity.token:
            _, first, valid = self._plan.layout.tiles[tile]
            flags = self._flag[first : first + valid]
            waited = self._watch.until(
                lambda: bool((flags == self._epoch).all()),
                lambda: self._sentence(tile, valid, int((flags == self._epoch).sum())),
            )
        else:
            counter = self._plan.readiness.counter_of_tile[tile]
            words = self._target.ready()[counter]
            expected = self._plan.readiness.expected[counter]
            waited = self._watch.until(
                lambda: bool(words.sum() >= expected),
                lambda: self._sentence(tile, int(expected), int(words.sum())),
            )
        self._lane.lap(SpanKind.wait, tile, waited)
        if tile == self._plan.layout.num_tiles - 1:
            pause(self._delays.last_read_ms)

    def wait_all(self) -> None:
        """Return once every row of this launch is here."""
        total = self._plan.layout.num_rows
        waited = self._watch.until(
            lambda: self.num_arrived() >= total,
            lambda: f"role receive, epoch {self._epoch}: {self.num_arrived()} of {total} rows",
        )
        self._lane.lap(SpanKind.wait, part=waited)
        pause(self._delays.last_read_ms)

    def num_arrived(self) -> int:
        """Rows of this launch that are here."""
        layout = self._plan.layout
        if self._target.granularity is Granularity.token:
            return int((self._flag[: layout.extent] == self._epoch).sum())
        return int(self._target.ready()[: len(self._plan.readiness.expected)].sum())

    def _sentence(self, tile: int, expected: int, seen: int) -> str:
        expert = int(self._plan.layout.tiles[tile, 0])
        return (
            f"role GEMM, tile {tile}, local expert {expert}, epoch {self._epoch}: "
            f"expected {expected} rows, seen {seen}"
        )


class EarlyTiles:
    """Counts M tiles that the GEMM took up before the last row had arrived."""

    def __init__(self, arrivals: Arrivals, plan: RankPlan) -> None:
        self._arrivals, self._total = arrivals, plan.layout.num_rows
        self._all_here = False
        self.num_early = 0

    def count(self) -> None:
        """The GEMM takes up an M tile now."""
        self._all_here = self._all_here or self._arrivals.num_arrived() >= self._total
        self.num_early += not self._all_here
