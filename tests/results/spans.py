"""Made-up recordings: two ranks, a sender and a GEMM each, or the SMs of a GPU."""

from tilepipe.records import Span, SpanKind, SpanRole, with_idle
from tilepipe.results.recording import Recording

LAUNCH = {"start_ns": 1000, "end_ns": 101_000}


def lane(name, role, *laps, start_ns=1000, end_ns=101_000):
    """`laps`: kind, start, end and whatever else the span says, microseconds of the launch."""
    spans = [
        Span(
            lane=name,
            role=role,
            kind=SpanKind[kind],
            start_ns=1000 + int(1000 * start_us),
            end_ns=1000 + int(1000 * end_us),
            **told,
        )
        for kind, start_us, end_us, told in laps
    ]
    return with_idle(spans, lane=name, role=role, start_ns=start_ns, end_ns=end_ns)


def two_ranks():
    """Dispatch -> GEMM, one M tile each: rank 0 sends the last rows that rank 1 waits for."""
    late = {"m_tile": 0, "expert": 1, "lateness_ns": 40_000}
    tile = {"m_tile": 0, "expert": 1, "num_rows": 16}
    rank_0 = lane(
        "computing",
        SpanRole.compute,
        ("gate", 0, 1, {}),
        ("plan", 1, 2.5, {}),
        ("wait", 2.5, 3, {"m_tile": 0, "expert": 0}),
        ("tile", 3, 90, {"m_tile": 0, "n_tile": 0, "chunk": 0, "expert": 0, "deadline": 0}),
    ) + lane(
        "sender",
        SpanRole.communication,
        ("send", 2, 2.75, {"peer": 0, "ticket": 0, "m_tile": 0, "expert": 0, "num_rows": 3}),
        ("send", 3, 43, {"peer": 1, "ticket": 1, "m_tile": 0, "expert": 1, "num_rows": 16}),
    )
    rank_1 = lane(
        "computing",
        SpanRole.compute,
        ("wait", 3, 43, late),
        ("copy", 43, 45, tile),
        ("tile", 45, 60, {**tile, "n_tile": 0, "chunk": 0, "deadline": 0}),
        ("tile", 60, 60, {**tile, "n_tile": 1, "chunk": 0, "deadline": 1}),
    ) + lane(
        "sender",
        SpanRole.communication,
        ("send", 4, 5, {"peer": 1, "ticket": 0, "m_tile": 0, "expert": 1, "num_rows": 1}),
    )
    return {0: tuple(rank_0), 1: tuple(rank_1)}


def sms(num_sms):
    """One rank of a GPU: odd SMs multiply, even ones send."""
    spans = []
    for sm in range(num_sms):
        role = SpanRole.compute if sm % 2 else SpanRole.communication
        kind = "tile" if sm % 2 else "send"
        laps = [(kind, 5 * n, 5 * n + 4, {"m_tile": n}) for n in range(20)]
        spans += lane(str(sm), role, *laps)
    return {0: tuple(spans)}


def recording(point, spans):
    return Recording(
        point=point,
        spans=spans,
        ended_utc="2026-11-29T10:00:01.000+00:00",
        device="a processor, 2 cores",
        commit="0123abcd",
    )


def layer_of_two_ranks():
    """A layer: the launch of `two_ranks`, then a second plan, a tile and its send on each."""
    told = {"lane": "computing", "role": SpanRole.compute}
    home = {"lane": "sender", "role": SpanRole.communication}

    def late(kind, start, **where):
        end = start + 10_000
        return Span(
            **(home if kind is SpanKind.send else told),
            kind=kind,
            start_ns=start,
            end_ns=end,
            **where,
        )

    return {
        rank: (
            *found,
            late(SpanKind.plan, 900_000),
            late(SpanKind.tile, 910_000, m_tile=0, chunk=0, expert=rank),
            late(SpanKind.send, 930_000, m_tile=0, chunk=0, expert=rank, ticket=7),
        )
        for rank, found in two_ranks().items()
    }
