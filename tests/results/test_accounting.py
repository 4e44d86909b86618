"""Figures of a point, each worked out by hand from made-up samples with different slowest ranks."""

import pytest

from tilepipe.records import Point, RankRecord, Sample
from tilepipe.results.accounting import account

COUNTS = {
    "num_tokens": 4,
    "all_rows": 16,
    "max_expert_rows": 6,
    "max_rank_rows": 10,
    "logical_bytes": 8_000_000,
    "dedup_bytes": 6_000_000,
    "wire_bytes": 4_000_000,
    "flops": 40_000_000_000,
}


def point(operation):
    return Point(
        name="exp",
        operation=operation,
        executor="host",
        config={"workload": {"num_experts": 8}},
        choices={},
        overrides=(),
        config_id="c0ffee",
        build_id="b0b",
    )


def records(times, counts=COUNTS):
    """times: (contender, component) -> milliseconds of rank 0 and rank 1, in two iterations."""
    return [
        RankRecord(
            rank=rank,
            samples=tuple(
                Sample(
                    contender=contender,
                    component=component,
                    iteration=iteration,
                    start_ns=0,
                    duration_ns=round(1e6 * by_rank[rank]),
                )
                for (contender, component), by_rank in times.items()
                for iteration in range(2)
            ),
            verdicts=(),
            counts=counts,
        )
        for rank in range(2)
    ]


DISPATCH_GEMM = {
    # Rank 1 plans longest, rank 0 ends last: stage is 12 - 3, on no rank the longest stage.
    ("fused", "e2e"): (12, 11),
    ("fused", "plan"): (1, 3),
    ("sequential", "e2e"): (20, 16),
    ("sequential", "plan"): (2, 2),
    ("dispatch", "e2e"): (5, 4),
    ("dispatch", "plan"): (1, 1),
    ("gemm_all", "stage"): (7, 8),
    ("gemm_flags", "stage"): (8, 8.5),
    ("gemm_contended", "stage"): (8.75, 8),
}


def test_dispatch_gemm_by_hand():
    terms, figures = account(point("dispatch_gemm"), records(DISPATCH_GEMM))

    values = {term.term: term.interval and term.interval.value / 1e6 for term in terms}
    assert values == {
        "e2e": 12,
        "plan": 3,
        "gemm_all": 8,
        "sm_tax": None,
        "sync_tax": 0.5,
        "contention": 0.25,
        "late": 0.25,
    }
    assert figures == pytest.approx(
        {
            "logical_bytes": 8e6,
            "dedup_bytes": 6e6,
            "wire_bytes": 4e6,
            "flops": 4e10,
            "expert_max_over_mean": 6 * 8 / 16,
            "rank_max_over_mean": 10 * 2 / 16,
            # fused without plan 9, gemm 8, communication 5 - 1
            "fused/efficiency": 8 / 9,
            "fused/hidden_share": 1 - (9 - 8) / 4,
            "fused/speedup": 18 / 9,
            "fused/speedup_low": 18 / 9,
            "fused/speedup_high": 18 / 9,
            # per rank, over 4 ms
            "dispatch/logical_gbps": 1.0,
            "dispatch/dedup_gbps": 0.75,
            "dispatch/wire_gbps": 0.5,
            # 2e10 flop a rank
            "fused/tflops": 20 / 9,
            "sequential/tflops": 20 / 18,
            "gemm_all/tflops": 20 / 8,
        }
    )


GEMM_COMBINE = {
    ("fused", "e2e"): (12, 11),
    ("fused", "plan"): (2, 1),
    ("sequential", "e2e"): (16, 16),
    ("sequential", "plan"): (1, 1),
    ("push", "e2e"): (9, 10),
    ("push", "plan"): (1, 1),
    ("reduce", "stage"): (0.5, 0.25),
    ("gemm_all", "stage"): (7, 8),
    ("gemm_publish", "stage"): (8.5, 8),
    ("gemm_contended", "stage"): (8, 9),
}


def test_gemm_combine_adds_the_reduction_to_the_longer_of_gemm_and_pushes():
    terms, figures = account(point("gemm_combine"), records(GEMM_COMBINE))

    values = {term.term: term.interval and term.interval.value / 1e6 for term in terms}
    assert (values["publish_tax"], values["contention"], values["tail"]) == (0.5, 0.5, 1.0)
    assert figures["fused/efficiency"] == pytest.approx((9 + 0.5) / 10)
    assert figures["fused/hidden_share"] == pytest.approx(1 - (10 - 8) / 9)
    assert figures["fused/speedup"] == pytest.approx(15 / 10)
    assert figures["push/wire_gbps"] == pytest.approx(2e6 / 9e6)
    assert not any(key.startswith("reduce/") for key in figures)


def test_without_rows_nothing_is_said_of_overlap_or_imbalance():
    counts = {**COUNTS, "all_rows": 0, "max_expert_rows": 0, "max_rank_rows": 0}

    _, figures = account(point("dispatch_gemm"), records(DISPATCH_GEMM, counts))

    assert "fused/efficiency" not in figures
    assert "expert_max_over_mean" not in figures


def test_communication_alone_has_rates_and_no_breakdown():
    times = {("combine", "e2e"): (3, 5), ("combine", "plan"): (1, 1), ("reduce", "stage"): (1, 1)}

    terms, figures = account(point("combine"), records(times))

    assert terms == ()
    assert figures["combine/logical_gbps"] == pytest.approx(1.0)


def test_without_samples_the_figures_of_the_routing_remain():
    bare = [RankRecord(rank=rank, samples=(), verdicts=(), counts=COUNTS) for rank in range(2)]

    terms, figures = account(point("dispatch_gemm"), bare)

    assert terms == ()
    assert figures["wire_bytes"] == 4e6
    assert not any("/" in key for key in figures)
