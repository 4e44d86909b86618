"""Samples to table numbers."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilepipe.records import Clocks, Status
from tilepipe.results.schema import PERFORMANCE_COLUMNS, SUMMARY
from tilepipe.results.summary import rate_figures, reduce_series, slowest_rank, summary_rows

TIMES = st.integers(0, 2**53)


@given(st.data(), st.integers(1, 4), st.integers(1, 6))
def test_an_iteration_takes_as_long_as_its_slowest_rank(make_record, data, num_ranks, num_iters):
    rows = data.draw(
        st.lists(
            st.lists(TIMES, min_size=num_iters, max_size=num_iters),
            min_size=num_ranks,
            max_size=num_ranks,
        )
    )

    series = slowest_rank(make_record(r, {("a", "e2e"): row}) for r, row in enumerate(rows))

    assert series.keys() == {("a", "e2e")}
    assert series["a", "e2e"].tolist() == np.array(rows).max(axis=0).tolist()


def test_slowest_rank_refuses_an_iteration_that_a_rank_lacks(make_record):
    records = [make_record(0, {("a", "e2e"): (5, 6)}), make_record(1, {("a", "e2e"): (5,)})]

    with pytest.raises(ValueError, match=r"a e2e iteration 1 lacks ranks \[1\]"):
        slowest_rank(records)


def test_slowest_rank_refuses_a_sample_that_is_there_twice(make_record):
    record = make_record(0, {("a", "e2e"): (5, 6)})

    with pytest.raises(ValueError, match="rank 0 has two samples of a e2e iteration 0"):
        slowest_rank([record, record])


def test_reduction_of_a_known_series():
    reduced = reduce_series(np.arange(100, 0, -1) * 10)

    assert vars(reduced) == {
        "num_iters": 100,
        "median_ns": 505,
        "low_ns": 400,
        "high_ns": 610,
        "interval_kind": "order95",
        "p10_ns": 100,
        "p90_ns": 900,
        "min_ns": 10,
        "spread": 800 / 505,
    }


@given(st.lists(TIMES, min_size=1, max_size=40), st.randoms())
def test_reduction_forgets_the_order_and_keeps_its_bounds_in_order(values, random):
    reduced = reduce_series(np.array(values))

    assert reduced == reduce_series(np.array(random.sample(values, len(values))))
    assert min(values) == reduced.min_ns <= reduced.p10_ns <= reduced.p90_ns <= max(values)
    assert reduced.low_ns <= reduced.median_ns <= reduced.high_ns
    assert {reduced.p10_ns, reduced.p90_ns} <= set(values)
    assert (reduced.spread is None) == (reduced.median_ns == 0)
    assert reduced.interval_kind == ("range" if len(values) < 6 else "order95")


def test_an_ok_point_gives_one_row_per_contender_with_its_figures(make_outcome, make_record):
    fused_times = {("fused", "e2e"): (9, 9), ("fused", "plan"): (2, 4), ("fused", "stage"): (7, 5)}
    times = {**fused_times, ("gemm_all", "stage"): (6, 8)}
    outcome = make_outcome(
        records=(make_record(0, times),),
        figures={"wire_bytes": 512.0, "fused/efficiency": 0.75, "gemm_all/tflops": 1.5},
    )

    fused, gemm_all = summary_rows([outcome])

    times = ("contender", "component", "median_ns", "plan_ns", "stage_ns")
    shown = (*times, "efficiency", "tflops", "wire_bytes")
    assert [fused[key] for key in shown] == ["fused", "e2e", 9, 3, 6, 0.75, None, 512.0]
    assert [gemm_all[key] for key in shown] == ["gemm_all", "stage", 7, None, 7, None, 1.5, 512.0]
    assert fused.keys() == set(SUMMARY.names)


def test_a_row_carries_where_experts_lived(make_outcome, make_point):
    placement = {"rule": "file", "path": "map.json", "layer": 4, "replica": "local"}
    outcome = make_outcome(point=make_point(placement=placement))
    records = tuple(
        replace(record, counts={**record.counts, "num_physical": 12}) for record in outcome.records
    )

    plain, counted = summary_rows([make_outcome()])[0], replace(outcome, records=records)

    row = summary_rows([counted])[0]
    columns = ("placement", "placement_path", "placement_layer", "placement_replica")
    assert [row[key] for key in (*columns, "num_redundant")] == ["file", "map.json", 4, "local", 4]
    # A point of an older version has no such group and no such count.
    assert [plain[key] for key in (*columns, "num_redundant")] == [None] * 5


def test_a_row_carries_workload_routing_and_kernel_of_its_point(make_outcome):
    row = summary_rows([make_outcome()])[0]

    want = {
        "schema_version": 7,
        "config_id": "c0ffee",
        "operation": "dispatch_gemm",
        "status": "ok",
        "hardware": "cpu",
        "fabric": "host",
        "num_ranks": 2,
        "num_tokens": 16,
        "num_tokens_total": 16,
        "hidden": 64,
        "law": "zipf",
        "routing_seed": 3,
        "routing_exponent": 1.5,
        "routing_sigma": None,
        "order": "edf",
        "copy": None,
        "num_comm_ctas": None,
        "num_comm_warps": None,
        "l2": None,
        "regime": None,
        "pace_gbps": None,
        "pace_latency_ns": None,
        "sm_clock_mhz": None,
        "clock_reasons": None,
        "throttled": None,
        "num_warmups": 1,
        "num_iters": 2,
    }
    assert {key: row[key] for key in want} == want


def on_gpu(make_point):
    point = make_point(
        kernel={"copy": "simt", "num_comm_ctas": 12, "num_comm_warps": 16, "num_loads": 14}
        | {"num_stages": 3, "stage_bytes": 14_336, "flag_batch": 4},
        measure={"num_warmups": 2, "num_iters": 30, "l2": "warm", "regime": "chained"},
        launch={"num_ranks": 2, "fabric": "loopback", "pace_gbps": 50.0, "pace_latency_ns": 700},
    )
    return replace(point, executor="cuda")


def test_a_row_of_a_gpu_carries_how_it_was_run_and_what_the_clocks_did(
    make_outcome, make_record, make_point
):
    times = {("fused", "e2e"): (9, 9)}
    calm = Clocks(
        sm_mhz=1980,
        sm_mhz_min=1965,
        sm_mhz_max=1980,
        power_w_max=412.5,
        temperature_c_max=51,
        reasons=("gpu_idle",),
        num_samples=40,
    )
    hot = replace(
        calm, sm_mhz=1755, sm_mhz_min=1410, power_w_max=699.0, reasons=("gpu_idle", "sw_power_cap")
    )
    records = tuple(
        replace(make_record(rank, times), clocks=clocks) for rank, clocks in enumerate((calm, hot))
    )

    (row,) = summary_rows([make_outcome(point=on_gpu(make_point), records=records, figures={})])

    want = {
        "num_comm_ctas": 12,
        "num_comm_warps": 16,
        "num_loads": 14,
        "num_stages": 3,
        "stage_bytes": 14_336,
        "flag_batch": 4,
        "l2": "warm",
        "regime": "chained",
        "pace_gbps": 50.0,
        "pace_latency_ns": 700,
        "sm_clock_mhz": 1755,
        "sm_clock_min_mhz": 1410,
        "sm_clock_max_mhz": 1980,
        "power_w": 699.0,
        "temperature_c": 51,
        "clock_reasons": "gpu_idle+sw_power_cap",
        "throttled": True,
    }
    assert {key: row[key] for key in want} == want


def test_a_number_of_ctas_that_was_found_stands_where_a_typed_one_would(
    make_outcome, make_record, make_point
):
    point = replace(make_point(kernel={"num_comm_ctas": "auto"}), executor="cuda")
    record = make_record(0, {("fused", "e2e"): (9, 9)})
    found = replace(record, counts={**record.counts, "num_comm_ctas": 7})

    rows = [
        summary_rows([make_outcome(point=point, figures={}, **ended)])[0]
        for ended in (
            {"records": (found,)},
            {"records": (record,)},  # of an older version
            {"records": (), "status": Status.runtime_error, "reason": "because"},
        )
    ]

    assert [row["num_comm_ctas"] for row in rows] == [7, None, None]


@pytest.mark.parametrize(
    ("reasons", "throttled", "word"),
    [
        ((), False, ""),
        (
            ("applications_clocks_setting", "gpu_idle"),
            False,
            "applications_clocks_setting+gpu_idle",
        ),
        (("display_clocks_setting", "none"), False, "display_clocks_setting+none"),
        (("hw_thermal_slowdown",), True, "hw_thermal_slowdown"),
        (("gpu_idle", "sync_boost"), True, "gpu_idle+sync_boost"),
        (("other",), True, "other"),
    ],
)
def test_only_what_lowers_the_clock_counts_as_throttled(
    make_outcome, make_record, make_point, reasons, throttled, word
):
    clocks = Clocks(
        sm_mhz=1,
        sm_mhz_min=1,
        sm_mhz_max=1,
        power_w_max=1.0,
        temperature_c_max=1,
        reasons=reasons,
        num_samples=1,
    )
    record = replace(make_record(0, {("fused", "e2e"): (9, 9)}), clocks=clocks)

    (row,) = summary_rows([make_outcome(point=on_gpu(make_point), records=(record,), figures={})])

    assert clocks.throttled is throttled
    assert (row["throttled"], row["clock_reasons"]) == (throttled, word)


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.ok])
def test_a_point_that_is_not_ok_gives_one_row_without_any_time(make_outcome, status):
    rows = summary_rows([make_outcome(status=status, reason="because")])

    assert len(rows) == 1
    assert {rows[0][column] for column in PERFORMANCE_COLUMNS} == {None}
    assert (rows[0]["status"], rows[0]["reason"]) == (status.name, "because")
    assert rows[0]["logical_bytes"] == 4096.0


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"speed": 1.0}, "figure speed is unknown"),
        ({"efficiency": 1.0}, "figure efficiency is unknown"),
        ({"fused/flops": 1.0}, "figure fused/flops is unknown"),
        ({"quack/tflops": 1.0}, r"contenders \['quack'\]: those measured are \['fused'\]"),
        ({"flops": float("nan")}, "figure flops is nan"),
    ],
)
def test_a_figure_without_a_column_or_value_is_refused(make_outcome, figures, message):
    with pytest.raises(ValueError, match=message):
        summary_rows([make_outcome(figures=figures)])


def test_rates_are_per_rank_and_carry_their_basis():
    figures = rate_figures(
        "comm", median_ns=2_000, num_ranks=4, all_ranks={"wire_bytes": 80_000, "flops": 16_000_000}
    )

    # 20 000 bytes in 2 us are 10e9 byte/s; 4e6 flop in 2 us are 2e12 flop/s.
    assert figures == {"comm/wire_gbps": 10.0, "comm/tflops": 2.0}


def test_a_time_of_zero_gives_no_rate():
    assert rate_figures("c", median_ns=0, num_ranks=1, all_ranks={"wire_bytes": 1}) == {}
