"""Which hardware option this machine is, by NVML.

Knows nothing of Hydra or torch; initialises no CUDA.
"""

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import pynvml

__all__ = ["capabilities", "gpu_names", "hardware_option"]

# NVML name -> prefix of its options in conf/hardware/ and the GPU counts they exist for, largest
# first. PCIe and NVL boards carry other names: their figures differ, so they are generic_x1.
_OPTIONS = {
    "NVIDIA H200": ("h200", (8, 4, 2, 1)),
    "NVIDIA H100 80GB HBM3": ("h100", (8, 1)),
    "NVIDIA B200": ("b200", (8,)),
}


@cache
def gpu_names() -> tuple[str, ...]:
    """Names of the GPUs a CUDA process started now would see; empty where there is no driver."""
    return tuple(_of_visible(pynvml.nvmlDeviceGetName))


@cache
def capabilities() -> tuple[tuple[int, int], ...]:
    """Compute capability, major and minor, of each of them."""
    found = _of_visible(pynvml.nvmlDeviceGetCudaComputeCapability)
    return tuple((int(major), int(minor)) for major, minor in found)


def _of_visible(read: Callable[[Any], Any]) -> list[Any]:
    """What `read` says of each GPU that a CUDA process would see."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        found = [read(handle) for handle in handles]
        uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
    chosen = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)
    return [found[index] for index in chosen]


def visible_devices(visible: str | None, uuids: list[str]) -> list[int]:
    """Device numbers that CUDA_VISIBLE_DEVICES lets through: CUDA stops at the first bad word."""
    if visible is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for word in visible.split(","):
        word = word.strip()
        if word.isdecimal():
            matches = [int(word)] if int(word) < len(uuids) else []
        else:
            matches = [index for index, uuid in enumerate(uuids) if word and uuid.startswith(word)]
        if len(matches) != 1 or matches[0] in chosen:
            break
        chosen += matches
    return chosen


def hardware_option() -> str:
    """Option of the group `hardware` that fits this machine: the largest that is fully here."""
    names = gpu_names()
    if not names:
        return "cpu"
    if len(set(names)) == 1 and names[0] in _OPTIONS:
        prefix, counts = _OPTIONS[names[0]]
        for count in counts:
            if len(names) >= count:
                return f"{prefix}_x{count}"
    return "generic_x1"
