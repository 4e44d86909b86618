"""Rows between processes by torch's all-to-all, its failures told in a sentence.

Knows nothing of experts, tokens and of how processes were started.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from tilepipe.fabric.watch import PeerAborted, WatchdogTimeout

__all__ = ["Collective", "joined"]


class Collective:
    """One process of torch's default group; all of them call in the same order."""

    def __init__(self, *, limit_s: float, give_up: Callable[[], None]) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self._limit_s, self._give_up = limit_s, give_up

    def exchange(
        self,
        out: torch.Tensor,  # rows that come, by source rank
        rows: torch.Tensor,  # rows that go, by destination rank
        received: list[int] | None = None,  # (num_ranks,) rows that come; None: as many of each
        sent: list[int] | None = None,  # (num_ranks,) rows that go
    ) -> None:
        """Every rank's rows to their destinations. Raises WatchdogTimeout or PeerAborted."""
        try:
            dist.all_to_all_single(out, rows, received, sent)
        except RuntimeError as error:
            raise _told(error, self.rank, self._limit_s, self._give_up) from error


@contextmanager
def joined(
    store: Store,
    *,
    backend: str,  # gloo for the CPU, nccl for one GPU a process
    rank: int,
    num_ranks: int,
    limit_s: float,  # of each exchange, launch.watchdog_ms
    give_up: Callable[[], None],  # tells all peers that this rank stops
    device: torch.device | None = None,  # nccl: the GPU of this process
) -> Iterator[Collective]:
    """Join torch's default group, and leave it however the block ends."""
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=limit_s),
            device_id=device,
        )
    except RuntimeError as error:
        raise _told(error, rank, limit_s, give_up) from error
    try:
        yield Collective(limit_s=limit_s, give_up=give_up)
    except BaseException:
        _leave_at_once(backend)
        raise
    dist.destroy_process_group()


def _leave_at_once(backend: str) -> None:
    """Leave a group that cannot go on: NCCL would wait for peers, which may wait for this rank."""
    if backend == "nccl":
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def _told(
    error: RuntimeError, rank: int, limit_s: float, give_up: Callable[[], None]
) -> RuntimeError:
    """The failure as one of ours; one that only follows a peer's end blames nobody anew."""
    give_up()
    text = " ".join(str(error).split())
    if re.search(r"timed? ?out", text, re.IGNORECASE):
        return WatchdogTimeout(
            f"rank {rank} waited {limit_s:g} s (launch.watchdog_ms): role torch all-to-all: a rank "
            "has not come; see its log"
        )
    if re.search(r"connection|peer|remote", text, re.IGNORECASE):
        return PeerAborted(f"rank {rank} stopped because a rank left torch's group: {text}")
    return error
