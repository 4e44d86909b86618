"""Two points share a folder only if the same thing made the same measurement."""

import shutil

import pytest

from tilepipe.config import detect, identity


@pytest.fixture(autouse=True)
def fresh():
    """Digests are kept per process: start every test without them."""
    identity._content.cache_clear()
    identity._sources.cache_clear()


@pytest.mark.parametrize(
    "word", ["name=x", "results_dir=x", "launch.watchdog_ms=5", "launch.time_limit_s=5"]
)
def test_names_and_limits_do_not_change_the_config_id(word, container):
    assert identity.config_id(container(word)) == identity.config_id(container())


@pytest.mark.parametrize(
    "word",
    [
        "kernel.order=random",
        "workload.num_tokens=33",
        "launch.num_ranks=2",
        "launch.pace_gbps=50",
        "launch.pace_latency_ns=500",
        "measure.l2=warm",
        "measure.regime=chained",
        "routing.seed=1",
        "placement=round_robin",
    ],
)
def test_what_defines_a_measurement_changes_the_config_id(word, container):
    assert identity.config_id(container(word)) != identity.config_id(container())


@pytest.mark.parametrize("law", ["trace", "counts"])
def test_a_recording_is_known_by_its_content(container, tmp_path, law):
    first, same, other = (tmp_path / name for name in ("first.npy", "same.npy", "other.npy"))
    first.write_bytes(b"abc")
    shutil.copy(first, same)
    other.write_bytes(b"abd")

    ids = [
        identity.config_id(container(f"routing={law}", f"routing.path={path}"))
        for path in (first, same, other)
    ]

    assert ids[0] == ids[1] != ids[2]


def test_a_map_of_experts_is_known_by_its_content(container, tmp_path):
    first, same, other = (tmp_path / name for name in ("first.json", "same.json", "other.json"))
    first.write_text("[0, 1]")
    shutil.copy(first, same)
    other.write_text("[1, 0]")

    ids = [
        identity.config_id(container("placement=file", f"placement.path={path}"))
        for path in (first, same, other)
    ]

    assert ids[0] == ids[1] != ids[2]


def test_a_missing_trace_is_known_by_its_path(container):
    ids = [
        identity.config_id(container("routing=trace", f"routing.path=/no/{name}")) for name in "ab"
    ]

    assert ids[0] != ids[1]


def test_identifiers_are_short_and_repeatable(container):
    plain = container()

    ids = identity.config_id(plain), identity.build_id(plain["hardware"])

    assert ids == (identity.config_id(container()), identity.build_id(plain["hardware"]))
    assert [len(word) for word in ids] == [12, 8]
    assert all(set(word) <= set("0123456789abcdef") for word in ids)


def build_of(hardware):
    return identity.build_id(identity.build_facts(hardware))


def test_sources_that_make_a_number_change_the_build_id(tmp_path, monkeypatch, container):
    for package in ("host", "kernels", "run", "launch", "results"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "module.py").write_text("a = 1\n")
    for maker in identity._MAKERS:
        if maker.endswith(".py"):
            (tmp_path / maker).write_text("a = 1\n")
    monkeypatch.setattr(identity, "_PACKAGE", tmp_path)
    hardware = container()["hardware"]

    ids = []
    for package in (None, "run", "host", "kernels"):
        if package is not None:
            (tmp_path / package / "module.py").write_text("a = 2\n")
        identity._sources.cache_clear()
        ids.append(build_of(hardware))

    assert ids[0] == ids[1] != ids[2]
    assert ids[3] not in ids[:3]


def test_another_machine_changes_the_build_id(container, monkeypatch):
    hardware = container()["hardware"]
    here = build_of(hardware)
    monkeypatch.setattr(detect, "gpu_names", lambda: ("NVIDIA H200",))

    assert build_of(hardware) != here
    assert identity.device_name() == "1 x NVIDIA H200"
