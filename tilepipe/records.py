"""Frozen records that every part exchanges: points, samples, verdicts.

Knows nothing of Hydra, torch, Parquet or how a number was measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

__all__ = [
    "BreakdownTerm",
    "Clocks",
    "Interval",
    "Outcome",
    "Point",
    "RankRecord",
    "Sample",
    "Span",
    "SpanKind",
    "SpanRole",
    "Status",
    "Verdict",
    "with_idle",
]


class Status(Enum):
    """How a point ended; only `ok` rows may carry times."""

    ok = "ok"  # every gate passed and every sample was taken
    incorrect = "incorrect"  # an output differed from the oracle; no time is kept
    compile_error = "compile_error"  # a kernel did not compile
    refused = "refused"  # its settings do not go together; no rank was started
    runtime_error = "runtime_error"  # a rank raised or died, or the ranks could not be started
    timeout = "timeout"  # the wall-clock limit or a watchdog ended it
    oom = "oom"  # memory ran out: host, device, /dev/shm or disk
    skipped = "skipped"  # the machine lacks the hardware this point names
    unsupported = "unsupported"  # the version that met it had no code for the point


@dataclass(frozen=True, kw_only=True)
class Point:
    """One composed configuration, ready to run; `config` is the resolved plain container."""

    name: str
    operation: str
    executor: str  # host or cuda
    config: dict[str, Any]
    choices: dict[str, str]  # Hydra group -> chosen option
    overrides: tuple[str, ...]  # the words after `python -m tilepipe.run` that compose it again
    config_id: str
    build_id: str
    build: dict[str, Any] = field(default_factory=dict)  # what build_id is the digest of
    repetition: int = 0  # of the whole sweep

    @property
    def folder(self) -> str:
        """Name of the point's folder below `<results_dir>/<name>/`."""
        repeated = f"-r{self.repetition}" if self.repetition else ""
        return f"{self.config_id}-{self.build_id}{repeated}"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One launch of one contender on one rank."""

    contender: str
    component: str  # e2e, plan or stage: what lies inside the window
    iteration: int
    start_ns: int  # on the host's monotonic clock, common to the ranks of one host
    duration_ns: int


class SpanRole(Enum):
    """What a lane was there for while a span of it lasted."""

    communication = "communication"  # moves rows between ranks
    compute = "compute"  # multiplies, and reduces what has come home
    plan = "plan"  # opens the launch: gate and Plan


class SpanKind(Enum):
    """What a lane did; the schema of the timeline has a sentence for each."""

    gate = "gate"
    plan = "plan"
    send = "send"
    wait = "wait"
    copy = "copy"
    tile = "tile"
    reduce = "reduce"
    idle = "idle"


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One thing that a lane did in a recorded launch; None where a part has no meaning for it.

    A lane is what does one thing at a time: a thread on the host; on a GPU an SM, or a warp of it
    where warps of an SM work apart. Spans of a lane follow each other without gap or overlap.
    """

    lane: str
    role: SpanRole
    kind: SpanKind
    start_ns: int  # on a clock common to the ranks
    end_ns: int
    expert: int | None = None  # number in the whole group
    m_tile: int | None = None  # of the rank that owns the expert
    n_tile: int | None = None
    chunk: int | None = None
    peer: int | None = None  # rank that receives
    ticket: int | None = None  # place in the sending order
    num_rows: int | None = None
    deadline: int | None = None  # place in the GEMM's hand-out; of a row's way home: a token
    lateness_ns: int | None = None  # of a wait that did not find what it looked for at once


def with_idle(
    spans: Sequence[Span],  # of one lane, in time order, none overlapping
    *,
    lane: str,
    role: SpanRole,
    start_ns: int,  # of the launch on this rank
    end_ns: int,
) -> list[Span]:
    """The lane from end to end: what lies between its spans is idle."""
    whole: list[Span] = []
    last_ns = start_ns

    def idle_until(until_ns: int) -> None:
        assert last_ns <= until_ns, f"lane {lane}: spans overlap, or lie outside the launch"
        if last_ns < until_ns:
            kind = SpanKind.idle
            whole.append(Span(lane=lane, role=role, kind=kind, start_ns=last_ns, end_ns=until_ns))

    for span in spans:
        idle_until(span.start_ns)
        whole.append(span)
        last_ns = span.end_ns
    idle_until(end_ns)
    return whole


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What comparing one output with the oracle found."""

    contender: str
    stage: str  # before or after the timed loop
    passed: bool
    num_values: int
    num_wrong: int
    max_error: float
    detail: str  # empty when passed, else the first difference in words


# Reasons for a clock that do not lower it below what the user or the load asks for.
_HARMLESS_REASONS = frozenset(
    ("applications_clocks_setting", "display_clocks_setting", "gpu_idle", "none")
)


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """What a GPU did while a point was timed, sampled beside it."""

    sm_mhz: int  # median of the samples
    sm_mhz_min: int
    sm_mhz_max: int
    power_w_max: float
    temperature_c_max: int
    reasons: tuple[str, ...]  # why the clock was what it was, in words, sorted
    num_samples: int

    @property
    def throttled(self) -> bool:
        """Whether anything lowered the clock: power, heat, or another GPU it keeps pace with."""
        return bool(set(self.reasons) - _HARMLESS_REASONS)


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """All that one rank hands back to the driver."""

    rank: int
    samples: tuple[Sample, ...]
    verdicts: tuple[Verdict, ...]
    counts: dict[str, int]  # recv_rows, num_tiles, num_tickets, wire_bytes and the like
    clocks: Clocks | None = None  # of its GPU during the timed loop; None on the host
    spans: tuple[Span, ...] = ()  # lane by lane; empty where no launch was recorded


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A figure with its 95 % interval, in the figure's own unit."""

    value: int
    low: int
    high: int


@dataclass(frozen=True, kw_only=True)
class BreakdownTerm:
    """One term of a breakdown, int64 nanoseconds; `interval` is None where nothing was measured."""

    term: str
    interval: Interval | None
    stamped_ns: int | None = None  # what stamps in kernels say of it, of `fused` alone
    stamped_loss_ns: int | None = None  # the same beside the launch that the term is taken from


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A finished point: what becomes its row."""

    point: Point
    status: Status
    reason: str  # one sentence; empty when ok
    records: tuple[RankRecord, ...] = ()
    terms: tuple[BreakdownTerm, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)  # imbalance, efficiency, bandwidths
    left_out: tuple[str, ...] = ()  # contenders asked for and missing here, a sentence each
    started_utc: str = ""
    ended_utc: str = ""
