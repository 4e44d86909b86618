"""Byte and FLOP formulas against cases counted by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilepipe.config import routings, schemas
from tilepipe.config.choices import Operation
from tilepipe.workload import (
    GemmShape,
    Routing,
    Traffic,
    dedup_bytes,
    dedup_wire_bytes,
    draw,
    gemm_shape,
    gemm_shapes,
    grouped_gemm_flops,
    logical_bytes,
    row_bytes,
    wire_bytes,
)

WORKLOAD = schemas.Workload(
    num_tokens=4, hidden=7168, intermediate=2048, num_experts=256, num_topk=8
)

# Two ranks, experts 0 1 | 2 3. Rank 0: token 0 to 0 1, token 1 to 1 2, token 2 to 2 3.
# Rank 1: token 0 to 0 and a dropped slot, token 1 dropped altogether.
TOY = Routing(
    (np.array([[0, 1], [1, 2], [2, 3]], np.int32), np.array([[0, -1], [-1, -1]], np.int32)),
    (np.full((3, 2), 0.5, np.float32), np.array([[1, 0], [0, 0]], np.float32)),
    4,
)


def test_logical_bytes_count_every_valid_slot():
    assert logical_bytes(TOY, row_bytes=10) == Traffic(
        total_bytes=70, sent_bytes=(60, 10), received_bytes=(40, 30)
    )


def test_dedup_bytes_count_a_token_once_per_rank():
    assert dedup_bytes(TOY, row_bytes=10) == Traffic(
        total_bytes=50, sent_bytes=(40, 10), received_bytes=(30, 20)
    )


def test_wire_bytes_leave_out_rows_that_stay():
    assert wire_bytes(TOY, row_bytes=10) == Traffic(
        total_bytes=40, sent_bytes=(30, 10), received_bytes=(10, 30)
    )


def test_with_one_copy_for_each_rank_fewer_bytes_cross_a_link():
    # Of rank 0 tokens 1 and 2 go to rank 1, which owns both experts of token 2.
    assert dedup_wire_bytes(TOY, row_bytes=10) == Traffic(
        total_bytes=30, sent_bytes=(20, 10), received_bytes=(10, 20)
    )


@given(seed=st.integers(0, 1000), num_ranks=st.sampled_from([1, 2, 4]))
def test_bytes_agree_with_counting_row_by_row(seed, num_ranks):
    law = routings.MaskedRouting(seed=seed, masked_share=0.3)
    routing = draw(law, num_ranks=num_ranks, num_tokens=7, num_experts=8, num_topk=3)
    rows = [
        (source, token, int(expert) // (8 // num_ranks))
        for source, ids in enumerate(routing.topk_idx)
        for token, row in enumerate(ids)
        for expert in row
        if expert >= 0
    ]

    logical = logical_bytes(routing, row_bytes=6)
    wire = wire_bytes(routing, row_bytes=6)
    dedup = dedup_bytes(routing, row_bytes=6)
    dedup_wire = dedup_wire_bytes(routing, row_bytes=6)

    assert logical.total_bytes == 6 * len(rows)
    assert wire.total_bytes == 6 * sum(source != owner for source, _, owner in rows)
    assert dedup.total_bytes == 6 * len(set(rows))
    moved_once = {(source, token, owner) for source, token, owner in rows if source != owner}
    assert dedup_wire.total_bytes == 6 * len(moved_once)
    for traffic in (logical, wire, dedup, dedup_wire):
        assert sum(traffic.sent_bytes) == sum(traffic.received_bytes) == traffic.total_bytes


def test_nothing_crosses_a_link_when_all_stays_local():
    law = routings.AllLocalRouting()

    routing = draw(law, num_ranks=2, num_tokens=5, num_experts=8, num_topk=2)

    assert wire_bytes(routing, row_bytes=2).total_bytes == 0


def test_a_bf16_row_has_two_bytes_an_element():
    assert row_bytes(WORKLOAD) == 14_336


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (Operation.dispatch, None),
        (Operation.combine, None),
        (Operation.grouped_gemm, GemmShape(n=4096, k=7168)),
        (Operation.dispatch_gemm, GemmShape(n=4096, k=7168)),
        (Operation.gemm_combine, GemmShape(n=7168, k=2048)),
    ],
)
def test_each_operation_has_the_gemm_of_its_half_of_the_layer(operation, expected):
    assert gemm_shape(WORKLOAD, operation) == expected
    assert gemm_shapes(WORKLOAD, operation) == (() if expected is None else (expected,))


def test_a_layer_has_the_gemms_of_both_halves_and_so_no_one():
    halves = [
        gemm_shape(WORKLOAD, half) for half in (Operation.dispatch_gemm, Operation.gemm_combine)
    ]

    assert list(gemm_shapes(WORKLOAD, Operation.moe_layer)) == halves
    assert gemm_shape(WORKLOAD, Operation.moe_layer) is None


def test_flops_count_a_multiply_and_an_add():
    # 3 rows x 2 columns x 5 products, each multiplied and added.
    assert grouped_gemm_flops(3, GemmShape(n=2, k=5)) == 60
