"""Run or describe the operation that a configuration names.

Knows no operation by import: each module of this package names its own as TRIAL.
"""

import importlib

from tilepipe.config.schemas import Config
from tilepipe.experiments.beside import with_baselines
from tilepipe.experiments.session import Session
from tilepipe.experiments.setting import reserved
from tilepipe.experiments.trial import Trial, measure
from tilepipe.fabric.host import HeapPlace
from tilepipe.host.delays import NO_DELAYS, Delays
from tilepipe.host.memory import symmetric_bytes
from tilepipe.records import RankRecord

__all__ = ["run_rank", "symmetric_bytes_of"]


def run_rank(
    config: Config, *, rank: int, place: HeapPlace, delays: Delays = NO_DELAYS
) -> RankRecord:
    """Measure the operation on this rank, all ranks together."""
    kind = _trial(config)
    session = Session(config, kind.memory(config), rank=rank, place=place, delays=delays)
    try:
        with with_baselines(kind(session)) as trial:
            return measure(trial)
    finally:
        session.host.close()


def symmetric_bytes_of(config: Config) -> int:
    """Bytes of symmetric memory that each rank would reserve.

    Raises what `draw` and `place` do, and ValueError where that is not enough.
    """
    return symmetric_bytes(*reserved(config, _trial(config).memory(config)))


def _trial(config: Config) -> type[Trial]:
    module = importlib.import_module(f"tilepipe.experiments.{config.operation.name}")
    kind: type[Trial] = module.TRIAL
    return kind
