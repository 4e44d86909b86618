"""What laps of a stamped launch stand for: tiles, tickets, peers and deadlines of its plan."""

from dataclasses import replace

import numpy as np
import pytest

from tests.kernels.stamped_laws import most_backwards_ns, rank_faults
from tests.kernels.tracks import begun, words_of_laps
from tilepipe.kernels.spans import Stamped, dispatched, returned, spans_of_tracks
from tilepipe.kernels.track import AT_HOME, Event, read_tracks
from tilepipe.records import SpanKind, SpanRole
from tilepipe.schedule.plan import make_plan
from tilepipe.schedule.settings import PlanSettings

# Two ranks, two experts each; rank 0 gets 5 rows of expert 0 and 2 of expert 1.
TOPK = [np.array([[0], [0], [1], [2], [0]], np.int32), np.array([[0], [3], [1], [0]], np.int32)]
SETTINGS = PlanSettings(num_ranks=2, num_experts=4, num_topk=1, tile_m=4, num_n_tiles=2)


@pytest.fixture
def plan():
    return make_plan(TOPK, SETTINGS, epoch=1)[0]


def spans_of(tracks, stamped, *, num_ctas=2, base_ns=0):
    found, lost = read_tracks(words_of_laps(tracks, num_ctas=num_ctas, step=1))
    assert lost == 0
    start_ns, end_ns = min(t.start_ns for t in found), max(t.end_ns for t in found)
    return spans_of_tracks(found, stamped, base_ns=base_ns, start_ns=start_ns, end_ns=end_ns)


def sending(plan):
    """Warps 0 and 1 of an SM that pushes: rows of the opening, then the others."""
    rows = plan.num_sent
    laps = [(Event.send, 100 * (n + 1), n, 0, 1) for n in range(2)]
    laps += [(Event.send, 100 * (n + 1), n - 2, 1, 1) for n in range(2, rows)]
    return [begun(9), *laps, (Event.send, 100 * rows + 50, None, 0, 0)]


def multiplying(plan, *, wait_ns=50):
    """Loads, waits and tiles of an SM that multiplies all that there is, tile after tile."""
    loads, tiles, at = [], [], 1_000
    for m_tile, n_tile in plan.handout.tolist():
        valid = int(plan.layout.tiles[m_tile, 2])
        loads += [
            (Event.stand, at + 10, None, 0, 0),
            (Event.wait, at + 10 + wait_ns, m_tile, int(n_tile == 0), valid),
            (Event.load, at + 90, m_tile, n_tile, valid),
        ]
        tiles += [
            (Event.stand, at + 100, None, 0, 0),
            (Event.tile, at + 300, m_tile, n_tile, valid),
        ]
        at += 300
    return {(1, 0): [begun(4), *loads], **{(1, w): [begun(4), *tiles] for w in (4, 5, 8)}}


def test_a_dispatch_gemm_tells_of_every_row_and_tile_with_its_place_in_the_plan(plan):
    stamped = Stamped(plan=plan, settings=SETTINGS, sending=dispatched(plan), num_first=2)

    spans = spans_of({(0, 0): sending(plan), **multiplying(plan)}, stamped, base_ns=5_000)

    assert rank_faults(spans, stamped) == []
    assert {span.lane for span in spans} == {"9", "4.0", "4.4"}
    assert min(span.start_ns for span in spans) == 5_000
    tile = next(s for s in spans if s.kind is SpanKind.tile)
    assert (tile.m_tile, tile.n_tile, tile.expert, tile.chunk) == (0, 0, 0, 0)
    assert (tile.num_rows, tile.deadline, tile.role) == (4, 0, SpanRole.compute)
    sends = [s for s in spans if s.kind is SpanKind.send and s.ticket is not None]
    tickets = plan.tickets
    for send in sends:
        told = (send.peer, send.m_tile, send.expert, send.deadline)
        by_plan = (tickets.peer, tickets.tile, tickets.expert, tickets.deadline)
        assert told == tuple(column[send.ticket] for column in by_plan)
    assert {send.role for send in sends} == {SpanRole.communication}


def test_waits_are_late_only_where_the_first_look_found_nothing(plan):
    stamped = Stamped(plan=plan, settings=SETTINGS, sending=dispatched(plan))

    spans = spans_of(multiplying(plan), stamped)

    waits = [s for s in spans if s.kind is SpanKind.wait]
    assert [s.lateness_ns for s in waits[:2]] == [50, None]
    assert [s.deadline for s in waits[:2]] == [0, 0]
    assert {s.role for s in waits} == {SpanRole.compute}


