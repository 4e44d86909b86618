"""The CuTe DSL's library sets and NVSHMEM: installed, of one version, and whole.

Knows nothing of kernels; imports neither library.

In 4.8.1 each CUDA major has a library set of its own (libs-cu12, libs-cu13) beside what both
share (libs-base, libs-core); where both are installed the DSL takes the newest that the driver can
run, and without a driver the newest.
"""

from collections.abc import Callable, Sequence
from ctypes.util import find_library
from importlib.metadata import Distribution
from pathlib import Path

from tilepipe.doctor.fact import Fact, State
from tilepipe.doctor.libraries import Libraries, extra, spelled_cuda
from tilepipe.doctor.wheels import file_faults

__all__ = ["CUTE_DSL_PARTS", "NVSHMEM_PARTS", "cute_dsl_facts", "nvshmem_facts"]

_DSL = "nvidia-cutlass-dsl"
_SHARED = (f"{_DSL}-libs-base", f"{_DSL}-libs-core")
_SETS = {12: f"{_DSL}-libs-cu12", 13: f"{_DSL}-libs-cu13"}
_BINDINGS = {12: "nvshmem4py-cu12", 13: "nvshmem4py-cu13"}
_NVSHMEM = {12: "nvidia-nvshmem-cu12", 13: "nvidia-nvshmem-cu13"}
_NVSHMEM_LIBRARY = "libnvshmem_host.so"
CUTE_DSL_PARTS = (_DSL, *_SHARED, *_SETS.values())
NVSHMEM_PARTS = (*_BINDINGS.values(), *_NVSHMEM.values())


def cute_dsl_facts(libraries: Libraries, *, driver_cuda: int | None, needed: bool) -> list[Fact]:
    """`needed`: whether the main job compiles kernels here; else faults are only noted."""
    bad = State.missing if needed else State.note
    if libraries.version(_DSL) is None:
        return []  # named among the libraries of the main job
    facts = [
        _parts(libraries, bad),
        _chosen_set(libraries, driver_cuda, bad),
    ]
    step = f"make a fresh environment, by pip and not uv: {_either_extra(libraries)}"
    return [*facts, _files("CuTe DSL", libraries, CUTE_DSL_PARTS, bad, step)]


def nvshmem_facts(
    libraries: Libraries,
    *,
    driver_cuda: int | None,
    needed: bool,
    find: Callable[[str], str | None] = find_library,
) -> list[Fact]:
    """`needed`: whether the ranks of the main job are GPUs that write to each other."""
    bad = State.missing if needed else State.note
    majors = [major for major, name in _BINDINGS.items() if libraries.version(name)]
    facts = [_bindings(libraries, majors, driver_cuda, bad), _library(libraries, majors, bad, find)]
    present = [name for name in NVSHMEM_PARTS if libraries.version(name)]
    if present:
        step = f"make a fresh environment with one of them: {_either_extra(libraries)}"
        facts.append(_files("NVSHMEM", libraries, NVSHMEM_PARTS, bad, step))
    return facts


def _parts(libraries: Libraries, bad: State) -> Fact:
    versions = {name: libraries.version(name) for name in CUTE_DSL_PARTS}
    spelled = ", ".join(
        f"{name.removeprefix(f'{_DSL}-')} {version or 'none'}" for name, version in versions.items()
    )
    reinstall = f"make a fresh environment: {_either_extra(libraries)}"
    if len({version for version in versions.values() if version}) > 1:
        text = f"parts of different versions: {spelled}"
        return Fact("CuTe DSL", "parts", bad, text, reinstall)
    lacking = [name for name in _SHARED if versions[name] is None]
    if lacking:
        text = f"{' and '.join(lacking)} not installed ({spelled})"
        return Fact("CuTe DSL", "parts", bad, text, reinstall)
    return Fact("CuTe DSL", "parts", State.ok, spelled)


