"""What ranks would find out about a point before their first launch, found out without them.

Knows nothing of how points run. Routing is drawn in a process of its own: only there an experiment
is imported, and only that process is lost where memory does not suffice.
"""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tilepipe.config.choices import Law, PlacementRule, Planner
from tilepipe.config.limits import MAX_PLANNED_EXPERTS
from tilepipe.launch.drawing import available_bytes, drawing_fault
from tilepipe.launch.worker import Described, describe, end_with
from tilepipe.records import Point, Status
from tilepipe.stopping import Stopping, out_of_the_terminals_reach

__all__ = ["Describing", "Undescribed"]

_LOOK_S = 0.1
# Parts of a configuration that say what is drawn, planned and reserved.
_PARTS = ("operation", "hardware", "kernel", "workload", "routing", "placement", "launch")


class Undescribed(Exception):
    """A point that could not be described, for no reason that a user could mend."""


class Describing:
    """Describes points until it is closed."""

    def __init__(self, stopping: Stopping) -> None:
        self._stopping = stopping
        self._found: dict[str, Described | Exception] = {}
        self._process: Any = None
        self._connection: Connection | None = None

    def described(self, point: Point) -> Described:
        """Memory that each rank would reserve, and more; points alike are asked about once.

        Raises ValueError or OSError as the ranks would, MemoryError where the routing does not fit,
        Undescribed where something else went wrong, Interrupted where this process is asked to end.
        """
        if lacking := drawing_fault(point.config, available_bytes()):
            raise MemoryError(lacking)
        key = json.dumps([point.config.get(part) for part in _PARTS], sort_keys=True)
        if key not in self._found:
            self._found[key] = self._ask(point.config)
        answer = self._found[key]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def fault(self, point: Point) -> tuple[Status, str] | None:
        """How the point would end before its first launch, and why; None where it would not.

        But for memory, looked for only where what was typed depends on what is drawn or read.
        """
        if not _depends_on_rows(point.config):
            lacking = drawing_fault(point.config, available_bytes())
            return (Status.oom, lacking) if lacking else None
        try:
            self.described(point)
        except (ValueError, OSError) as error:
            return Status.refused, str(error)
        except MemoryError as error:
            return Status.oom, str(error)
        except Undescribed:
            return None  # ranks meet it too, and leave their logs
        return None

    def _ask(self, container: dict[str, Any]) -> Described | Exception:
        connection = self._connection or self._start()
        connection.send(container)
        try:
            while not connection.poll(_LOOK_S):
                self._stopping.check()
            answer: Described | Exception = connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode
            self.close()  # the next point gets another
            answer = MemoryError()
            if code != -signal.SIGKILL:
                answer = _fault_of(container, code)
        if isinstance(answer, MemoryError):
            workload = container["workload"]
            tokens, experts = workload["num_tokens"], workload["num_experts"]
            return MemoryError(
                f"workload.num_tokens={tokens}, workload.num_experts={experts}: their routing does "
                "not fit into this machine's memory; lower one of them"
            )
        return answer

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, os.getpid(), describe), daemon=True
        )
        with out_of_the_terminals_reach():
            self._process.start()
        theirs.close()  # so that its end is seen here
        return self._connection

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = self._connection = None


def _fault_of(container: dict[str, Any], code: int) -> Exception:
    """Why a process that described a point ended: a library may die of a damaged file."""
    for group in ("routing", "placement"):
        if code < 0 and (path := container[group].get("path")):
            name = signal.Signals(-code).name
            return ValueError(
                f"{group}.path={path}: reading it ended the process by {name}: its content is "
                "damaged; write the file again"
            )
    return Undescribed(f"describing the point ended with code {code}: a fault of ours")


def _serve(
    connection: Connection, driver_pid: int, described: Callable[[dict[str, Any]], Described]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(driver_pid)
    while True:
        container = connection.recv()
        answer: Described | Exception
        try:
            answer = described(container)
        except (ValueError, OSError, MemoryError) as error:
            answer = error
        connection.send(answer)


def _depends_on_rows(container: dict[str, Any]) -> bool:
    """Whether settings that fit each other may yet be refused for the rows or a file's content."""
    kernel, workload = container["kernel"], container["workload"]
    return (
        kernel.get("capacity_factor") is not None
        or container["routing"]["law"] in (Law.trace.name, Law.counts.name)
        or container["placement"]["rule"] in (PlacementRule.file.name, PlacementRule.balanced.name)
        or (
            kernel.get("planner") == Planner.device.name
            and workload["num_experts"] > MAX_PLANNED_EXPERTS
        )
    )
