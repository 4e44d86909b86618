"""Points of both fused operations whose ranks are processes, and an entry that compares their bits.

Imported by rank processes too. Knows nothing of how many GPUs there are.
"""

import importlib
import os

import torch

from tilepipe.config.choices import Operation
from tilepipe.experiments.cuda import trial as trials
from tilepipe.experiments.cuda.trial import CudaTrial, Gated
from tilepipe.fabric.table import Slot, Word
from tilepipe.kernels.group import DeviceGroup
from tilepipe.launch.worker import Job, Records, at_job_boundary, run_point

# Tiles of several source ranks, N tiles and chunks of a row, experts that split unevenly.
_OUT = ("kernel=dispatch_gemm", "workload.hidden=256", "workload.intermediate=256")
_HOME = ("kernel=gemm_combine", "workload.hidden=4096", "workload.intermediate=256")
SIZES = ("workload.num_tokens=300", "workload.num_experts=16", "workload.num_topk=4")
_BULK, _SWITCH = "kernel.copy=tma", "kernel.roles=switch"
# Name -> words; every value of copy, granularity, order, roles and layout twice or more.
CASES = {
    "out_plain": (*_OUT, _SWITCH),
    "out_bulk_expert_random": (*_OUT, _BULK, "kernel.granularity=expert", "kernel.order=random"),
    "out_token_packed": (
        *(*_OUT, "kernel.granularity=token", "kernel.layout=packed"),
        *("kernel.order=token", "kernel.roles=fixed", "routing=masked"),
    ),
    "out_bulk_token_fixed": (
        *(*_OUT, _BULK, "kernel.granularity=token", "kernel.roles=fixed"),
        *("kernel.order=random", "routing=ragged"),
    ),
    "out_expert_hot": (
        *(*_OUT, _SWITCH, "kernel.granularity=expert", "kernel.order=edf_list"),
        "routing=hot_rank",
    ),
    "out_beside": (*_OUT, "routing=ragged"),
    "out_bulk_packed": (*_OUT, _BULK, "kernel.layout=packed", "routing=all_remote"),
    "home_plain": (*_HOME, _SWITCH),
    "home_beside": (*_HOME, "routing=ragged"),
    "home_bulk_token": (*_HOME, _BULK, "kernel.granularity=token", "routing=masked"),
    "home_by_rank_packed": (
        *(*_HOME, "kernel.home_granularity=rank", "kernel.layout=packed"),
        *("kernel.roles=fixed", "routing=ragged"),
    ),
    "home_bulk_expert": (
        *(*_HOME, _BULK, "kernel.granularity=expert", "kernel.roles=fixed"),
        *("kernel.home_granularity=rank", "routing=hot_rank"),
    ),
    "home_bulk_packed": (*_HOME, _BULK, "kernel.layout=packed", "routing=all_remote"),
}
# Payload of the launches whose bits are compared: none that the gate or a timed loop reaches.
_COMPARED_LAUNCH = 60_000


def fused_equals_sequential(job: Job) -> Records:
    """Runs the point of `job`; raises before it where a fused launch and the same parts one after
    the other do not leave the same bits."""

    def body(job: Job, rank: int) -> Records:
        measure = trials.measure

        def compared(trial: Gated) -> Records:
            _compare(getattr(trial, "_trial", trial))
            return measure(trial)

        trials.measure = compared
        return run_point(job, rank)

    return at_job_boundary(job, body)


def _compare(trial: CudaTrial) -> None:
    group, found = trial.session.group, []
    for contender in ("fused", "sequential"):
        trial.prepare(contender, _COMPARED_LAUNCH)
        trial.poison(contender)
        group.heap.barrier()
        trial.run(contender)
        group.synchronize()
        found.append(_bits(trial, contender))
    for rank, fused, sequential in zip(trial.session.ranks, *found, strict=True):
        num_wrong = int(torch.count_nonzero(fused != sequential))
        if num_wrong:
            raise AssertionError(f"rank {rank}: {num_wrong} values are not those of the sequence")


def _bits(trial: CudaTrial, contender: str) -> list[torch.Tensor]:
    """What a launch has left, of each own rank: rows of experts, or tokens."""
    session = trial.session
    group, topk_idx = session.group, session.routing.topk_idx
    if session.config.operation is Operation.gemm_combine:
        slot = trial._output(contender)
        return [group.tensor(rank, slot)[: len(topk_idx[rank])].clone() for rank in session.ranks]
    found = []
    for place, rank in enumerate(session.ranks):
        held = torch.from_numpy(group.plans[rank].layout.held_rows()[1]).to(group.device)
        found.append(trial._out[contender].view(torch.int16)[place][held])
    return found


# Faults of the ranks of a point, by the number of its tokens.

NO_SENDS, NO_TILE, HIGH_THRESHOLD, DEAD_RANK, FINE = 301, 302, 303, 304, 305
DEATH_CODE = 9
_LAUNCHES_BEFORE_DEATH = 5


def spoiled(job: Job) -> Records:
    """Runs the point of `job`, spoilt by what its token count names.

    NO_SENDS: rank 0 owes its peers rows. NO_TILE: it computes a tile less than it has.
    HIGH_THRESHOLD: it waits for a row more than come. DEAD_RANK: rank 1 ends between its launches,
    while its peers wait for it.
    """

    def body(job: Job, rank: int) -> Records:
        tokens = job["config"]["workload"]["num_tokens"]
        if rank == 0 and tokens in _SPOIL:
            name, spoil = _SPOIL[tokens]
            module = importlib.import_module(_MODULES[job["config"]["operation"]])
            setattr(module, name, _then(getattr(module, name), spoil))
        if rank == 1 and tokens == DEAD_RANK:
            DeviceGroup.open = _until_death(DeviceGroup.open)
        return run_point(job, rank)

    return at_job_boundary(job, body)


_MODULES = {name: f"tilepipe.experiments.cuda.{name}" for name in ("dispatch_gemm", "gemm_combine")}


def _then(upload, spoil):
    def spoiled_upload(group: DeviceGroup, *arguments, **chosen) -> None:
        upload(group, *arguments, **chosen)
        spoil(group)

    return spoiled_upload


def _no_sends(group: DeviceGroup) -> None:
    words = group.tensor(0, Slot.words)
    for name in (Word.num_sends, Word.num_first, Word.num_rest):
        words[int(name)] = 0


def _no_tile(group: DeviceGroup) -> None:
    group.tensor(0, Slot.words)[int(Word.num_gemm_tiles)] -= 1


def _high_threshold(group: DeviceGroup) -> None:
    group.tensor(0, Slot.ready_expected)[0] += 1


# Tokens of a point -> what is spoilt behind, and how.
_SPOIL = {
    NO_SENDS: ("upload_layer", _no_sends),
    NO_TILE: ("upload_home", _no_tile),
    HIGH_THRESHOLD: ("upload_layer", _high_threshold),
}


def _until_death(opens):
    def counted(group: DeviceGroup, **how) -> None:
        if group.epoch >= _LAUNCHES_BEFORE_DEATH:
            os._exit(DEATH_CODE)
        opens(group, **how)

    return counted
