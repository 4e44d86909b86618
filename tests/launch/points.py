"""Points of a tiny workload, as the command line would compose them."""

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tilepipe.config.identity import config_id
from tilepipe.config.register import CONF_DIR, register
from tilepipe.records import Point


def compose_point(*words: str, name: str = "tiny") -> Point:
    """A point from the words of a command line."""
    register()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        cfg = compose("config", overrides=["hardware=cpu", f"name={name}", *words])
    container = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    fabric = container["launch"]["fabric"]
    return Point(
        name=name,
        operation=container["operation"],
        executor="host" if fabric == "host" else "cuda",
        config=container,
        choices={},
        overrides=words,
        config_id=config_id(container),
        build_id="0" * 8,
        build={"sources": {"host": "a"}, "versions": {"torch": "1"}},
    )
