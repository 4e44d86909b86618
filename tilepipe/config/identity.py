"""Names of a point: what defines its measurement, and what made its numbers.

Knows nothing of Hydra, Parquet or how a point runs.
"""

import hashlib
import json
import platform
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tilepipe.config import detect

__all__ = ["build_id", "config_id", "device_name"]

_CONFIG_ID_LENGTH = 12
_BUILD_ID_LENGTH = 8
# Packages whose sources make a number; the rest composes, launches, stores or shows it.
_MAKERS = ("experiments", "fabric", "host", "measure", "reference", "schedule", "workload")
_LIBRARIES = ("numpy", "nvidia-cutlass-dsl", "torch")
_PACKAGE = Path(__file__).resolve().parents[1]


def config_id(container: dict[str, Any]) -> str:
    """Digest of all that defines the measurement: not the folder, not when it is given up."""
    defining = {
        key: value for key, value in container.items() if key not in ("name", "results_dir")
    }
    launch = container["launch"]
    limits = ("watchdog_ms", "time_limit_s")
    defining["launch"] = {key: value for key, value in launch.items() if key not in limits}
    routing = container["routing"]
    if "path" in routing:
        defining["routing"] = {**routing, "path": _content(routing["path"])}
    return _digest(defining, _CONFIG_ID_LENGTH)


def _without(group: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in keys}


def build_id(hardware: dict[str, Any]) -> str:
    """Digest of sources, library versions and the machine; `hardware` is the resolved group."""
    made_by = {
        "sources": _sources(),
        "versions": {library: version(library) for library in _LIBRARIES},
        "hardware": hardware,
        "gpus": detect.gpu_names(),
        "cpu": cpu_model(),
    }
    return _digest(made_by, _BUILD_ID_LENGTH)


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
def _sources() -> str:
    paths = [path for maker in _MAKERS for path in (_PACKAGE / maker).rglob("*.py")]
    return _files(sorted(paths))


@cache
def _content(path: str) -> str:
    """Digest of a trace, so that a copy elsewhere is the same point.

    A missing file keeps its path: the rank process that reads it says what is wrong.
    """
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
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
