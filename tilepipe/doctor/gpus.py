"""The GPUs that NVML shows, how they reach each other, and what hardware=auto makes of them.

Knows nothing of libraries; makes no CUDA context.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import permutations
from typing import Any

from tilepipe.config.choices import Operation
from tilepipe.doctor.fact import Fact, State
from tilepipe.doctor.libraries import spelled_cuda
from tilepipe.results.provenance import gpu_facts

__all__ = ["Gpus", "Topology", "gpu_section", "hardware_section", "look_at_gpus", "read_topology"]

_GIB = 2**30
# NVML's numbers; pynvml spells the index of reading as a tuple, so they are written out here.
_WRITE, _NVLINK, _ATOMICS = 1, 2, 3
_PAIR_STATES = (
    "ok",
    "the chipset does not support it",
    "the GPU does not support it",
    "the topology does not support it",
    "disabled by a registry key",
    "not supported",
    "unknown",
)


@dataclass(frozen=True)
class Topology:
    """How each GPU reaches each other one."""

    # (from, to) -> why a store or an atomic of one cannot reach the other; absent where it can.
    unreachable: Mapping[tuple[int, int], str]
    by_nvlink: frozenset[tuple[int, int]]
    num_links: tuple[int, ...]  # by GPU: NVLink links that are up
    num_links_down: tuple[int, ...]


@dataclass(frozen=True)
class Gpus:
    """What the doctor judges."""

    facts: Mapping[str, Any] | None  # as provenance.gpu_facts; None without a driver
    topology: Topology | None  # None with fewer than two GPUs
    visible: tuple[str, ...]  # names of the GPUs that a CUDA process would see
    option: str | None  # of hardware=auto; None where nvidia-ml-py is not installed

    @property
    def num_gpus(self) -> int:
        return len(self.facts["gpus"]) if self.facts else 0

    @property
    def driver_cuda(self) -> int | None:
        """Newest CUDA that the driver can run, 13000 for 13.0; None without a driver."""
        return self.facts["cuda_driver"] if self.facts else None

    @property
    def on_host(self) -> bool:
        """Whether the main job runs on the host executor here."""
        return self.option in (None, "cpu")


def look_at_gpus() -> Gpus:
    """Ask NVML."""
    if find_spec("pynvml") is None:
        return Gpus(facts=None, topology=None, visible=(), option=None)
    # Here and not above: both need nvidia-ml-py, whose absence is one of the things to be told.
    import pynvml

    from tilepipe.config import detect

    facts = gpu_facts()
    num_gpus = len(facts["gpus"]) if facts else 0
    return Gpus(
        facts=facts,
        topology=read_topology(pynvml, num_gpus) if num_gpus > 1 else None,
        visible=detect.gpu_names(),
        option=detect.hardware_option(),
    )


def read_topology(nvml: Any, num_gpus: int) -> Topology | None:
    """`nvml` as the module pynvml; None where the driver stops answering."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(num_gpus)]
        unreachable, by_nvlink = {}, set()
        for pair in permutations(range(num_gpus), 2):
            ends = [handles[index] for index in pair]
            states = {index: nvml.nvmlDeviceGetP2PStatus(*ends, index) for index in (1, 2, 3)}
            failed = [states[index] for index in (_WRITE, _ATOMICS) if states[index] != 0]
            if failed:
                unreachable[pair] = _PAIR_STATES[min(failed[0], len(_PAIR_STATES) - 1)]
            if states[_NVLINK] == 0:
                by_nvlink.add(pair)
        links = [_links(nvml, handle) for handle in handles]
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()
    return Topology(
        unreachable=unreachable,
        by_nvlink=frozenset(by_nvlink),
        num_links=tuple(up for up, _ in links),
        num_links_down=tuple(down for _, down in links),
    )


def _links(nvml: Any, handle: Any) -> tuple[int, int]:
    """NVLink links that are up and down; NVML refuses numbers that this GPU does not have."""
    states = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            states.append(int(nvml.nvmlDeviceGetNvLinkState(handle, link)))
        except nvml.NVMLError:
            continue
    return states.count(1), states.count(0)


def gpu_section(gpus: Gpus) -> list[Fact]:
    """Driver, each GPU, and how they reach each other."""
    if gpus.option is None:
        text = "not asked: nvidia-ml-py is not installed"
        return [Fact("GPUs", "driver", State.note, text, "install it, see libraries")]
    if gpus.facts is None:
        text = "no NVIDIA driver answers; everything runs on the host executor"
        step = "for GPUs install NVIDIA's driver, and start a container with --gpus all"
        return [Fact("GPUs", "driver", State.note, text, step)]
    facts = [_driver(gpus)]
    facts += [_gpu(index, gpu) for index, gpu in enumerate(gpus.facts["gpus"])]
    if len(gpus.visible) != gpus.num_gpus:
        text = f"a CUDA process sees {len(gpus.visible)} of {gpus.num_gpus} GPUs"
        step = "unset CUDA_VISIBLE_DEVICES to use all"
        facts.append(Fact("GPUs", "visible", State.note, text, step))
    if gpus.num_gpus > 1:
        facts += _reach(gpus)
    return facts


