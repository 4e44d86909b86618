"""Points of a tiny workload, as the command line would compose them."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tilepipe.config.register import CONF_DIR, register
from tilepipe.records import Point


@pytest.fixture
def point():
    """A point from the words of a command line."""

    def compose_point(*words: str, name: str = "tiny") -> Point:
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
            config_id=f"{abs(hash(words)) % 16**12:012x}",
            build_id="0" * 8,
        )

    return compose_point


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder
