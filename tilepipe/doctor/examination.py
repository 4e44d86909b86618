"""All sections of the report, in order.

Knows nothing of how they are shown.
"""

from pathlib import Path

import tilepipe
from tilepipe.doctor.cutedsl import CUTE_DSL_PARTS, NVSHMEM_PARTS, cute_dsl_facts, nvshmem_facts
from tilepipe.doctor.fact import Fact
from tilepipe.doctor.gpus import Gpus, gpu_section, hardware_section, look_at_gpus
from tilepipe.doctor.libraries import (
    LIBRARIES,
    Libraries,
    look_at_libraries,
    main_facts,
    optional_facts,
    source_fact,
)
from tilepipe.doctor.machine import Machine, look_at_machine, machine_facts
from tilepipe.results.provenance import git_state

__all__ = ["examine", "sections"]


def examine(python: Fact, results_dir: Path) -> tuple[list[Fact], str | None]:
    """Look at everything: all facts, and what hardware=auto picks."""
    root = Path(tilepipe.__file__).resolve().parents[1]
    git = git_state(root)
    names = (*LIBRARIES, *CUTE_DSL_PARTS, *NVSHMEM_PARTS)
    libraries = look_at_libraries(names, is_checkout=(root / "pyproject.toml").is_file())
    gpus = look_at_gpus()
    first = [python, source_fact(tilepipe.__version__, root, git)]
    return first + sections(look_at_machine(results_dir), libraries, gpus), gpus.option


def sections(machine: Machine, libraries: Libraries, gpus: Gpus) -> list[Fact]:
    """The facts of what was found; nothing is looked at here but installed files."""
    on_gpus = not gpus.on_host
    many = on_gpus and not str(gpus.option).endswith("_x1")
    cuda = gpus.driver_cuda
    return [
        *machine_facts(machine, host_executor=gpus.on_host),
        *main_facts(libraries, num_gpus=gpus.num_gpus, driver_cuda=cuda),
        *gpu_section(gpus),
        *cute_dsl_facts(libraries, driver_cuda=cuda, needed=on_gpus),
        *nvshmem_facts(libraries, driver_cuda=cuda, needed=many),
        *optional_facts(libraries),
        *hardware_section(gpus),
    ]
