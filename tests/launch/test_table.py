"""What a sweep shows of points on a GPU fits a terminal, and says what sets a row apart."""

from dataclasses import replace

import pytest

from tests.launch.points import compose_point
from tilepipe.launch import console, screen
from tilepipe.launch.table import figures_table, times_table
from tilepipe.records import Clocks, Outcome, RankRecord, Sample, Status
from tilepipe.results.accounting import account

# 4 ranks of 4096 tokens, topk 8, rows of 14 336 bytes.
COUNTS = {
    "num_tokens": 4096,
    "all_rows": 131_072,
    "max_expert_rows": 4_300,
    "max_rank_rows": 33_000,
    "num_physical": 32,
    "max_physical_rows": 4_300,
    "logical_bytes": 1_879_048_192,
    "dedup_bytes": 1_500_000_000,
    "wire_bytes": 1_409_286_144,
}
CALM = ("gpu_idle",)


def outcome(*words, e2e_us=1020.0, plan_us=20.0, reasons=CALM, kernel="dispatch", **counted):
    point = compose_point(
        "hardware=h200_x1",
        "workload=deepseek_v3_ep8_rank",
        f"kernel={kernel}",
        "launch.num_ranks=4",
        *words,
        name=f"{kernel}_granularity",
    )
    windows = {"e2e": e2e_us} if plan_us is None else {"e2e": e2e_us, "plan": plan_us}
    samples = tuple(
        Sample(
            contender=kernel,
            component=component,
            iteration=iteration,
            start_ns=0,
            duration_ns=round(1e3 * duration_us) + iteration,
        )
        for component, duration_us in windows.items()
        for iteration in range(8)
    )
    clocks = Clocks(
        sm_mhz=1755,
        sm_mhz_min=1410,
        sm_mhz_max=1980,
        power_w_max=690.0,
        temperature_c_max=60,
        reasons=reasons,
        num_samples=9,
    )
    counts = {**COUNTS, **counted}
    records = tuple(
        RankRecord(rank=rank, samples=samples, verdicts=(), counts=counts, clocks=clocks)
        for rank in range(4)
    )
    terms, figures = account(point, records)
    return Outcome(
        point=point, status=Status.ok, reason="", records=records, terms=terms, figures=figures
    )


def cells(table):
    """Heading in one line -> its cells."""
    return {str(column.header).replace("\n", " "): list(column.cells) for column in table.columns}


def test_a_dispatch_on_a_gpu_shows_its_rate_its_share_of_memory_and_that_of_a_cta():
    swept = [outcome("kernel.num_comm_ctas=8"), outcome("kernel.num_comm_ctas=16", e2e_us=520.0)]

    found = cells(figures_table(swept))

    # 469.8 MB a rank in 1 ms and 0.5 ms; 3.758 GB read and written by all.
    assert "executor cuda over loopback, ranks 4" in str(figures_table(swept).title)
    assert found["CTAs"] == ["8", "16"]
    assert found["logical GB/s"] == ["470", "940"]
    assert found["GB/s a CTA"] == ["58.7", "58.7"]
    assert found["of memory"] == ["0.783", "1.57"]
    assert "of link" not in found
    assert "mark" not in found


def test_a_number_of_ctas_that_was_found_is_always_shown_and_says_so():
    found = outcome("kernel.num_comm_ctas=auto", num_comm_ctas=10)

    for table in (figures_table([found]), times_table([found], narrow=True)):
        assert cells(table)["CTAs"] == ["auto: 10"]
    assert cells(figures_table([found]))["GB/s a CTA"] == ["47"]
    assert "CTAs" not in cells(figures_table([outcome()]))


@pytest.mark.parametrize(
    ("words", "reasons", "mark"),
    [
        ((), ("gpu_idle", "sw_power_cap"), "throttled"),
        (("launch.pace_gbps=50",), CALM, "paced"),
        (("launch.pace_latency_ns=700",), CALM, "paced"),
        (("measure.regime=chained", "measure.l2=warm"), CALM, "chained"),
        (("launch.fabric=nvshmem",), CALM, "shared_gpu"),
        (
            ("measure.regime=chained", "measure.l2=warm", "launch.pace_gbps=50"),
            ("hw_slowdown",),
            "throttled\npaced\nchained",
        ),
    ],
)
def test_what_sets_a_row_apart_is_said_in_it(words, reasons, mark):
    plain, other = outcome(), outcome(*words, reasons=reasons)

    for table in (figures_table([plain, other]), times_table([plain, other], narrow=True)):
        assert cells(table)["mark"] == ["", mark]


def test_a_chain_shows_its_period_and_says_so():
    table = times_table(
        [outcome("measure.regime=chained", "measure.l2=warm", plan_us=None)], narrow=False
    )

    assert "chained: the period" in str(table.title)
    assert cells(table)["dispatch"] == ["1.02 ±0%"]


