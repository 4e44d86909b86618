"""What the laps of a recorded launch stand for: tiles, tickets, peers and deadlines of its plan.

Knows nothing of threads and clocks.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tilepipe.config.choices import Granularity
from tilepipe.host.launch import Stamps
from tilepipe.host.recorder import Lane, Lanes, Lap
from tilepipe.records import Span, SpanKind, SpanRole, with_idle
from tilepipe.schedule.completion import plan_completion
from tilepipe.schedule.plan import RankPlan
from tilepipe.schedule.sends import Tickets
from tilepipe.schedule.settings import PlanSettings

__all__ = ["lanes_for", "spans_of"]

_LAUNCH = (SpanKind.gate, SpanKind.plan)


def lanes_for(plan: RankPlan, settings: PlanSettings, *, num_tokens: int) -> Lanes:
    """Empty lanes with room for any launch of this plan."""
    layout = plan.layout
    # Gate, Plan, every tile, a wait and a copy an M tile, a wait and a sum a token at worst.
    computing = 4 + len(plan.handout) + 2 * layout.num_tiles + 2 * num_tokens
    # Idle, Plan, and a ticket a row at worst, in chunks, with a wait for each unit that is pushed.
    pushes = max(layout.num_rows, plan.num_sent) * settings.num_chunks
    sender = 2 + pushes + plan_completion(layout, settings).num_units
    return Lanes(computing=Lane(computing), sender=Lane(sender))


def spans_of(
    lanes: Lanes, stamps: Stamps, *, plan: RankPlan, tickets: Tickets, settings: PlanSettings
) -> tuple[Span, ...]:
    """Spans of both lanes, each from the launch's start on this rank to its end.

    `tickets` are those that the launch has sent: the plan's own, or those of the way home.
    """
    meaning = _Meaning(plan, tickets, settings)
    whole: list[Span] = []
    for name, lane, role in (
        ("computing", lanes.computing, SpanRole.compute),
        ("sender", lanes.sender, SpanRole.communication),
    ):
        assert isinstance(lane, Lane), "a launch that was not recorded"
        spans = [
            Span(
                lane=name,
                role=SpanRole.plan if lap.kind in _LAUNCH else role,
                kind=lap.kind,
                start_ns=lap.start_ns,
                end_ns=lap.end_ns,
                **dict(meaning.of(lap, sent=role is SpanRole.communication)),
            )
            for lap in lane.laps(stamps.start_ns)
        ]
        whole += with_idle(
            spans, lane=name, role=role, start_ns=stamps.start_ns, end_ns=stamps.end_ns
        )
    return tuple(whole)


class _Meaning:
    """Looks up what a lap's numbers stand for."""

    def __init__(self, plan: RankPlan, tickets: Tickets, settings: PlanSettings) -> None:
        self._settings, self._layout, self._tickets = settings, plan.layout, tickets
        self._first_expert = plan.rank * settings.num_experts_per_rank
        self._place: dict[tuple[int, int], int] = {}
        self._first_place: dict[int, int] = {}
        for place, (m_tile, n_tile) in enumerate(plan.handout.tolist()):
            self._place[m_tile, n_tile] = place
            self._first_place.setdefault(m_tile, place)

    def of(self, lap: Lap, *, sent: bool) -> Iterator[tuple[str, Any]]:
        """Fields of the lap's span; `sent`: it is the sender's."""
        if lap.kind is SpanKind.send:
            yield from self._ticket(lap)
        elif lap.kind is SpanKind.wait and lap.item >= 0 and sent:
            yield from self._unit(lap.item)
        elif lap.item >= 0 and lap.kind is not SpanKind.reduce:
            yield from self._m_tile(lap.item)
            yield "deadline", self._first_place[lap.item]
        if lap.kind is SpanKind.tile:
            yield "n_tile", lap.part
            yield "chunk", self._settings.chunk_of_n_tile(lap.part)
            yield "deadline", self._place[lap.item, lap.part]
        if lap.num_rows >= 0:
            yield "num_rows", lap.num_rows
        if lap.kind is SpanKind.wait and lap.part == 1:
            yield "lateness_ns", lap.end_ns - lap.start_ns

    def _ticket(self, lap: Lap) -> Iterator[tuple[str, int]]:
        tickets, number = self._tickets, lap.item
        yield "ticket", number
        yield "peer", int(tickets.peer[number])
        yield "m_tile", int(tickets.tile[number])
        yield "expert", int(tickets.expert[number])
        yield "deadline", int(tickets.deadline[number])
        if lap.part >= 0:
            yield "chunk", lap.part

    def _unit(self, unit: int) -> Iterator[tuple[str, int]]:
        """What the sender waited for: see `CompletionQueue`."""
        match self._settings.granularity:
            case Granularity.tile:
                m_tile, chunk = divmod(unit, self._settings.num_chunks)
                yield from self._m_tile(m_tile)
                yield "chunk", chunk
            case Granularity.token:
                starts = self._layout.tiles[:, 1]
                yield from self._m_tile(int(np.searchsorted(starts, unit, side="right")) - 1)
            case Granularity.expert:
                yield "expert", self._first_expert + unit

    def _m_tile(self, m_tile: int) -> Iterator[tuple[str, int]]:
        yield "m_tile", m_tile
        yield "expert", self._first_expert + int(self._layout.tiles[m_tile, 0])
