"""Which of the libraries that TilePipe uses are installed, in which versions.

Knows nothing of the machine; imports none of what it looks for.
"""

import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from tilepipe.doctor.fact import Fact, State

__all__ = [
    "LIBRARIES",
    "Libraries",
    "extra",
    "look_at_libraries",
    "main_facts",
    "optional_facts",
    "source_fact",
    "spelled_cuda",
]

# Every dependency that the main job cannot do without, and what for.
MAIN = {
    "torch": "starts and watches the ranks",
    "hydra-core": "composes configurations",
    "omegaconf": "holds configurations",
    "numpy": "makes plans and runs the host executor",
    "pyarrow": "stores results",
    "rich": "shows results",
    "nvidia-ml-py": "asks the driver for GPUs",
    "nvidia-cutlass-dsl": "compiles GPU kernels, and its version is part of every result",
}
# Name -> the extra that brings it, and what for.
_OPTIONAL = {
    "quack-kernels": ("baselines", "the peer that GEMMs are compared with"),
    "matplotlib": ("plot", "figures"),
    "nvtx": ("profile", "named ranges under launch.wrap"),
}
LIBRARIES = (*MAIN, *_OPTIONAL)
_PROFILERS = {
    "ncu": "kernels",
    "nsys": "time lines",
    "compute-sanitizer": "memory faults and races",
}
# Where the CUDA toolkit puts them, on PATH or not.
_TOOLKIT = "/usr/local/cuda/bin"
_TORCH_CUDA = re.compile(r"^cuda\b[^=]*=\s*(?:None|'([^']*)')", re.MULTILINE)


@dataclass(frozen=True)
class Libraries:
    """What the doctor judges."""

    installed: Mapping[str, Distribution]
    wanted: Mapping[str, str]  # version ranges that TilePipe's own metadata asks for
    torch_cuda: str | None  # CUDA version of the torch build; None: built for the CPU, or no torch
    is_checkout: bool

    def version(self, name: str) -> str | None:
        found = self.installed.get(name)
        return found.version if found else None


def look_at_libraries(names: Iterable[str], *, is_checkout: bool) -> Libraries:
    """Read package metadata of this environment."""
    installed = {name: found for name in names if (found := _distribution(name)) is not None}
    own, torch = _distribution("tilepipe"), installed.get("torch")
    return Libraries(
        installed=installed,
        wanted=_ranges(own.requires or ()) if own else {},
        torch_cuda=torch_cuda_of(torch) if torch else None,
        is_checkout=is_checkout,
    )


def extra(name: str, *, is_checkout: bool) -> str:
    """The command that installs an extra into this environment."""
    if is_checkout:
        return f"python -m pip install -c constraints.txt -e '.[{name}]'"
    return f"python -m pip install 'tilepipe[{name}]'"


def source_fact(version: str, root: Path, git: Mapping[str, Any] | None) -> Fact:
    """Which TilePipe this is; `git` as provenance.git_state."""
    text = f"{version} in {root}"
    if git is None:
        text += ", no git checkout of its own"
    else:
        commit = str(git["commit"] or "none")[:12]
        text += f", commit {commit}{' with changes on top' if git['dirty'] else ''}"
    return Fact("tilepipe", "version", State.ok, text)


def main_facts(libraries: Libraries, *, num_gpus: int, driver_cuda: int | None) -> list[Fact]:
    """One fact for every library of the main job; `driver_cuda` as NVML has it, 13000 for 13.0."""
    facts = []
    for name, purpose in MAIN.items():
        fact = _main(libraries, name, purpose)
        if name == "torch" and fact.state is State.ok:
            fact = _torch(fact.text, libraries.torch_cuda, num_gpus, driver_cuda)
        facts.append(fact)
    return facts


