"""Tell Hydra where conf/ is, which schemas type it and which resolvers it uses.

Knows nothing of what a configuration is for.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf

from tilepipe.config import detect, schemas
from tilepipe.config.choices import Operation, Resume
from tilepipe.config.placements import PLACEMENTS
from tilepipe.config.routings import ROUTINGS

__all__ = ["CONF_DIR", "Root", "by_device", "cta_axis", "register"]

# In a wheel conf/ lies inside the package, in a checkout beside it.
_PACKAGE = Path(__file__).resolve().parents[1]
CONF_DIR = next(
    folder
    for folder in (_PACKAGE / "conf", _PACKAGE.parent / "conf")
    if (folder / "config.yaml").is_file()
)


@dataclass(kw_only=True)
class Root:
    """Root keys; groups are typed by their own schemas, since omegaconf knows no union of them."""

    name: str
    operation: Operation
    results_dir: str
    resume: Resume
    dry_run: bool
    fail_fast: bool
    repetitions: int
    hardware: Any
    kernel: Any
    workload: Any
    routing: Any
    placement: Any
    measure: Any
    launch: Any


def register(scratch: Path | None = None) -> None:
    """Store schemas, resolvers and the computed option hardware=auto; calling twice is harmless.

    `scratch` is where Hydra may write what it insists on; not needed where it only composes.
    """
    _store_schemas()
    # No auto.yaml: Hydra interpolates no defaults list by what a machine has.
    detected = {"defaults": [detect.hardware_option()]}
    ConfigStore.instance().store(group="hardware", name="auto", node=detected)
    # Hydra would compose every point of a sweep twice, since others may launch it elsewhere.
    Sweeper.validate_batch_is_legal = lambda *_: None  # type: ignore[method-assign]
    for resolver in (
        *(axis, by_copy, by_device, by_gpus, by_granularity, comm_ctas),
        *(cta_axis, link_chunks, num_tokens, operation, roles, token_axis),
    ):
        OmegaConf.register_new_resolver(f"tilepipe.{resolver.__name__}", resolver, replace=True)
    OmegaConf.register_new_resolver("tilepipe.scratch", lambda: str(scratch), replace=True)


@cache
def _store_schemas() -> None:
    """Once a process: a quarter of the time that composing a point takes."""
    store = ConfigStore.instance()
    # A group of their own, so that no schema becomes an option a user could choose.
    store.store(group="schema", name="root", node=Root)
    store.store(group="schema", name="hardware", node=schemas.Hardware)
    store.store(group="schema", name="workload", node=schemas.Workload)
    store.store(group="schema", name="measure", node=schemas.Measure)
    store.store(group="schema", name="launch", node=schemas.Launch)
    for choice, kernel in schemas.KERNELS.items():
        store.store(group="schema/kernel", name=choice.name, node=kernel)
    for law, routing in ROUTINGS.items():
        store.store(group="schema/routing", name=law.name, node=routing)
    for rule, placement in PLACEMENTS.items():
        store.store(group="schema/placement", name=rule.name, node=placement)


def by_device(hardware: str, gpu: Any, cpu: Any) -> Any:
    """One value for hardware with GPUs, another for the host executor."""
    return cpu if _option(hardware) == "cpu" else gpu


def by_gpus(hardware: str, many: Any, one: Any, cpu: Any) -> Any:
    """As by_device, with a value of its own for hardware with one GPU."""
    option = _option(hardware)
    return cpu if option == "cpu" else one if option.endswith("_x1") else many


def by_copy(copy: Any, simt: Any, tma: Any, none: Any) -> Any:
    """One value for each copy, another where there is none: the host executor has no copies."""
    if copy is None:
        return none
    return tma if _word(copy) == "tma" else simt


def by_granularity(hardware: str, granularity: Any, tile: Any, others: Any) -> Any:
    """One value where chunks of rows go home one by one, another where whole rows do; null on the
    host, which has no CTAs."""
    return by_device(hardware, tile if _word(granularity) == "tile" else others, None)


def comm_ctas(
    hardware: str,
    count: int,
    push: Any = "epilogue",
    home_granularity: Any = "token",
    *,
    _parent_: DictConfig,
) -> int | None:
    """Communication CTAs: none where a warp beside the tiles does their work, else `count`; null
    on the host.

    It does unless roles are typed that have such CTAs. On the way home it does only if rows leave
    with their tiles and tokens are reduced one by one.
    """
    aside = _sets_aside(_parent_) or not _may_be_beside(push, home_granularity)
    found: int | None = by_device(hardware, count if aside else 0, None)
    return found


def _may_be_beside(push: Any, home_granularity: Any) -> bool:
    return (_word(push), _word(home_granularity)) == ("epilogue", "token")


def _sets_aside(kernel: DictConfig) -> bool:
    """Whether roles were typed, and have CTAs that communicate; untyped, they follow the count."""
    if OmegaConf.is_interpolation(kernel, "roles"):
        return False
    return _word(kernel.roles) in ("fixed", "switch")


def link_chunks(hardware: str, push: Any, hidden: Any, tile_n: Any) -> int | None:
    """Two chunks where tiles are sent across links and rows have two equal ones, else null.

    Of rows of 14 336 bytes two were 3 % faster than four on two GPUs (H200, 2026-11), and as fast
    on one.
    """
    sizes = isinstance(hidden, int) and isinstance(tile_n, int) and tile_n > 0
    equal = sizes and hidden > 0 and hidden % (2 * tile_n) == 0
    return by_gpus(hardware, 2, None, None) if equal and _word(push) == "epilogue" else None


def operation(kernel: DictConfig) -> str:
    """Operation of the chosen kernel option, whatever was typed as kernel.operation.

    So a typed one differs from the root key, and `config_from_dict` can refuse it.
    """
    schema = OmegaConf.get_type(kernel)
    own = [choice.name for choice, known in schemas.KERNELS.items() if known is schema]
    return own[0] if own else str(kernel.operation)


def roles(
    hardware: str, num_comm_ctas: Any, push: Any = "epilogue", home_granularity: Any = "token"
) -> str | None:
    """What CTAs of a fused launch do where so many communicate; null on the host without CTAs.

    `auto` is none where a warp beside the tiles can do their work: in every published sweep that is
    faster than any count.
    """
    beside = num_comm_ctas == 0
    if num_comm_ctas == "auto":
        beside = _may_be_beside(push, home_granularity)
    found: str | None = by_device(hardware, "beside" if beside else "switch", None)
    return found


def num_tokens(routing: Any, count: int) -> int | None:
    """The workload's token count, or null where a trace brings its own."""
    return None if _word(routing) == "trace" else count


