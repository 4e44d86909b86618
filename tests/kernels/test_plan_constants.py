"""What the plan kernels are compiled for, and the room that they reserve; needs no GPU stack."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilepipe.config.choices import Order
from tilepipe.fabric.table import Slot
from tilepipe.kernels.buffers import buffer_specs
from tilepipe.kernels.plan_constants import MAX_PLAN_CTAS, plan_constants_of
from tilepipe.schedule.plan import make_plan
from tilepipe.schedule.settings import PlanSettings
from tilepipe.schedule.shape import Shape

PLAIN = PlanSettings(num_ranks=2, num_experts=8, num_topk=2, tile_m=16)


@pytest.mark.parametrize(
    ("max_tokens", "num_ctas"), [(0, 1), (1, 1), (1023, 1), (1024, 2), (2560, 5), (16_384, 8)]
)
def test_a_rank_of_more_tokens_is_planned_by_more_ctas(max_tokens, num_ctas):
    constants = plan_constants_of(PLAIN, Shape(max_tokens=max_tokens, num_tokens=max_tokens))

    assert constants.num_ctas == num_ctas


def test_a_small_device_has_fewer_ctas():
    shape = Shape(max_tokens=16_384, num_tokens=16_384)

    assert [plan_constants_of(PLAIN, shape, max_ctas=n).num_ctas for n in (1, 3, 8)] == [1, 3, 8]


@pytest.mark.parametrize("order", Order)
def test_scratch_holds_either_plan_of_as_many_ctas_as_there_may_be(order):
    settings, shape = replace(PLAIN, order=order), Shape(max_tokens=300, num_tokens=600)
    constants = replace(plan_constants_of(settings, shape), num_ctas=MAX_PLAN_CTAS)

    (words,) = buffer_specs(settings, shape)[Slot.scratch].shape

    assert words == constants.scratch_words
    assert words >= sum(constants.plan_parts.values())
    assert words >= sum(constants.returns_parts.values())
    assert buffer_specs(settings, shape)[Slot.plan_rounds].shape == (MAX_PLAN_CTAS,)


@given(
    st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(1, 40), st.integers(0, 90)
)
def test_there_is_room_for_all_tickets_and_runs(ranks, experts, topk, tile_m, tokens):
    settings = PlanSettings(
        num_ranks=ranks, num_experts=ranks * experts, num_topk=topk, tile_m=tile_m
    )
    rng = np.random.default_rng(tokens)
    ids = [rng.integers(-1, ranks * experts, (tokens, topk), np.int32) for _ in range(ranks)]
    constants = plan_constants_of(settings, Shape(max_tokens=tokens, num_tokens=ranks * tokens))

    for plan in make_plan(ids, settings):
        assert len(plan.tickets) <= constants.max_tickets
        assert len(np.unique(plan.tickets.run)) <= constants.max_runs
