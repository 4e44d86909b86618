"""Which ranks this process holds, on which GPU and in which memory.

Knows nothing of operations and kernels.
"""

from collections.abc import Mapping

import torch

from tilepipe.config.choices import Fabric
from tilepipe.config.schemas import Config
from tilepipe.fabric.device_heap import DeviceHeap
from tilepipe.fabric.host import ArraySpec
from tilepipe.fabric.loopback import LoopbackHeap
from tilepipe.fabric.table import Slot

__all__ = ["open_heap", "shares_gpus", "watchdog_s"]

# Processes on one GPU take turns of some milliseconds: a flag that takes a microsecond between two
# GPUs takes 4 ms with two processes on one, 17 ms with eight (H200, 2026-11).
_TURNS = 1000


def shares_gpus(config: Config) -> bool:
    """Whether processes of several ranks take turns on a GPU: a test, never a measurement."""
    launch = config.launch
    return launch.fabric is Fabric.nvshmem and launch.num_ranks > config.hardware.num_gpus


def watchdog_s(config: Config) -> float:
    """Limit of one wait inside a launch."""
    return config.launch.watchdog_ms / 1e3 * (_TURNS if shares_gpus(config) else 1)


def open_heap(config: Config, specs: Mapping[Slot, ArraySpec]) -> DeviceHeap:
    """Memory of the ranks of this process, on the GPU that becomes the current one.

    To be closed by whoever opens it. Raises what the heaps raise.
    """
    launch = config.launch
    if launch.fabric is Fabric.loopback:
        device = torch.device("cuda", torch.cuda.current_device())
        return LoopbackHeap(specs, num_ranks=launch.num_ranks, device=device)
    # Loads NVSHMEM: only where ranks are processes of their own.
    from tilepipe.fabric.nvshmem import NvshmemHeap, meet_by_environment

    meeting = meet_by_environment(launch.num_ranks, limit_s=launch.time_limit_s)
    # All ranks are on one host, so they count its GPUs alike.
    device = torch.device("cuda", meeting.rank % config.hardware.num_gpus)
    torch.cuda.set_device(device)
    return NvshmemHeap(specs, meeting=meeting, device=device)
