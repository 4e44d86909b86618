"""Processor, cores, memory and room for shared memory, against what the default sweep needs.

Knows nothing of libraries or GPUs.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilepipe.doctor.fact import Fact, State
from tilepipe.results.provenance import host_facts

__all__ = ["Machine", "Room", "look_at_machine", "machine_facts"]

# What `+experiment=dispatch_gemm hardware=cpu` takes; a test compares it with the composed sweep.
DEFAULT_NUM_RANKS = 4
DEFAULT_SHM_BYTES = 80 * 2**20  # all ranks together
# All processes together; 691 MiB of PSS were seen (4 ranks, torch for the CPU, 2026-11).
DEFAULT_MEMORY_BYTES = 2**30

_MIB, _GIB = 2**20, 2**30
_SHM_DIR = Path("/dev/shm")
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(frozen=True)
class Room:
    """A file system that rows may lie on."""

    folder: str
    total_bytes: int
    free_bytes: int
    writable: bool = True


@dataclass(frozen=True)
class Machine:
    """What the doctor judges; None where it could not be had."""

    host: dict[str, Any]  # as provenance.host_facts
    memory_limit_bytes: int | None  # of the container
    shm: Room | None
    results: Room | None  # where results go, and shared memory that /dev/shm has no room for


def look_at_machine(results_dir: Path) -> Machine:
    """Ask the kernel."""
    return Machine(
        host=host_facts(),
        memory_limit_bytes=_memory_limit(),
        shm=_room(_SHM_DIR),
        results=_room(_nearest_folder(results_dir)),
    )


def machine_facts(machine: Machine, *, host_executor: bool) -> list[Fact]:
    """`host_executor`: whether the main job runs on it here; else its needs are only noted."""
    needed = State.missing if host_executor else State.note
    return [
        _processor(machine.host, needed),
        _cores(machine.host["num_usable_cores"] or machine.host["num_cores"]),
        _memory(machine, needed),
        _shm(machine, needed),
        _results(machine.results),
    ]


def _fact(name: str, state: State, text: str, next_step: str = "") -> Fact:
    return Fact("machine", name, state, text, next_step)


def _processor(host: dict[str, Any], needed: State) -> Fact:
    kind, model = host["machine"], host["cpu_model"]
    named = f"{kind}, {model}" if model else str(kind)
    if str(kind).lower() in ("x86_64", "amd64"):
        return _fact("processor", State.ok, f"{named}: has the store order of the host executor")
    return _fact(
        "processor",
        needed,
        f"{named}: the host executor refuses it, since flags and rows in shared memory rely on the "
        "store order of x86-64",
        "run on an x86-64 machine",
    )


def _cores(num_cores: int | None) -> Fact:
    if num_cores is None:
        return _fact("cores", State.note, "the kernel does not say how many")
    text = f"{num_cores} usable, the default sweep has {DEFAULT_NUM_RANKS} ranks"
    if num_cores >= DEFAULT_NUM_RANKS:
        return _fact("cores", State.ok, text)
    return _fact(
        "cores",
        State.note,
        f"{text}, so ranks take turns and waits grow",
        f"for steadier times give each rank a core: launch.num_ranks={num_cores}",
    )


def _memory(machine: Machine, needed: State) -> Fact:
    sizes = [machine.host["memory_bytes"], machine.memory_limit_bytes]
    known = [size for size in sizes if size is not None]
    if not known:
        return _fact("memory", State.note, "the kernel does not say how much")
    limited = machine.memory_limit_bytes == min(known)
    text = f"{min(known) / _GIB:.1f} GiB{' (limit of this container)' if limited else ''}"
    if min(known) >= DEFAULT_MEMORY_BYTES:
        return _fact("memory", State.ok, text)
    return _fact(
        "memory",
        needed,
        f"{text}, but the default sweep takes {DEFAULT_MEMORY_BYTES / _GIB:.0f} GiB",
        "take a machine or container with more memory, or type launch.num_ranks=2 workload=tiny",
    )


def _shm(machine: Machine, needed: State) -> Fact:
    want = f"the default sweep takes {DEFAULT_SHM_BYTES / _MIB:.0f} MiB"
    shm, spill = machine.shm, machine.results
    text = "/dev/shm is not there"
    if shm is not None:
        text = f"{shm.folder}: {shm.free_bytes / _MIB:.0f} of {shm.total_bytes / _MIB:.0f} MiB free"
        if shm.writable and shm.free_bytes >= DEFAULT_SHM_BYTES:
            return _fact("shared memory", State.ok, f"{text}, {want}")
        if not shm.writable:
            text += ", but it cannot be written"
    larger = "give it more: docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm"
    if spill is not None and spill.writable and spill.free_bytes >= DEFAULT_SHM_BYTES:
        text += f"; {want}, so ranks without room there put their rows into files under the "
        return _fact("shared memory", State.note, text + "results folder, which is slower", larger)
    return _fact(
        "shared memory", needed, f"{text}; {want}, and the results folder has no room", larger
    )


def _results(room: Room | None) -> Fact:
    if room is None or not room.writable:
        where = f"{room.folder} cannot be written" if room else "no folder was found"
        step = "run from a folder that can be written, or name one with results_dir="
        return _fact("results folder", State.missing, where, step)
    free = f"{room.folder}: {room.free_bytes / _GIB:.1f} GiB free"
    return _fact("results folder", State.ok, free)


def _room(folder: Path) -> Room | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return Room(
        folder=str(folder),
        total_bytes=found.f_blocks * found.f_frsize,
        free_bytes=found.f_bavail * found.f_frsize,
        writable=os.access(folder, os.W_OK),
    )


def _nearest_folder(folder: Path) -> Path:
    """`folder`, or the one in which it would be made."""
    absolute = folder.absolute()
    return next(path for path in (absolute, *absolute.parents) if path.is_dir())


def _memory_limit() -> int | None:
    """Of the container; None where there is none, or another kernel."""
    for path in _CGROUP_LIMITS:
        try:
            word = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        # Version 1 spells "no limit" as a number no machine has.
        return int(word) if word.isdecimal() and int(word) < 2**60 else None
    return None
