"""Names of a point: what defines its measurement, and what made its numbers.

Knows nothing of Hydra, Parquet or how a point runs.
"""

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tilepipe.config import detect
from tilepipe.config.schemas import SWEEP_KEYS

__all__ = ["build_facts", "build_id", "config_id", "cpu_model", "defining", "device_name"]

# Of the configuration, but no part of what is measured: where results lie, how a sweep is run, and
# whether a launch is recorded afterwards, for which no number is another.
_NOT_MEASURED = (
    "name",
    *SWEEP_KEYS,
    "launch.watchdog_ms",
    "launch.time_limit_s",
    "launch.wrap",
    "measure.timeline",
)
_CONFIG_ID_LENGTH = 12
_BUILD_ID_LENGTH = 8
# Packages and modules whose sources make a number; the rest composes, stores or shows it.
_MAKERS = (
    "baselines",
    "experiments",
    "fabric",
    "host",
    "kernels",
    "launch/agent.py",
    "launch/ranks.py",
    "launch/worker.py",
    "measure",
    "reference",
    "results/accounting.py",
    "results/breakdown.py",
    "results/summary.py",
    "schedule",
    "workload",
)
_LIBRARIES = ("numpy", "nvidia-cutlass-dsl", "torch")
_PACKAGE = Path(__file__).resolve().parents[1]


def defining(container: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a configuration that defines what is measured."""
    return {
        key: {k: v for k, v in value.items() if f"{key}.{k}" not in _NOT_MEASURED}
        if isinstance(value, dict)
        else value
        for key, value in container.items()
        if key not in _NOT_MEASURED
    }


def config_id(container: dict[str, Any]) -> str:
    """Digest of all that defines the measurement."""
    found = defining(container)
    for group in ("routing", "placement"):
        settings = found[group]
        if "path" in settings:
            found[group] = {**settings, "path": _content(settings["path"])}
    return _digest(found, _CONFIG_ID_LENGTH)


def build_facts(hardware: dict[str, Any]) -> dict[str, Any]:
    """What made a point's numbers: sources by package, library versions and the machine.

    `hardware` is the resolved group. Plain JSON values, so that two builds can be told apart.
    """
    return {
        "sources": {maker: _sources(maker) for maker in _MAKERS},
        "versions": {library: version(library) for library in _LIBRARIES},
        "hardware": hardware,
        "gpus": list(detect.gpu_names()),
        "cpu": cpu_model(),
        "cores": _usable_cores(),
    }


def build_id(facts: dict[str, Any]) -> str:
    """Digest of `build_facts`."""
    return _digest(facts, _BUILD_ID_LENGTH)


def device_name() -> str:
    """The machine in words: its GPUs, or its CPU where there are none."""
    gpus = detect.gpu_names()
    if not gpus:
        return cpu_model()
    kinds = sorted(set(gpus))
    return ", ".join(f"{gpus.count(kind)} x {kind}" for kind in kinds)


@cache
def cpu_model() -> str:
    """Name of the CPU as the kernel reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@cache
def _sources(maker: str) -> str:
    path = _PACKAGE / maker
    return _files([path] if path.suffix else sorted(path.rglob("*.py")))


def _usable_cores() -> int:
    """Cores that ranks on the host share: fewer than ranks, and overlap hides little."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def _content(path: str) -> str:
    """Digest of a trace or a map, so that a copy elsewhere is the same point.

    What is no file keeps its path: the rank process that reads it says what is wrong.
    """
    try:
        if not Path(path).is_file():
            return path
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):
        return path


def _files(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(_PACKAGE).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _digest(value: Any, length: int) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:length]
