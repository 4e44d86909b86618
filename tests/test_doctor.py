"""`python -m tilepipe.doctor` says what is there, what is missing and what to do about it."""

import base64
import hashlib
import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib.metadata import distribution, distributions
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tilepipe.config import detect
from tilepipe.config.register import CONF_DIR, register
from tilepipe.config.schemas import config_from_dict
from tilepipe.doctor import __main__ as command
from tilepipe.doctor import examination, machine
from tilepipe.doctor.cutedsl import CUTE_DSL_PARTS, NVSHMEM_PARTS, cute_dsl_facts, nvshmem_facts
from tilepipe.doctor.fact import Fact, State
from tilepipe.doctor.gpus import Gpus, gpu_section, hardware_section, look_at_gpus, read_topology
from tilepipe.doctor.interpreter import python_fact
from tilepipe.doctor.libraries import (
    LIBRARIES,
    MAIN,
    Libraries,
    look_at_libraries,
    main_facts,
    optional_facts,
    satisfies,
    source_fact,
    torch_cuda_of,
)
from tilepipe.doctor.machine import Machine, Room, machine_facts
from tilepipe.doctor.wheels import file_faults
from tilepipe.experiments.entry import symmetric_bytes_of

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MIB, GIB = 2**20, 2**30
NO_GPUS = Gpus(facts=None, topology=None, visible=(), option="cpu")


def told(facts, name):
    """State, text and next step of the one fact of that name."""
    (fact,) = [fact for fact in facts if fact.name == name]
    return fact.state.name, fact.text, fact.next_step


# Python.


@pytest.mark.parametrize("version", [(3, 11, 0), (3, 12, 9), (3, 13, 2)])
def test_a_python_in_range_is_ok(version):
    assert python_fact(version, "/env").state is State.ok


@pytest.mark.parametrize(
    ("version", "text"),
    [
        (
            (3, 14, 0),
            "3.14.0, but TilePipe needs 3.11 to 3.13: every released Hydra 1.3 fails in argparse "
            "from 3.14 on",
        ),
        (
            (3, 10, 12),
            "3.10.12, but TilePipe needs 3.11 to 3.13: its language and library are too old",
        ),
    ],
)
def test_a_python_out_of_range_is_missing_and_says_which_to_take(version, text):
    fact = python_fact(version)

    step = "make clean, then make run PYTHON=python3.13 (or another of them)"
    assert (fact.state, fact.text, fact.next_step) == (State.missing, text, step)


def test_the_range_of_python_is_that_of_the_project():
    wanted = PROJECT["requires-python"]

    for minor in range(8, 20):
        is_ok = python_fact((3, minor, 0)).state is State.ok
        assert is_ok is satisfies(f"3.{minor}", wanted), minor


# The machine.

SOUND = Machine(
    host={
        "machine": "x86_64",
        "cpu_model": "Some CPU",
        "num_cores": 8,
        "num_usable_cores": 8,
        "memory_bytes": 16 * GIB,
    },
    memory_limit_bytes=None,
    shm=Room("/dev/shm", 8 * GIB, 4 * GIB),
    results=Room("/home/me/outputs", 100 * GIB, 50 * GIB),
)


def on_host(**changes):
    host = {**SOUND.host, **changes.pop("host", {})}
    return machine_facts(replace(SOUND, host=host, **changes), host_executor=True)


def test_a_sound_machine_lacks_nothing():
    facts = on_host()

    assert [(fact.name, fact.state.name, fact.text) for fact in facts] == [
        ("processor", "ok", "x86_64, Some CPU: has the store order of the host executor"),
        ("cores", "ok", "8 usable, the default sweep has 4 ranks"),
        ("memory", "ok", "16.0 GiB"),
        (
            "shared memory",
            "ok",
            "/dev/shm: 4096 of 8192 MiB free, the default sweep takes 80 MiB",
        ),
        ("results folder", "ok", "/home/me/outputs: 50.0 GiB free"),
    ]


def test_another_processor_is_missing_for_the_host_executor_and_noted_beside_gpus():
    arm = {"machine": "aarch64", "cpu_model": None}
    text = (
        "aarch64: the host executor refuses it, since flags and rows in shared memory rely on the "
        "store order of x86-64"
    )

    beside_gpus = machine_facts(replace(SOUND, host={**SOUND.host, **arm}), host_executor=False)

    step = "run on an x86-64 machine"
    assert told(on_host(host=arm), "processor") == ("missing", text, step)
    assert told(beside_gpus, "processor") == ("note", text, step)


