"""Rank processes for tests: forked, so that starting a group costs milliseconds."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilepipe.fabric.host import HeapPlace
from tilepipe.host.rank import HostRank
from tilepipe.schedule.settings import PlanSettings
from tilepipe.schedule.shape import Shape

_group_number = 0


@dataclass
class Failed:
    """A rank that raised."""

    error: str
    text: str


def run_ranks(
    num_ranks: int,
    body: Callable[..., Any],  # body(rank, place, *args)
    *args: Any,
    shm_dir: Path = Path("/dev/shm"),
    spill_dir: Path | None = None,
    limit_s: float = 60,
) -> list[Any]:
    """What `body` returned on each rank, or Failed; raises when a rank gives nothing in time."""
    global _group_number
    _group_number += 1
    place = HeapPlace(
        token=f"test-{os.getpid()}-{_group_number}", shm_dir=shm_dir, spill_dir=spill_dir
    )
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    children = [
        context.Process(target=_child, args=(pipe[1], body, rank, place, args))
        for rank, pipe in enumerate(pipes)
    ]
    for child, (_, writer) in zip(children, pipes, strict=True):
        child.start()
        writer.close()
    try:
        return [_result(reader, rank, limit_s) for rank, (reader, _) in enumerate(pipes)]
    finally:
        for child in children:
            child.join(timeout=5)
            if child.is_alive():
                child.kill()
                child.join()


def _result(reader: Connection, rank: int, limit_s: float) -> Any:
    if not reader.poll(limit_s):
        raise TimeoutError(f"rank {rank} gave nothing within {limit_s} s")
    try:
        return reader.recv()
    except EOFError:
        return Failed(error="EOFError", text="the process died")


def _child(
    writer: Connection,
    body: Callable[..., Any],
    rank: int,
    place: HeapPlace,
    args: tuple[Any, ...],
) -> None:
    try:
        writer.send(body(rank, place, *args))
    except Exception as error:  # noqa: BLE001  the test decides what a failure means
        writer.send(Failed(error=type(error).__name__, text=f"{error}\n{traceback.format_exc()}"))
    os._exit(0)


def host_rank(
    rank: int,
    place: HeapPlace,
    settings: PlanSettings,
    shape: Shape,
    *,
    topk_idx: NDArray[np.int32] | None = None,
    topk_weights: NDArray[np.float32] | None = None,
    watchdog_s: float = 20,
) -> HostRank:
    """A rank with its routing set; weights default to 1 over topk."""
    state = HostRank(
        place,
        rank=rank,
        settings=settings,
        shape=shape,
        watchdog_s=watchdog_s,
        start_limit_s=20,
    )
    if topk_idx is not None:
        if topk_weights is None:
            topk_weights = np.full(topk_idx.shape, 1 / max(1, topk_idx.shape[1]), np.float32)
        state.set_routing(topk_idx, topk_weights)
    return state