def test_ping_pong_tiles_are_told_by_both_warpgroups(plan):
    tracks = multiplying(plan)
    whole = tracks[1, 4]
    tracks[1, 4] = [begun(4), *(lap for n in range(1, len(whole), 4) for lap in whole[n : n + 2])]
    tracks[1, 8] = [begun(4), *(lap for n in range(3, len(whole), 4) for lap in whole[n : n + 2])]
    stamped = Stamped(plan=plan, settings=SETTINGS, sending=dispatched(plan), multiplying=(4, 8))

    spans = spans_of(tracks, stamped)

    assert {s.lane for s in spans if s.kind is SpanKind.tile} == {"4.4", "4.8"}
    assert not any("multiplied" in fault for fault in rank_faults(spans, stamped))


def test_a_gemm_combine_tells_of_pieces_of_tiles_and_of_tokens(plan):
    units = np.array([(0, 0, 0, 1), (0, 1, 0, 1), (1, 0, 1, 1), (1, 1, 1, 1)], np.int32)
    settings = SETTINGS
    sending_home = returned(plan, settings, units, num_groups=2, by_chunk=True)
    stamped = Stamped(plan=plan, settings=settings, sending=sending_home, homewards=True)
    pushes = [
        (Event.look, 1_010, None, 0, 0),
        (Event.wait, 1_500, 3, 1, 0),  # group 1 of unit 1
        (Event.send, 1_700, 3, 0, 2),
        (Event.reduce, 1_750, None, 0, 0),
        (Event.wait, 1_800, 7, AT_HOME, 0),
        (Event.reduce, 1_900, 7, 3, 0),
    ]

    spans = spans_of({(0, 4): [begun(2), *pushes], **multiplying(plan)}, stamped)

    told = [s for s in spans if s.lane == "2" and s.kind is not SpanKind.idle]
    assert [s.kind.name for s in told] == ["copy", "wait", "send", "reduce", "wait", "reduce"]
    look, wait, send, _, home_wait, reduced = told
    assert (wait.m_tile, wait.chunk, wait.ticket, wait.lateness_ns) == (0, 1, 3, 490)
    assert (send.m_tile, send.chunk, send.expert, send.num_rows, send.peer) == (0, 1, 0, 2, None)
    assert (home_wait.deadline, home_wait.lateness_ns, reduced.deadline) == (7, None, 7)
    roles = [s.role.name for s in (look, wait, send, home_wait, reduced)]
    assert roles == [*["communication"] * 3, "compute", "compute"]


def test_an_sm_that_had_nothing_to_do_is_idle_all_the_time(plan):
    stamped = Stamped(plan=plan, settings=SETTINGS, sending=dispatched(plan))
    tracks = {(0, 4): [begun(7), (Event.stand, 900, None, 0, 0)], **multiplying(plan)}

    spans = spans_of(tracks, stamped)

    (idle,) = [s for s in spans if s.lane == "7"]
    assert idle.kind is SpanKind.idle


def test_laws_are_broken_by_a_tile_that_is_missing_and_by_a_row_sent_twice(plan):
    stamped = Stamped(plan=plan, settings=SETTINGS, sending=dispatched(plan))
    tracks = {(0, 0): sending(plan), **multiplying(plan)}
    tracks[1, 4] = tracks[1, 4][:-2]
    tracks[0, 0] = [*tracks[0, 0], (Event.send, 9_000, 0, 0, 1)]

    faults = rank_faults(spans_of(tracks, stamped), stamped)

    assert "tiles are not each multiplied once" in faults
    assert "tickets are not each sent once" in faults


def test_an_effect_that_seems_to_come_before_its_cause_is_measured(plan):
    stamped = Stamped(plan=plan, settings=SETTINGS, sending=dispatched(plan), num_first=2)

    spans = spans_of({(0, 0): sending(plan), **multiplying(plan)}, stamped)

    assert most_backwards_ns({0: spans}, homewards=False) == 0
    late = replace(next(s for s in spans if s.m_tile == 0), kind=SpanKind.send, peer=0)
    spans = [*spans, replace(late, start_ns=0, end_ns=1_777)]
    # Its first tile begins 1100 ns after the launch.
    assert most_backwards_ns({0: spans}, homewards=False) == 677