def test_fewer_cores_than_ranks_are_noted():
    assert told(on_host(host={"num_usable_cores": 2}), "cores") == (
        "note",
        "2 usable, the default sweep has 4 ranks, so ranks take turns and waits grow",
        "for steadier times give each rank a core: launch.num_ranks=2",
    )


def test_the_limit_of_a_container_counts_as_its_memory():
    state, text, step = told(on_host(memory_limit_bytes=GIB // 2), "memory")

    assert (state, text) == (
        "missing",
        "0.5 GiB (limit of this container), but the default sweep takes 1 GiB",
    )
    assert "workload=tiny" in step


LARGER = "give it more: docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm"


def test_a_small_dev_shm_is_noted_where_rows_can_spill():
    small = Room("/dev/shm", 64 * MIB, 64 * MIB)

    assert told(on_host(shm=small), "shared memory") == (
        "note",
        "/dev/shm: 64 of 64 MiB free; the default sweep takes 80 MiB, so ranks without room there "
        "put their rows into files under the results folder, which is slower",
        LARGER,
    )


def test_a_small_dev_shm_is_missing_where_rows_cannot_spill():
    small, full = Room("/dev/shm", 64 * MIB, 64 * MIB), Room("/home/me/outputs", GIB, 8 * MIB)

    assert told(on_host(shm=small, results=full), "shared memory") == (
        "missing",
        "/dev/shm: 64 of 64 MiB free; the default sweep takes 80 MiB, and the results folder has "
        "no room",
        LARGER,
    )


@pytest.mark.parametrize(
    ("shm", "text"),
    [
        (None, "/dev/shm is not there; the default sweep takes 80 MiB, so ranks without"),
        (
            Room("/dev/shm", GIB, GIB, writable=False),
            "/dev/shm: 1024 of 1024 MiB free, but it cannot be written; the default sweep",
        ),
    ],
)
def test_without_dev_shm_rows_spill(shm, text):
    state, found, _ = told(on_host(shm=shm), "shared memory")

    assert (state, found[: len(text)]) == ("note", text)


def test_a_results_folder_that_cannot_be_written_is_missing():
    assert told(on_host(results=Room("/", GIB, GIB, writable=False)), "results folder") == (
        "missing",
        "/ cannot be written",
        "run from a folder that can be written, or name one with results_dir=",
    )


def test_what_the_default_sweep_takes_is_what_its_largest_point_reserves():
    register()
    words = ["+experiment=dispatch_gemm", "hardware=cpu"]
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        cfg = compose("config", overrides=words, return_hydra_config=True)
        counts = str(cfg.hydra.sweeper.params["workload.num_tokens"]).split(",")
        largest = max(map(int, counts))
        cfg = compose("config", overrides=[*words, f"workload.num_tokens={largest}"])
    config = config_from_dict(OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))

    reserved_bytes = config.launch.num_ranks * symmetric_bytes_of(config)

    assert config.launch.num_ranks == machine.DEFAULT_NUM_RANKS
    assert reserved_bytes <= machine.DEFAULT_SHM_BYTES <= 1.25 * reserved_bytes
    assert cfg.results_dir == str(command.RESULTS_DIR)


def test_this_machine_is_looked_at_without_making_a_folder(tmp_path):
    found = machine.look_at_machine(tmp_path / "not" / "there")

    assert found.results.folder == str(tmp_path)
    assert 0 < found.results.free_bytes <= found.results.total_bytes
    assert list(tmp_path.iterdir()) == []


# Wheels as installers leave them.


def digest(content):
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


class Site:
    """A folder of installed wheels."""

    def __init__(self, folder):
        self.folder = folder

    def install(self, name, version="4.8.1", **files):
        """Write a wheel's files over what is there; `files` are contents by stem."""
        paths = {f"pkg/{stem}.so": content for stem, content in files.items()}
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        record = [f"{path},sha256={digest(text)},{len(text)}" for path, text in paths.items()]
        record.append(f"{info.name}/METADATA,sha256=stale,1")
        (info / "RECORD").write_text("\n".join([*record, f"{info.name}/RECORD,,", "pkg/x.pyc,,"]))
        for path, content in paths.items():
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).write_bytes(content)

    def wheels(self):
        return {found.name: found for found in distributions(path=[str(self.folder)])}

    def libraries(self, **changes):
        found = Libraries(self.wheels(), wanted={}, torch_cuda=None, is_checkout=True)
        return replace(found, **changes)


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path / "site")


