"""What the laps of a stamped launch stand for: tiles, tickets, peers and deadlines of its plan.

Knows nothing of CuTe, torch and clocks. A lane is a warp of an SM, `SM.WARP`, or the SM alone where
one warp of it has something to tell: warp 0 of a CTA that multiplies issues loads and waits for
rows, or for the warp that waits for them before it hands a tile out; warp 4 multiplies for its
warpgroups, warps that move or reduce rows do so each for itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilepipe.kernels.track import AT_HOME, NO_ITEM, Event, Lap, Track
from tilepipe.records import Span, SpanKind, SpanRole, with_idle
from tilepipe.schedule.plan import RankPlan
from tilepipe.schedule.settings import PlanSettings

__all__ = ["Sending", "Stamped", "dispatched", "returned", "spans_of_tracks"]

_KINDS = {
    Event.look: SpanKind.copy,
    Event.send: SpanKind.send,
    Event.wait: SpanKind.wait,
    Event.load: SpanKind.copy,
    Event.tile: SpanKind.tile,
    Event.reduce: SpanKind.reduce,
}
_SENDING = (Event.look, Event.send)


@dataclass(frozen=True, kw_only=True)
class Sending:
    """What is known of each place of a rank's sending order; -1 where a number has no meaning."""

    ticket: NDArray[np.int64]
    peer: NDArray[np.int64]
    m_tile: NDArray[np.int64]
    chunk: NDArray[np.int64]
    expert: NDArray[np.int64]  # of the whole group
    deadline: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Stamped:
    """One rank of a stamped launch."""

    plan: RankPlan
    settings: PlanSettings
    sending: Sending
    num_first: int = 0  # places of the opening, behind which the others count from 0 again
    homewards: bool = False  # GEMM -> combine
    multiplying: tuple[int, ...] = (4,)  # the first warp of those that multiply a tile together


def dispatched(plan: RankPlan) -> Sending:
    """Of a rank's sends: a row a place."""
    tickets = plan.tickets
    ticket = np.repeat(np.arange(len(tickets)), tickets.num_rows)
    return Sending(
        ticket=ticket,
        peer=tickets.peer[ticket].astype(np.int64),
        m_tile=tickets.tile[ticket].astype(np.int64),
        chunk=np.full(len(ticket), -1),
        expert=tickets.expert[ticket].astype(np.int64),
        deadline=tickets.deadline[ticket].astype(np.int64),
    )


def returned(
    plan: RankPlan,
    settings: PlanSettings,
    units: NDArray[np.int32],  # (num_units, 4): M tile, chunk, first tile to wait for, how many
    *,
    num_groups: int,  # of a unit: a group of rows is a place
    by_chunk: bool,  # False: whole rows go home
) -> Sending:
    """Of the pieces of stored tiles that go home."""
    unit = np.repeat(np.arange(len(units)), num_groups)
    m_tile, none = units[unit, 0].astype(np.int64), np.full(len(unit), -1)
    first_expert = plan.rank * settings.num_experts_per_rank
    return Sending(
        ticket=np.arange(len(unit)),
        peer=np.zeros(len(unit), np.int64) if settings.num_ranks == 1 else none,
        m_tile=m_tile,
        chunk=units[unit, 1].astype(np.int64) if by_chunk else none,
        expert=first_expert + plan.layout.tiles[m_tile, 0].astype(np.int64),
        deadline=none,
    )


