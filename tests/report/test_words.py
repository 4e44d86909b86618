"""How numbers, their origin and doubts about them are told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.made_up import launch_of
from tilepipe.report.points import find_points
from tilepipe.report.shapes import Value
from tilepipe.report.words import amount, caption, told_value, warnings_of


def rows_of(store):
    return find_points(store.root).points.to_pylist()


def value(middle, low=None, high=None):
    return Value(
        value=middle, low=middle if low is None else low, high=middle if high is None else high
    )


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, "-"),
        (0.0, "0.000"),
        (0.01234, "0.012"),
        (1.5, "1.50"),
        (12.345, "12.3"),
        (123.4, "123"),
        (-0.0001, "0.000"),
        (1234567.0, "1\u202f234\u202f567"),
    ],
)
def test_numbers_have_three_digits_or_all_of_a_whole_number(number, text):
    assert amount(number) == text


def test_a_value_shows_the_ends_of_its_interval():
    assert told_value(value(19.06, 15.1, 74.96)) == "19.1 (15.1 to 75.0)"


def test_a_narrow_interval_gets_one_digit_more():
    assert told_value(value(625.9, 625.7, 626.2)) == "625.9 (625.7 to 626.2)"


def test_a_value_without_an_interval_stands_alone():
    assert told_value(value(2.5)) == "2.50"


@given(st.floats(-1e9, 1e9), st.floats(0, 1e6), st.floats(0, 1e6))
def test_what_is_shown_is_the_value_within_its_last_digit(middle, below, above):
    text = told_value(value(middle, middle - below, middle + above))

    shown = float(text.partition(" (")[0].replace("\u202f", ""))
    # Half of the last digit, of the value or of an interval that is wider.
    assert shown == pytest.approx(middle, rel=6e-3, abs=6e-4 + 3e-3 * (below + above))


def test_an_interval_wider_than_its_value_leaves_out_digits_that_say_nothing():
    assert told_value(value(0.316, -19.652, 3.774), mark="~") == "0.3~ (-19.7 to 3.8)"


def test_a_caption_says_machine_date_commit_executor_pacing_and_conditions(store):
    store.add({"dispatch": launch_of(10, 100)}, day="2026-11-28", commit="a" * 40)
    store.add(
        {"dispatch": launch_of(10, 100)}, kernel={"order": "token"}, commit="b" * 40, dirty=True
    )

    assert caption(rows_of(store)) == (
        "NVIDIA H200; 2026-11-28 to 2026-11-29; "
        "commit aaaaaaaa, commit bbbbbbbb with uncommitted changes; "
        "executor cuda; not paced; isolated, L2 cold; 1 rank over loopback; 2 points. "
        "Same for all: hidden 512, 8 experts, uniform, flags by tile, padded, simt, 16 CTAs, "
        "16 warps, 14 loads, 4 rows a fence, 64 tokens, 0 redundant. "
        "Intervals: 95 %, of the median, by order statistics. "
        "One rank: no row crosses a link."
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_ranks": 2}, "Ranks share one GPU: proves no link bandwidth."),
        (
            {"num_ranks": 4, "fabric": "nvshmem", "hardware": {"num_gpus": 2}},
            "Ranks take turns on a GPU: proves no link bandwidth.",
        ),
        (
            {"executor": "host", "num_ranks": 2},
            "Times of a CPU: they say nothing of NVLink or SMs.",
        ),
    ],
)
def test_a_caption_ends_with_what_its_numbers_cannot_prove(store, settings, sentence):
    store.add({"dispatch": launch_of(10, 100)}, **settings)

    assert caption(rows_of(store)).endswith(sentence)


def test_a_gpu_for_every_rank_needs_no_disclaimer(store):
    store.add(
        {"dispatch": launch_of(10, 100)}, num_ranks=2, fabric="nvshmem", hardware={"num_gpus": 2}
    )

    assert "proves no" not in caption(rows_of(store))


def test_a_caption_tells_what_belongs_to_each_of_two_copies(store):
    ring = {"num_loads": None, "num_stages": 4, "stage_bytes": 7168, "flag_batch": 8}
    store.add({"dispatch": launch_of(10, 100)})
    store.add({"dispatch": launch_of(10, 100)}, kernel={"copy": "tma", "num_comm_warps": 8, **ring})

    told = caption(rows_of(store))

    assert "Simt: 16 warps, 14 loads, 4 rows a fence; tma: 8 warps, 4 stages, " in told
    assert "7168 bytes a stage, 8 rows a fence." in told
    assert "warps" not in told.partition("Same for all: ")[2].partition(". ")[0]


def test_few_iterations_are_told_to_be_a_range(store):
    store.add({"dispatch": ([10, 10, 10], [100, 110, 120])})

    assert "Intervals: range of all iterations, fewer than six." in caption(rows_of(store))


def test_a_caption_of_two_executors_is_a_bug(store):
    store.add({"dispatch": launch_of(10, 100)})
    store.add({"dispatch": launch_of(10, 100)}, executor="host")

    with pytest.raises(AssertionError, match="a figure of executors"):
        caption(rows_of(store))


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        (
            {},
            "ranks share one GPU, no row crossed a link, so this is a rate of its memory",
        ),
        (
            {"fabric": "nvshmem", "hardware": {"num_gpus": 1}},
            "several ranks share a GPU, so rows between them crossed no link",
        ),
        (
            {"fabric": "nvshmem", "hardware": {"num_gpus": 2}},
            "no byte basis explains that: check hardware.link_gbps and the timed window",
        ),
    ],
)
def test_wire_bytes_above_the_link_are_a_warning(store, settings, cause):
    store.add(
        {"dispatch": launch_of(10, 100)},
        num_ranks=2,
        counts={"wire_bytes": 100_000},
        **settings,
    )

    wire = [text for text in warnings_of(rows_of(store)) if "wire_bytes" in text]

    assert wire == [
        "dispatch, dispatch: 500 GB/s of wire_bytes are more than the link's 450 GB/s: "
        f"{cause} (point dispatch/c001-b1)"
    ]


@pytest.mark.parametrize("time_ns", [112, 200])
def test_wire_bytes_up_to_the_link_are_none(store, time_ns):
    store.add(
        {"dispatch": ([10] * 7, [time_ns] * 7)},
        num_ranks=2,
        counts={"wire_bytes": 100_000, "logical_bytes": 100_000},
    )

    assert warnings_of(rows_of(store)) == []


@pytest.mark.parametrize(
    ("num_ranks", "counts", "told"),
    [
        (1, {"logical_bytes": 5_000}, "50.0 GB/s of logical_bytes"),
        (2, {"logical_bytes": 16_000, "wire_bytes": 10_000}, "50.0 GB/s of wire_bytes"),
    ],
)
def test_more_than_the_pace_is_a_warning_by_the_bytes_that_are_paced(
    store, num_ranks, counts, told
):
    store.add(
        {"dispatch": launch_of(10, 100)},
        num_ranks=num_ranks,
        launch={"pace_gbps": 44.0},
        counts=counts,
    )

    (warning,) = warnings_of(rows_of(store))

    assert warning.startswith(f"dispatch, dispatch: {told} are more than the pace's 44.0 GB/s: ")
    assert "what a bucket saved while it was idle passes at once" in warning


@pytest.mark.parametrize(
    ("l2", "order", "cause"),
    [
        ("warm", "edf", "rows may have been served by a warm L2 cache"),
        (
            "cold",
            "edf",
            "no byte basis explains that: check hardware.hbm_gbps and the timed window",
        ),
        (
            *("cold", "token"),
            "rows of a token are sent one after the other, and L2 serves every read but the first",
        ),
    ],
)
def test_more_than_the_memory_gives_is_a_warning(store, l2, order, cause):
    store.add({"dispatch": launch_of(10, 100)}, measure={"l2": l2}, kernel={"order": order})

    assert warnings_of(rows_of(store)) == [
        "dispatch, dispatch: 9\u202f600 GB/s of bytes read and written are more than the memory's "
        f"4\u202f800 GB/s: {cause} (point dispatch/c001-b1)"
    ]


def test_alike_warnings_are_one_with_the_highest_rate(store):
    for order, time_ns in (("edf", 100), ("expert", 50), ("random", 80)):
        store.add({"dispatch": launch_of(10, time_ns)}, kernel={"order": order})

    (warning,) = warnings_of(rows_of(store))

    assert warning.startswith("dispatch, dispatch: 19\u202f200 GB/s of bytes read and written")
    assert warning.endswith("(3 points, the highest dispatch/c002-b1)")
