"""Composing configurations as the command line does, without a process."""

from collections.abc import Callable
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from tilepipe.config import detect
from tilepipe.config.register import CONF_DIR, register


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """The machine these tests see has no GPU, whatever runs them."""
    monkeypatch.setattr(detect, "gpu_names", lambda: ())


@pytest.fixture
def composed() -> Callable[..., DictConfig]:
    def compose_words(*words: str) -> DictConfig:
        register()
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            return compose("config", overrides=list(words), return_hydra_config=True)

    return compose_words


@pytest.fixture
def container(composed) -> Callable[..., dict[str, Any]]:
    """The plain resolved container of a command line, without Hydra's own part."""

    def plain(*words: str) -> dict[str, Any]:
        cfg = composed(*words)
        OmegaConf.set_struct(cfg, False)
        cfg.pop("hydra")
        return OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)

    return plain


@pytest.fixture
def axes(composed) -> Callable[..., dict[str, list[str]]]:
    """The sweep an experiment adds: key -> values."""

    def sweep(*words: str) -> dict[str, list[str]]:
        params = OmegaConf.to_container(composed(*words).hydra.sweeper.params, resolve=True)
        parse = OverridesParser.create().parse_override
        found = {key: parse(f"{key}={values}") for key, values in params.items()}
        return {
            key: list(override.sweep_string_iterator())
            if override.is_sweep_override()
            else [override.get_value_element_as_str()]
            for key, override in found.items()
        }

    return sweep
