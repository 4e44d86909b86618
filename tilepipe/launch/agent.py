"""torch's elastic agent for the ranks of one point, asked at each of its looks whether to go on.

Knows nothing of points, results or why ranks fail. Importing it imports torch.

The agent's start and its end are long: an exception that a signal's handler raises there leaves
ranks behind that nobody ends. So handlers only remember, and the agent asks between its looks at
the ranks, where it can end all of them.
"""

import logging
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.elastic.rendezvous.registry as rendezvous
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.launcher.api import LaunchConfig

from tilepipe.stopping import Stopping

__all__ = ["ChildFailedError", "run_ranks"]

_LOOK_S = 0.1


class _Agent(LocalElasticAgent):
    """Ends its ranks when `stopping` says so."""

    def __init__(self, spec: WorkerSpec, config: LaunchConfig, stopping: Stopping) -> None:
        assert config.logs_specs is not None
        super().__init__(spec, config.logs_specs, start_method=config.start_method)
        self._stopping = stopping

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        self._stopping.ranks = tuple(started.values())
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._stopping.check()
        looked: RunResult = super()._monitor_workers(worker_group)
        return looked


def run_ranks(
    entry: Callable[..., Any] | str,  # a function, or a program
    args: tuple[Any, ...],
    *,
    num_processes: int,
    log_dir: Path,
    stopping: Stopping,
) -> dict[int, Any]:
    """What every process returns, by rank.

    Raises ChildFailedError where a process fails, Interrupted as `stopping.check` does.
    """
    for name in ("torch.distributed", "torch.multiprocessing.spawn", "torchelastic-events-null"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    log_dir.mkdir(parents=True, exist_ok=True)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(log_dir), redirects=Std.ALL),
    )
    handler = rendezvous.get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint="localhost:0",
            run_id=uuid.uuid4().hex,
            min_nodes=1,
            max_nodes=1,
            **config.rdzv_configs,
        )
    )
    spec = WorkerSpec(
        role=config.role,
        local_world_size=num_processes,
        entrypoint=entry,
        args=args,
        rdzv_handler=handler,
        max_restarts=0,
        monitor_interval=_LOOK_S,
        numa_options=config.numa_options,
    )
    try:
        result: RunResult = _Agent(spec, config, stopping).run()
    finally:
        stopping.ranks = ()
        handler.shutdown()
    if result.is_failed():
        raise ChildFailedError(name=str(entry), failures=result.failures)
    returned: dict[int, Any] = result.return_values
    return returned
