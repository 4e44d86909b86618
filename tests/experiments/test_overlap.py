"""Overlap shown by counted events, and each injected delay in its own term of the breakdown."""

from functools import cache

import pytest

from tests.experiments.groups import make_config, measure_group, random_routing
from tilepipe.config.choices import Granularity, Operation
from tilepipe.host.delays import NO_DELAYS, Delays
from tilepipe.records import Point
from tilepipe.results.accounting import account
from tilepipe.workload.routing import Routing

DELAY_MS = 20.0
RANKS, EXPERTS = 2, 16


def one_row_each() -> Routing:
    """Every rank sends one row to every expert: as many tickets as experts, a tile an expert."""
    routing = random_routing([EXPERTS] * RANKS, num_experts=EXPERTS, num_topk=1)
    for ids in routing.topk_idx:
        ids[:, 0] = range(EXPERTS)
    return routing


@pytest.mark.parametrize("granularity", list(Granularity))
def test_tiles_are_computed_before_the_last_row_has_been_sent(granularity):
    # Each rank keeps its last ticket, which goes to itself, until it has computed a tile. A GEMM
    # that waited for all rows would never get there.
    routing = one_row_each()
    config = make_config(Operation.dispatch_gemm, routing, granularity=granularity)

    (records,) = measure_group([config], routing, delays=[Delays(hold_last_send=True)] * RANKS)

    assert all(1 <= record.counts["tiles_before_last_row"] < 8 for record in records)


@pytest.mark.parametrize("granularity", list(Granularity))
def test_rows_are_pushed_home_before_the_last_tile_has_been_computed(granularity):
    routing = one_row_each()
    config = make_config(Operation.gemm_combine, routing, granularity=granularity)

    (records,) = measure_group([config], routing, delays=[Delays(hold_last_tile=True)] * RANKS)

    assert all(record.counts["pushes_before_last_tile"] >= 1 for record in records)


def terms_ms(operation, delays):
    routing = one_row_each()
    config = make_config(operation, routing, num_warmups=1, num_iters=3)
    (records,) = measure_group([config], routing, delays=[delays] * RANKS)
    point = Point(
        name="test",
        operation=operation.name,
        executor="host",
        config={"workload": {"num_experts": EXPERTS}},
        choices={},
        overrides=(),
        config_id="",
        build_id="",
    )
    terms, _ = account(point, records)
    values = {term.term: term.interval.value for term in terms if term.interval is not None}
    assert sum(values.values()) == 2 * values["e2e"]  # integers: the terms add up exactly
    del values["e2e"]
    return {term: value / 1e6 for term, value in values.items()}


@cache
def undelayed_ms(operation, attempt):
    """Measured once for all delays, and again for those that try again."""
    return terms_ms(operation, NO_DELAYS)


# 16 tickets and 8 tiles a rank: what makes it late, 160 ms by either.
@pytest.mark.parametrize(
    ("operation", "delays", "term", "expected_ms"),
    [
        (Operation.dispatch_gemm, Delays(send_ms=DELAY_MS / 2), "late", 8 * DELAY_MS),
        (Operation.dispatch_gemm, Delays(check_ms=DELAY_MS), "sync_tax", 8 * DELAY_MS),
        (Operation.dispatch_gemm, Delays(gemm_ms=DELAY_MS), "gemm_all", 8 * DELAY_MS),
        (Operation.gemm_combine, Delays(send_ms=DELAY_MS / 2), "tail", 8 * DELAY_MS),
        (Operation.dispatch_gemm, Delays(contended_ms=DELAY_MS), "contention", 8 * DELAY_MS),
        (Operation.dispatch_gemm, Delays(entry_ms=200), "plan", 200),
        (Operation.gemm_combine, Delays(gemm_ms=DELAY_MS), "gemm_all", 8 * DELAY_MS),
        (Operation.gemm_combine, Delays(publish_ms=DELAY_MS), "publish_tax", 8 * DELAY_MS),
        (Operation.gemm_combine, Delays(contended_ms=DELAY_MS), "contention", 8 * DELAY_MS),
    ],
)
def test_a_delay_moves_its_own_term_by_its_own_amount(operation, delays, term, expected_ms):
    tries = []
    # Of three: others may hold the cores for a while, but not a wrong term right.
    for attempt in range(3):
        before = undelayed_ms(operation, attempt)
        after = terms_ms(operation, delays)
        tries.append({name: after[name] - before[name] for name in before})
        apart = {**tries[-1], term: tries[-1][term] - expected_ms}
        if all(abs(amount) <= expected_ms / 10 for amount in apart.values()):
            return

    pytest.fail(f"{term} did not move by {expected_ms} ms, or another did by a tenth: {tries}")