def spans_of_tracks(
    tracks: Sequence[Track],  # of the rank's CTAs
    stamped: Stamped,
    *,
    base_ns: int,  # when the launch began, on the clock that spans are told by
    start_ns: int,  # of the launch, on that of the tracks
    end_ns: int,
) -> tuple[Span, ...]:
    """Lanes of the rank, each from the launch's start to its end, by SM and warp."""
    meaning = _Meaning(stamped)
    told: dict[int, dict[int, list[tuple[Lap, SpanKind, SpanRole]]]] = {}
    for track in sorted(tracks, key=lambda track: (track.sm, track.cta, track.warp)):
        found = told.setdefault(track.sm, {})
        laps = [known for lap in track.laps if (known := _known(lap, track.warp, stamped))]
        if laps:
            assert track.warp not in found, f"two CTAs on SM {track.sm}"
            found[track.warp] = laps
    whole: list[Span] = []
    for sm, warps in told.items():
        # An SM that had nothing to do has a lane too.
        for warp, laps in (warps or {0: []}).items():
            lane = f"{sm}.{warp}" if len(warps) > 1 else str(sm)
            spans = [
                Span(
                    lane=lane,
                    role=role,
                    kind=kind,
                    start_ns=base_ns + lap.start_ns - start_ns,
                    end_ns=base_ns + lap.end_ns - start_ns,
                    **dict(meaning.of(lap)),
                )
                for lap, kind, role in laps
            ]
            role = spans[-1].role if spans else SpanRole.compute
            whole += with_idle(
                spans,
                lane=lane,
                role=role,
                start_ns=base_ns,
                end_ns=base_ns + end_ns - start_ns,
            )
    return tuple(whole)


def _known(lap: Lap, warp: int, stamped: Stamped) -> tuple[Lap, SpanKind, SpanRole] | None:
    """A lap with its kind and role; None where it says nothing that another lane does not."""
    kind = _KINDS.get(lap.event)
    if kind is None or lap.end_ns == lap.start_ns:
        return None
    if lap.event is Event.tile and warp not in stamped.multiplying:
        return None
    if lap.event is Event.load and not lap.num_rows:
        return None  # B for a neighbour alone
    pushes = lap.event is Event.wait and stamped.homewards and not lap.part & AT_HOME
    sends = lap.event in _SENDING or pushes
    return lap, kind, SpanRole.communication if sends else SpanRole.compute


class _Meaning:
    """Looks up what a lap's numbers stand for."""

    def __init__(self, stamped: Stamped) -> None:
        self._of, self._layout = stamped, stamped.plan.layout
        self._first_expert = stamped.plan.rank * stamped.settings.num_experts_per_rank
        self._place: dict[tuple[int, int], int] = {}
        self._first_place: dict[int, int] = {}
        for place, (m_tile, n_tile) in enumerate(stamped.plan.handout.tolist()):
            self._place[m_tile, n_tile] = place
            self._first_place.setdefault(m_tile, place)

    def of(self, lap: Lap) -> Iterator[tuple[str, Any]]:
        """Fields of the lap's span."""
        if lap.item == NO_ITEM:
            return
        if lap.event is Event.wait:
            yield from self._wait(lap)
        elif lap.event is Event.send:
            yield from self._place_of(lap.item + lap.part * self._of.num_first)
            yield "num_rows", lap.num_rows
        elif lap.event is Event.reduce:
            yield "deadline", lap.item
        elif lap.event in (Event.load, Event.tile):
            yield from self._m_tile(lap.item)
            yield "n_tile", lap.part
            yield "chunk", self._of.settings.chunk_of_n_tile(lap.part)
            yield "num_rows", lap.num_rows
            yield "deadline", self._place[lap.item, lap.part]

    def _wait(self, lap: Lap) -> Iterator[tuple[str, Any]]:
        if lap.part & AT_HOME:
            yield "deadline", lap.item
        elif self._of.homewards:
            yield from self._place_of(lap.item)
        else:
            yield from self._m_tile(lap.item)
            yield "num_rows", lap.num_rows
            yield "deadline", self._first_place[lap.item]
        if lap.part & 1:
            yield "lateness_ns", lap.end_ns - lap.start_ns

    def _place_of(self, place: int) -> Iterator[tuple[str, int]]:
        told: Mapping[str, NDArray[np.int64]] = vars(self._of.sending)
        for name, values in told.items():
            value = int(values[place])
            if value >= 0:
                yield name, value

    def _m_tile(self, m_tile: int) -> Iterator[tuple[str, int]]:
        yield "m_tile", m_tile
        yield "expert", self._first_expert + int(self._layout.tiles[m_tile, 0])