def axis(choices: Any, gpu: str, cpu: str, traced: str | None = None) -> str:
    """Values a sweep takes on GPUs, on the host, and on the host with recorded routing."""
    if traced is not None and choices["routing"] == "trace":
        cpu = traced
    return str(by_device(choices["hardware"], gpu, cpu))


def cta_axis(choices: Any, typed: Any, gpu: str, cpu: str) -> str:
    """Counts of communication CTAs that a sweep takes on GPUs: those that go with typed roles."""
    roles = [word.partition("=")[2] for word in typed if word.startswith("kernel.roles=")]
    counts = gpu.split(",")
    if roles == ["beside"]:
        counts = ["0"]
    elif roles and "beside" not in roles[0]:
        counts = [count for count in counts if count != "0"]
    return str(by_device(choices["hardware"], ",".join(counts), cpu))


def token_axis(choices: Any, gpu: str, cpu: str) -> str:
    """Token counts of a sweep; none of its own where a trace brings one."""
    return "null" if choices["routing"] == "trace" else axis(choices, gpu, cpu)


def _option(hardware: str) -> str:
    return detect.hardware_option() if hardware == "auto" else hardware


def _word(value: Any) -> Any:
    """A choice as it is typed; omegaconf gives it so, or as its schema's enumeration."""
    return value.name if isinstance(value, Enum) else value
