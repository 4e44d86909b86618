"""One rank of the host executor: its memory, its gate, and the launches of every operation.

Knows nothing of configuration, oracle or clocks beyond the stamps that a launch leaves.

A launch runs two threads: the caller computes (waits for rows, multiplies, reduces), a second one
sends. Both are joined before the launch returns, so the next launch's gate may promise its peers
that every reader here has ended.
"""

import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tilepipe.fabric.host import HeapPlace, HostHeap
from tilepipe.host.buffers import DispatchTarget, HomeTarget, unpack_home
from tilepipe.host.combine import CompletionQueue, Pusher, reduce_tokens, wait_home
from tilepipe.host.delays import NO_DELAYS, pause
from tilepipe.host.dispatch import Arrivals, EarlyTiles, send_rows
from tilepipe.host.gemm import GroupedGemm
from tilepipe.host.launch import Form, Stamps, TwoThreads
from tilepipe.host.memory import specs_of
from tilepipe.host.protocol import LaunchGate
from tilepipe.host.recorder import NO_LANES, Lanes
from tilepipe.host.spans import lanes_for, spans_of
from tilepipe.records import Span, SpanKind
from tilepipe.schedule.completion import chunk_columns
from tilepipe.schedule.layout import check_capacity, count_rows
from tilepipe.schedule.plan import (
    RankPlan,
    homeward_plan,
    make_rank_plan,
    plan_home,
    plan_returns,
)
from tilepipe.schedule.settings import PlanSettings
from tilepipe.schedule.shape import Shape, capacity_of

__all__ = ["HostRank"]