@pytest.fixture
def cute_dsl(site):
    """The CuTe DSL 4.8.1 as pip installs it without extras."""
    for part in CUTE_DSL_PARTS[:4]:
        site.install(part, **{part.rpartition("-")[2]: part.encode()})
    return site


def test_wheels_whose_files_are_as_recorded_have_no_fault(cute_dsl):
    # Equal contents under one path harm nobody.
    cute_dsl.install("other", core=b"nvidia-cutlass-dsl-libs-core")

    assert file_faults(list(cute_dsl.wheels().values())) == []


def test_two_wheels_over_one_file_are_named_with_the_one_that_won(site):
    site.install("libs-cu13", ir=b"cu13", ops=b"cu13", own=b"1")
    site.install("libs-base", ir=b"base", ops=b"base")
    (site.folder / "pkg" / "ops.so").write_bytes(b"cu13")

    assert file_faults(list(site.wheels().values())) == [
        "libs-base and libs-cu13 both hold 2 files with different contents, such as ir.so; on disk "
        "are 1 of libs-base, 1 of libs-cu13"
    ]


def test_files_that_are_gone_or_changed_are_counted(site):
    site.install("libs", a=b"a", b=b"b", c=b"c")
    (site.folder / "pkg" / "a.so").unlink()
    (site.folder / "pkg" / "b.so").write_bytes(b"other")

    assert file_faults(list(site.wheels().values())) == [
        "1 file of libs is gone, such as a.so",
        "1 file of libs is not what its wheel holds, such as b.so",
    ]


# The CuTe DSL.

EITHER = (
    "python -m pip install -c constraints.txt -e '.[cu12]' or "
    "python -m pip install -c constraints.txt -e '.[cu13]'"
)


def test_one_sound_set_of_the_cute_dsl_is_ok(cute_dsl):
    facts = cute_dsl_facts(cute_dsl.libraries(), driver_cuda=None, needed=False)

    assert [(fact.name, fact.state.name, fact.text) for fact in facts] == [
        (
            "parts",
            "ok",
            "nvidia-cutlass-dsl 4.8.1, libs-base 4.8.1, libs-core 4.8.1, libs-cu12 4.8.1, "
            "libs-cu13 none",
        ),
        ("set", "ok", "libs-cu12 is taken, no driver to ask"),
        ("files", "ok", "as their wheels recorded, none written by two"),
    ]


@pytest.mark.parametrize(
    ("driver_cuda", "taken"),
    [
        (None, "libs-cu13 of libs-cu12 and libs-cu13 is taken, no driver to ask"),
        (13000, "libs-cu13 of libs-cu12 and libs-cu13 is taken, which the driver can run"),
        (12090, "libs-cu12 of libs-cu12 and libs-cu13 is taken, which the driver can run"),
    ],
)
def test_of_both_sets_the_newest_that_the_driver_runs_is_taken(cute_dsl, driver_cuda, taken):
    cute_dsl.install(CUTE_DSL_PARTS[4])

    facts = cute_dsl_facts(cute_dsl.libraries(), driver_cuda=driver_cuda, needed=True)

    assert told(facts, "set") == ("ok", taken, "")


@pytest.mark.parametrize(("needed", "state"), [(True, "missing"), (False, "note")])
def test_parts_of_different_versions_are_named(cute_dsl, needed, state):
    cute_dsl.install(CUTE_DSL_PARTS[4], version="4.4.2")

    facts = cute_dsl_facts(cute_dsl.libraries(), driver_cuda=13000, needed=needed)

    assert told(facts, "parts") == (
        state,
        "parts of different versions: nvidia-cutlass-dsl 4.8.1, libs-base 4.8.1, libs-core 4.8.1, "
        "libs-cu12 4.8.1, libs-cu13 4.4.2",
        f"make a fresh environment: {EITHER}",
    )


