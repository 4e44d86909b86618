"""Results folders with times of known truth."""

from tilepipe.records import (
    BreakdownTerm,
    Interval,
    Outcome,
    Point,
    RankRecord,
    Sample,
    Status,
    Verdict,
)
from tilepipe.results.store import claim_folder, write_outcome

BUILD = {
    "sources": {"host": "aaaa", "kernels": "bbbb"},
    "versions": {"numpy": "2.5.2"},
    "gpus": [],
    "cpu": "a CPU",
    "cores": 2,
}
PROVENANCE = {"tilepipe": "0.1.0", "git": {"commit": "c0", "dirty": False, "diff_hash": None}}
# 40 times about 1 ms, spread 0.5 %, in an order that tells nothing of the next.
TIMES = tuple(1_000_000 + 250 * ((17 * i) % 40) - 5_000 for i in range(40))


def config_of(*, num_tokens=64, order="edf", **more):
    config = {
        "name": "exp",
        "results_dir": "outputs",
        "hardware": {"name": "cpu", "gpu": None},
        "kernel": {"order": order},
        "workload": {"num_tokens": num_tokens},
        "routing": {"law": "uniform"},
        "launch": {"num_ranks": 2, "time_limit_s": 60.0},
    }
    for key, value in more.items():
        group, _, name = key.partition("__")
        config[group] = {**config.get(group, {}), name: value}
    return config


def store(
    root,
    times=None,  # contender -> times of its whole launch; None: as TIMES
    *,
    config_id="c1",
    build_id="b1",
    name="exp",
    executor="host",
    repetition=0,
    status=Status.ok,
    terms=(),
    config=None,
    build=None,
    provenance=None,
    ended="2026-11-29T10:00:01.000+00:00",
    spans=None,  # of a recorded launch, by rank
):
    """Store a point of two ranks, the first of which is always the slower one."""
    point = Point(
        name=name,
        operation="dispatch_gemm",
        executor=executor,
        config=config or config_of(),
        choices={},
        overrides=("+experiment=dispatch_gemm",),
        config_id=config_id,
        build_id=build_id,
        build={**BUILD, **(build or {})},
        repetition=repetition,
    )
    passed = {"num_values": 1, "num_wrong": 0, "max_error": 0.0, "detail": ""}
    verdict = Verdict(contender="fused", stage="after", passed=True, **passed)
    records = tuple(
        RankRecord(
            rank=rank,
            samples=tuple(
                Sample(
                    contender=contender,
                    component="e2e",
                    iteration=iteration,
                    start_ns=iteration,
                    duration_ns=max(0, duration_ns - 10 * rank),
                )
                for contender, durations in (times or {"fused": TIMES}).items()
                for iteration, duration_ns in enumerate(durations)
            ),
            verdicts=(verdict,),
            counts={"num_tokens": 4},
            spans=(spans or {}).get(rank, ()),
        )
        for rank in range(2)
    )
    outcome = Outcome(
        point=point,
        status=status,
        reason="" if status is Status.ok else "too slow",
        records=records,
        terms=tuple(
            BreakdownTerm(term=term, interval=Interval(value=value, low=low, high=high))
            for term, (value, low, high) in dict(terms).items()
        ),
        started_utc="2026-11-29T10:00:00.000+00:00",
        ended_utc=ended,
    )
    with claim_folder(root, point) as folder:
        write_outcome(folder, outcome, {**PROVENANCE, **(provenance or {})})
    return root / name / point.folder
