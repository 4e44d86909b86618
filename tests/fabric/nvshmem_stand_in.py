"""In place of nvshmem4py: processes are threads of one, symmetric memory is the CPU's."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import torch

from tilepipe.fabric.meeting import Meeting
from tilepipe.fabric.nvshmem import NvshmemHeap

# A collective call that a rank makes without the others ends here.
_PATIENCE_S = 5.0
SETTINGS = ("NVSHMEM_DISABLE_NCCL", "NVSHMEM_DISABLE_NVLS", "NVSHMEM_SYMMETRIC_SIZE")


class NvshmemError(Exception):
    pass


class NvshmemInvalid(Exception):
    pass


class NVSHMEMError(Exception):
    pass


class StandIn:
    """The modules that fabric.nvshmem imports; `calls` has (rank, call) in order."""

    def __init__(self, num_ranks, *, version="0.4.1", unreachable=(), has_room=True, ends=True):
        self.num_ranks = num_ranks
        self.version = version
        self.unreachable = set(unreachable)  # (rank, peer)
        self.has_room, self.ends = has_room, ends
        self.calls, self.inits, self.memory = [], {}, {}
        self._rank = threading.local()
        self._all = threading.Barrier(num_ranks)

    def install(self, monkeypatch):
        for name in SETTINGS:
            monkeypatch.setenv(name, "")  # so that what is set is taken back
        modules = {
            "nvshmem": {"__version__": self.version},
            "nvshmem.core": {
                name: getattr(self, name)
                for name in ("get_unique_id", "init", "tensor", "get_peer_tensor", "free_tensor")
            }
            | {"finalize": self.finalize, "NvshmemError": NvshmemError},
            "nvshmem.bindings.nvshmem": {"NVSHMEMError": NVSHMEMError},
            "cuda.core": {"Device": FakeDevice},
            "cuda.pathfinder": {"load_nvidia_dynamic_lib": lambda name: None},
        }
        for name, content in modules.items():
            module = ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)
        return self

    # What nvshmem.core has.

    def get_unique_id(self):
        return "the id of this group"

    def init(self, *, device, uid, rank, nranks, initializer_method):
        assert device.is_current
        self._rank.value = rank
        self.inits[rank] = (uid, nranks, initializer_method)
        self._together("init")

    def tensor(self, shape, *, dtype):
        if not self.has_room:
            raise NvshmemError("Failed to allocate memory")
        spare = torch.full((shape[0] + 256,), 7, dtype=dtype)
        first = -spare.data_ptr() % 256
        self.memory[self._rank.value] = spare[first : first + shape[0]]
        self._together("tensor")
        return self.memory[self._rank.value]

    def get_peer_tensor(self, tensor, peer):
        rank = self._rank.value
        assert tensor is self.memory[rank]
        assert peer != rank, "counts a user more, and never frees"
        if (rank, peer) in self.unreachable:
            raise NvshmemError("Failed to retrieve peer buffer")
        return self.memory[peer]

    def free_tensor(self, tensor):
        assert tensor is self.memory[self._rank.value]
        self._together("free")

    def finalize(self):
        self._together("finalize")
        if not self.ends:
            raise NVSHMEMError("Status code 7")

    def _together(self, call):
        self._all.wait(_PATIENCE_S)
        self.calls.append((self._rank.value, call))

    def calls_of(self, rank):
        return [call for caller, call in self.calls if caller == rank]


class FakeDevice:
    is_current = False

    def __init__(self, index):
        assert index is None, "the CPU has no number"

    def set_current(self):
        self.is_current = True


def on_ranks(num_ranks, body, *, limit_s=20.0):
    """What `body(meeting)` returns or raises on each rank, a thread each."""
    store = torch.distributed.HashStore()

    def run(rank):
        return body(Meeting(store, rank=rank, num_ranks=num_ranks, limit_s=limit_s))

    with ThreadPoolExecutor(num_ranks) as pool:
        ranks = [pool.submit(run, rank) for rank in range(num_ranks)]
        return [each.exception() or each.result() for each in ranks]


def with_heaps(num_ranks, specs, body):
    """`body(heap, rank)` on every rank, between opening and closing its heap."""

    def run(meeting):
        with NvshmemHeap(specs, meeting=meeting, device=torch.device("cpu")) as heap:
            return body(heap, meeting.rank)

    return on_ranks(num_ranks, run)
