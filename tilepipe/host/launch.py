"""One launch of a rank: two threads, their end, and the moments between.

Knows nothing of rows and operations.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum

from tilepipe.fabric.host import HostHeap
from tilepipe.fabric.watch import PeerAborted

__all__ = ["Form", "Stamps", "TwoThreads"]


class Form(Enum):
    """How the parts of an operation meet in one launch; every form computes the same bits."""

    fused = "fused"  # communication and GEMM at once, meeting at flags
    sequential = "sequential"  # one after the other, nothing overlaps
    gemm_all = "gemm_all"  # the GEMM with neither flags nor communication
    gemm_flags = "gemm_flags"  # the GEMM looking at flags that are all set (dispatch -> GEMM)
    gemm_publish = "gemm_publish"  # the GEMM raising flags that nobody reads (GEMM -> combine)
    gemm_contended = "gemm_contended"  # the same, while communication runs into a spare buffer


@dataclass(frozen=True, kw_only=True)
class Stamps:
    """Moments of one launch on this rank, monotonic nanoseconds."""

    start_ns: int  # the launch is asked for
    planned_ns: int  # gate passed, plan made
    computed_ns: int  # the computing thread has ended
    sent_ns: int  # the sending thread has ended; equal to computed_ns where nothing is sent
    early: int = (
        0  # fused: M tiles computed before the last row came, or pushes before the last tile
    )

    @property
    def end_ns(self) -> int:
        return max(self.computed_ns, self.sent_ns)


class TwoThreads:
    """Runs launches of one rank: the caller computes, a second thread sends."""

    def __init__(self, heap: HostHeap) -> None:
        self._heap = heap
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"send-{heap.rank}")
        self.latest: Stamps  # of the launch that has ended last

    def close(self) -> None:
        """End the sending thread; peers may still read this rank's memory."""
        self._pool.shutdown(wait=True)

    def run(
        self,
        start_ns: int,
        planned_ns: int,
        *,
        compute: Callable[[], None],
        send: Callable[[], None] | None,
    ) -> Stamps:
        """Run both threads to their end; a failure of either stops the other and all peers."""
        sending = None if send is None else self._pool.submit(self._guarded, send)
        try:
            compute()
            computed_ns = time.monotonic_ns()
            sent_ns = computed_ns if sending is None else sending.result()
        except BaseException as error:
            self._abort_for(error)
            cause = _first_cause(error, sending)
            if cause is error:
                raise
            raise cause from None
        self.latest = Stamps(
            start_ns=start_ns, planned_ns=planned_ns, computed_ns=computed_ns, sent_ns=sent_ns
        )
        return self.latest

    def _guarded(self, send: Callable[[], None]) -> int:
        """Send and stamp the end; on failure the computing thread must not wait for the rows."""
        try:
            send()
        except BaseException as error:
            self._abort_for(error)
            raise
        return time.monotonic_ns()

    def _abort_for(self, error: BaseException) -> None:
        """Stop this rank's other thread and all peers; one that only follows blames nobody anew."""
        if not isinstance(error, PeerAborted):
            self._heap.abort()


def _first_cause(error: BaseException, sending: "Future[int] | None") -> BaseException:
    """The error to report: that of the sending thread where this one merely followed it."""
    other = None if sending is None else sending.exception()
    if isinstance(error, PeerAborted) and other is not None:
        return other
    return error
