"""Where a number comes from: sources, versions, machine, environment, command line.

Knows nothing of points or times. The only module that reads environment variables into results;
versions are read from package metadata, so that nothing heavy is imported to be named.
"""

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tilepipe

__all__ = ["environment", "git_state", "gpu_facts", "host_facts", "provenance", "utc_now"]

PACKAGES = (
    "numpy",
    "torch",
    "pyarrow",
    "hydra-core",
    "omegaconf",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "nvshmem4py-cu12",
    "nvshmem4py-cu13",
    "nvidia-ml-py",
)
# These change what is measured; nothing else of the environment is kept, for it may hold secrets.
KEPT_NAMES = ("OMP_NUM_THREADS",)
KEPT_PREFIXES = ("CUDA_", "NVSHMEM_", "OPENBLAS_")
GIT_LIMIT_S = 20


def utc_now() -> str:
    """Now in UTC, ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def provenance(command_line: Sequence[str]) -> dict[str, Any]:
    """All facts that can be had, plain JSON values; what cannot be had is null."""
    package_root = Path(tilepipe.__file__).resolve().parent.parent
    return {
        "tilepipe": tilepipe.__version__,
        "git": git_state(package_root),
        "python": platform.python_version(),
        "packages": {name: _version_of(name) for name in PACKAGES},
        "gpu": gpu_facts(),
        "host": host_facts(),
        "environment": environment(os.environ),
        "command_line": list(command_line),
        "collected_utc": utc_now(),
    }


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables on the allow-list, sorted by name."""
    return {
        name: variables[name]
        for name in sorted(variables)
        if name in KEPT_NAMES or name.startswith(KEPT_PREFIXES)
    }


def git_state(root: Path) -> dict[str, Any] | None:
    """Commit, dirty flag and hash of what is not committed; None where root is no checkout.

    Dirty: a tracked file has changed, or there are sources that git does not know. Other new files,
    such as a recording or results, change nothing of what runs.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    # An installed copy may lie inside somebody else's checkout: that commit is not ours.
    if top is None or Path(os.fsdecode(top.strip())).resolve() != root.resolve():
        return None
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    listed = _git(root, "ls-files", "-o", "-z", "--exclude-standard", "--", "tilepipe", "conf")
    sources = sorted(part for part in (listed or b"").split(b"\0") if part)
    dirty = commit is None or bool(changed) or bool(sources)
    return {
        "commit": commit.decode().strip() if commit else None,
        "dirty": dirty if changed is not None else None,
        "diff_hash": _diff_hash(root, sources) if dirty else None,
    }


def _diff_hash(root: Path, sources: Sequence[bytes]) -> str:
    """Of changes to tracked files and of untracked sources; equal hashes, equal sources."""
    digest = hashlib.sha256(_git(root, "diff", "HEAD", "--binary") or b"")
    for name in sources:
        path = root / os.fsdecode(name)
        digest.update(name + b"\0" + (path.read_bytes() if path.is_file() else b""))
    return digest.hexdigest()[:16]


def _git(root: Path, *words: str) -> bytes | None:
    """Output of a git command; None without git, without a repository or when it takes long."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words],
            capture_output=True,
            check=True,
            timeout=GIT_LIMIT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def host_facts() -> dict[str, Any]:
    """The machine as its kernel describes it."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {
        "hostname": platform.node(),
        "machine": platform.machine(),
        "kernel": f"{platform.system()} {platform.release()}",
        "cpu_model": _cpu_model(),
        "num_cores": os.cpu_count(),
        "num_usable_cores": usable,
        "memory_bytes": _memory_bytes(),
        "num_numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        "byte_order": sys.byteorder,
    }


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, None) or platform.processor() or None


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def gpu_facts() -> dict[str, Any] | None:
    """Driver and GPUs by NVML, no CUDA context made; None where there is no driver."""
    import pynvml  # a driver library is looked for: only when asked

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return {
            "driver": _asked(pynvml.nvmlSystemGetDriverVersion),
            "cuda_driver": _asked(pynvml.nvmlSystemGetCudaDriverVersion),
            "gpus": [_one_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())],
        }
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _one_gpu(pynvml: Any, index: int) -> dict[str, Any]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = _asked(pynvml.nvmlDeviceGetMemoryInfo, handle)
    mig = _asked(pynvml.nvmlDeviceGetMigMode, handle)
    capability = _asked(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    return {
        "name": _asked(pynvml.nvmlDeviceGetName, handle),
        "uuid": _asked(pynvml.nvmlDeviceGetUUID, handle),
        "compute_capability": None if capability is None else ".".join(map(str, capability)),
        "memory_bytes": None if memory is None else int(memory.total),
        "sm_clock_mhz": _asked(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        "max_sm_clock_mhz": _asked(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
        "memory_clock_mhz": _asked(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM),
        "power_limit_mw": _asked(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle),
        "power_mw": _asked(pynvml.nvmlDeviceGetPowerUsage, handle),
        "temperature_c": _asked(
            pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU
        ),
        "clock_event_reasons": _asked(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle),
        "mig_enabled": None if mig is None else bool(mig[0]),
    }


def _asked(question: Callable[..., Any], *arguments: Any) -> Any:
    """One NVML answer; None where this GPU or driver does not know it."""
    import pynvml

    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None
