"""Terms that add up, intervals that repeat, and the figures of an overlap."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tilepipe.records import BreakdownTerm, Interval
from tilepipe.results.breakdown import (
    bound_mark,
    breakdown_interval_kind,
    breakdown_terms,
    lower_bound_ns,
    overlap_figures,
    terms_error,
    way_of,
)

FLAGGED = {"dispatch_gemm": "gemm_flags", "gemm_combine": "gemm_publish"}


@st.composite
def ladders(draw, operation):
    num_iters = draw(st.integers(1, 24))
    names = ("e2e", "plan", "gemm_all", FLAGGED[operation], "gemm_contended")
    elements = st.integers(0, 2**50)
    return {name: draw(hnp.arrays(np.int64, num_iters, elements=elements)) for name in names}


def values_of(terms):
    return {term.term: term.interval and term.interval.value for term in terms}


@pytest.mark.parametrize("operation", sorted(FLAGGED))
@given(data=st.data())
def test_terms_add_up_to_e2e_in_integers_whatever_was_measured(operation, data):
    series = data.draw(ladders(operation))

    terms = breakdown_terms(operation, series)

    values = values_of(terms)
    total = values.pop("e2e")
    assert total == sum(value for value in values.values() if value is not None)
    assert total == int(np.floor(np.median(series["e2e"].astype(object))))
    assert values["sm_tax"] is None
    for term in terms:
        assert (
            term.interval is None or term.interval.low <= term.interval.value <= term.interval.high
        )


@given(ladders("dispatch_gemm"))
def test_equal_series_give_equal_intervals(series):
    assert breakdown_terms("dispatch_gemm", series) == breakdown_terms(
        "dispatch_gemm", {name: times.copy() for name, times in series.items()}
    )


def test_each_term_is_one_step_of_the_ladder():
    series = {
        "e2e": np.full(8, 1000),
        "plan": np.full(8, 100),
        "gemm_all": np.full(8, 500),
        "gemm_flags": np.full(8, 520),
        "gemm_publish": np.full(8, 530),
        "gemm_contended": np.full(8, 600),
    }

    dispatch = values_of(breakdown_terms("dispatch_gemm", series))
    combine = values_of(breakdown_terms("gemm_combine", series))

    assert list(dispatch.items()) == [
        ("e2e", 1000),
        ("plan", 100),
        ("gemm_all", 500),
        ("sm_tax", None),
        ("sync_tax", 20),
        ("contention", 80),
        ("late", 300),
    ]
    assert list(combine.items()) == [
        ("e2e", 1000),
        ("plan", 100),
        ("gemm_all", 500),
        ("sm_tax", None),
        ("publish_tax", 30),
        ("contention", 70),
        ("tail", 300),
    ]


def test_terms_may_be_negative():
    constant = {"e2e": 90, "plan": 10, "gemm_all": 80, "gemm_flags": 70, "gemm_contended": 100}
    series = {name: np.full(6, value) for name, value in constant.items()}

    values = values_of(breakdown_terms("dispatch_gemm", series))

    assert (values["sync_tax"], values["contention"], values["late"]) == (-10, 30, -20)


def test_resampling_in_pairs_cancels_drift_that_hits_all_contenders():
    generator = np.random.Generator(np.random.PCG64(7))
    drift = generator.integers(0, 100_000, 40)
    series = {
        "e2e": 1_000_000 + drift,
        "plan": np.full(40, 50_000),
        "gemm_all": 600_000 + drift,
        "gemm_flags": 620_000 + drift,
        "gemm_contended": 700_000 + drift,
    }

    terms = {term.term: term.interval for term in breakdown_terms("dispatch_gemm", series)}

    assert terms["sync_tax"] == Interval(value=20_000, low=20_000, high=20_000)
    assert terms["late"] == Interval(value=250_000, low=250_000, high=250_000)
    # e2e itself drifts: its interval is that of a median of 40 draws from 100 000.
    assert 10_000 < terms["e2e"].high - terms["e2e"].low < 60_000


def test_fewer_than_six_iterations_give_the_range_and_say_so():
    series = {
        "e2e": np.array([10, 30, 20]),
        "plan": np.array([1, 1, 1]),
        "gemm_all": np.array([5, 6, 7]),
        "gemm_flags": np.array([7, 7, 8]),
        "gemm_contended": np.array([8, 8, 8]),
    }

    terms = {term.term: term.interval for term in breakdown_terms("dispatch_gemm", series)}

    assert terms["e2e"] == Interval(value=20, low=10, high=30)
    assert terms["sync_tax"] == Interval(value=1, low=1, high=2)
    assert breakdown_interval_kind(3) == "range"
    assert breakdown_interval_kind(6) == "bootstrap95"


def test_series_of_different_lengths_are_refused():
    series = {"e2e": 3, "plan": 3, "gemm_all": 3, "gemm_flags": 2, "gemm_contended": 3}

    with pytest.raises(ValueError, match="'gemm_flags': 2"):
        breakdown_terms("dispatch_gemm", {name: np.ones(n, "i8") for name, n in series.items()})


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"e2e": 10, "plan": 4, "late": 6}, None),
        ({"e2e": 10, "plan": 4, "late": 5}, "terms add up to 9 ns, e2e is 10 ns"),
        ({"plan": 4, "late": 6}, "term e2e is missing or null"),
        ({"e2e": None, "plan": 4}, "term e2e is missing or null"),
        ({"e2e": 10, "other": 10}, "terms are ['e2e', 'other']"),
    ],
)
def test_what_is_wrong_with_terms_is_told(values, fault):
    terms = [
        BreakdownTerm(term=t, interval=None if v is None else Interval(value=v, low=v, high=v))
        for t, v in values.items()
    ]

    found = terms_error(terms)

    assert found == fault if fault is None else found.startswith(fault)


def test_overlap_figures_of_a_known_case():
    figures = overlap_figures(
        "fused",
        fused=np.full(30, 100),
        sequential=np.full(30, 150),
        gemm_all=np.full(30, 90),
        comm=np.full(30, 60),
    )

    assert figures == {
        "fused/efficiency": 0.9,
        "fused/hidden_share": pytest.approx(1 - 10 / 60),
        "fused/speedup": 1.5,
        "fused/speedup_low": 1.5,
        "fused/speedup_high": 1.5,
    }


def test_the_last_reduction_belongs_to_the_lower_bound():
    figures = overlap_figures(
        "fused",
        fused=np.full(3, 100),
        sequential=np.full(3, 100),
        gemm_all=np.full(3, 50),
        comm=np.full(3, 60),
        reduce_ns=10,
    )

    assert figures["fused/efficiency"] == 0.7


def test_figures_without_a_divisor_are_left_out():
    nothing = np.zeros(3, np.int64)

    assert (
        overlap_figures("f", fused=nothing, sequential=nothing, gemm_all=nothing, comm=nothing)
        == {}
    )


@pytest.mark.parametrize(
    ("setting", "bound"),
    [
        ({}, 150 + 40),
        ({"push": "ctas", "walk": "expert", "num_chunks": 4}, 150 + 40),
        ({"push": "epilogue", "walk": "expert", "num_chunks": 4}, 100 + 40),
        ({"push": "ctas", "walk": "chunk", "num_chunks": 4}, 150 + 10),
        ({"push": "epilogue", "walk": "chunk", "num_chunks": 8}, 100 + 5),
        # Of 14 336 bytes four chunks are 3.5 KiB each.
        (
            {"push": None, "walk": "chunk", "num_chunks": None, "hidden": 7168, "tile_n": 256},
            150 + 10,
        ),
    ],
)
def test_the_bound_leaves_out_what_a_way_home_can_hide(setting, bound):
    assert lower_bound_ns(100, 150, 40, way_of(setting)) == bound


SWITCH = {"operation": "dispatch_gemm", "roles": "switch"}


@pytest.mark.parametrize(
    ("setting", "comm_ns", "bound"),
    [
        (SWITCH, 0, 100),
        # Half of the GEMM is done when the sends are out, the rest of it is half of the whole.
        (SWITCH, 60, 60 + 50),
        (SWITCH, 120, 120),
        (SWITCH, 150, 150),
        ({**SWITCH, "roles": "fixed"}, 60, 120),
        # CTAs that push or reduce never multiply.
        ({**SWITCH, "operation": "gemm_combine"}, 60, 120),
    ],
)
def test_the_gemm_goes_on_on_all_sms_once_those_that_sent_have_joined(setting, comm_ns, bound):
    assert lower_bound_ns(120, comm_ns, way=way_of(setting), whole_ns=100) == bound


@given(
    split=st.integers(1, 2**40),
    whole=st.integers(0, 2**40),
    comm=st.integers(0, 2**40),
    more=st.integers(0, 2**20),
)
def test_a_bound_with_ctas_that_join_rises_with_every_part(split, whole, comm, more):
    whole = min(whole, split)
    bound = partial(lower_bound_ns, way=way_of(SWITCH))
    here = bound(split, comm, whole_ns=whole)

    assert max(whole, comm) <= here <= max(split, comm)
    assert here <= bound(split + more, comm, whole_ns=whole)
    # Rounding down takes less than a nanosecond.
    assert here <= bound(split, comm + more, whole_ns=whole) + 1
    assert here <= bound(split + more, comm, whole_ns=whole + more)


PARTS = ("dispatch_gemm", "swiglu", "gemm_combine")


@given(st.data())
def test_parts_of_a_layer_and_what_is_left_add_up_to_e2e(data):
    num_iters = data.draw(st.integers(1, 24))
    elements = st.integers(0, 2**50)
    series = {
        name: data.draw(hnp.arrays(np.int64, num_iters, elements=elements))
        for name in ("e2e", "plan", *PARTS)
    }

    terms = breakdown_terms("moe_layer", series)

    values = values_of(terms)
    assert list(values) == ["e2e", "plan", *PARTS, "joined"]
    medians = {name: int(np.floor(np.median(series[name].astype(object)))) for name in series}
    assert {name: values[name] for name in medians} == medians
    assert values.pop("e2e") == sum(values.values())


def test_a_layer_without_a_part_in_pairs_has_no_breakdown():
    series = {name: np.full(3 + (name == "swiglu"), 5) for name in ("e2e", "plan", *PARTS)}

    with pytest.raises(ValueError, match=r"'swiglu': 4.*: a breakdown needs them in pairs"):
        breakdown_terms("moe_layer", series)


@pytest.mark.parametrize(
    ("bound_ns", "fused_ns", "mark"),
    [
        ((80, 89), (90, 99), ""),
        ((80, 90), (90, 99), "~"),
        ((95, 96), (90, 99), "~"),
        ((99, 120), (90, 99), "~"),
        ((100, 120), (90, 99), "!"),
    ],
)
def test_a_bound_is_marked_where_the_launch_may_have_reached_it_or_was_below(
    bound_ns, fused_ns, mark
):
    assert bound_mark(bound_ns=bound_ns, fused_ns=fused_ns) == mark
