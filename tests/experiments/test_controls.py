"""Controls: with something broken on purpose, the gate must not pass.

Communication here is faster than the GEMM, so a broken wait may go unseen unless sends are slowed:
each control slows what has to be late.
"""

import numpy as np
import pytest

from tests.experiments.groups import make_config, random_routing, wrong_verdicts
from tests.host.ranks import Failed, run_ranks
from tilepipe.config.choices import Granularity, Operation
from tilepipe.experiments import entry, session, setting
from tilepipe.host import combine, dispatch, gemm, protocol
from tilepipe.host.delays import Delays
from tilepipe.host.gemm import GroupedGemm

ROUTING = random_routing([40, 40], num_experts=4, num_topk=2)


def without_waits_for_rows():
    dispatch.Arrivals.wait_tile = lambda self, tile: None
    return Delays(send_ms=2)


def with_half_the_threshold():
    make = dispatch.Arrivals.__init__

    def halved(self, plan, *args, **kwargs):
        make(self, plan, *args, **kwargs)
        plan.readiness.expected[:] //= 2

    dispatch.Arrivals.__init__ = halved
    return Delays(send_ms=2)


def without_zeroing():
    protocol.LaunchGate._begin = lambda self, counters: (
        setattr(self, "epoch", self.epoch + 1) or (self.epoch)
    )
    return Delays(send_ms=2)


def with_rows_of_the_launch_before():
    made = session.Session.rows_to_send
    session.Session.rows_to_send = lambda self, launch, hidden: made(
        self, launch - (launch > 1), hidden
    )
    return Delays()


def with_rows_sent_to_a_neighbour_slot():
    pack = dispatch.pack_home
    dispatch.pack_home = lambda rank, token, slot: pack(rank, token, slot)
    take = np.take

    def swapped(x, source, **kwargs):
        return take(x, source[::-1], **kwargs)

    dispatch.np = type("np", (), {"take": staticmethod(swapped), "uint16": np.uint16})
    return Delays()


def without_waits_for_tokens():
    combine._complete = lambda target, home: np.ones(len(home.token_expected), bool)
    return Delays(send_ms=2)


def with_a_tile_left_out():
    run = GroupedGemm.run

    def shorter(self, plan, *args, **kwargs):
        object.__setattr__(plan, "handout", plan.handout[:-1])
        return run(self, plan, *args, **kwargs)

    gemm.GroupedGemm.run = shorter
    return Delays()


def broken(rank, place, config, break_it):
    setting.draw = lambda *_, **__: ROUTING
    delays = break_it()
    return entry.run_rank(config, rank=rank, place=place, delays=delays)


def wrong(operation, break_it, **kernel):
    config = make_config(operation, ROUTING, tile_m=16, tile_n=16, num_iters=2, **kernel)
    results = run_ranks(2, broken, config, break_it)
    assert not [result.text for result in results if isinstance(result, Failed)]
    samples = [len(result.samples) for result in results]
    return wrong_verdicts(results), samples


@pytest.mark.parametrize(
    "break_it",
    [without_waits_for_rows, with_half_the_threshold, without_zeroing],
)
def test_dispatch_gemm_that_reads_rows_too_early_is_incorrect(break_it):
    found, _ = wrong(Operation.dispatch_gemm, break_it)

    assert found


def test_rows_of_an_earlier_launch_are_found_after_the_timed_loop():
    found, samples = wrong(Operation.dispatch_gemm, with_rows_of_the_launch_before)

    assert found
    assert all(" after: " in sentence for sentence in found)
    assert min(samples) > 0


def test_rows_in_each_others_slots_are_found_and_nothing_is_timed():
    found, samples = wrong(Operation.dispatch_gemm, with_rows_sent_to_a_neighbour_slot)

    assert any(" before: " in sentence for sentence in found)
    assert samples == [0, 0]


def test_a_tile_that_is_never_computed_is_found():
    found, samples = wrong(Operation.dispatch_gemm, with_a_tile_left_out)

    assert any("never written" in sentence for sentence in found)
    assert samples == [0, 0]


@pytest.mark.parametrize("granularity", list(Granularity))
def test_gemm_combine_that_reduces_too_early_is_incorrect(granularity):
    found, _ = wrong(
        Operation.gemm_combine,
        without_waits_for_tokens,
        granularity=granularity,
    )

    assert any("fused" in sentence for sentence in found)


def test_without_anything_broken_the_same_set_up_is_correct():
    for operation in (Operation.dispatch_gemm, Operation.gemm_combine):
        found, samples = wrong(operation, lambda: Delays(send_ms=2))
        assert found == []
        assert min(samples) > 0
