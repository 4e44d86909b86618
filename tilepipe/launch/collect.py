"""Turn composed configurations into points, and say what was typed.

Knows nothing of how a point runs; judges no setting, so that one bad point stops no sweep.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from tilepipe.config.identity import build_facts, build_id, config_id, cpu_model, device_name
from tilepipe.config.schemas import SWEEP_KEYS
from tilepipe.records import Point

__all__ = ["announcement_of", "own_experiment_fault", "point_from", "several_experiments"]

_PACKAGE = "# @package _global_"


def own_experiment_fault(argv: Sequence[str]) -> str:
    """What an experiment file of the user's lacks, in a sentence; empty where it lacks nothing.

    Without the line Hydra puts the file's keys below a key `experiment`, and speaks of that.
    """
    words = [part for word in argv for part in word.split("=", 1)]
    following = dict(itertools.pairwise(words))
    folder, option = following.get("--config-dir"), following.get("+experiment")
    if folder is None or option is None:
        return ""
    path = Path(folder) / "experiment" / f"{option}.yaml"
    if not path.is_file() or _PACKAGE in path.read_text(encoding="utf-8", errors="replace"):
        return ""
    return f"{path}: the first line of an experiment must be {_PACKAGE}; put it there"


def several_experiments(points: Sequence[Point], config_dirs: Sequence[Path]) -> str:
    """Why the experiments typed cannot be run as one sweep, in a sentence; empty where they can.

    A list lays one file over the other, and a comma list takes the sweep of neither. What has no
    `name` of its own is no experiment, and may lie over one.
    """
    layers = {option for point in points for option in _experiments_of(point)}
    alone = [option for option in sorted(layers) if _has_name(option, config_dirs)]
    if len(alone) < 2:
        return ""
    return (
        f"experiment={','.join(alone)}: each has a kernel and a sweep of its own; start one after "
        "the other"
    )


def _experiments_of(point: Point) -> list[str]:
    """Options of the group experiment behind a point."""
    typed = [word.partition("=") for word in point.overrides]
    words = [value for key, _, value in typed if key.lstrip("+") == "experiment"]
    return [option.strip() for word in words for option in word.strip("[]").split(",")]


def _has_name(option: str, config_dirs: Sequence[Path]) -> bool:
    files = [folder / "experiment" / f"{option}.yaml" for folder in config_dirs]
    found = next((path for path in files if path.is_file()), None)
    return found is not None and "name" in OmegaConf.load(found)


def point_from(cfg: DictConfig, hydra_cfg: HydraConf) -> Point:
    """The point as plain data: interpolations resolved, enums by name.

    `overrides` are words as Hydra reads them: quoted for a shell they compose this one point again.
    Words that say how the sweep is run are not among them.
    """
    resolved = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    container = cast(dict[str, Any], resolved)
    choices = {
        group: option
        for group, option in hydra_cfg.runtime.choices.items()
        if option is not None and not group.startswith("hydra/")
    }
    build = build_facts(container["hardware"])
    return Point(
        name=container["name"],
        operation=container["operation"],
        executor="host" if container["launch"]["fabric"] == "host" else "cuda",
        config=container,
        choices=choices,
        overrides=(
            *_config_dir(hydra_cfg),
            *(word for word in hydra_cfg.overrides.task if not _of_sweep(word)),
        ),
        config_id=config_id(container),
        build_id=build_id(build),
        build=build,
    )


def announcement_of(points: Sequence[Point]) -> str:
    """The first line: the machine, how many points of what, and what was composed for it."""
    names = ", ".join(sorted({point.name for point in points}))
    number = len({(point.name, point.folder) for point in points})
    count = f"{number} point{'s' if number > 1 else ''} of {names}"
    options = sorted({point.config["hardware"]["name"] for point in points})
    device = cpu_model() if options == ["cpu"] else device_name()
    line = f"{device}: {count} for hardware={','.join(options)}"
    if options == ["cpu"]:
        workloads = ", ".join(sorted({point.choices["workload"] for point in points}))
        found = "no GPU found, so " if all(p.choices["hardware"] == "auto" for p in points) else ""
        line += f"; {found}composed for the host executor"
        if not all(any(word.startswith("workload=") for word in p.overrides) for p in points):
            line += f": workload {workloads}"
        if "paced" in names:
            line += "; no link is throttled there"
    return line


def _of_sweep(word: str) -> bool:
    """A key of the sweep, or the tool to run under; only where results go is worth repeating."""
    key = word.partition("=")[0].lstrip("+")
    return key == "launch.wrap" or (key in SWEEP_KEYS and key != "results_dir")


def _config_dir(hydra_cfg: HydraConf) -> tuple[str, ...]:
    """The user's own folder of options, if one was typed."""
    typed = [s.path for s in hydra_cfg.runtime.config_sources if s.provider == "command-line"]
    return ("--config-dir", typed[0]) if typed else ()
