"""Figures of a point, each worked out by hand from made-up samples with different slowest ranks."""

from dataclasses import replace

import pytest

from tilepipe.records import Outcome, Point, RankRecord, Sample, Status
from tilepipe.results.accounting import account, as_today, efficiency_mark
from tilepipe.results.summary import slowest_rank

COUNTS = {
    "num_tokens": 4,
    "all_rows": 16,
    "max_expert_rows": 6,
    "max_rank_rows": 10,
    "num_physical": 10,
    "max_physical_rows": 4,
    "logical_bytes": 8_000_000,
    "dedup_bytes": 6_000_000,
    "wire_bytes": 4_000_000,
    "dedup_wire_bytes": 2_000_000,
    "flops": 40_000_000_000,
}


def point(operation, executor="host", **config):
    return Point(
        name="exp",
        operation=operation,
        executor=executor,
        config={"workload": {"num_experts": 8}, **config},
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
            "dedup_wire_bytes": 2e6,
            "flops": 4e10,
            "expert_max_over_mean": 6 * 8 / 16,
            "rank_max_over_mean": 10 * 2 / 16,
            "physical_max_over_mean": 4 * 10 / 16,
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


@pytest.mark.parametrize("contender", ["dispatch", "torch_dispatch"])
def test_a_baseline_has_the_rates_of_its_work_and_none_by_our_ctas(contender):
    on_gpu = {
        "kernel": {"num_comm_ctas": 4},
        "hardware": {"link_gbps": None, "hbm_gbps": 10.0, "num_gpus": 1},
        "launch": {"fabric": "loopback"},
    }
    times = {(contender, "e2e"): (5, 4), (contender, "plan"): (1, 1)}

    _, figures = account(point("dispatch", "cuda", **on_gpu), records(times))

    assert figures[f"{contender}/logical_gbps"] == 1.0
    assert figures[f"{contender}/memory_gbps"] == 4.0
    by_cta = figures.get(f"{contender}/gbps_per_cta")
    assert by_cta == (None if contender.startswith("torch_") else 0.25)


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


MOE_LAYER = {
    ("fused", "e2e"): (12, 11),
    ("fused", "plan"): (2, 1),
    ("sequential", "e2e"): (16, 16),
    ("sequential", "plan"): (1, 1),
    ("dispatch_gemm", "stage"): (5, 5),
    ("swiglu", "stage"): (1, 1),
    ("gemm_combine", "stage"): (3, 3.5),
    ("torch_layer", "e2e"): (21, 20),
    ("torch_layer", "plan"): (1, 1),
}


def test_a_layer_is_told_by_its_parts_and_has_no_bound():
    terms, figures = account(point("moe_layer"), records(MOE_LAYER))

    values = {term.term: term.interval and term.interval.value / 1e6 for term in terms}
    assert values == {
        "e2e": 12.0,
        "plan": 2.0,
        "dispatch_gemm": 5.0,
        "swiglu": 1.0,
        "gemm_combine": 3.5,
        "joined": 0.5,
    }
    assert figures["fused/speedup"] == pytest.approx(15 / 10)
    assert figures["torch_layer/tflops"] == pytest.approx(20 / 20)
    assert not {"fused/efficiency", "fused/hidden_share", "dispatch_gemm/tflops"} & set(figures)


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


def on_gpu(operation, fabric, *, num_comm_ctas=4, num_gpus=2, link_gbps=450.0, hbm_gbps=4800.0):
    return point(
        operation,
        executor="cuda",
        kernel={"num_comm_ctas": num_comm_ctas},
        launch={"fabric": fabric},
        hardware={"num_gpus": num_gpus, "link_gbps": link_gbps, "hbm_gbps": hbm_gbps},
    )


# COUNTS: 16 rows of 500 000 bytes; two ranks of 4 tokens.
COMBINE = {
    ("combine", "e2e"): (0.0250, 0.0225),
    ("combine", "plan"): (0.0025, 0.005),
    ("push", "e2e"): (0.0120, 0.0125),
    ("push", "plan"): (0.0025, 0.0025),
    ("reduce", "stage"): (0.0075, 0.0070),
}


def test_dispatch_on_one_gpu_by_hand():
    times = {("dispatch", "e2e"): (0.012, 0.0125), ("dispatch", "plan"): (0.0025, 0.0025)}

    _, figures = account(on_gpu("dispatch", "loopback"), records(times))

    # Per rank 4 MB, 3 MB and 2 MB in 10 us; both ranks together read and write 16 MB.
    assert {key: value for key, value in figures.items() if "/" in key} == pytest.approx(
        {
            "dispatch/logical_gbps": 400.0,
            "dispatch/dedup_gbps": 300.0,
            "dispatch/wire_gbps": 200.0,
            "dispatch/gbps_per_cta": 100.0,
            "dispatch/memory_gbps": 1600.0,
            "dispatch/memory_share": 1 / 3,
        }
    )


def test_combine_on_one_gpu_reads_each_row_twice_and_writes_a_row_a_token():
    _, figures = account(on_gpu("combine", "loopback"), records(COMBINE))

    shares = {key: value for key, value in figures.items() if "memory" in key or "cta" in key}
    # push: 16 MB in 10 us; reduce: 8 MB and 8 tokens x 0.5 MB in 7.5 us; combine: 28 MB in 20 us.
    assert shares == pytest.approx(
        {
            "push/memory_gbps": 1600.0,
            "reduce/memory_gbps": 1600.0,
            "combine/memory_gbps": 1400.0,
            "push/memory_share": 1600 / 4800,
            "reduce/memory_share": 1600 / 4800,
            "combine/memory_share": 1400 / 4800,
            "push/gbps_per_cta": 100.0,
            "combine/gbps_per_cta": 50.0,
        }
    )
    assert "reduce/logical_gbps" not in figures


def test_between_gpus_the_share_is_of_a_link_and_memory_is_each_gpus_own():
    _, figures = account(on_gpu("combine", "nvshmem"), records(COMBINE))

    assert figures["push/link_share"] == pytest.approx(200 / 450)
    assert figures["combine/link_share"] == pytest.approx(100 / 450)
    assert figures["push/memory_gbps"] == pytest.approx(800.0)
    assert not any("memory_share" in key for key in figures)


def test_ranks_that_take_turns_on_one_gpu_have_no_share_of_a_link():
    _, figures = account(on_gpu("combine", "nvshmem", num_gpus=1), records(COMBINE))

    assert figures["push/memory_gbps"] == pytest.approx(1600.0)
    assert not any("_share" in key for key in figures)


def test_rows_that_cross_no_link_have_no_share_of_one():
    stays = {**COUNTS, "wire_bytes": 0}

    _, figures = account(on_gpu("combine", "nvshmem"), records(COMBINE, stays))

    assert figures["push/wire_gbps"] == 0.0
    assert not any("link_share" in key for key in figures)


def test_what_a_gpu_gives_is_left_out_where_it_is_not_known():
    unknown = on_gpu("combine", "loopback", num_comm_ctas="auto", link_gbps=None, hbm_gbps=None)

    _, figures = account(unknown, records(COMBINE))

    names = {key.partition("/")[2] for key in figures if "/" in key}
    assert names == {"logical_gbps", "dedup_gbps", "wire_gbps", "memory_gbps"}


def test_without_rows_no_memory_is_said_to_be_used():
    empty = dict.fromkeys(COUNTS, 0)

    _, figures = account(on_gpu("combine", "loopback"), records(COMBINE, empty))

    assert not any("memory" in key for key in figures)


def test_a_fused_launch_has_no_rate_of_memory():
    _, figures = account(on_gpu("dispatch_gemm", "loopback"), records(DISPATCH_GEMM))

    assert "dispatch/memory_gbps" in figures
    assert not any(key.startswith(("fused/mem", "gemm_all/mem")) for key in figures)


def test_launches_in_a_chain_have_the_rate_of_their_period():
    times = {("dispatch", "e2e"): (0.010, 0.010)}

    _, figures = account(on_gpu("dispatch", "loopback"), records(times))

    assert figures["dispatch/logical_gbps"] == pytest.approx(400.0)


def test_without_samples_the_figures_of_the_routing_remain():
    bare = [RankRecord(rank=rank, samples=(), verdicts=(), counts=COUNTS) for rank in range(2)]

    terms, figures = account(point("dispatch_gemm"), bare)

    assert terms == ()
    assert figures["wire_bytes"] == 4e6
    assert not any("/" in key for key in figures)


def test_an_efficiency_that_may_be_1_or_is_above_it_is_marked():
    def mark(operation, **changed):
        times = {**DISPATCH_GEMM, **{(name, "stage"): ms for name, ms in changed.items()}}
        return efficiency_mark(operation, slowest_rank(records(times)))

    # Fused without plan 9 ms; the first is that of gemm_all, 8 ms.
    assert mark("dispatch_gemm") == ""
    assert mark("dispatch_gemm", gemm_all=(9, 7)) == "~"
    assert mark("dispatch_gemm", gemm_all=(9.5, 7)) == "!"
    assert mark("dispatch_gemm", gemm_all=(8, 7), gemm_split=(9.5, 8)) == "!"
    no_whole = {key: ms for key, ms in DISPATCH_GEMM.items() if key[0] != "gemm_all"}
    no_whole |= {("gemm_split", "stage"): (9.5, 8)}
    assert efficiency_mark("dispatch_gemm", slowest_rank(records(no_whole))) == "!"
    assert mark("gemm_combine", push=(4, 5), reduce=(0.5, 0.75)) == ""
    assert mark("gemm_combine", push=(4, 5), reduce=(0.5, 1.25)) == "!"
    assert mark("moe_layer", gemm_all=(99, 99)) == ""


def test_a_bound_of_an_older_version_is_made_anew_where_it_is_read():
    times = DISPATCH_GEMM | {("gemm_split", "stage"): (8.5, 8.5)}
    asked = on_gpu("dispatch_gemm", "loopback")
    asked.config["kernel"]["roles"] = "switch"
    _, figures = account(asked, records(times))
    # Communication takes 4 of 8.5 ms, then 4.5 / 8.5 of the 8 ms on all SMs are left.
    bound = 4 + 8 * 4.5 / 8.5
    assert figures["fused/efficiency"] == pytest.approx(bound / 9)
    stored = Outcome(
        point=asked,
        status=Status.ok,
        reason="",
        records=tuple(records(times)),
        figures={**figures, "fused/efficiency": 8.5 / 9, "fused/hidden_share": 0.5},
    )

    assert as_today(stored, 7) == stored
    anew = as_today(stored, 6).figures
    assert anew["fused/efficiency"] == figures["fused/efficiency"]
    assert anew["fused/hidden_share"] == 0.5, "its formula has not changed"
    # Versions 1 and 2 had fewer counts.
    fewer = {key: count for key, count in COUNTS.items() if "physical" not in key}
    early = replace(stored, records=tuple(records(times, counts=fewer)))
    assert as_today(early, 2).figures == anew
    # What is not there to make it of stays as it was, for whoever says what is wrong with it.
    for gone in ("gemm_all", "gemm_split", "dispatch", "fused"):
        some = {key: ms for key, ms in times.items() if key[0] != gone}
        damaged = replace(stored, records=tuple(records(some)))
        assert as_today(damaged, 6) == damaged
    for ms in (0, -(2**43)):
        damaged = replace(
            stored, records=tuple(records(times | {("gemm_split", "stage"): (ms, ms)}))
        )
        assert as_today(damaged, 6) == damaged
    bare = replace(stored, status=Status.timeout, records=())
    assert as_today(bare, 6) == bare
    fixed = on_gpu("dispatch_gemm", "loopback")
    fixed.config["kernel"]["roles"] = "fixed"
    assert as_today(replace(stored, point=fixed), 6).figures == stored.figures
