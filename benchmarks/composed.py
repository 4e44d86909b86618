"""The configuration that words of a command line compose.

Knows nothing of what is measured by it.
"""

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tilepipe.config.register import CONF_DIR, register
from tilepipe.config.schemas import Config, config_from_dict

__all__ = ["config_from"]


def config_from(*words: str) -> Config:
    """As `tilepipe.run` would read the words, no experiment among them."""
    register()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        composed = compose("config", list(words))
    container = OmegaConf.to_container(composed, resolve=True, enum_to_str=True)
    assert isinstance(container, dict)
    return config_from_dict({str(key): value for key, value in container.items()})
