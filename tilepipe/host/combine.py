"""Combine on the host: rows pushed home as they are finished, tokens reduced as they complete.

Knows nothing of how rows are computed.
"""

import heapq
import threading
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tilepipe.config.choices import Granularity
from tilepipe.fabric.watch import THREAD_LOOK_S, Watch
from tilepipe.host.buffers import HomeTarget, unpack_home
from tilepipe.host.delays import Delays, pause
from tilepipe.host.recorder import NoLane
from tilepipe.records import SpanKind
from tilepipe.schedule.completion import completion_capacity, plan_completion
from tilepipe.schedule.layout import ReceiveLayout
from tilepipe.schedule.plan import HomePlan, RankPlan
from tilepipe.schedule.sends import Tickets
from tilepipe.schedule.settings import PlanSettings
from tilepipe.workload import bf16

__all__ = ["CompletionQueue", "Pusher", "reduce_tokens", "wait_home"]

# Tokens summed in one go; bounds the float32 scratch, has no effect on the result.
_REDUCE_BATCH = 256


class CompletionQueue:
    """Units finished by the GEMM, in the order in which they were finished.

    One unit is an (M tile, chunk), a row or an expert, by granularity. The computing thread is the
    only writer: it fills the next cell with `epoch << 32 | unit`; the sending thread waits on its
    next cell. A cell of an earlier launch carries another epoch, so nothing is reset.
    """

    def __init__(self, settings: PlanSettings, *, rows: int) -> None:
        """`rows`: receive rows that this rank has room for."""
        self._settings = settings
        self._cells = np.zeros(completion_capacity(settings, rows), np.int64)
        self._epoch = 0
        self._news = threading.Event()

    def open(self, layout: ReceiveLayout, epoch: int) -> None:
        """Begin a launch; the computing thread of the last one has ended."""
        self._layout, self._epoch, self._filled = layout, epoch, 0
        plan = plan_completion(layout, self._settings)
        self._left_of_chunk = plan.tiles_of_chunk.copy()
        self._left_of_expert = plan.tiles_of_expert.copy()
        self.num_units = plan.num_units

    def tile_stored(self, m_tile: int, n_tile: int) -> None:
        """Count one stored output tile and publish the units that it completes."""
        settings = self._settings
        expert, first, valid = self._layout.tiles[m_tile].tolist()
        chunk = settings.chunk_of_n_tile(n_tile)
        self._left_of_chunk[m_tile, chunk] -= 1
        self._left_of_expert[expert] -= 1
        match settings.granularity:
            case Granularity.tile:
                if self._left_of_chunk[m_tile, chunk] == 0:
                    self._publish(np.array([m_tile * settings.num_chunks + chunk]))
            case Granularity.token:
                if not self._left_of_chunk[m_tile].any():
                    self._publish(np.arange(first, first + valid))
            case Granularity.expert:
                if self._left_of_expert[expert] == 0:
                    self._publish(np.array([expert]))

    def unit(self, number: int) -> int | None:
        """The unit in cell `number`, or None while it is not filled."""
        word = int(self._cells[number])
        return word & 0xFFFFFFFF if word >> 32 == self._epoch else None

    def sleep(self, nap_s: float) -> None:
        """Sleep until a cell is filled: no look in vain takes the core from the GEMM."""
        self._news.wait(THREAD_LOOK_S)
        self._news.clear()

    def _publish(self, units: NDArray[np.int64]) -> None:
        end = self._filled + len(units)
        self._cells[self._filled : end] = (self._epoch << 32) | units
        self._filled = end
        self._news.set()