def _chosen_set(libraries: Libraries, driver_cuda: int | None, bad: State) -> Fact:
    majors = [major for major, name in _SETS.items() if libraries.version(name)]
    fit = [major for major in majors if driver_cuda is None or major <= driver_cuda // 1000]
    have = " and ".join(f"libs-cu{major}" for major in majors)
    if not majors:
        text = "neither libs-cu12 nor libs-cu13 is installed, so the DSL cannot be imported"
        step = _either_extra(libraries)
    elif not fit:
        assert driver_cuda is not None
        text = f"{have} installed, but the driver stops at CUDA {spelled_cuda(driver_cuda)}"
        step = "install a newer driver" + (
            f", or {extra('cu12', is_checkout=libraries.is_checkout)}" if majors == [13] else ""
        )
    else:
        why = "which the driver can run" if driver_cuda is not None else "no driver to ask"
        both = "" if len(majors) == 1 else f" of {have}"
        return Fact("CuTe DSL", "set", State.ok, f"libs-cu{max(fit)}{both} is taken, {why}")
    return Fact("CuTe DSL", "set", bad, text, step)


def _files(section: str, libraries: Libraries, names: Sequence[str], bad: State, step: str) -> Fact:
    wheels = [libraries.installed[name] for name in names if name in libraries.installed]
    faults = file_faults(wheels)
    if faults:
        return Fact(section, "files", bad, "; ".join(faults), step)
    return Fact(section, "files", State.ok, "as their wheels recorded, none written by two")


def _bindings(libraries: Libraries, majors: list[int], driver_cuda: int | None, bad: State) -> Fact:
    if not majors:
        wanted = 12 if driver_cuda is not None and driver_cuda < 13000 else 13
        text = "neither nvshmem4py-cu12 nor nvshmem4py-cu13 is installed: needed for 2 GPUs or more"
        step = extra(f"cu{wanted}", is_checkout=libraries.is_checkout)
        return Fact("NVSHMEM", "bindings", bad, text, step)
    have = " and ".join(f"{_BINDINGS[m]} {libraries.version(_BINDINGS[m])}" for m in majors)
    if len(majors) > 1:
        text = f"{have} are both installed, and both write the package nvshmem"
        step = f"make a fresh environment with one of them: {_either_extra(libraries)}"
        return Fact("NVSHMEM", "bindings", bad, text, step)
    if driver_cuda is not None and driver_cuda // 1000 < majors[0]:
        text = f"{have}, but the driver stops at CUDA {spelled_cuda(driver_cuda)}"
        step = extra("cu12", is_checkout=libraries.is_checkout)
        return Fact("NVSHMEM", "bindings", bad, text, f"install a newer driver, or {step}")
    return Fact("NVSHMEM", "bindings", State.ok, have)


def _library(
    libraries: Libraries, majors: list[int], bad: State, find: Callable[[str], str | None]
) -> Fact:
    """The wheel's own library wins; else what the dynamic linker knows."""
    for major in majors or _NVSHMEM:
        wheel = libraries.installed.get(_NVSHMEM[major])
        path = _shipped(wheel) if wheel else None
        if wheel and path:
            return Fact("NVSHMEM", "library", State.ok, f"{wheel.name} {wheel.version}: {path}")
    linked = find(_NVSHMEM_LIBRARY.removeprefix("lib").removesuffix(".so"))
    if linked:
        return Fact("NVSHMEM", "library", State.ok, f"{linked}, of the system")
    wanted = f"cu{majors[0] if majors else 13}"
    step = extra(wanted, is_checkout=libraries.is_checkout)
    return Fact("NVSHMEM", "library", bad, f"no {_NVSHMEM_LIBRARY} was found", step)


def _shipped(wheel: Distribution) -> Path | None:
    paths = (
        Path(str(f.locate())) for f in wheel.files or () if f.name.startswith(_NVSHMEM_LIBRARY)
    )
    return next((path for path in paths if path.is_file()), None)


def _either_extra(libraries: Libraries) -> str:
    return " or ".join(extra(name, is_checkout=libraries.is_checkout) for name in ("cu12", "cu13"))