def hardware_section(gpus: Gpus) -> list[Fact]:
    """What hardware=auto picks, which executor that means and whether it has kernels."""
    if gpus.option is None:
        text = "not resolved: nvidia-ml-py is not installed"
        step = "install it, see libraries"
        return [Fact("hardware", "hardware=auto", State.missing, text, step)]
    if gpus.on_host:
        text = "is cpu: the host executor, ranks are processes of this machine"
        return [Fact("hardware", "hardware=auto", State.ok, text)]
    used = int(gpus.option.rpartition("_x")[2])
    text = f"is {gpus.option}: executor cuda"
    auto = Fact("hardware", "hardware=auto", State.ok, text)
    if used < len(gpus.visible):
        text += f", which uses {used} of {len(gpus.visible)} GPUs"
        auto = Fact("hardware", "hardware=auto", State.note, text, "type another hardware option")
    text = f"this version has those of {', '.join(Operation.__members__)}"
    return [auto, Fact("hardware", "kernels", State.ok, text)]


def _driver(gpus: Gpus) -> Fact:
    assert gpus.facts is not None
    cuda = f", up to CUDA {spelled_cuda(gpus.driver_cuda)}" if gpus.driver_cuda else ""
    return Fact("GPUs", "driver", State.ok, f"{gpus.facts['driver'] or 'unknown version'}{cuda}")


def _gpu(index: int, gpu: Mapping[str, Any]) -> Fact:
    memory, capability = gpu["memory_bytes"], gpu["compute_capability"]
    text = ", ".join(
        (
            gpu["name"] or "unnamed",
            f"{memory / _GIB:.0f} GiB" if memory else "memory unknown",
            f"compute capability {capability or 'unknown'}",
        )
    )
    if gpu["mig_enabled"]:
        text += ", MIG on: it is cut into slices that cannot reach other GPUs"
        step = "for work on the whole GPU have MIG switched off: nvidia-smi -mig 0"
        return Fact("GPUs", f"GPU {index}", State.note, text, step)
    return Fact("GPUs", f"GPU {index}", State.ok, text)


def _reach(gpus: Gpus) -> list[Fact]:
    topology, num = gpus.topology, gpus.num_gpus
    if topology is None:
        text = "the driver does not say which GPU reaches which"
        return [Fact("GPUs", "peer access", State.note, text, "ask nvidia-smi topo -p2p w")]
    return [_peer_access(topology, num, gpus), _nvlink(topology, num)]


def _peer_access(topology: Topology, num: int, gpus: Gpus) -> Fact:
    if not topology.unreachable:
        text = f"stores and atomics of all {num} GPUs reach one another"
        return Fact("GPUs", "peer access", State.ok, text)
    (source, target), why = min(topology.unreachable.items())
    num_pairs = num * (num - 1)
    text = (
        f"{len(topology.unreachable)} of {num_pairs} directed pairs have none, such as GPU "
        f"{source} to GPU {target}: {why}"
    )
    # With one GPU no peer is used; with some hidden, the pair may be among those.
    alone = gpus.option is None or gpus.option.endswith("_x1") or len(gpus.visible) < num
    step = "pick GPUs that reach each other with CUDA_VISIBLE_DEVICES, or one alone"
    return Fact("GPUs", "peer access", State.note if alone else State.missing, text, step)


def _nvlink(topology: Topology, num: int) -> Fact:
    without = sorted(set(permutations(range(num), 2)) - topology.by_nvlink)
    links = _listed(topology.num_links)
    if without:
        source, target = without[0]
        text = (
            f"{len(without)} of {num * (num - 1)} directed pairs have none, such as GPU {source} "
            f"to GPU {target}; links up by GPU: {links}"
        )
        step = "their rows cross PCIe, which is several times slower: see nvidia-smi topo -m"
        return Fact("GPUs", "NVLink", State.note, text, step)
    if any(topology.num_links_down):
        text = f"between all GPUs; links up by GPU: {links}, {sum(topology.num_links_down)} down"
        step = "bandwidth is lower than the data sheet's: see nvidia-smi nvlink -s"
        return Fact("GPUs", "NVLink", State.note, text, step)
    return Fact("GPUs", "NVLink", State.ok, f"between all GPUs; links up by GPU: {links}")


def _listed(counts: Sequence[int]) -> str:
    return f"{counts[0]} each" if len(set(counts)) == 1 else ", ".join(map(str, counts))