def test_a_set_that_overwrote_another_is_named(cute_dsl):
    cute_dsl.install(CUTE_DSL_PARTS[4], base=b"other")

    facts = cute_dsl_facts(cute_dsl.libraries(), driver_cuda=13000, needed=True)

    assert told(facts, "files") == (
        "missing",
        "nvidia-cutlass-dsl-libs-base and nvidia-cutlass-dsl-libs-cu13 both hold 1 file with "
        "different contents, such as base.so; on disk are 0 of nvidia-cutlass-dsl-libs-base, 1 of "
        "nvidia-cutlass-dsl-libs-cu13",
        f"make a fresh environment, by pip and not uv: {EITHER}",
    )


def test_a_driver_too_old_for_the_only_set_is_named(site):
    for part in (*CUTE_DSL_PARTS[:3], CUTE_DSL_PARTS[4]):
        site.install(part)

    facts = cute_dsl_facts(site.libraries(is_checkout=False), driver_cuda=12040, needed=True)

    assert told(facts, "set") == (
        "missing",
        "libs-cu13 installed, but the driver stops at CUDA 12.4",
        "install a newer driver, or python -m pip install 'tilepipe[cu12]'",
    )


def test_a_front_without_any_set_is_named(site):
    site.install(CUTE_DSL_PARTS[0])

    facts = cute_dsl_facts(site.libraries(), driver_cuda=None, needed=True)

    assert told(facts, "set")[:2] == (
        "missing",
        "neither libs-cu12 nor libs-cu13 is installed, so the DSL cannot be imported",
    )
    assert told(facts, "parts")[1] == (
        "nvidia-cutlass-dsl-libs-base and nvidia-cutlass-dsl-libs-core not installed "
        "(nvidia-cutlass-dsl 4.8.1, libs-base none, libs-core none, libs-cu12 none, "
        "libs-cu13 none)"
    )


def test_without_the_cute_dsl_the_main_job_lacks_it(site):
    facts = main_facts(site.libraries(), num_gpus=0, driver_cuda=None)

    assert told(facts, "nvidia-cutlass-dsl") == (
        "missing",
        "not installed: compiles GPU kernels, and its version is part of every result",
        "make clean, then make run, sets up .venv with it",
    )
    assert cute_dsl_facts(site.libraries(), driver_cuda=None, needed=True) == []


# NVSHMEM.


def no_library(name):
    return None


@pytest.mark.parametrize(
    ("driver_cuda", "extra_name"), [(None, "cu13"), (13000, "cu13"), (12080, "cu12")]
)
def test_without_nvshmem_the_extra_for_the_driver_is_named(site, driver_cuda, extra_name):
    facts = nvshmem_facts(site.libraries(), driver_cuda=driver_cuda, needed=True, find=no_library)

    assert told(facts, "bindings") == (
        "missing",
        "neither nvshmem4py-cu12 nor nvshmem4py-cu13 is installed: needed for 2 GPUs or more",
        f"python -m pip install -c constraints.txt -e '.[{extra_name}]'",
    )
    assert told(facts, "library")[:2] == ("missing", "no libnvshmem_host.so was found")


def test_bindings_and_their_library_are_ok(site):
    site.install("nvshmem4py-cu13", "0.4.1", bindings=b"13")
    site.install("nvidia-nvshmem-cu13", "3.8.0")
    record = next(site.folder.glob("nvidia_nvshmem*/RECORD"))
    record.write_text(f"{record.read_text()}\nnvidia/nvshmem/lib/libnvshmem_host.so.3,,\n")
    library = site.folder / "nvidia" / "nvshmem" / "lib" / "libnvshmem_host.so.3"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"")

    facts = nvshmem_facts(site.libraries(), driver_cuda=13000, needed=True, find=no_library)

    assert [(fact.name, fact.state.name, fact.text) for fact in facts] == [
        ("bindings", "ok", "nvshmem4py-cu13 0.4.1"),
        ("library", "ok", f"nvidia-nvshmem-cu13 3.8.0: {library}"),
        ("files", "ok", "as their wheels recorded, none written by two"),
    ]


def test_the_library_of_the_system_is_found_too(site):
    facts = nvshmem_facts(
        site.libraries(), driver_cuda=None, needed=False, find={"nvshmem_host": "lib.so.3"}.get
    )

    assert told(facts, "library") == ("ok", "lib.so.3, of the system", "")


