"""Gate, time, gate again: the same for every operation.

Knows nothing of what an operation does; see `Trial` for what it must offer.
"""

from functools import partial
from typing import Protocol

from tilepipe.config.schemas import Config
from tilepipe.experiments.session import Session
from tilepipe.experiments.setting import GATE_LAUNCH, Components, Memory
from tilepipe.measure.contenders import run_interleaved
from tilepipe.measure.ranges import ranges
from tilepipe.records import RankRecord, Sample, Span, Verdict

__all__ = ["Gated", "Trial", "measure"]


class Gated(Protocol):
    """Contenders of one operation on one rank.

    Every rank calls the same methods in the same order.
    """

    session: Session

    @property
    def contenders(self) -> tuple[str, ...]:
        """Names of what is timed, interleaved."""

    @property
    def checked(self) -> tuple[str, ...]:
        """Contenders whose outputs the oracle knows."""

    def prepare(self, contender: str, launch: int) -> None:
        """Write the inputs of a launch; outside every window."""

    def poison(self, contender: str) -> None:
        """Overwrite all that the contender will write."""

    def run(self, contender: str) -> Components:
        """Launch once and return the windows."""

    def check(self, contender: str, launch: int, stage: str) -> list[Verdict]:
        """Compare what the latest run of the contender, of that launch, has left."""

    def counts(self) -> dict[str, int]:
        """Figures of the plan and of the runs so far."""


class Trial(Gated, Protocol):
    """An operation's own contenders."""

    def __init__(self, session: Session) -> None: ...

    @staticmethod
    def memory(config: Config) -> Memory:
        """What the operation stores at its peers."""


def measure(trial: Gated) -> RankRecord:
    """Compare poisoned outputs, time, and compare what the last timed launches left.

    With a failed gate on any rank no rank takes a sample. A timeline comes last, so that no stamp
    lies in a timed launch.
    """
    heap, config = trial.session.host.heap, trial.session.config
    verdicts: list[Verdict] = []
    for contender in trial.checked:
        # One payload for all, so that contenders may be compared with each other bit for bit.
        trial.prepare(contender, GATE_LAUNCH)
        trial.poison(contender)
        heap.barrier()
        trial.run(contender)
        verdicts += trial.check(contender, GATE_LAUNCH, "before")
    samples: tuple[Sample, ...] = ()
    spans: tuple[Span, ...] = ()
    if heap.all_agree(all(verdict.passed for verdict in verdicts)):
        last_launch: dict[str, int] = {}
        annotate = ranges(wanted=config.launch.wrap is not None)

        def timed(contender: str, number: int) -> Components:
            last_launch[contender] = launch = GATE_LAUNCH + 1 + number
            trial.prepare(contender, launch)
            heap.barrier()
            with annotate(contender):
                return trial.run(contender)

        samples = run_interleaved(
            {name: partial(timed, name) for name in trial.contenders},
            num_warmups=config.measure.num_warmups,
            num_iters=config.measure.num_iters,
            barrier=heap.barrier,
            max_iters=config.measure.max_iters,
            interval=config.measure.interval,
            agree=heap.all_agree,
        )
        for contender in trial.checked:
            verdicts += trial.check(contender, last_launch[contender], "after")
        if config.measure.timeline and config.launch.wrap is None:
            spans = _record(trial, 1 + max(last_launch.values()))
    return RankRecord(
        rank=trial.session.rank,
        samples=samples,
        verdicts=tuple(verdicts),
        counts=trial.counts(),
        spans=spans,
    )


def _record(trial: Gated, launch: int) -> tuple[Span, ...]:
    """One launch of the first contender, stamped; every rank does it at the same place."""
    contender, host = trial.contenders[0], trial.session.host
    trial.prepare(contender, launch)
    host.heap.barrier()
    return host.record(partial(trial.run, contender))