def test_times_below_a_millisecond_keep_their_microseconds():
    found = cells(times_table([outcome(e2e_us=62.5, plan_us=20.25)], narrow=True))

    assert found["dispatch"] == ["0.042"]


def test_a_placement_is_told_by_its_name_and_by_more_where_two_share_it():
    plain, few = outcome(), outcome("placement=balanced", num_physical=36)
    many = outcome("placement=balanced", "placement.num_redundant=8", num_physical=40)
    local = outcome("placement=balanced", "placement.replica=local", num_physical=36)

    by_name = cells(figures_table([plain, few]))
    by_count = cells(figures_table([plain, few, many]))
    by_replica = cells(figures_table([few, local]))

    assert by_name["placement"] == ["contiguous", "balanced"]
    assert not {"redund.", "replica", "map layer"} & set(by_name)
    assert by_count["redund."] == ["0", "4", "8"]
    assert by_replica["replica"] == ["spread", "local"]
    assert "placement" not in by_replica


WIDEST = (
    ("kernel.granularity=token", "kernel.flag_batch=16", "kernel.num_comm_ctas=24"),
    ("measure.regime=chained", "measure.l2=warm", "launch.pace_gbps=50", "kernel.flag_batch=4"),
)


@pytest.mark.parametrize("kernel", ["dispatch", "combine"])
def test_tables_of_a_sweep_on_a_gpu_fit_100_columns(kernel, monkeypatch, capsys):
    monkeypatch.setattr(console, "_PIPED_WIDTH", 100)
    swept = [
        outcome(*words, kernel=kernel, reasons=reasons)
        for words, reasons in zip(WIDEST, (CALM, ("hw_slowdown",)), strict=True)
    ]

    for table in (figures_table(swept), times_table(swept, narrow=True)):
        screen.Screen(len(swept)).show(table)
        lines = capsys.readouterr().out.splitlines()

        assert max(len(line.rstrip()) for line in lines) <= 100
        # No cell is cut off, and only the marks of a row take more than one line.
        assert "…" not in "".join(lines)
        assert len([line for line in lines if " 16384 " in line]) == len(swept)


def test_a_rate_of_thousands_is_spelled_out():
    found = cells(figures_table([outcome(e2e_us=220.0)]))

    assert found["logical GB/s"] == ["2349"]


def overlapped(*gemm_us):
    """A fused launch of 100 us beside a GEMM of other times."""
    point = compose_point("workload=tiny", "hardware=cpu", "launch.num_ranks=1", name="overlapped")
    times = {"fused": [100.0] * 8, "sequential": [150.0] * 8, "dispatch": [40.0] * 8}
    rungs = ("gemm_all", "gemm_flags", "gemm_contended")
    times |= {rung: list(gemm_us) for rung in rungs}
    samples = tuple(
        Sample(
            contender=contender,
            component=component,
            iteration=iteration,
            start_ns=0,
            duration_ns=round(1e3 * us) * (component != "plan"),
        )
        for contender, series in times.items()
        for component in (("stage",) if contender in rungs else ("e2e", "plan"))
        for iteration, us in enumerate(series)
    )
    record = RankRecord(rank=0, samples=samples, verdicts=(), counts={**COUNTS, "flops": 10**9})
    terms, figures = account(point, (record,))
    return Outcome(
        point=point, status=Status.ok, reason="", records=(record,), terms=terms, figures=figures
    )


def test_an_efficiency_says_where_it_may_be_1_and_where_its_bound_is_none():
    below, unsure, above = (
        overlapped(*[90.0] * 8),
        overlapped(*range(96, 104)),
        overlapped(*[120] * 8),
    )

    assert cells(figures_table([below, unsure]))["effic."] == ["0.9", "0.995~"]
    assert str(figures_table([below]).title).endswith(
        "figures; ~: may be 1; expert, rank: max/mean rows"
    )
    table = figures_table([below, above])
    assert cells(table)["effic."] == ["0.9", "1.2!"]
    assert "; !: above 1, parts were slower alone;" in str(table.title)


def test_a_rate_of_an_unsure_time_says_how_far_its_interval_reaches():
    point = outcome("workload.num_tokens=64")
    (first, *others) = point.records
    spread = tuple(
        replace(sample, duration_ns=sample.duration_ns * (10 + sample.iteration))
        if sample.component == "e2e"
        else sample
        for sample in first.samples
    )
    unsure = replace(point, records=(replace(first, samples=spread), *others))

    assert cells(figures_table([point]))["logical GB/s"] == ["470"]
    assert cells(figures_table([unsure]))["logical GB/s"] == ["470 ±26%"]
    assert cells(figures_table([unsure], narrow=True))["logical GB/s"] == ["470"]
