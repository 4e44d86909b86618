"""The number of communication CTAs that a model of the fused time chooses."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.launch.points import compose_point
from tilepipe.config.choices import Operation, Roles
from tilepipe.config.schemas import config_from_dict
from tilepipe.experiments.comm_ctas import asks_for_comm_ctas, rates_of, with_comm_ctas
from tilepipe.experiments.setting import placed_routing
from tilepipe.kernels.overlap.plan import split_chip
from tilepipe.schedule.comm_ctas import (
    Rates,
    Work,
    beside_gbps,
    best_num_comm_ctas,
    modelled_ns,
    work_of,
)
from tilepipe.schedule.settings import PlanSettings

RESULTS = Path(__file__).parents[2] / "results"
FUSED = (Operation.dispatch_gemm, Operation.gemm_combine)
# The way home on which CTAs push, all through a launch.
PUSHED = ("kernel.push=ctas", "kernel.walk=expert")
# How far the choice may be from the best count of a sweep.
NEAR = 1.03

RATES = st.builds(
    Rates,
    num_sms=st.integers(2, 132),
    cta_gbps=st.floats(5, 100),
    beside_gemm=st.floats(0.2, 1),
    shared_gbps=st.floats(50, 4000),
    memory_gbps=st.floats(100, 4000),
    tflops=st.floats(10, 1000),
    link_gbps=st.none() | st.floats(5, 900),
)


@st.composite
def works(draw):
    moved, share = draw(st.integers(0, 10**9)), draw(st.floats(0, 1))
    return Work(
        moved_bytes=moved,
        linked_bytes=int(share * moved),
        rolling_bytes=draw(st.integers(0, moved)),
        reduced_bytes=draw(st.integers(0, moved)),
        num_tiles=draw(st.integers(0, 10**4)),
        tile_flops=draw(st.integers(10**6, 10**9)),
    )


@given(work=works(), rates=RATES, roles=st.sampled_from(Roles), parts=st.integers(1, 8))
def test_a_gemm_that_sends_is_modelled_by_what_is_left_to_reduce(work, rates, roles, parts):
    late = work.reduced_bytes // parts
    sent = replace(work, early_bytes=work.reduced_bytes - late)

    def time_ns(count, of):
        return modelled_ns(Operation.gemm_combine, roles, count, work=of, rates=rates)

    for count in range(1, rates.num_sms):
        # Nobody moves rows, and the last part is reduced by whoever is there.
        slowest, own = time_ns(count, replace(sent, early_bytes=0)), time_ns(count, sent)
        everyone = rates.num_sms if roles is Roles.switch else count
        gbps = min(everyone * rates.cta_gbps, rates.memory_gbps)
        assert own >= (slowest - sent.early_bytes / gbps) * (1 - 1e-9)
        assert own >= late / gbps * (1 - 1e-9)
        assert own <= min(slowest, time_ns(count, work)) * (1 + 1e-9)


def chosen(operation, roles, work, rates, **given_):
    return best_num_comm_ctas({operation: work}, roles, rates=rates, **given_)


any_launch = given(
    operation=st.sampled_from(FUSED),
    roles=st.sampled_from(Roles),
    work=works(),
    rates=RATES,
    factor=st.floats(1.1, 10),
)


@given(
    operation=st.sampled_from(FUSED),
    roles=st.sampled_from(Roles),
    work=works(),
    rates=RATES,
    cluster_m=st.integers(1, 4),
)
def test_whole_clusters_of_both_roles_fit_the_rank(operation, roles, work, rates, cluster_m):
    if rates.num_sms < 2 * cluster_m:
        with pytest.raises(ValueError, match=r"^kernel\.num_comm_ctas=auto: a rank has \d+ SMs"):
            chosen(operation, roles, work, rates, cluster_m=cluster_m)
        return

    count = chosen(operation, roles, work, rates, cluster_m=cluster_m)

    split = split_chip(rates.num_sms, num_launch_ranks=1, num_comm_ctas=count, cluster_m=cluster_m)
    assert split.num_gemm_ctas >= cluster_m


@any_launch
def test_no_count_is_modelled_to_be_faster_and_no_smaller_one_as_fast(
    operation, roles, work, rates, factor
):
    times = [
        modelled_ns(operation, roles, count, work=work, rates=rates)
        for count in range(1, rates.num_sms)
    ]

    count = chosen(operation, roles, work, rates)

    assert times[count - 1] == pytest.approx(min(times), rel=1e-8)
    assert all(time > times[count - 1] for time in times[: count - 1])


# A whole factor leaves the share that crosses the link as it is.
@given(
    operation=st.sampled_from(FUSED),
    roles=st.sampled_from(Roles),
    work=works(),
    rates=RATES,
    factor=st.integers(2, 10),
)
def test_more_bytes_take_no_fewer_ctas(operation, roles, work, rates, factor):
    more = replace(
        work, moved_bytes=work.moved_bytes * factor, linked_bytes=work.linked_bytes * factor
    )

    assert chosen(operation, roles, more, rates) >= chosen(operation, roles, work, rates)


def test_a_short_part_counts_beside_any_long_one():
    rates = Rates(
        num_sms=6,
        cta_gbps=5.0,
        beside_gemm=1.0,
        shared_gbps=50.0,
        memory_gbps=100.0,
        tflops=10.0,
        link_gbps=5.0,
    )
    counts = set()
    for factor in (1, 2, 1000):
        work = Work(
            moved_bytes=factor * 40_000_000,
            linked_bytes=factor * 20_000_000,  # what takes longest, whatever the count
            rolling_bytes=0,
            reduced_bytes=1,
            num_tiles=0,
            tile_flops=1_000_000,
        )
        counts.add(chosen(Operation.gemm_combine, Roles.fixed, work, rates))

    # All the link's time they reduce one byte, and five do so a tenth of a nanosecond earlier.
    assert counts == {5}


@any_launch
def test_a_longer_gemm_and_faster_ctas_take_no_more_of_them(operation, roles, work, rates, factor):
    count = chosen(operation, roles, work, rates)

    longer = replace(work, num_tiles=int(work.num_tiles * factor))
    faster = replace(rates, cta_gbps=rates.cta_gbps * factor)

    assert chosen(operation, roles, longer, rates) <= count
    assert chosen(operation, roles, work, faster) <= count


@any_launch
def test_a_slower_link_takes_no_more_ctas(operation, roles, work, rates, factor):
    link_gbps = 100.0 if rates.link_gbps is None else rates.link_gbps
    fast, slow = (replace(rates, link_gbps=rate) for rate in (link_gbps, link_gbps / factor))

    # Where the link keeps SMs from multiplying anyway, more of them reduce.
    if (operation, roles) != (Operation.gemm_combine, Roles.fixed):
        assert chosen(operation, roles, work, slow) <= chosen(operation, roles, work, fast)


@any_launch
def test_a_launch_is_never_modelled_below_its_parts(operation, roles, work, rates, factor):
    count = chosen(operation, roles, work, rates)

    time_ns = modelled_ns(operation, roles, count, work=work, rates=rates)

    gemm_ns = work.num_tiles * work.tile_flops / rates.tflops / 1e3
    link_ns = 0 if rates.link_gbps is None else work.linked_bytes / rates.link_gbps
    assert time_ns >= max(gemm_ns, link_ns) * (1 - 1e-9)


def test_the_work_of_a_launch_is_that_of_its_busiest_rank():
    # Two ranks with two experts each; rank 0 sends 300 + 10, rank 1 sends 5 + 100.
    counts = np.array([[200, 100, 10, 0], [5, 0, 0, 100]], np.int32)
    settings = PlanSettings(num_ranks=2, num_experts=4, num_topk=1, num_n_tiles=3)
    sizes = {"num_sms": 66, "row_bytes": 100, "tile_n": 256, "num_k": 64}

    out = work_of(counts, settings, operation=Operation.dispatch_gemm, **sizes)
    home = work_of(counts, settings, operation=Operation.gemm_combine, **sizes)

    assert out == Work(
        moved_bytes=31_000,  # of rank 0
        linked_bytes=1_000,  # 10 rows leave rank 0, 5 come
        rolling_bytes=30_500,  # all that any rank receives: three groups of eight tiles hold more
        reduced_bytes=0,
        num_tiles=9,  # 205 and 100 rows: two M tiles and one
        tile_flops=2 * 128 * 256 * 64,
    )
    assert home == replace(out, moved_bytes=30_500, reduced_bytes=31_000)


def test_what_rolls_in_or_out_is_a_round_of_tiles_of_all_sms():
    counts = np.full((1, 32), 1024, np.int32)
    settings = PlanSettings(num_ranks=1, num_experts=32, num_topk=8, num_n_tiles=16)
    sizes = {"num_sms": 132, "row_bytes": 14_336, "tile_n": 256, "num_k": 7168}

    out = work_of(counts, settings, operation=Operation.dispatch_gemm, **sizes)
    home = work_of(counts, settings, operation=Operation.gemm_combine, **sizes)

    # 128 tiles are a group of 8 by 16, and 4 rows of the next are begun; 8.25 rows are ended.
    assert out.rolling_bytes == 12 * 128 * 14_336
    assert home.rolling_bytes == 1056 * 14_336
    # One rank alone stands for one of a group.
    assert out.linked_bytes == out.moved_bytes == 32 * 1024 * 14_336


@given(first=works(), second=works(), rates=RATES, roles=st.sampled_from(Roles))
def test_launches_with_one_count_take_the_one_with_which_both_together_are_fastest(
    first, second, rates, roles
):
    works_ = dict(zip(FUSED, (first, second), strict=True))

    count = best_num_comm_ctas(works_, roles, rates=rates)

    def time_ns(count):
        return sum(
            modelled_ns(operation, roles, count, work=work, rates=rates)
            for operation, work in works_.items()
        )

    assert all(time_ns(count) <= time_ns(other) * (1 + 1e-9) for other in range(1, rates.num_sms))
    alone = [chosen(operation, roles, work, rates) for operation, work in works_.items()]
    if alone[0] == alone[1]:
        assert count == alone[0]


def config_of(*words):
    return config_from_dict(compose_point("hardware=h200_x1", *words).config)


def auto_of(*words, num_sms=132):
    """The count that is found for these words, CTAs set aside where no roles are typed."""
    if not any(word.startswith("kernel.roles=") for word in words):
        words += ("kernel.roles=switch",)
    config = config_of("kernel.num_comm_ctas=auto", *words)
    assert asks_for_comm_ctas(config)
    return with_comm_ctas(config, placed_routing(config), num_sms=num_sms).kernel.num_comm_ctas


def swept(name, contender):
    """Communication CTAs -> time over that of the GEMM alone, as a benchmark has swept them."""
    with (RESULTS / f"h200_x1_{name}.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["contender"] == contender]
    return {int(row["num_comm_ctas"]): float(row["x_gemm_all"]) for row in rows}


def swept_alone(roles="switch"):
    """(operation, ranks, CTAs of a cluster) -> communication CTAs -> us, 4096 tokens of all ranks,
    simt: every sweep that is published."""
    jobs = {}
    with (RESULTS / "h200_x1_comm_ctas.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            job = row["operation"], int(row["num_ranks"]), int(row["cluster_m"])
            assert row["copy"] == "simt"
            if row["verdict"] == "ok" and row["roles"] == roles:
                jobs.setdefault(job, {})[int(row["num_comm_ctas"])] = float(row["median_us"])
    return jobs


def paced(operation, copy):
    """Communication CTAs -> ns of fused launches of one rank on a link of 360 GB/s."""
    with (RESULTS / "h200_x1_paced.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["contender"] == "fused"]
    one = {"name": f"{operation}_paced", "num_ranks": "1", "copy": copy, "pace_gbps": "360"}
    return {
        int(row["num_comm_ctas"]): float(row["stage_ns"])
        for row in rows
        if all(row[key] == value for key, value in one.items())
    }


def over_best(times, count):
    """Time at a count, on the line through its neighbours, over that of the best one."""
    counts = sorted(times)
    assert counts[0] <= count <= counts[-1], f"{count} lies outside of the sweep"
    return np.interp(count, counts, [times[key] for key in counts]) / min(times.values())


@pytest.mark.parametrize(
    ("words", "times"),
    [
        (
            ("kernel=dispatch_gemm", "kernel.copy=tma", "kernel.roles=switch"),
            swept("overlap_times", "fused_together_switch"),
        ),
        (
            ("kernel=dispatch_gemm", "kernel.copy=tma", "kernel.roles=fixed"),
            swept("overlap_times", "fused_fixed"),
        ),
        (
            ("kernel=dispatch_gemm", "kernel.copy=simt", "launch.pace_gbps=360"),
            paced("dispatch_gemm", "simt"),
        ),
        (
            ("kernel=gemm_combine", "kernel.copy=simt", "kernel.roles=fixed", *PUSHED),
            {24: 1885.8, 40: 1874.3},  # us, of an earlier build
        ),
        (("kernel=gemm_combine",), swept("home_ways", "epilogue_chunk_4")),
        (
            ("kernel=gemm_combine", "launch.num_ranks=8", "workload.num_tokens=512"),
            {
                1: 1932.7,
                2: 1959.6,
                3: 2012.1,
                4: 2053.2,
            },  # us; sweeps that are published begin at 2
        ),
        (("kernel=gemm_combine", *PUSHED), swept("home_ways", "ctas_expert_4")),
        (
            ("kernel=gemm_combine", "kernel.push=ctas", "kernel.walk=chunk"),
            swept("home_ways", "ctas_chunk_4"),
        ),
    ],
)
def test_the_choice_is_near_the_best_count_of_a_measured_sweep(words, times):
    count = auto_of("workload=deepseek_v3_ep8_rank", *words)

    assert over_best(times, count) <= NEAR


@pytest.mark.parametrize(("job", "times"), swept_alone().items(), ids=str)
def test_the_choice_is_near_the_best_count_of_every_sweep_of_counts(job, times):
    operation, num_ranks, _ = job

    count = auto_of(
        *(f"kernel={operation}", "kernel.copy=simt", "kernel.roles=switch"),
        *("workload=deepseek_v3_ep8_rank", f"launch.num_ranks={num_ranks}"),
        f"workload.num_tokens={4096 // num_ranks}",
    )

    # On the way home of eight ranks on a chip each is given one, where sweeps begin at two.
    assert count >= min(times) or (operation, num_ranks, count) == ("gemm_combine", 8, 1)
    assert over_best(times, max(count, min(times))) <= NEAR


@pytest.mark.parametrize(("job", "times"), swept_alone("beside").items(), ids=str)
def test_no_count_is_faster_than_none_which_is_chosen_where_no_roles_are_typed(job, times):
    operation, num_ranks, cluster_m = job
    words = f"kernel={operation}", "workload=deepseek_v3_ep8_rank"
    words += f"launch.num_ranks={num_ranks}", f"workload.num_tokens={4096 // num_ranks}"

    config = config_of("kernel.num_comm_ctas=auto", *words)
    found = with_comm_ctas(config, placed_routing(config), num_sms=132).kernel

    assert (found.roles, found.num_comm_ctas) == (Roles.beside, 0)
    assert times[0] < min(swept_alone()[operation, num_ranks, cluster_m].values())


SHORT = Rates(
    num_sms=16,
    cta_gbps=10.0,
    beside_gemm=1.0,
    shared_gbps=1e9,  # as good as none
    memory_gbps=1e9,
    tflops=16.0,
    link_gbps=None,
    column=8,
)


@pytest.mark.parametrize(
    ("count", "apart_ns"),
    [
        (1, 4_000 / 10),  # it sends for as long as the others multiply
        (2, 2_000 / 10 + 2_000 / 10),
        (6, 4_000 / 10),
        (7, 4_000 / 7 / 10),  # enough can stay back, so what they are gone for is all
        (8, 0),
        (9, 4_000 / 9 / 10),
    ],
)
def test_rounds_that_end_within_a_column_cost_a_tenth_where_l2_is_short(count, apart_ns):
    work = Work(
        moved_bytes=40_000,
        linked_bytes=0,
        rolling_bytes=0,
        reduced_bytes=0,
        num_tiles=64,
        tile_flops=1_000_000,
    )

    def time_ns(rates, roles=Roles.switch):
        return modelled_ns(Operation.dispatch_gemm, roles, count, work=work, rates=rates)

    plain = replace(SHORT, column=None)
    # Rows are wanted a fifth earlier, which one CTA alone does not reach.
    late_ns = 1.25 * 4_000 / count
    own_ns = 4_000 + 4_000 / 16 + apart_ns
    assert time_ns(SHORT) == pytest.approx(max(own_ns, late_ns), rel=1e-6)
    assert time_ns(replace(SHORT, column=5)) == time_ns(plain), "no whole columns"
    assert time_ns(SHORT, Roles.fixed) == time_ns(plain, Roles.fixed)


@pytest.mark.parametrize(("num_ranks", "column"), [(1, None), (2, None), (4, 8), (8, 8)])
def test_l2_is_short_where_many_ranks_share_a_gpu(num_ranks, column):
    words = "kernel=dispatch_gemm", f"launch.num_ranks={num_ranks}"
    config = config_of(*words, "workload=deepseek_v3_ep8_rank", "workload.num_tokens=512")

    assert rates_of(config, num_sms=132).column == column


def test_pushes_beside_a_gemm_take_as_long_as_their_modelled_rate_says():
    config = config_of("kernel=gemm_combine", *PUSHED, "workload=deepseek_v3_ep8_rank")
    rates, reduce_ns = rates_of(config, num_sms=132), 127e3  # on all SMs, results/README.md
    moved_bytes = 32_768 * 14_336
    gemm_all_ns = 1.2405e6  # of the sweep

    # With 16 CTAs and more the GEMM takes as long as they do.
    for count in (4, 8, 12):
        measured_ns = swept("home_ways", "ctas_expert_4")[count] * gemm_all_ns
        modelled = moved_bytes / beside_gbps(rates, count) + reduce_ns
        assert modelled == pytest.approx(measured_ns, rel=0.05)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_layer_takes_one_count_between_those_of_its_halves(num_ranks):
    words = ("workload=deepseek_v3_ep8_rank", "workload.num_tokens=1024")
    words += (f"launch.num_ranks={num_ranks}",)

    halves = [auto_of(f"kernel={kernel}", *words) for kernel in ("dispatch_gemm", "gemm_combine")]

    assert min(halves) <= auto_of("kernel=moe_layer", *words) <= max(halves)


def test_a_paced_link_and_ranks_that_share_the_chip_are_part_of_the_choice():
    rank = ("workload=deepseek_v3_ep8_rank", "kernel=gemm_combine", *PUSHED)
    small = ("workload.num_experts=32", "workload.num_tokens=512", "launch.num_ranks=8")

    paced = auto_of(*rank, "launch.pace_gbps=100")
    free = auto_of(*rank)
    shared = auto_of("workload=deepseek_v3", *small, "launch.pace_gbps=43.6")

    # Beside a GEMM three CTAs fill 100 GB/s.
    assert paced == 3 < free
    assert 1 <= shared <= 3


def test_rates_are_those_of_the_rank_s_share_of_its_gpu():
    config = config_of("kernel.copy=tma", "launch.num_ranks=2", "launch.pace_gbps=50")
    alone = config_of("kernel.copy=simt", "launch.num_ranks=1")
    linked = config_of("hardware=h200_x8", "kernel=gemm_combine")

    assert rates_of(config, num_sms=132) == Rates(
        num_sms=66,
        cta_gbps=47.7,
        beside_gemm=0.8,
        shared_gbps=750.0,
        memory_gbps=1200.0,
        tflops=412.5,
        link_gbps=50.0,
    )
    assert rates_of(alone, num_sms=132).cta_gbps == 45.6
    assert rates_of(alone, num_sms=132).link_gbps is None
    assert rates_of(linked, num_sms=132).link_gbps == 358.0
    assert rates_of(linked, num_sms=132).num_sms == 132