class Pusher:
    """Pushes one rank's finished rows home."""

    def __init__(
        self,
        settings: PlanSettings,
        plan: RankPlan,
        tickets: Tickets,  # of plan_returns
        row_home: NDArray[np.uint64],  # (rows,) of this rank
        y: NDArray[np.uint16],  # (rows, hidden) bf16 bits to push
        target: HomeTarget,
        home: HomePlan,
        watch: Watch,
        *,
        chunk_columns: list[slice],
        epoch: int,
        delays: Delays,
        lane: NoLane,
    ) -> None:
        self._settings, self._plan, self._tickets = settings, plan, tickets
        self._lane = lane
        self._y, self._target, self._by_rank = y, target, home.by_rank
        self._watch, self._epoch, self._delays = watch, epoch, delays
        self._chunk_columns = chunk_columns
        _, token, slot = unpack_home(row_home[: plan.layout.extent])
        self._token, self._home_row = token, token * settings.num_topk + slot
        self._index_tickets()
        self.num_pushed = 0

    def push_all(self) -> None:
        """Push every row whole, in plan order: nothing is being computed."""
        self._lane.lap(SpanKind.idle)
        for number in range(len(self._tickets)):
            self._push(number, 0, int(self._tickets.num_rows[number]), None)

    def push_after(self, computed: threading.Event) -> None:
        """Push every row whole once the GEMM has ended."""
        self._watch.until(
            computed.is_set,
            lambda: "role push: the GEMM has not ended",
            sleep=lambda _: computed.wait(THREAD_LOOK_S),
        )
        self.push_all()

    def push_as_completed(self, queue: CompletionQueue) -> None:
        """Push units as they appear; of those at hand, the one that the plan's order puts first."""
        self._lane.lap(SpanKind.idle)
        at_hand: list[tuple[int, int, int, int]] = []  # place in order, chunk (-1 all), row, rows
        for number in range(queue.num_units):
            while (unit := queue.unit(number)) is None:
                if at_hand:
                    self._push_entry(heapq.heappop(at_hand))
                else:
                    self._wait_cell(queue, number)
            for entry in self._entries(unit):
                heapq.heappush(at_hand, entry)
        while at_hand:
            self._push_entry(heapq.heappop(at_hand))

    def _wait_cell(self, queue: CompletionQueue, number: int) -> None:
        self._watch.until(
            lambda: queue.unit(number) is not None,
            lambda: f"role push, epoch {self._epoch}, cell {number} of {queue.num_units}: empty",
            sleep=queue.sleep,
        )
        unit = queue.unit(number)
        assert unit is not None
        self._lane.lap(SpanKind.wait, unit, True)

    def _entries(self, unit: int) -> Iterator[tuple[int, int, int, int]]:
        """Pushes that a finished unit allows."""
        match self._settings.granularity:
            case Granularity.tile:
                m_tile, chunk = divmod(unit, self._settings.num_chunks)
                for number in self._of_tile(m_tile):
                    yield number, chunk, 0, int(self._tickets.num_rows[number])
            case Granularity.token:
                number = int(self._ticket_of_row[unit])
                yield number, -1, unit - int(self._tickets.first_row[number]), 1
            case Granularity.expert:
                first, last = self._plan.layout.expert_first_tile[unit : unit + 2]
                for m_tile in range(first, last):
                    for number in self._of_tile(m_tile):
                        yield number, -1, 0, int(self._tickets.num_rows[number])

    def _index_tickets(self) -> None:
        """Prepare look-ups from M tile and row to tickets."""
        tickets = self._tickets
        self._by_tile = np.argsort(tickets.tile, kind="stable")
        bounds = np.searchsorted(
            tickets.tile[self._by_tile], np.arange(self._plan.layout.num_tiles + 1)
        )
        self._tile_bounds = bounds.tolist()
        if self._settings.granularity is Granularity.token:
            number = np.repeat(np.arange(len(tickets)), tickets.num_rows)
            done = np.cumsum(tickets.num_rows) - tickets.num_rows
            rows = tickets.first_row[number] + np.arange(len(number)) - done[number]
            self._ticket_of_row = np.zeros(self._plan.layout.extent, np.int64)
            self._ticket_of_row[rows] = number

    def _of_tile(self, m_tile: int) -> list[int]:
        lo, hi = self._tile_bounds[m_tile : m_tile + 2]
        members: list[int] = self._by_tile[lo:hi].tolist()
        return members

    def _push_entry(self, entry: tuple[int, int, int, int]) -> None:
        number, chunk, offset, rows = entry
        self._push(number, offset, rows, None if chunk < 0 else chunk)

    def _push(self, number: int, offset: int, num_rows: int, chunk: int | None) -> None:
        """Store rows of one ticket at home (all columns, or one chunk), then raise its counter."""
        if self.num_pushed == len(self._tickets) // 2:
            pause(self._delays.mid_send_ms)
        pause(self._delays.send_ms)
        peer = int(self._tickets.peer[number])
        first = int(self._tickets.first_row[number]) + offset
        rows = slice(first, first + num_rows)
        columns = slice(None) if chunk is None else self._chunk_columns[chunk]
        self._target.y[peer][self._home_row[rows], columns] = self._y[rows, columns]
        # Single-writer words: this rank's column. A ticket's rows belong to one expert, so its
        # tokens are distinct and the indexed addition counts each of them.
        raised = self._settings.num_chunks if chunk is None else 1
        if self._by_rank:
            self._target.rank_ready[peer][self._target.rank] += num_rows * raised
        else:
            self._target.token_ready[peer][self._token[rows], self._target.rank] += raised
        self.num_pushed += 1
        self._lane.lap(SpanKind.send, number, -1 if chunk is None else chunk, num_rows)
        if self.num_pushed % 64 == 0:
            self._watch.check_peers()


