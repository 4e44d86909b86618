"""Gate, time, gate again on the cuda executor: the same for every operation.

Knows nothing of what an operation does; see `CudaTrial` for what it must offer.
"""

from functools import partial
from typing import Protocol

from tilepipe.config.schemas import Config
from tilepipe.experiments.cuda.recording import Recordable, Recorded, record
from tilepipe.experiments.cuda.session import CudaSession
from tilepipe.experiments.setting import GATE_LAUNCH, Components, Memory
from tilepipe.measure.clocks import ClockWatch
from tilepipe.measure.contenders import run_interleaved
from tilepipe.measure.ranges import ranges
from tilepipe.records import Clocks, RankRecord, Sample, Verdict

__all__ = ["CudaTrial", "Gated", "measure"]


class Gated(Protocol):
    """Contenders of one operation on the ranks of this process.

    Every process of a group calls the same methods in the same order.
    """

    session: CudaSession

    @property
    def contenders(self) -> tuple[str, ...]:
        """Names of what is timed, interleaved."""

    @property
    def checked(self) -> tuple[str, ...]:
        """Contenders whose outputs the oracle knows."""

    def prepare(self, contender: str, launch: int) -> None:
        """Write the inputs of a launch on all own ranks; outside every window."""

    def poison(self, contender: str) -> None:
        """Overwrite all that the contender will write."""

    def run(self, contender: str) -> None:
        """Launch once; does not wait."""

    def time(self, contender: str) -> Components:
        """Launch and return the windows."""

    def check(self, contender: str, rank: int, launch: int, stage: str) -> list[Verdict]:
        """Compare what the latest run of the contender, of that launch, has left on a rank."""


class CudaTrial(Gated, Protocol):
    """An operation's own contenders."""

    def __init__(self, session: CudaSession) -> None: ...

    @staticmethod
    def memory(config: Config) -> Memory:
        """What the operation stores at its peers."""


def measure(trial: Gated) -> tuple[RankRecord, ...]:
    """Compare poisoned outputs, time, and compare what the last timed launches left.

    With a failed gate on any rank no rank takes a sample. Ranks of one process share a launch, so
    they share its samples. A timeline comes last, so that no stamp lies in a timed launch; what the
    stamped launch leaves is compared too.
    """
    session, heap = trial.session, trial.session.group.heap
    verdicts: dict[int, list[Verdict]] = {rank: [] for rank in session.ranks}
    for launch, contender in enumerate(trial.checked, start=GATE_LAUNCH):
        trial.prepare(contender, launch)
        trial.poison(contender)
        heap.barrier()
        trial.run(contender)
        session.group.synchronize()
        for rank in session.ranks:
            verdicts[rank] += trial.check(contender, rank, launch, "before")
    samples: tuple[Sample, ...] = ()
    clocks: Clocks | None = None
    recorded = Recorded(spans={}, counts={})
    if heap.all_agree(all(verdict.passed for found in verdicts.values() for verdict in found)):
        samples, clocks, last_launch = _time(trial)
        for contender in trial.checked:
            for rank in session.ranks:
                launch = last_launch[contender]
                verdicts[rank] += trial.check(contender, rank, launch, "after")
        if session.config.measure.timeline and session.config.launch.wrap is None:
            assert isinstance(trial, Recordable), "an operation whose kernels leave no stamps"
            launch = 1 + max(last_launch.values())
            recorded = record(trial, launch)
            for rank in session.ranks:
                verdicts[rank] += trial.check("fused", rank, launch, "after")
    return tuple(
        RankRecord(
            rank=rank,
            samples=samples,
            verdicts=tuple(verdicts[rank]),
            counts={**session.counts(rank), **recorded.counts.get(rank, {})},
            clocks=clocks,
            spans=recorded.spans.get(rank, ()),
        )
        for rank in session.ranks
    )


def _time(trial: Gated) -> tuple[tuple[Sample, ...], Clocks | None, dict[str, int]]:
    session, settings = trial.session, trial.session.config.measure
    heap = session.group.heap
    last_launch: dict[str, int] = {}
    annotate = ranges(wanted=session.config.launch.wrap is not None)

    def timed(contender: str, number: int) -> Components:
        last_launch[contender] = launch = GATE_LAUNCH + len(trial.checked) + number
        session.group.refresh_plan()
        trial.prepare(contender, launch)
        heap.barrier()
        with annotate(contender):
            return trial.time(contender)

    watch: ClockWatch = session.clock_watch()
    with watch:
        samples = run_interleaved(
            {name: partial(timed, name) for name in trial.contenders},
            num_warmups=settings.num_warmups,
            num_iters=settings.num_iters,
            barrier=lambda: None,  # `timed` meets the peers, its inputs written
            max_iters=settings.max_iters,
            interval=settings.interval,
            agree=heap.all_agree,
        )
    return samples, watch.clocks, last_launch
