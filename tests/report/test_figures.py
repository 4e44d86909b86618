"""The values that each kind of figure is handed, from points with chosen times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.made_up import fused_times, launch_of, layer_times, steady
from tests.results.spans import lane, two_ranks
from tilepipe.records import SpanRole
from tilepipe.report.ablations import ablation_grids, best_of
from tilepipe.report.bandwidth import bandwidth_figures
from tilepipe.report.imbalance import imbalance_figures
from tilepipe.report.overlap import bound_ns, overlap_figures
from tilepipe.report.peers import baseline_figures, peer_figures
from tilepipe.report.points import find_points
from tilepipe.report.shapes import Level, Value
from tilepipe.report.terms import breakdown_figures
from tilepipe.report.timelines import timeline_figures
from tilepipe.results.spans import by_lane


def points_of(store):
    return find_points(store.root).points


def middles(values):
    return [None if value is None else value.value for value in values]


def add_sweep(store, *, copies=("simt",), tokens=(64,), ctas=(8, 16), **settings):
    for copy in copies:
        for num_tokens in tokens:
            for num_ctas in ctas:
                store.add(
                    {"dispatch": launch_of(10, 8_000 // num_ctas)},
                    kernel={"copy": copy, "num_comm_ctas": num_ctas},
                    workload={"num_tokens": num_tokens},
                    **settings,
                )


# Bandwidth against CTAs


def test_one_gpu_is_held_against_its_memory_by_bytes_read_and_written(store):
    add_sweep(store)

    (figure,) = bandwidth_figures(points_of(store), "dispatch")

    (line,) = figure.lines
    assert line.x == (8.0, 16.0)
    # 480 000 payload bytes are read once and written once, in 1 000 and 500 ns.
    assert middles(line.y) == [960.0, 1920.0]
    assert line.y[0] == Value(value=960.0, low=960_000 / 1_030, high=960_000 / 970)
    assert figure.y_label == "GB/s of one GPU, bytes read and written"
    assert figure.levels == (Level(label="memory, 4\u202f800 GB/s", value=4800.0),)


def test_rows_that_cross_a_link_are_held_against_the_link_by_wire_bytes(store):
    add_sweep(
        store,
        num_ranks=2,
        fabric="nvshmem",
        hardware={"num_gpus": 2},
        counts={"wire_bytes": 600_000, "dedup_wire_bytes": 270_000},
    )

    (figure,) = bandwidth_figures(points_of(store), "dispatch")

    said = "the data sheet's. One copy of a token for each rank would put 55 % fewer bytes on it"
    assert said in figure.caption
    # 600 000 bytes of two ranks in 1 000 and 500 ns.
    assert middles(figure.lines[0].y) == [300.0, 600.0]
    assert figure.y_label == "GB/s a rank, wire_bytes"
    assert figure.levels == (Level(label="link, one direction, 450 GB/s", value=450.0),)


def test_paced_rows_are_held_against_their_pace_and_kept_apart(store):
    add_sweep(store)
    add_sweep(store, launch={"pace_gbps": 400.0})

    plain, paced = sorted(
        bandwidth_figures(points_of(store), "dispatch"),
        key=lambda figure: "paced to" in figure.title,
    )

    assert paced.levels == (Level(label="pace, 400 GB/s", value=400.0),)
    # With one rank no byte crosses a link, yet all rows are paced.
    assert paced.y_label == "GB/s a rank, logical_bytes"
    assert middles(paced.lines[0].y) == [480.0, 960.0]
    assert "paced to 400 GB/s" in paced.caption
    assert "no measurement of a link" in paced.caption
    assert "not paced" in plain.caption


def test_a_line_is_a_copy_and_a_token_count_and_copies_share_a_colour(store):
    add_sweep(store, copies=("simt", "tma"), tokens=(64, 128))

    (figure,) = bandwidth_figures(points_of(store), "dispatch")

    looks = {line.label: (line.color, line.dash) for line in figure.lines}
    assert looks == {
        "64 tokens, simt": (0, 0),
        "64 tokens, tma": (0, 1),
        "128 tokens, simt": (1, 0),
        "128 tokens, tma": (1, 1),
    }
    assert figure.numbers.head[:4] == ("num_tokens", "copy", "CTAs", "time, µs")


def test_more_lines_than_can_be_told_apart_become_several_figures(store):
    add_sweep(store, copies=("simt", "tma"), tokens=(1, 2, 4, 8, 16))

    figures = bandwidth_figures(points_of(store), "dispatch")

    assert [len(figure.lines) for figure in figures] == [5, 5]
    assert [figure.title[-4:] for figure in figures] == ["simt", " tma"]


def test_one_cta_count_is_no_line(store):
    add_sweep(store, ctas=(16,))

    assert bandwidth_figures(points_of(store), "dispatch") == []


def test_the_host_has_no_bandwidth_by_ctas(store):
    store.add({"dispatch": launch_of(10, 100)}, executor="host")

    assert bandwidth_figures(points_of(store), "dispatch") == []


def test_combine_and_its_push_are_figures_and_the_reduction_is_none(store):
    for num_ctas in (8, 16):
        store.add(
            {
                "combine": launch_of(10, 900),
                "push": launch_of(10, 500),
                "reduce": steady(90),
            },
            name="combine",
            operation="combine",
            kernel={"num_comm_ctas": num_ctas},
        )

    figures = bandwidth_figures(points_of(store), "combine")

    assert [figure.title for figure in figures] == [
        "combine: bandwidth against communication CTAs",
        "combine: bandwidth of push against communication CTAs",
    ]


# Fused against unfused


@pytest.mark.parametrize(
    ("operation", "rest", "bound_us"),
    [("dispatch_gemm", "late", 0.7), ("gemm_combine", "tail", 0.9)],
)
def test_the_lower_bound_is_the_larger_part_and_the_reduction(store, operation, rest, bound_us):
    store.add(fused_times(rest=rest), operation=operation)

    (figure,) = overlap_figures(points_of(store), operation)

    (panel,) = figure.panels
    assert panel.x_label == "µs"
    assert [series.label.partition(" ")[0] for series in panel.dots] == [
        "fused",
        "sequential",
        "lower",
    ]
    assert [middles(series.values) for series in panel.dots] == [[1.0], [1.5], [bound_us]]
    assert panel.dots[0].values[0] == Value(value=1.0, low=0.97, high=1.03)
    # Sequential over fused, pair by pair, of equal rising steps.
    assert figure.numbers.rows[0][4].startswith("1.50 (1.4")


def test_a_layer_stands_beside_the_sum_of_its_parts_and_has_no_bound(store):
    store.add(layer_times(), operation="moe_layer")

    (figure,) = overlap_figures(points_of(store), "moe_layer")

    dots = figure.panels[0].dots
    assert [middles(series.values) for series in dots] == [[1.0], [1.5], [1.05]]
    assert dots[2].label == "its parts: dispatch → GEMM, SwiGLU, GEMM → combine"
    assert figure.numbers.head[-3:] == ("its parts, µs", "speed-up (interval)", "fused over parts")
    assert figure.numbers.rows[0][-1] == f"{1000 / 1050:.3f}"
    assert "lower bound" not in f"{figure.caption} {figure.numbers.note}"


def test_terms_of_a_layer_are_its_parts_and_what_joining_them_saves(store):
    store.add(layer_times(), operation="moe_layer")

    (figure,) = breakdown_figures(find_points(store.root).terms, "moe_layer")

    found = {part.label: middles(part.values) for part in figure.parts}
    assert found == {
        "plan": [0.1],
        "dispatch_gemm": [0.6],
        "swiglu": [0.05],
        "gemm_combine": [0.4],
        "joined": [-0.05],
    }
    assert len({part.color for part in figure.parts}) == 5


def test_of_several_cta_counts_the_one_with_the_lowest_fused_time_is_shown(store):
    for num_ctas, fused_ns in ((8, 1_400), (16, 1_200), (24, 1_300)):
        store.add(
            fused_times(fused_ns=fused_ns),
            operation="dispatch_gemm",
            kernel={"num_comm_ctas": num_ctas},
        )

    (figure,) = overlap_figures(points_of(store), "dispatch_gemm")

    assert middles(figure.panels[0].dots[0].values) == [1.2]
    assert "Of several CTA counts the one with the lowest fused time is shown" in figure.caption


def test_a_speed_up_whose_interval_holds_one_is_marked(store):
    times = fused_times() | {"sequential": (steady(100, step_ns=0), steady(1_000, step_ns=90))}
    store.add(times, operation="dispatch_gemm")

    (figure,) = overlap_figures(points_of(store), "dispatch_gemm")

    assert figure.numbers.rows[0][4].startswith("1.00~ (")


@pytest.mark.parametrize(
    ("fused_ns", "told"), [(1_000, "0.70"), (710, "0.99~"), (690, "1.01~"), (600, "1.17!")]
)
def test_an_efficiency_that_may_be_1_or_is_above_it_is_marked(fused_ns, told, store):
    store.add(fused_times(fused_ns=fused_ns), operation="dispatch_gemm")

    (figure,) = overlap_figures(points_of(store), "dispatch_gemm")

    assert figure.numbers.rows[0][5] == told
    assert "!: it is above 1" in figure.numbers.note


# Breakdown


def test_terms_of_a_bar_add_up_to_its_mark_negative_ones_included(store):
    times = fused_times(fused_ns=700)
    store.add(times, operation="dispatch_gemm")

    (figure,) = breakdown_figures(find_points(store.root).terms, "dispatch_gemm")

    values = {part.label: part.values[0].value for part in figure.parts}
    assert values == {
        "plan": 0.1,
        "gemm_all": 0.6,
        "sync_tax": 0.05,
        "contention": 0.15,
        "late": -0.1,
    }
    assert sum(values.values()) == pytest.approx(figure.totals[0].value) == pytest.approx(0.8)
    assert "Not measured: sm_tax" in figure.caption
    assert figure.numbers.head[2:] == (
        *("plan", "gemm_all", "sm_tax", "sync_tax", "contention", "late"),
    )
    assert figure.numbers.rows[0][4] == "-"


def test_every_term_has_its_interval(store):
    store.add(fused_times(), operation="dispatch_gemm")
    found = find_points(store.root)

    (figure,) = breakdown_figures(found.terms, "dispatch_gemm")

    stored = {row["term"]: row for row in found.terms.to_pylist()}
    for part in figure.parts:
        row = stored[part.label]
        assert part.values == (
            Value(
                value=row["value_ns"] / 1e3,
                low=row["term_low_ns"] / 1e3,
                high=row["term_high_ns"] / 1e3,
            ),
        )


def test_equal_terms_have_equal_colours_in_both_forms(store):
    store.add(fused_times(), name="a", operation="dispatch_gemm")
    store.add(fused_times(rest="tail"), name="b", operation="gemm_combine")
    terms = find_points(store.root).terms

    colors = {
        part.label: part.color
        for operation in ("dispatch_gemm", "gemm_combine")
        for figure in breakdown_figures(terms, operation)
        for part in figure.parts
    }

    assert colors["sync_tax"] == colors["publish_tax"]
    assert colors["late"] == colors["tail"]
    assert len(set(colors.values())) == 5


# Ablations


def test_a_table_has_a_column_a_value_and_bold_where_intervals_part(store):
    for num_tokens, times in (
        (64, {"edf": 1_000, "token": 1_200}),
        (256, {"edf": 2_000, "token": 2_010}),
    ):
        for order, time_ns in times.items():
            store.add(
                {"dispatch": launch_of(10, time_ns)},
                kernel={"order": order},
                workload={"num_tokens": num_tokens},
            )

    (grid,) = ablation_grids(points_of(store), "order")

    assert grid.title == "dispatch: dispatch by order, µs"
    assert grid.head == ("settings", "edf", "token")
    assert grid.rows == (
        ("64 tokens", "1.00 (0.97 to 1.03)", "1.20 (1.17 to 1.23)"),
        ("256 tokens", "2.00 (1.97 to 2.03)", "2.01 (1.98 to 2.04)"),
    )
    assert grid.best == {(0, 1)}


def test_a_line_with_one_value_is_no_ablation(store):
    store.add({"dispatch": launch_of(10, 100)}, kernel={"order": "edf"})
    store.add({"dispatch": launch_of(10, 100)}, kernel={"order": "token", "num_comm_ctas": 8})

    assert ablation_grids(points_of(store), "order") == []


def test_depth_is_told_by_warps(store):
    for num_warps in (12, 16):
        for num_loads in (7, 14):
            store.add(
                {"dispatch": launch_of(10, 1_000)},
                kernel={"num_comm_warps": num_warps, "num_loads": num_loads},
            )

    (grid,) = ablation_grids(points_of(store), "num_loads")

    assert grid.head == ("settings", "7 loads", "14 loads")
    assert [row[0] for row in grid.rows] == ["12 warps", "16 warps"]


def test_a_fused_point_is_told_by_its_fused_time(store):
    for granularity in ("tile", "token"):
        store.add(
            fused_times(fused_ns=2_000),
            operation="dispatch_gemm",
            kernel={"granularity": granularity},
        )

    (grid,) = ablation_grids(points_of(store), "granularity")

    assert grid.rows == (("all", "2.00 (1.97 to 2.03)", "2.00 (1.97 to 2.03)"),)
    assert grid.best == frozenset()


VALUES = st.lists(
    st.one_of(
        st.none(),
        st.tuples(*[st.integers(0, 50)] * 3)
        .map(sorted)
        .map(lambda ends: Value(low=ends[0], value=ends[1], high=ends[2])),
    ),
    max_size=6,
)


@given(VALUES)
def test_a_best_value_is_below_all_others_by_its_whole_interval(values):
    place = best_of(values)

    others = [value for i, value in enumerate(values) if value is not None and i != place]
    if place is None:
        assert not any(
            a is not None
            and all(b is None or b is a or a.high < b.low for b in values)
            and sum(b is not None for b in values) > 1
            for a in values
        )
    else:
        assert others
        assert all(values[place].high < other.low for other in others)


# Peers


def test_peers_are_told_in_tflops_where_all_have_one(store):
    store.add(
        {"gemm_all": steady(1_000), "blas_per_expert": steady(2_000)},
        name="grouped_gemm",
        operation="grouped_gemm",
    )

    (figure,) = peer_figures(points_of(store))

    (panel,) = figure.panels
    assert panel.x_label == "TFLOP/s a rank"
    # 6 000 000 operations in 1 000 and 2 000 ns.
    assert {d.label: middles(d.values) for d in panel.dots} == {
        "gemm_all": [6.0],
        "blas_per_expert": [3.0],
    }
    assert panel.dots[0].label == "gemm_all"
    assert "Contenders of a point ran interleaved" in figure.caption


def test_a_gemm_without_peers_is_no_figure(store):
    store.add({"gemm_all": steady(1_000)}, name="grouped_gemm", operation="grouped_gemm")

    assert peer_figures(points_of(store)) == []


def test_torch_stands_beside_what_does_the_same_and_beside_nothing_else(store):
    store.add(
        {
            "fused": ([100], [1_000]),
            "sequential": ([100], [1_500]),
            "gemm_all": [700],
            "gemm_flags": [710],
            "gemm_contended": [720],
            "dispatch": [400],
            "torch_sequential": ([900], [2_000]),
        },
        name="dispatch_gemm",
        operation="dispatch_gemm",
        executor="host",
    )

    (figure,) = baseline_figures(points_of(store), "dispatch_gemm")

    (panel,) = figure.panels
    assert {d.label: middles(d.values) for d in panel.dots} == {
        "fused": [1.0],
        "sequential": [1.5],
        "torch_sequential": [2.0],
    }
    assert "Times without plan. Contenders of a point ran interleaved" in figure.caption
    assert figure.numbers.head == (
        "point",
        *(f"{name}, µs" for name in ("fused", "sequential", "torch_sequential")),
    )


def test_a_point_without_torch_has_no_place_beside_one_that_has_it(store):
    store.add({"dispatch": [1_000], "torch_dispatch": [3_000]}, workload={"num_tokens": 64})
    store.add({"dispatch": [2_000]}, workload={"num_tokens": 256})

    (figure,) = baseline_figures(points_of(store), "dispatch")

    assert [middles(d.values) for d in figure.panels[0].dots] == [[1.0], [3.0]]
    assert baseline_figures(points_of(store), "combine") == []


# Imbalance


def test_laws_stand_beside_the_imbalance_they_make(store):
    for routing, rows, time_ns in (
        ({"law": "uniform"}, 256, 1_000),
        ({"law": "zipf", "exponent": 1.0}, 300, 1_200),
        ({"law": "zipf", "exponent": 2.0}, 400, 1_600),
    ):
        store.add(
            {"dispatch": launch_of(10, time_ns)},
            num_ranks=2,
            routing=routing,
            counts={"max_rank_rows": rows},
        )

    (figure,) = imbalance_figures(points_of(store))

    assert figure.rows == ("uniform", "zipf, exponent 1.0", "zipf, exponent 2.0")
    time, ratio = figure.panels
    assert middles(time.dots[0].values) == [1.0, 1.2, 1.6]
    # Two ranks share 512 rows.
    assert middles(ratio.dots[0].values) == [1.0, 300 / 256, 400 / 256]


def test_one_law_is_no_comparison_of_laws(store):
    store.add({"dispatch": launch_of(10, 100)})
    store.add({"dispatch": launch_of(10, 100)}, kernel={"order": "token"}, routing={"law": "zipf"})

    assert imbalance_figures(points_of(store)) == []


# All of them


def test_no_figure_mixes_executors_machines_or_regimes(store):
    for settings in (
        {"executor": "host"},
        {},
        {"gpu": "NVIDIA H100"},
        {"measure": {"regime": "chained", "l2": "warm"}},
        {"measure": {"l2": "warm"}},
        {"num_ranks": 2},
    ):
        for order in ("edf", "token"):
            store.add({"dispatch": launch_of(10, 100)}, kernel={"order": order}, **settings)

    grids = ablation_grids(points_of(store), "order")

    assert len(grids) == 6
    assert all("2 points" in grid.note for grid in grids)


def test_a_title_names_what_sets_a_figure_apart_in_its_experiment_only(store):
    add_sweep(store)
    add_sweep(store, num_ranks=2, name="two")
    add_sweep(store, num_ranks=1, name="two")

    figures = bandwidth_figures(points_of(store), "dispatch")

    what = "bandwidth against communication CTAs"
    assert [figure.title for figure in figures] == [
        f"dispatch: {what}",
        f"two: {what}, 1 rank",
        f"two: {what}, 2 ranks",
    ]


def test_models_of_unlike_size_share_no_figure(store):
    for hidden in (64, 512):
        for granularity in ("tile", "expert"):
            store.add(
                fused_times(),
                operation="dispatch_gemm",
                workload={"hidden": hidden},
                kernel={"granularity": granularity},
            )

    small, large = overlap_figures(points_of(store), "dispatch_gemm")

    assert small.title == "dispatch: fused against unfused, hidden 64"
    assert "Same for all: hidden 64," in small.caption
    assert large.rows == ("flags by expert", "flags by tile")


# Timelines


def test_every_point_with_a_timeline_gets_a_picture_and_where_its_time_went(store):
    for order, spans in (("edf", two_ranks()), ("random", None), ("token", two_ranks())):
        store.add(
            fused_times(),
            name="dispatch_gemm",
            operation="dispatch_gemm",
            executor="host",
            num_ranks=2,
            kernel={"order": order},
            spans=spans,
        )

    first, second = timeline_figures(find_points(store.root))

    assert first.title == "dispatch_gemm: one recorded launch, edf"
    assert second.title == "dispatch_gemm: one recorded launch, token"
    assert dict(first.recording.spans) == two_ranks()
    assert first.numbers.head == (
        *("lane", "busy, µs", "wait, µs", "copy, µs", "idle, µs", "longest wait, µs"),
    )
    assert first.numbers.rows == (
        ("rank 0 computing", "88.5", "1.50", "0.000", "10.0", "0.000"),
        ("rank 0 sender", "0.000", "0.000", "40.8", "59.2", "0.000"),
        ("rank 1 computing", "15.0", "40.0", "2.00", "43.0", "40.0"),
        ("rank 1 sender", "0.000", "0.000", "1.00", "99.0", "0.000"),
    )
    assert "executor host; not paced; 2 ranks over host; 1 point." in first.caption
    assert "One launch, recorded after the timed ones" in first.caption
    assert "Intervals" not in first.caption


def test_of_a_launch_on_a_gpu_sms_are_lanes_and_roles_are_told(store):
    spans = [
        *lane("7.0", SpanRole.compute, ("wait", 0, 30, {"m_tile": 0})),
        *lane("7.4", SpanRole.compute, ("tile", 40, 100, {"m_tile": 0})),
        *lane("8", SpanRole.compute, ("tile", 0, 100, {"m_tile": 1})),
        *lane("9", SpanRole.communication, ("send", 0, 25, {"m_tile": 0})),
    ]
    store.add(fused_times(), operation="dispatch_gemm", num_ranks=1, spans={0: spans})

    (figure,) = timeline_figures(find_points(store.root))

    assert list(by_lane(figure.recording.spans[0])) == ["7", "8", "9"]
    assert figure.numbers.head == ("mean of SMs", "busy, µs", "wait, µs", "copy, µs", "idle, µs")
    assert figure.numbers.rows == (
        ("rank 0, 1 SMs, communication", "0.000", "0.000", "25.0", "75.0"),
        ("rank 0, 2 SMs, compute", "80.0", "15.0", "0.000", "5.00"),
    )


def test_a_timeline_of_an_older_point_is_not_shown_for_the_one_that_replaced_it(store):
    for spans in (two_ranks(), None):
        store.add(
            fused_times(), operation="dispatch_gemm", executor="host", num_ranks=2, spans=spans
        )

    assert timeline_figures(find_points(store.root)) == []


def test_the_lower_bound_is_that_of_the_efficiency_where_sms_are_given_away():
    point = {
        name: {"work_ns": ns}
        for name, ns in {"gemm_all": 100, "gemm_split": 120, "push": 90, "reduce": 8}.items()
    }
    point["fused"] = {"work_ns": 140}

    assert bound_ns(point, "gemm_combine") == 128
    sent = {"push": "epilogue", "walk": "chunk", "num_chunks": 4, "hidden": 7168, "tile_n": 256}
    # Of four chunks three are reduced while tiles are multiplied.
    assert bound_ns({**point, "fused": {**sent, **point["fused"]}}, "gemm_combine") == 122
    # Once 90 of 120 are over a quarter of the whole is left.
    joins = {"operation": "dispatch_gemm", "roles": "switch", "work_ns": 140}
    out = {**point, "dispatch": point["push"], "fused": joins}
    del out["reduce"]
    assert bound_ns(out, "dispatch_gemm") == 90 + 25
    del point["gemm_split"]  # the host gives none away
    assert bound_ns(point, "gemm_combine") == 108
