"""Outcomes as the launcher would hand them over: small, made up, complete."""

import copy

import pytest
from hypothesis import strategies as st

from tilepipe.records import (
    BreakdownTerm,
    Clocks,
    Interval,
    Outcome,
    Point,
    RankRecord,
    Sample,
    Status,
    Verdict,
)
from tilepipe.results.schema import CONTENDERS

CONFIG = {
    "name": "exp",
    "operation": "dispatch_gemm",
    "hardware": {"name": "cpu", "gpu": None},
    "kernel": {
        "operation": "dispatch_gemm",
        "copy": None,
        "num_comm_ctas": None,
        "order": "edf",
        "granularity": "tile",
        "layout": "padded",
        "tile_m": 128,
        "tile_n": 256,
        "capacity_factor": None,
    },
    "workload": {
        "num_tokens": 16,
        "hidden": 64,
        "intermediate": 32,
        "num_experts": 8,
        "num_topk": 2,
        "dtype": "bf16",
    },
    "routing": {"law": "zipf", "seed": 3, "exponent": 1.5},
    "measure": {"num_warmups": 1, "num_iters": 2},
    "launch": {"num_ranks": 2, "fabric": "host", "watchdog_ms": 1000, "time_limit_s": 60.0},
    "results_dir": "outputs",
}


def _point(config_id="c0ffee", build_id="b0b", **config):
    return Point(
        name="exp",
        operation="dispatch_gemm",
        executor="host",
        config=copy.deepcopy({**CONFIG, **config}),
        choices={"kernel": "dispatch_gemm", "workload": "tiny"},
        overrides=("+experiment=dispatch_gemm", "routing.path=a b.jsonl"),
        config_id=config_id,
        build_id=build_id,
    )


def _record(rank, times, num_tokens=16):
    """`times`: (contender, component) -> duration of each iteration."""
    return RankRecord(
        rank=rank,
        samples=tuple(
            Sample(
                contender=contender,
                component=component,
                iteration=iteration,
                start_ns=1000 * iteration + rank,
                duration_ns=duration_ns,
            )
            for (contender, component), durations in times.items()
            for iteration, duration_ns in enumerate(durations)
        ),
        verdicts=(
            Verdict(
                contender="fused",
                stage="before",
                passed=True,
                num_values=64,
                num_wrong=0,
                max_error=0.0,
                detail="",
            ),
        ),
        counts={"num_tokens": num_tokens, "recv_rows": 30 + rank},
    )


def _outcome(**changes):
    values = {
        "point": _point(),
        "status": Status.ok,
        "reason": "",
        "records": (
            _record(0, {("fused", "e2e"): (100, 140), ("fused", "plan"): (10, 12)}),
            _record(1, {("fused", "e2e"): (120, 110), ("fused", "plan"): (11, 9)}, num_tokens=0),
        ),
        "terms": (
            BreakdownTerm(term="e2e", interval=Interval(value=130, low=120, high=140)),
            BreakdownTerm(term="plan", interval=Interval(value=11, low=11, high=12)),
            BreakdownTerm(term="sm_tax", interval=None),
            BreakdownTerm(term="contention", interval=Interval(value=0, low=-3, high=2)),
            BreakdownTerm(term="late", interval=Interval(value=119, low=100, high=125)),
        ),
        "figures": {"logical_bytes": 4096.0, "fused/logical_gbps": 15.75},
        "started_utc": "2026-11-29T10:00:00.000+00:00",
        "ended_utc": "2026-11-29T10:00:01.000+00:00",
    }
    return Outcome(**{**values, **changes})


@pytest.fixture(scope="session")
def make_point():
    return _point


@pytest.fixture(scope="session")
def make_record():
    return _record


@pytest.fixture(scope="session")
def make_outcome():
    return _outcome


INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def _verdicts(num_wrong):
    return st.builds(
        Verdict,
        contender=TEXT,
        stage=st.sampled_from(["before", "after"]),
        passed=st.just(num_wrong == 0),
        num_values=st.integers(0, 2**40),
        num_wrong=st.just(num_wrong),
        max_error=st.floats(allow_nan=False),
        detail=TEXT,
    )


CLOCKS = st.builds(
    Clocks,
    **dict.fromkeys(("sm_mhz", "sm_mhz_min", "sm_mhz_max"), st.integers(0, 10_000)),
    power_w_max=st.floats(0, 2_000),
    temperature_c_max=st.integers(-50, 150),
    reasons=st.lists(st.sampled_from(["gpu_idle", "sw_power_cap", "other"]), unique=True).map(
        lambda words: tuple(sorted(words))
    ),
    num_samples=st.integers(1, 10_000),
)


@st.composite
def _outcomes(draw):
    """Any outcome that may be stored: ok with times, or another status without."""
    status = draw(st.sampled_from(Status))
    num_ranks = draw(st.integers(1, 3))
    num_iters = draw(st.integers(1, 4))
    windows = draw(
        st.lists(
            st.tuples(
                st.sampled_from(sorted(CONTENDERS)), st.sampled_from(["e2e", "plan", "stage"])
            ),
            min_size=1,
            max_size=3,
            unique=True,
        )
    )
    durations = st.lists(st.integers(0, 2**63 - 1), min_size=num_iters, max_size=num_iters)
    num_wrong = st.just(0) if status is Status.ok else st.integers(0, 2**40)
    verdict = num_wrong.flatmap(_verdicts)
    records = tuple(
        RankRecord(
            rank=rank,
            samples=_record(rank, {window: draw(durations) for window in windows}).samples
            if status is Status.ok
            else (),
            verdicts=tuple(draw(st.lists(verdict, min_size=1, max_size=2))),
            counts=draw(st.dictionaries(TEXT, INT64, max_size=3)),
            clocks=draw(st.none() | CLOCKS),
        )
        for rank in range(num_ranks)
    )
    launch = {**CONFIG["launch"], "num_ranks": num_ranks}
    return _outcome(
        point=_point(launch=launch),
        status=status,
        reason="" if status is Status.ok else draw(TEXT.filter(bool)),
        records=records,
        terms=(),
        figures=draw(st.dictionaries(st.just("flops"), st.floats(0, 1e300))),
        started_utc=draw(TEXT),
        ended_utc=draw(TEXT),
    )


@pytest.fixture(scope="session")
def outcomes():
    return _outcomes()
