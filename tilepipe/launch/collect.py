"""Turn one composed configuration into a Point.

Knows nothing of how a point runs; judges no setting, so that one bad point stops no sweep.
"""

from typing import Any, cast

from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from tilepipe.config.identity import build_facts, build_id, config_id
from tilepipe.config.schemas import SWEEP_KEYS
from tilepipe.records import Point

__all__ = ["point_from"]


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


def _of_sweep(word: str) -> bool:
    """A key of the sweep, or the tool to run under; only where results go is worth repeating."""
    key = word.partition("=")[0].lstrip("+")
    return key == "launch.wrap" or (key in SWEEP_KEYS and key != "results_dir")


def _config_dir(hydra_cfg: HydraConf) -> tuple[str, ...]:
    """The user's own folder of options, if one was typed."""
    typed = [s.path for s in hydra_cfg.runtime.config_sources if s.provider == "command-line"]
    return ("--config-dir", typed[0]) if typed else ()