def reduce_tokens(
    target: HomeTarget,
    home: HomePlan,
    topk_idx: NDArray[np.int32],  # (num_tokens, num_topk)
    topk_weights: NDArray[np.float32],  # (num_tokens, num_topk)
    out: NDArray[np.uint16],  # (num_tokens, hidden) bf16 bits
    watch: Watch,
    *,
    epoch: int,
    delays: Delays,
    lane: NoLane,
) -> None:
    """Sum every token once its rows are home: FP32, in slot order, one rounding.

    Tokens are taken as they complete; each one's sum depends on nothing but its own rows, so the
    result is the same bits in whatever order rows arrive.
    """
    pending = np.ones(len(topk_idx), bool)
    while pending.any():
        waited = watch.until(
            lambda: bool((_complete(target, home) & pending).any()),
            lambda: _reduce_sentence(target, home, pending, epoch),
        )
        lane.lap(SpanKind.wait, part=waited)
        tokens = np.flatnonzero(_complete(target, home) & pending)[:_REDUCE_BATCH]
        if len(tokens) == pending.sum():
            pause(delays.last_read_ms)
        rows = target.y[target.rank].reshape(-1, topk_idx.shape[1], out.shape[1])
        out[tokens] = _weighted_sum(rows, tokens, topk_idx, topk_weights)
        pending[tokens] = False
        lane.lap(SpanKind.reduce, int(tokens[0]), num_rows=len(tokens))


def wait_home(
    target: HomeTarget, home: HomePlan, watch: Watch, *, epoch: int, lane: NoLane
) -> None:
    """Return once every row of this rank's tokens is home."""
    waited = watch.until(
        lambda: bool(_complete(target, home).all()),
        lambda: _reduce_sentence(target, home, ~_complete(target, home), epoch),
    )
    lane.lap(SpanKind.wait, part=waited)


def _complete(target: HomeTarget, home: HomePlan) -> NDArray[np.bool_]:
    if home.by_rank:
        here = bool((target.rank_ready[target.rank] >= home.rank_expected).all())
        return np.full(len(home.token_expected), here)
    seen = target.token_ready[target.rank][: len(home.token_expected)].sum(axis=1)
    return np.asarray(seen >= home.token_expected)


def _weighted_sum(
    rows: NDArray[np.uint16],
    tokens: NDArray[np.int64],
    topk_idx: NDArray[np.int32],
    topk_weights: NDArray[np.float32],
) -> NDArray[np.uint16]:
    total = np.zeros((len(tokens), rows.shape[2]), np.float32)
    for slot in range(topk_idx.shape[1]):
        kept = topk_idx[tokens, slot] >= 0
        chosen = tokens[kept]
        total[kept] += topk_weights[chosen, slot, None] * bf16.from_bits(rows[chosen, slot])
    return bf16.to_bits(total)


def _reduce_sentence(
    target: HomeTarget, home: HomePlan, pending: NDArray[np.bool_], epoch: int
) -> str:
    if home.by_rank:
        return (
            f"role reduce, epoch {epoch}: expected {home.rank_expected.tolist()} rows x chunks by "
            f"source rank, seen {target.rank_ready[target.rank].tolist()}"
        )
    token = int(np.flatnonzero(pending)[0])
    return (
        f"role reduce, token {token}, epoch {epoch}: expected {home.token_expected[token]} rows x "
        f"chunks, seen {target.token_ready[target.rank][token].sum()}"
    )