class HostRank:
    """Standing state of one rank between launches."""

    def __init__(
        self,
        place: HeapPlace,
        *,
        rank: int,
        settings: PlanSettings,
        shape: Shape,
        watchdog_s: float,
        start_limit_s: float,
    ) -> None:
        """Reserve symmetric memory together with all peers; see HostHeap for what it raises."""
        self.rank, self.settings, self.shape = rank, settings, shape
        self.capacity = capacity_of(settings, shape)
        self.heap = HostHeap(
            place,
            rank=rank,
            num_ranks=settings.num_ranks,
            specs=specs_of(settings, shape),
            watchdog_s=watchdog_s,
            start_limit_s=start_limit_s,
        )
        self.watch = self.heap.watch
        fingerprint = zlib.crc32(repr((settings, shape)).encode())
        self.gate = LaunchGate(self.heap, fingerprint=fingerprint)
        self._targets = [
            DispatchTarget(self.heap, settings.granularity, suffix) for suffix in shape.suffixes
        ]
        self._homes = [HomeTarget(self.heap, suffix) for suffix in shape.suffixes]
        self._queue = CompletionQueue(settings.homeward, rows=self.capacity)
        self._threads = TwoThreads(self.heap)
        self.delays = NO_DELAYS
        self.plan: RankPlan | None = None
        self._lanes = NO_LANES

    def set_routing(
        self,
        topk_idx: NDArray[np.int32],  # (num_tokens, num_topk) of this rank
        topk_weights: NDArray[np.float32],  # (num_tokens, num_topk)
    ) -> None:
        """Routing of the launches that follow; takes effect at the next dispatch."""
        self._topk_idx, self._topk_weights = topk_idx, topk_weights
        self._rows_to = count_rows(topk_idx, self.settings.num_experts)

    @property
    def current_plan(self) -> RankPlan:
        """The plan of the latest exchange."""
        assert self.plan is not None, "no dispatch has been launched yet"
        return self.plan

    @property
    def recv_x(self) -> NDArray[np.uint16]:  # (capacity, dispatch_hidden)
        """Rows that this rank has received."""
        return self._targets[0].x[self.rank]

    def received_homes(
        self,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Receive rows that hold one, and their source rank, token and slot."""
        _, rows = self.current_plan.layout.held_rows()
        return rows, *unpack_home(self._targets[0].row_home[self.rank][rows])

    def poison_home(self, value: int) -> None:
        """Overwrite the rows that combine has brought home to this rank."""
        self._homes[0].y[self.rank][...] = value

    def record(self, launch: Callable[[], object]) -> tuple[Span, ...]:
        """Run a launch that is stamped, and say what both threads did; its time is no sample.

        A launch of the same routing has gone before.
        """
        self._lanes = self._empty_lanes(self.current_plan, self.settings)
        try:
            launch()
            return self._recorded(self.current_plan, self.settings)
        finally:
            self._lanes = NO_LANES

    def _empty_lanes(self, plan: RankPlan, settings: PlanSettings) -> Lanes:
        return lanes_for(plan, settings, num_tokens=len(self._topk_idx))

    def _recorded(self, plan: RankPlan, settings: PlanSettings) -> tuple[Span, ...]:
        lanes, stamps, tickets = self._lanes, self._threads.latest, self._tickets
        return spans_of(lanes, stamps, plan=plan, tickets=tickets, settings=settings)

    def close(self) -> None:
        """End the sending thread; peers may still read this rank's memory."""
        self._threads.close()

    # Launches. Each runs on all ranks at once, in the same order.

    def dispatch(self, x: NDArray[np.uint16]) -> Stamps:
        """Send every row and wait for all that come here."""
        start_ns, plan, arrivals = self._open_dispatch(spare=False)
        planned_ns = self._planned_ns()
        sending = self._sending(plan, x, self._targets[0])
        return self._threads.run(start_ns, planned_ns, compute=arrivals.wait_all, send=sending)

    def dispatch_gemm(
        self,
        x: NDArray[np.uint16],  # (num_tokens, K)
        gemm: GroupedGemm,
        out: NDArray[np.uint16],  # (capacity, N)
        form: Form,
        *,
        count_early: bool = False,  # of Form.fused: tiles taken up before the last row came
    ) -> Stamps:
        """Dispatch and multiply what arrives; see Form for the variants."""
        if form is Form.gemm_all:
            return self.grouped_gemm(self.recv_x, gemm, out)
        contended = form is Form.gemm_contended
        start_ns, plan, arrivals = self._open_dispatch(spare=contended)
        if form in (Form.gemm_flags, Form.gemm_contended):
            arrivals.preset()
        planned_ns = self._ready_ns(form)
        early, first_tile = EarlyTiles(arrivals, plan), threading.Event()

        def compute() -> None:
            if form is Form.sequential:
                arrivals.wait_all()

            def before_tile(tile: int) -> None:
                if form is not Form.sequential:
                    arrivals.wait_tile(tile)
                if count_early and form is Form.fused:
                    early.count()

            gemm.run(
                plan,
                self.recv_x,
                out,
                before_tile=before_tile,
                after_read=lambda _: self._pause_tile(form),
                after_store=lambda *_: first_tile.set(),
                lane=self._lanes.computing,
            )
            first_tile.set()

        target = self._targets[1 if contended else 0]
        sending = None
        if form is not Form.gemm_flags:
            held_for = first_tile if form is Form.fused else None
            sending = self._sending(plan, x, target, held_for)
        stamps = self._threads.run(start_ns, planned_ns, compute=compute, send=sending)
        return replace(stamps, early=early.num_early)

    def grouped_gemm(
        self, a: NDArray[np.uint16], gemm: GroupedGemm, out: NDArray[np.uint16]
    ) -> Stamps:
        """Multiply rows that lie here already; no flags, no communication, no gate."""
        start_ns = time.monotonic_ns()

        def compute() -> None:
            lane, slow = self._lanes.computing, self.delays.gemm_ms
            gemm.run(self.current_plan, a, out, after_read=lambda _: pause(slow), lane=lane)

        return self._threads.run(start_ns, start_ns, compute=compute, send=None)

    def combine(
        self,
        y: NDArray[np.uint16],  # (capacity, home_hidden), rows in receive order
        out: NDArray[np.uint16],  # (num_tokens, home_hidden)
    ) -> Stamps:
        """Push every row home and reduce the tokens of this rank as they complete."""
        start_ns, pusher = self._open_combine(y, spare=False)
        planned_ns = self._planned_ns()
        return self._threads.run(
            start_ns, planned_ns, compute=self._reducing(out), send=pusher.push_all
        )

    def push(self, y: NDArray[np.uint16]) -> Stamps:  # (capacity, home_hidden)
        """Push every row home and wait for all that come here; nothing is reduced."""
        start_ns, pusher = self._open_combine(y, spare=False)
        planned_ns = self._planned_ns()
        return self._threads.run(
            start_ns, planned_ns, compute=self._wait_home, send=pusher.push_all
        )

    def reduce(self, out: NDArray[np.uint16]) -> Stamps:
        """Reduce rows that an earlier combine brought home; no gate, nothing is waited for."""
        self._homes[0].preset(self._home_plan)
        start_ns = time.monotonic_ns()
        return self._threads.run(start_ns, start_ns, compute=self._reducing(out), send=None)

    def gemm_combine(
        self,
        a: NDArray[np.uint16],  # (capacity, K), rows in receive order
        gemm: GroupedGemm,
        y: NDArray[np.uint16],  # (capacity, home_hidden), written
        out: NDArray[np.uint16],  # (num_tokens, home_hidden)
        form: Form,
    ) -> Stamps:
        """Multiply, push rows home as they are finished, reduce; see Form for the variants."""
        if form is Form.gemm_all:
            return self.grouped_gemm(a, gemm, y)
        start_ns, pusher = self._open_combine(y, spare=form is Form.gemm_contended)
        plan, queue = homeward_plan(self.current_plan, self.settings), self._queue
        queue.open(plan.layout, self.gate.epoch)
        planned_ns = self._ready_ns(form)
        computed = threading.Event()
        pushed_before_last = 0

        def before_tile(tile: int) -> None:
            if form is Form.fused and tile == plan.layout.num_tiles - 1:
                self._hold_last_tile(pusher)

        def compute() -> None:
            nonlocal pushed_before_last
            gemm.run(
                plan,
                a,
                y,
                before_tile=before_tile,
                after_read=lambda _: self._pause_tile(form),
                after_store=None if form is Form.sequential else queue.tile_stored,
                lane=self._lanes.computing,
            )
            pushed_before_last = pusher.num_pushed
            computed.set()
            if form is Form.sequential:
                self._wait_home()
            if form in (Form.fused, Form.sequential):
                self._reducing(out)()

        def send() -> None:
            if form is Form.sequential:
                pusher.push_after(computed)
            else:
                pusher.push_as_completed(queue)

        sending = None if form is Form.gemm_publish else send
        stamps = self._threads.run(start_ns, planned_ns, compute=compute, send=sending)
        return replace(stamps, early=pushed_before_last if form is Form.fused else 0)

    def _pause_tile(self, form: Form) -> None:
        pause(self.delays.gemm_ms)
        if form in (Form.fused, Form.gemm_publish, Form.gemm_contended):
            pause(self.delays.publish_ms)
        # Fused, communication runs beside the GEMM as well.
        if form in (Form.fused, Form.gemm_contended):
            pause(self.delays.contended_ms)

    def _hold_last_tile(self, pusher: Pusher) -> None:
        if self.delays.hold_last_tile:
            self.watch.until(
                lambda: pusher.num_pushed > 0, lambda: "role GEMM, held tile: nothing is pushed"
            )

    def _ready_ns(self, form: Form) -> int:
        """The moment from which a launch counts as planned.

        A stage that is timed alone begins when every rank is ready, as it does for `gemm_all`: rank
        by rank would leave the first ones the cores of those that still plan.
        """
        if form in (Form.gemm_flags, Form.gemm_publish, Form.gemm_contended):
            self.heap.barrier()
        return self._planned_ns()

    def _planned_ns(self) -> int:
        self._lanes.computing.lap(SpanKind.plan)
        return time.monotonic_ns()

    def _open_dispatch(self, *, spare: bool) -> tuple[int, RankPlan, Arrivals]:
        """Pass the gate, make the plan; the waits are those of the main buffers."""
        start_ns = time.monotonic_ns()
        pause(self.delays.entry_ms)
        targets = self._targets if spare else self._targets[:1]
        counters = [words for target in targets for words in target.counters()]
        counts = self.gate.exchange(self._rows_to, counters + self._homes[0].counters())
        self._lanes.computing.lap(SpanKind.gate)
        check_capacity(counts, self.settings, self.capacity)
        epoch = self.gate.epoch
        plan = make_rank_plan(self.rank, self._topk_idx, counts, self.settings, epoch=epoch)
        self.plan, self._tickets = plan, plan.tickets
        self._sent_idx, self._sent_weights = self._topk_idx, self._topk_weights
        arrivals = Arrivals(
            plan,
            self._targets[0],
            self.watch,
            epoch=epoch,
            delays=self.delays,
            lane=self._lanes.computing,
        )
        return start_ns, plan, arrivals

    def _open_combine(self, y: NDArray[np.uint16], *, spare: bool) -> tuple[int, Pusher]:
        """Pass the gate on the plan of the latest dispatch, order the way back."""
        start_ns = time.monotonic_ns()
        pause(self.delays.entry_ms)
        homes = self._homes if spare else self._homes[:1]
        self.gate.reopen([words for home in homes for words in home.counters()])
        self._lanes.computing.lap(SpanKind.gate)
        return start_ns, self._pusher(y, homes[-1])

    def _pusher(self, y: NDArray[np.uint16], home: HomeTarget) -> Pusher:
        """Plan the way home of rows that have arrived."""
        epoch, plan, settings = self.gate.epoch, self.current_plan, self.settings.homeward
        row_home = self._targets[0].row_home[self.rank]
        rank, token, _ = unpack_home(row_home[: plan.layout.extent])
        tickets = plan_returns(
            plan.layout, rank.astype(np.int32), token.astype(np.int32), settings, epoch=epoch
        )
        self._tickets, self._home_plan = tickets, plan_home(self._sent_idx, settings)
        return Pusher(
            settings,
            plan,
            tickets,
            row_home,
            y,
            home,
            self._home_plan,
            self.watch,
            chunk_columns=chunk_columns(settings, self.shape.tile_n, self.shape.home_hidden),
            epoch=epoch,
            delays=self.delays,
            lane=self._lanes.sender,
        )

    def _sending(
        self,
        plan: RankPlan,
        x: NDArray[np.uint16],
        target: DispatchTarget,
        first_tile: threading.Event | None = None,
    ) -> Callable[[], None]:
        return lambda: send_rows(
            plan,
            x,
            target,
            self.watch,
            epoch=self.gate.epoch,
            num_experts_per_rank=self.settings.num_experts_per_rank,
            delays=self.delays,
            lane=self._lanes.sender,
            first_tile_computed=first_tile,
        )

    def _wait_home(self) -> None:
        home, plan, lane = self._homes[0], self._home_plan, self._lanes.computing
        wait_home(home, plan, self.watch, epoch=self.gate.epoch, lane=lane)

    def _reducing(self, out: NDArray[np.uint16]) -> Callable[[], None]:
        return lambda: reduce_tokens(
            self._homes[0],
            self._home_plan,
            self._sent_idx,
            self._sent_weights,
            out,
            self.watch,
            epoch=self.gate.epoch,
            delays=self.delays,
            lane=self._lanes.computing,
        )