def test_both_bindings_over_one_package_are_named(site):
    site.install("nvshmem4py-cu12", "0.4.1", bindings=b"12")
    site.install("nvshmem4py-cu13", "0.4.1", bindings=b"13")

    facts = nvshmem_facts(site.libraries(), driver_cuda=13000, needed=True, find=no_library)

    assert told(facts, "bindings") == (
        "missing",
        "nvshmem4py-cu12 0.4.1 and nvshmem4py-cu13 0.4.1 are both installed, and both write the "
        "package nvshmem",
        f"make a fresh environment with one of them: {EITHER}",
    )
    assert told(facts, "files")[1] == (
        "nvshmem4py-cu12 and nvshmem4py-cu13 both hold 1 file with different contents, such as "
        "bindings.so; on disk are 0 of nvshmem4py-cu12, 1 of nvshmem4py-cu13"
    )


def test_bindings_newer_than_the_driver_are_named(site):
    site.install("nvshmem4py-cu13", "0.4.1")

    facts = nvshmem_facts(site.libraries(), driver_cuda=12080, needed=True, find=no_library)

    assert told(facts, "bindings")[:2] == (
        "missing",
        "nvshmem4py-cu13 0.4.1, but the driver stops at CUDA 12.8",
    )


# Other libraries.


@pytest.mark.parametrize(
    ("version", "wanted", "holds"),
    [
        ("1.3.8", "<1.4,>=1.3.8", True),
        ("1.4", "<1.4,>=1.3.8", False),
        ("1.3.7", "<1.4,>=1.3.8", False),
        ("2.13.0+cpu", ">=2.9", True),
        ("2.9", ">=2.9.0", True),
        ("2.10", ">=2.9", True),
        ("4.8.1", "==4.8.1", True),
        ("4.8.1.1", "==4.8.1", False),
        ("14", "", True),
    ],
)
def test_versions_are_compared_by_number(version, wanted, holds):
    assert satisfies(version, wanted) is holds


def test_every_dependency_of_the_project_is_looked_at_with_its_range():
    wanted = {re.split("[<>=]", words)[0]: words for words in PROJECT["dependencies"]}

    found = look_at_libraries(LIBRARIES, is_checkout=True)

    assert set(MAIN) == set(wanted)
    for name, words in wanted.items():
        clauses = words.removeprefix(name).split(",")
        assert sorted(found.wanted[name].split(",")) == sorted(clauses)


def test_a_library_out_of_range_is_missing(site):
    site.install("hydra-core", "1.4.0")

    facts = main_facts(
        site.libraries(wanted={"hydra-core": "<1.4,>=1.3.8"}), num_gpus=0, driver_cuda=None
    )

    assert told(facts, "hydra-core") == (
        "missing",
        "1.4.0, but this version of TilePipe needs <1.4,>=1.3.8",
        "python -m pip install 'hydra-core<1.4,>=1.3.8'",
    )


@pytest.mark.parametrize(
    ("cuda", "num_gpus", "driver_cuda", "state", "text"),
    [
        (None, 0, None, "ok", "2.13.0, built for the CPU; no GPU here to use"),
        ("13.0", 0, None, "ok", "2.13.0, built for CUDA 13.0; no GPU here to use"),
        (None, 2, 13000, "note", "2.13.0, built for the CPU, although there are GPUs"),
        (
            "13.0",
            1,
            12080,
            "note",
            "2.13.0, built for CUDA 13.0, but the driver stops at CUDA 12.8",
        ),
        ("12.8", 1, 13000, "ok", "2.13.0, built for CUDA 12.8, which the driver can run"),
    ],
)
def test_the_build_of_torch_is_held_against_gpus_and_driver(
    site, cuda, num_gpus, driver_cuda, state, text
):
    site.install("torch", "2.13.0")

    facts = main_facts(site.libraries(torch_cuda=cuda), num_gpus=num_gpus, driver_cuda=driver_cuda)

    assert told(facts, "torch")[:2] == (state, text)


