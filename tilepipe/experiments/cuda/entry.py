"""Run or describe, on the cuda executor, the operation that a configuration names.

Knows no operation by import: each module of this package names its own as TRIAL. Describing needs
no GPU and loads no kernel.
"""

import importlib

from tilepipe.config.schemas import Config
from tilepipe.experiments.comm_ctas import planned_comm_ctas
from tilepipe.experiments.setting import Memory, reserved
from tilepipe.fabric.device_heap import device_bytes
from tilepipe.kernels.buffers import buffer_specs
from tilepipe.records import RankRecord

__all__ = ["planned_comm_ctas", "run_ranks", "symmetric_bytes_of"]


def run_ranks(config: Config) -> tuple[RankRecord, ...]:
    """Measure the operation on the ranks of this process, all ranks together."""
    # Kernels and CUDA only where they run.
    from tilepipe.experiments.cuda.beside import with_baselines
    from tilepipe.experiments.cuda.session import opened_session
    from tilepipe.experiments.cuda.trial import measure
    from tilepipe.kernels.kept import codes_kept, default_folder

    kind = importlib.import_module(f"tilepipe.experiments.cuda.{config.operation.name}").TRIAL
    with (
        codes_kept(default_folder()),
        opened_session(config, kind.memory(config)) as session,
        with_baselines(kind(session)) as trial,
    ):
        records: tuple[RankRecord, ...] = measure(trial)
    return records


def symmetric_bytes_of(config: Config) -> int:
    """Bytes of device memory that each rank would reserve; raises as on the host."""
    hidden = config.workload.hidden
    memory = {
        "dispatch": Memory(dispatch_hidden=hidden),
        "combine": Memory(home_hidden=hidden),
        "grouped_gemm": Memory(dispatch_hidden=hidden),
        "dispatch_gemm": Memory(dispatch_hidden=hidden, spare=True),
        "gemm_combine": Memory(home_hidden=hidden, spare=True),
        "moe_layer": Memory(dispatch_hidden=hidden, home_hidden=hidden),
    }[config.operation.name]
    return device_bytes(buffer_specs(*reserved(config, memory)))
