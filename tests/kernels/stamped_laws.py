"""What the spans of a stamped launch must obey, whatever its plan: faults in words.

Knows nothing of how spans were stamped.
"""

from collections import Counter, defaultdict
from itertools import pairwise

from tilepipe.records import SpanKind
from tilepipe.results.sms import sm_spans
from tilepipe.results.spans import by_lane, lane_times

__all__ = ["most_backwards_ns", "rank_faults"]


def rank_faults(spans, stamped):
    """Of one rank: lanes without a gap, every tile once, every row or piece sent once, SMs whose
    shares add up to the launch."""
    faults = [f for lane, found in by_lane(spans).items() for f in _lane_faults(lane, found)]
    lengths = {(found[0].start_ns, found[-1].end_ns) for found in by_lane(spans).values()}
    faults += [f"lanes begin and end at {sorted(lengths)}"] * (len(lengths) > 1)
    faults += _tile_faults(spans, stamped) + _send_faults(spans, stamped)
    length_ns = max(span.end_ns for span in spans) - min(span.start_ns for span in spans)
    for sm, found in by_lane(sm_spans(spans)).items():
        faults += _lane_faults(f"SM {sm}", found)
        if lane_times(found).length_ns != length_ns:
            faults.append(f"shares of SM {sm} do not add up to the launch")
    return faults


def _lane_faults(lane, found):
    apart = [a for a, b in pairwise(found) if a.end_ns != b.start_ns]
    backwards = [span for span in found if span.end_ns < span.start_ns]
    return [f"lane {lane}: {len(apart)} gaps"] * bool(apart) + [f"lane {lane}: backwards"] * bool(
        backwards
    )


def _tile_faults(spans, stamped):
    """Whole tiles once, or in two halves that make one."""
    rows, times = Counter(), Counter()
    for span in spans:
        if span.kind is SpanKind.tile:
            rows[span.m_tile, span.n_tile] += span.num_rows
            times[span.m_tile, span.n_tile] += 1
    valid = stamped.plan.layout.tiles[:, 2].tolist()
    expected = {
        (m_tile, n_tile): count
        for m_tile, count in enumerate(valid)
        for n_tile in range(stamped.settings.num_n_tiles)
    }
    faults = ["tiles are not each multiplied once"] * (dict(rows) != expected)
    return faults + ["a tile is in more than two pieces"] * (max(times.values(), default=0) > 2)


def _send_faults(spans, stamped):
    sent = Counter()
    for span in spans:
        if span.kind is SpanKind.send and span.ticket is not None:
            sent[span.ticket] += span.num_rows
    if stamped.homewards:
        rows = sum(sent.values())
        pieces = len({*stamped.sending.chunk.tolist()})
        # Pieces that are sent home as they are made are told of as tiles.
        held = stamped.plan.layout.num_rows * pieces
        return [f"{rows} pieces go home of {held}"] * (rows != held)
    expected = dict(enumerate(stamped.plan.tickets.num_rows.tolist()))
    return ["tickets are not each sent once"] * (dict(sent) != expected)


def most_backwards_ns(spans_of_ranks, *, homewards):
    """By how much an effect seems to begin before its cause has ended, at most; 0: nowhere.

    Dispatch -> GEMM: a tile's first product and the last row sent into its M tile. GEMM -> combine:
    the end of a wait for a piece and the last tile that it waits for.
    """
    causes, effects = defaultdict(int), {}
    for rank, spans in spans_of_ranks.items():
        for span in spans:
            if homewards:
                key = (rank, span.m_tile, span.chunk)
                is_cause = span.kind is SpanKind.tile
                is_effect = span.kind is SpanKind.wait and span.m_tile is not None
                at_ns = span.end_ns
            else:
                is_cause = span.kind is SpanKind.send and span.m_tile is not None
                is_effect = span.kind is SpanKind.tile
                key = (span.peer if is_cause else rank, span.m_tile)
                at_ns = span.start_ns
            if is_cause:
                causes[key] = max(causes[key], span.end_ns)
            elif is_effect:
                effects[key] = min(effects.get(key, at_ns), at_ns)
    apart = (causes[key] - at_ns for key, at_ns in effects.items() if key in causes)
    return max(0, *apart, 0)