@pytest.mark.parametrize(
    ("line", "cuda"),
    [
        ("cuda: Optional[str] = None", None),
        ("cuda: Optional[str] = '13.0'", "13.0"),
        ("cuda = '12.8'", "12.8"),
        ("", None),
    ],
)
def test_the_build_of_torch_is_read_from_its_source(site, line, cuda):
    site.install("torch", "2.13.0")
    (site.folder / "torch").mkdir()
    (site.folder / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip = 1\n")

    assert torch_cuda_of(site.wheels()["torch"]) == cuda


def test_the_build_of_the_torch_installed_here_is_what_torch_says():
    done = subprocess.run(
        [sys.executable, "-c", "import torch.version; print(torch.version.cuda)"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert str(torch_cuda_of(distribution("torch"))) == done.stdout.strip()


def test_what_is_optional_is_noted_with_the_extra_that_brings_it(site):
    site.install("matplotlib", "3.11.2")
    on_path = {"ncu": "/bin/ncu", "/usr/local/cuda/bin/nsys": "/usr/local/cuda/bin/nsys"}

    facts = optional_facts(site.libraries(is_checkout=False), which=on_path.get)

    assert [(fact.name, fact.state.name, fact.text, fact.next_step) for fact in facts] == [
        (
            "quack-kernels",
            "note",
            "not installed: the peer that GEMMs are compared with",
            "python -m pip install 'tilepipe[baselines]'",
        ),
        ("matplotlib", "ok", "3.11.2", ""),
        (
            "nvtx",
            "note",
            "not installed: named ranges under launch.wrap",
            "python -m pip install 'tilepipe[profile]'",
        ),
        ("ncu", "ok", "/bin/ncu", ""),
        (
            "nsys",
            "note",
            "/usr/local/cuda/bin/nsys, which is not on PATH",
            "PATH=/usr/local/cuda/bin:$PATH",
        ),
        (
            "compute-sanitizer",
            "note",
            "not on PATH: shows memory faults and races under launch.wrap",
            "it comes with the CUDA toolkit",
        ),
    ]


def test_every_extra_that_is_named_exists(site):
    libraries = site.libraries()
    facts = [
        *optional_facts(libraries, which=no_library),
        *nvshmem_facts(libraries, driver_cuda=12080, needed=True, find=no_library),
        *nvshmem_facts(libraries, driver_cuda=13000, needed=True, find=no_library),
    ]

    named = {name for fact in facts for name in re.findall(r"\.\[(\w+)\]", fact.next_step)}

    assert named == {"baselines", "plot", "profile", "cu12", "cu13"}
    assert named <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize(
    ("git", "text"),
    [
        (None, "0.1.0 in /a, no git checkout of its own"),
        ({"commit": "c" * 40, "dirty": False}, f"0.1.0 in /a, commit {'c' * 12}"),
        ({"commit": None, "dirty": True}, "0.1.0 in /a, commit none with changes on top"),
    ],
)
def test_version_and_commit_are_told(git, text):
    assert source_fact("0.1.0", Path("/a"), git) == Fact("tilepipe", "version", State.ok, text)


# GPUs.


class NvmlError(Exception):
    pass


class FakeNvml:
    """A driver with as many H200 as asked for; handles are numbers."""

    NVMLError = NvmlError
    NVML_NVLINK_MAX_LINKS = 36
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, num_gpus, *, pair_states=None, mig=(), links_down=None):
        self.num_gpus = num_gpus
        self.pair_states = pair_states or {}  # (from, to, index) -> state
        self.mig = mig
        self.links_down = links_down or {}  # GPU -> count

    def __getattr__(self, name):
        """Whatever else is asked, this driver does not know."""

        def refuse(*arguments):
            raise NvmlError(name)

        return refuse

    def nvmlInit(self):
        pass

    def nvmlShutdown(self):
        pass

    def nvmlSystemGetDriverVersion(self):
        return "580.159.04"

    def nvmlSystemGetCudaDriverVersion(self):
        return 13000

    def nvmlDeviceGetCount(self):
        return self.num_gpus

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        return "NVIDIA H200"

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=140 * GIB)

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return 9, 0

    def nvmlDeviceGetMigMode(self, handle):
        return int(handle in self.mig), 0

    def nvmlDeviceGetP2PStatus(self, source, target, index):
        assert index in (1, 2, 3)
        return self.pair_states.get((source, target, index), 0)

    def nvmlDeviceGetNvLinkState(self, handle, link):
        if link >= 18:
            raise NvmlError("no such link")
        return int(link >= self.links_down.get(handle, 0))


@pytest.fixture
def seen(monkeypatch):
    """The GPUs of a fake driver, as the doctor sees them through every module it asks."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def look(nvml):
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(detect, "pynvml", nvml)
        monkeypatch.setattr("tilepipe.doctor.gpus.find_spec", lambda name: nvml)
        detect.gpu_names.cache_clear()
        return look_at_gpus()

    yield look
    detect.gpu_names.cache_clear()


def test_two_h200_are_told_with_their_links_and_what_auto_makes_of_them(seen):
    gpus = seen(FakeNvml(2))

    facts = [*gpu_section(gpus), *hardware_section(gpus)]

    h200 = "NVIDIA H200, 140 GiB, compute capability 9.0"
    assert [(fact.name, fact.state.name, fact.text) for fact in facts] == [
        ("driver", "ok", "580.159.04, up to CUDA 13.0"),
        ("GPU 0", "ok", h200),
        ("GPU 1", "ok", h200),
        ("peer access", "ok", "stores and atomics of all 2 GPUs reach one another"),
        ("NVLink", "ok", "between all GPUs; links up by GPU: 18 each"),
        ("hardware=auto", "ok", "is h200_x2: executor cuda"),
        (
            "kernels",
            "ok",
            "this version has those of dispatch, combine, grouped_gemm, dispatch_gemm, "
            "gemm_combine, moe_layer",
        ),
    ]
    assert facts[-1].next_step == ""


def test_gpus_that_cannot_store_to_each_other_are_missing(seen):
    gpus = seen(FakeNvml(2, pair_states={(1, 0, 1): 3, (1, 0, 2): 5}))

    facts = gpu_section(gpus)

    assert told(facts, "peer access") == (
        "missing",
        "1 of 2 directed pairs have none, such as GPU 1 to GPU 0: the topology does not support it",
        "pick GPUs that reach each other with CUDA_VISIBLE_DEVICES, or one alone",
    )
    assert told(facts, "NVLink")[:2] == (
        "note",
        "1 of 2 directed pairs have none, such as GPU 1 to GPU 0; links up by GPU: 18 each",
    )


def test_atomics_that_do_not_reach_a_peer_count_as_no_access(seen):
    gpus = seen(FakeNvml(2, pair_states={(0, 1, 3): 5}))

    assert told(gpu_section(gpus), "peer access")[1].endswith("GPU 0 to GPU 1: not supported")


def test_links_that_are_down_are_noted(seen):
    facts = gpu_section(seen(FakeNvml(2, links_down={1: 2})))

    assert told(facts, "NVLink")[:2] == (
        "note",
        "between all GPUs; links up by GPU: 18, 16, 2 down",
    )


def test_a_gpu_cut_by_mig_is_noted(seen):
    facts = gpu_section(seen(FakeNvml(1, mig=(0,))))

    state, text, step = told(facts, "GPU 0")
    assert (state, text.partition("9.0, ")[2]) == (
        "note",
        "MIG on: it is cut into slices that cannot reach other GPUs",
    )
    assert "nvidia-smi -mig 0" in step
    assert [fact.name for fact in facts] == ["driver", "GPU 0"]


def test_gpus_hidden_from_cuda_are_noted(seen, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    gpus = seen(FakeNvml(2, pair_states={(0, 1, 1): 3}))

    facts = gpu_section(gpus)

    assert told(facts, "visible") == (
        "note",
        "a CUDA process sees 1 of 2 GPUs",
        "unset CUDA_VISIBLE_DEVICES to use all",
    )
    assert told(facts, "peer access")[0] == "note"
    assert told(hardware_section(gpus), "hardware=auto")[1] == "is h200_x1: executor cuda"


def test_gpus_that_auto_leaves_idle_are_noted(seen):
    facts = hardware_section(seen(FakeNvml(3)))

    assert told(facts, "hardware=auto") == (
        "note",
        "is h200_x2: executor cuda, which uses 2 of 3 GPUs",
        "type another hardware option",
    )


def test_a_driver_that_does_not_know_the_topology_is_noted(seen):
    silent = FakeNvml(2)
    silent.nvmlDeviceGetP2PStatus = silent.nvmlDeviceGetSomethingElse

    gpus = seen(silent)

    assert read_topology(silent, 2) is None
    assert told(gpu_section(gpus), "peer access")[:2] == (
        "note",
        "the driver does not say which GPU reaches which",
    )


def test_without_a_driver_the_host_executor_is_told(seen):
    nvml = FakeNvml(0)
    nvml.nvmlInit = nvml.nvmlNotLoaded
    gpus = seen(nvml)

    assert gpus == NO_GPUS
    assert told(gpu_section(gpus), "driver")[:2] == (
        "note",
        "no NVIDIA driver answers; everything runs on the host executor",
    )
    assert told(hardware_section(gpus), "hardware=auto") == (
        "ok",
        "is cpu: the host executor, ranks are processes of this machine",
        "",
    )


def test_without_nvidia_ml_py_nothing_is_asked(monkeypatch):
    monkeypatch.setattr("tilepipe.doctor.gpus.find_spec", lambda name: None)

    gpus = look_at_gpus()

    assert gpus == Gpus(facts=None, topology=None, visible=(), option=None)
    assert told(hardware_section(gpus), "hardware=auto")[0] == "missing"
    assert told(gpu_section(gpus), "driver")[1] == "not asked: nvidia-ml-py is not installed"


# The whole report.


def examined(monkeypatch, gpus):
    """Pretend that this machine is sound and has these GPUs; its libraries are its own."""
    monkeypatch.setattr(examination, "look_at_gpus", lambda: gpus)
    monkeypatch.setattr(examination, "look_at_machine", lambda results_dir: SOUND)


def test_a_machine_that_lacks_nothing_is_ready(monkeypatch, capsys):
    examined(monkeypatch, NO_GPUS)

    assert command.main([]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "make run can run here on hardware=cpu"
    headings = [line for line in lines[:-2] if not line.startswith(" ")]
    assert headings == [
        "python",
        "tilepipe",
        "machine",
        "libraries",
        "GPUs",
        "CuTe DSL",
        "NVSHMEM",
        "optional",
        "hardware",
    ]


def test_json_says_the_same_as_the_lines(monkeypatch, capsys):
    examined(monkeypatch, NO_GPUS)

    assert command.main(["--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    command.main([])
    lines = capsys.readouterr().out.splitlines()

    assert (document["ready"], document["hardware"]) == (True, "cpu")
    for fact in document["facts"]:
        assert f"  {fact['state']:<8} {fact['name']:<18} {fact['text']}" in lines
        assert (fact["next_step"] is None) or any(
            line.strip() == f"-> {fact['next_step']}" for line in lines
        )
    assert len(lines) == 2 + sum(
        1 + (fact["next_step"] is not None) for fact in document["facts"]
    ) + len({fact["section"] for fact in document["facts"]})


def test_a_machine_with_gpus_lacks_no_kernels_of_the_main_job(monkeypatch, seen, capsys):
    examined(monkeypatch, seen(FakeNvml(2)))

    command.main([])

    last = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"make run can(not)? run here on hardware=h200_x2", last)
    assert "kernels" not in last


def test_a_python_out_of_range_is_told_before_anything_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(command.sys, "version_info", (3, 14, 1, "final", 0))

    assert command.main([]) == 1

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "python"
    assert lines[-1] == "make run cannot run here; missing: python: version"


def test_it_needs_no_library_to_say_that_all_are_missing(tmp_path):
    # -S: no site-packages, as with a Python into which nothing was installed.
    done = subprocess.run(
        [sys.executable, "-S", "-m", "tilepipe.doctor", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )

    assert (done.returncode, done.stderr) == (1, "")
    document = json.loads(done.stdout)
    missing = {fact["name"] for fact in document["facts"] if fact["state"] == "missing"}
    assert missing >= {*MAIN, "hardware=auto"}
    assert all(fact["next_step"] for fact in document["facts"] if fact["state"] == "missing")


def test_the_library_sets_installed_here_are_found_and_of_one_version():
    found = look_at_libraries((*CUTE_DSL_PARTS, *NVSHMEM_PARTS), is_checkout=True)

    versions = {found.version(name) for name in CUTE_DSL_PARTS} - {None}
    assert versions == {PROJECT["optional-dependencies"]["cu12"][0].partition("==")[2]}
