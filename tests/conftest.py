"""Fixtures that several packages' tests share."""

import copy
import functools
import gc
import os
import signal
import subprocess
import sys

# Before NumPy is loaded: ranks of a test share the cores, and threads of their products would spin
# for each other, tens of times as long as the products take.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import omegaconf.grammar_parser
import pytest
from hypothesis import settings
from omegaconf import OmegaConf

from tilepipe.config.register import CONF_DIR

# A shell that runs tests in the background, or nohup, has them ignore what asks to end, and all
# that they start: some of them ask themselves.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# What an example may take depends on who else uses the cores: a hang is pytest's to find.
# `make test` tries the same examples each time, so that a change is judged by what it changes;
# `make search` draws others.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, derandomize=False, print_blob=True)
settings.load_profile("same")

# As the launcher has it for ranks. It counts only before numpy is loaded, which is here: ranks that
# tests fork share the cores too, and with a thread a core each they mostly waited for one another.
os.environ.update(
    dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
)

# What is imported is no garbage, but looking through it would take a quarter of the time in which
# tests are found, and copy it into every rank that a test forks.
gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


# Hundreds of tests compose configurations, of the same files with the same interpolations: read
# and parsed once, composing one takes a third less.
_load, _parse = OmegaConf.load, omegaconf.grammar_parser.parse
_loaded = functools.cache(_load)


def _load_once(file):
    name = str(getattr(file, "name", file))
    return copy.deepcopy(_loaded(name)) if name.startswith(str(CONF_DIR)) else _load(file)


OmegaConf.load = _load_once
_parse_once = functools.cache(_parse)
for module in list(sys.modules.values()):
    if module.__name__.startswith("omegaconf") and getattr(module, "parse", None) is _parse:
        module.parse = _parse_once


@pytest.fixture
def mounted(tmp_path):
    """Mounts a real file system of a given size, where that is allowed."""
    mounts = []

    def mount(size):
        folder = tmp_path / f"mount-{len(mounts)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tilepipe-test", str(folder)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("mounting a tmpfs is not allowed here")
        mounts.append(folder)
        return folder

    yield mount
    for folder in mounts:
        subprocess.run(["umount", str(folder)], check=True)
