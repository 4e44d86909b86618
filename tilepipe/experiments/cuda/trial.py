"""Gate, time, gate again on the cuda executor: the same for every operation.

Knows nothing of what an operation does; see `CudaTrial` for what it must offer.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
    """Compare poisoned outputs, time, and compare what one more timed launch of each leaves.

    One more, since contenders share outputs: whose launch was the last of all depends on how often
    their order was rotated. With a failed gate on any rank no rank takes a sample. Ranks of one
    process share a launch, so they share its samples. A timeline comes last, so that no stamp lies
    in a timed launch; what the stamped launch leaves is compared too.
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
        samples, clocks, num_timed = _time(trial)
        for launch, contender in enumerate(trial.checked, start=num_timed):
            _launch_timed(trial, contender, launch)
            for rank in session.ranks:
                verdicts[rank] += trial.check(contender, rank, _payload(trial, launch), "after")
        if session.config.measure.timeline and session.config.launch.wrap is None:
            assert isinstance(trial, Recordable), "an operation whose kernels leave no stamps"
            launch = _payload(trial, num_timed + len(trial.checked))
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


def _payload(trial: Gated, number: int) -> int:
    """What the inputs of a timed launch are made from; the launches of the gate come before."""
    return GATE_LAUNCH + len(trial.checked) + number


def _launch_timed(
    trial: Gated,
    contender: str,
    number: int,
    within: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> Components:
    trial.session.group.refresh_plan()
    trial.prepare(contender, _payload(trial, number))
    trial.session.group.heap.barrier()
    with within(contender):
        return trial.time(contender)


def _time(trial: Gated) -> tuple[tuple[Sample, ...], Clocks | None, int]:
    """Samples, clocks beside them, and how many launches there were, warm-ups among them."""
    session, settings = trial.session, trial.session.config.measure
    heap = session.group.heap
    annotate = ranges(wanted=session.config.launch.wrap is not None)
    num_timed = 0

    def timed(contender: str, number: int) -> Components:
        nonlocal num_timed
        num_timed = number + 1
        return _launch_timed(trial, contender, number, within=annotate)

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
    return samples, watch.clocks, num_timed