def optional_facts(
    libraries: Libraries, *, which: Callable[[str], str | None] = shutil.which
) -> list[Fact]:
    """Baselines, figures and profilers; the main job needs none."""
    facts = []
    for name, (extra_name, purpose) in _OPTIONAL.items():
        version = libraries.version(name)
        if version:
            facts.append(Fact("optional", name, State.ok, version))
        else:
            step = extra(extra_name, is_checkout=libraries.is_checkout)
            text = f"not installed: {purpose}"
            facts.append(Fact("optional", name, State.note, text, step))
    return [*facts, *(_profiler(name, purpose, which) for name, purpose in _PROFILERS.items())]


def satisfies(version: str, wanted: str) -> bool:
    """Whether a version lies in a range such as `<1.4,>=1.3.8`; only its release numbers count."""
    release = _release(version)
    for clause in filter(None, wanted.split(",")):
        operator, bound = clause[: -len(clause.lstrip("<>=!~"))], clause.lstrip("<>=!~")
        limit = _release(bound)
        length = max(len(release), len(limit))
        have, want = (part + (0,) * (length - len(part)) for part in (release, limit))
        holds = {">=": have >= want, "<": have < want, "==": have == want}
        if not holds[operator]:
            return False
    return True


def torch_cuda_of(torch: Distribution) -> str | None:
    """CUDA version that torch was built for, read from its source: importing it takes seconds."""
    try:
        text = Path(str(torch.locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except OSError:
        return None
    found = _TORCH_CUDA.search(text)
    return found.group(1) if found else None


def _main(libraries: Libraries, name: str, purpose: str) -> Fact:
    version, wanted = libraries.version(name), libraries.wanted.get(name, "")
    # A finished .venv is not looked at again by make, so it has to go first.
    afresh = "make clean, then make run, sets up .venv with it"
    step = afresh if libraries.is_checkout else "python -m pip install tilepipe"
    if version is None:
        return Fact("libraries", name, State.missing, f"not installed: {purpose}", step)
    if not satisfies(version, wanted):
        text = f"{version}, but this version of TilePipe needs {wanted}"
        step = f"python -m pip install '{name}{wanted}'"
        return Fact("libraries", name, State.missing, text, step)
    return Fact("libraries", name, State.ok, version)


def _torch(version: str, cuda: str | None, num_gpus: int, driver_cuda: int | None) -> Fact:
    build = f"built for CUDA {cuda}" if cuda else "built for the CPU"
    if num_gpus == 0:
        state, text, step = State.ok, f"{version}, {build}; no GPU here to use", ""
    elif cuda is None:
        state, text = State.note, f"{version}, {build}, although there are GPUs"
        step = "install a CUDA build of torch in its place, for work on GPUs"
    elif driver_cuda is not None and driver_cuda // 1000 < int(cuda.partition(".")[0]):
        state = State.note
        text = f"{version}, {build}, but the driver stops at CUDA {spelled_cuda(driver_cuda)}"
        step = "install a newer driver, or a build of torch for that CUDA"
    else:
        state, text, step = State.ok, f"{version}, {build}, which the driver can run", ""
    return Fact("libraries", "torch", state, text, step)


def _profiler(name: str, purpose: str, which: Callable[[str], str | None]) -> Fact:
    found, beside = which(name), which(f"{_TOOLKIT}/{name}")
    if found:
        return Fact("optional", name, State.ok, found)
    if beside:
        text, step = f"{beside}, which is not on PATH", f"PATH={_TOOLKIT}:$PATH"
        return Fact("optional", name, State.note, text, step)
    text = f"not on PATH: shows {purpose} under launch.wrap"
    return Fact("optional", name, State.note, text, "it comes with the CUDA toolkit")


def spelled_cuda(version: int) -> str:
    """13.0 for NVML's 13000."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _distribution(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _ranges(requirements: Iterable[str]) -> dict[str, str]:
    """Version ranges by name, without those of extras."""
    plain = (words for words in requirements if ";" not in words)
    split = (re.match(r"([\w.-]+)\s*([<>=!~].*)?$", words) for words in plain)
    return {found.group(1): found.group(2) or "" for found in split if found}


def _release(version: str) -> tuple[int, ...]:
    numbers = re.match(r"[\d.]*\d", version)
    return tuple(map(int, numbers.group().split("."))) if numbers else ()
