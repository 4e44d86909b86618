"""A rank of the host executor that also runs whole layers: two halves, one after the other.

Knows nothing of configuration, oracle or clocks beyond the stamps that a launch leaves.

One gate opens both halves: it zeroes the counters of both, so a rank that is ahead may push rows
home to a peer that still multiplies for the first time. Within a rank the first half has ended
before the second begins: all rows are here and know their way home.
"""

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tilepipe.host.dispatch import Arrivals
from tilepipe.host.gemm import GroupedGemm
from tilepipe.host.launch import Form, Stamps
from tilepipe.host.rank import HostRank
from tilepipe.host.recorder import NO_LANES
from tilepipe.records import Span
from tilepipe.schedule.plan import RankPlan, homeward_plan
from tilepipe.schedule.settings import PlanSettings

__all__ = ["HostLayer"]

_Rows = NDArray[np.uint16]  # bf16 bits


class HostLayer(HostRank):
    """Standing state of one rank between launches, of plan settings with one GEMM or with two."""

    _early: tuple[Span, ...] = ()  # of a launch that is recorded: spans of its first half

    def moe_layer(
        self,
        x: _Rows,  # (num_tokens, hidden)
        gemms: tuple[GroupedGemm, GroupedGemm],  # the first one gated
        h: _Rows,  # (capacity, intermediate), written: what lies between them
        y: _Rows,  # (capacity, hidden), written
        out: _Rows,  # (num_tokens, hidden)
        form: Form,  # fused or sequential
    ) -> Stamps:
        """Dispatch and multiply, multiply again and bring home, reduce."""
        start_ns, plan, arrivals = self._open_dispatch(spare=False)
        planned_ns = self._planned_ns()
        first = self._threads.run(
            start_ns,
            planned_ns,
            compute=self._arriving(gemms[0], plan, arrivals, h, form),
            send=self._sending(plan, x, self._targets[0]),
        )
        plan = self._begin_second_half(plan)
        send, compute = self._homeward(gemms[1], plan, h, y, out, form)
        second = self._threads.run(first.end_ns, self._planned_ns(), compute=compute, send=send)
        return replace(second, start_ns=start_ns, planned_ns=planned_ns)

    def _arriving(
        self, gemm: GroupedGemm, plan: RankPlan, arrivals: Arrivals, h: _Rows, form: Form
    ) -> Callable[[], None]:
        def compute() -> None:
            if form is Form.sequential:
                arrivals.wait_all()
            gemm.run(
                plan,
                self.recv_x,
                h,
                before_tile=None if form is Form.sequential else arrivals.wait_tile,
                after_read=lambda _: self._pause_tile(form),
                lane=self._lanes.computing,
            )

        return compute

    def _begin_second_half(self, plan: RankPlan) -> RankPlan:
        """The same plan with the hand-out of the second GEMM; lanes of its own to record it."""
        second = homeward_plan(plan, self.settings)
        if self._lanes is not NO_LANES:
            self._early = super()._recorded(plan, self.settings)
            self._lanes = self._empty_lanes(second, self.settings.homeward)
        self._second_plan = second
        return second

    def _homeward(
        self, gemm: GroupedGemm, plan: RankPlan, h: _Rows, y: _Rows, out: _Rows, form: Form
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """What sends and what computes in the second half."""
        pusher, queue = self._pusher(y, self._homes[0]), self._queue
        queue.open(plan.layout, self.gate.epoch)
        computed, in_turn = threading.Event(), form is Form.sequential

        def compute() -> None:
            gemm.run(
                plan,
                h,
                y,
                after_read=lambda _: self._pause_tile(form),
                after_store=None if in_turn else queue.tile_stored,
                lane=self._lanes.computing,
            )
            computed.set()
            if in_turn:
                self._wait_home()
            self._reducing(out)()

        def send() -> None:
            if in_turn:
                pusher.push_after(computed)
            else:
                pusher.push_as_completed(queue)

        return send, compute

    def _recorded(self, plan: RankPlan, settings: PlanSettings) -> tuple[Span, ...]:
        early, self._early = self._early, ()
        if not early:
            return super()._recorded(plan, settings)
        late = super()._recorded(self._second_plan, settings.homeward)
        # Spans of a lane lie together; those of its second half begin where the first has ended.
        lanes = dict.fromkeys(span.lane for span in early)
        return tuple(span for lane in lanes for span in (*early, *late) if span.lane == lane)
