"""Frozen records that every part exchanges: points, samples, verdicts.

Knows nothing of Hydra, torch, Parquet or how a number was measured.
"""

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
    "Status",
    "Verdict",
]


class Status(Enum):
    """How a point ended; only `ok` rows may carry times."""

    ok = "ok"  # every gate passed and every sample was taken
    incorrect = "incorrect"  # an output differed from the oracle; no time is kept
    compile_error = "compile_error"  # a kernel did not compile
    runtime_error = "runtime_error"  # a rank raised, or a value could not be run
    timeout = "timeout"  # the wall-clock limit or a watchdog ended it
    oom = "oom"  # memory ran out: host, device, /dev/shm or disk
    skipped = "skipped"  # the machine lacks the hardware this point names
    unsupported = "unsupported"  # this version has no code for the point


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
