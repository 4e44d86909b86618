"""What ranks would refuse is refused before they start, in one sentence that names the way out."""

import re
from contextlib import closing

import numpy as np
import pytest

from tests.launch import entries
from tilepipe.config.limits import MAX_PLANNED_EXPERTS
from tilepipe.config.schemas import config_from_dict
from tilepipe.experiments.comm_ctas import with_comm_ctas
from tilepipe.experiments.setting import placed_routing
from tilepipe.launch import describing, driver
from tilepipe.launch.describing import Describing, Undescribed
from tilepipe.launch.driver import run_points
from tilepipe.launch.worker import Described, describe
from tilepipe.records import Status
from tilepipe.stopping import Stopping

TINY = ("workload=tiny", "measure=quick", "launch.num_ranks=2")


@pytest.fixture
def no_ranks(monkeypatch):
    def start(*_, **__):
        raise AssertionError("a rank was started")

    monkeypatch.setattr(driver, "start_ranks", start)


@pytest.fixture(scope="module")
def fault():
    """Asks one process about every point of this file."""
    with closing(Describing(Stopping())) as asked:
        yield asked.fault


@pytest.mark.parametrize("hardware", ["cpu", "h200_x1"])
@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("routing", ["zipf", "hot_rank"])
def test_a_capacity_that_is_too_small_is_told_with_the_smallest_that_works(
    point, fault, hardware, layout, routing
):
    words = (*TINY, f"hardware={hardware}", f"kernel.layout={layout}", f"routing={routing}")

    status, sentence = fault(point(*words, "kernel.capacity_factor=0.01"))
    found = re.fullmatch(
        r"kernel\.capacity_factor=0\.01: gives (\d+) receive rows a rank, and rank \d would "
        r"receive (\d+); use at least (\S+), or null for the worst case",
        sentence,
    )

    assert status is Status.refused
    assert int(found[1]) < int(found[2])
    assert fault(point(*words, f"kernel.capacity_factor={found[3]}")) is None
    less = float(found[3]) - 0.001
    assert fault(point(*words, f"kernel.capacity_factor={less}"))[0] is Status.refused


def test_it_is_a_row_of_status_refused_and_the_other_points_run(point, tmp_path, no_ranks, capsys):
    code = run_points([point(*TINY, "kernel.capacity_factor=0.01")], results_dir=tmp_path)

    assert code == 1
    assert "[1/1] refused: kernel.capacity_factor=0.01: gives" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("routing=trace", "routing.path={}/none.jsonl"), "none.jsonl: no such file"),
        (("routing=counts", "routing.path={}/none.npy"), "none.npy: no such file"),
        (("placement=file", "placement.path={}/none.npy"), "none.npy: no such file"),
        (("placement=file", "placement.path={}/layers.npy"), "layers.npy holds layers 0..2"),
        (("routing=trace", "routing.path={}/topk.npy"), "type workload.num_topk=1"),
    ],
)
def test_what_a_file_lacks_is_told_before_ranks_start(
    point, tmp_path, no_ranks, capsys, words, said
):
    np.save(tmp_path / "layers.npy", np.tile(np.arange(8, dtype=np.int32), (3, 1)))
    np.save(tmp_path / "topk.npy", np.zeros((5, 1), np.int32))
    typed = [word.format(tmp_path) for word in words]

    code = run_points([point(*TINY, *typed)], results_dir=tmp_path / "out")

    out = capsys.readouterr().out
    assert code == 1
    assert "[1/1] refused: " in out
    assert said in out


def test_more_experts_than_the_plan_kernel_counts_are_told_before_ranks_start(point, fault):
    many = 2 * MAX_PLANNED_EXPERTS
    words = ("hardware=h200_x1", "kernel.planner=device", f"workload.num_experts={many}")

    status, sentence = fault(point(*TINY, *words))

    assert status is Status.refused
    assert sentence.startswith("kernel.planner=device: the plan kernel counts at most")


def test_points_whose_settings_tell_all_are_not_asked_about(point, fault, monkeypatch):
    def unexpected(self, container):
        raise AssertionError("asked")

    monkeypatch.setattr(Describing, "_ask", unexpected)

    assert fault(point(*TINY, "routing=zipf")) is None


def test_a_routing_that_memory_does_not_hold_is_a_row_of_status_oom(point, monkeypatch):
    monkeypatch.setattr(describing, "describe", entries.is_killed_by_nine_tokens)

    words = (*TINY, "kernel.capacity_factor=9", "workload.num_tokens=9")

    with closing(Describing(Stopping())) as one:
        status, sentence = one.fault(point(*words))

    assert status is Status.oom
    assert sentence.startswith("workload.num_tokens=9, workload.num_experts=8: their routing does")


def test_points_that_differ_in_how_they_are_timed_are_asked_about_once(point, monkeypatch):
    asked = []
    monkeypatch.setattr(Describing, "_ask", lambda self, container: asked.append(1) or Described(5))
    words = (*TINY, "kernel.capacity_factor=9")

    with closing(Describing(Stopping())) as one:
        sizes = [one.described(point(*words, f"measure.num_iters={n}")) for n in (3, 4)]

    assert (sizes, asked) == ([Described(5)] * 2, [1])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("hardware=h200_x1", "kernel.num_comm_ctas=auto"), True),
        (("hardware=h200_x1", "kernel.num_comm_ctas=auto", "kernel.roles=switch"), True),
        (
            (
                *("hardware=h200_x1", "hardware.num_sms=null"),
                *("kernel.num_comm_ctas=auto", "kernel.roles=switch"),
            ),
            False,
        ),
        (("hardware=h200_x1",), False),
        (("hardware=cpu",), False),
    ],
)
def test_a_count_of_ctas_that_is_to_be_found_is_told_before_a_run(point, words, expected):
    sizes = ("workload=deepseek_v3_ep8_rank", "workload.num_tokens=512")
    config = point("kernel=dispatch_gemm", *sizes, *words).config

    told = describe(config)

    found = None
    if expected:
        asked = config_from_dict(config)
        found = with_comm_ctas(asked, placed_routing(asked), num_sms=132).kernel.num_comm_ctas
    assert told.num_bytes > 2**20
    assert told.num_comm_ctas == found


def test_a_dry_run_shows_the_count_of_ctas_that_it_would_take(point, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(describing, "describe", entries.takes_seven_ctas)
    monkeypatch.setenv("COLUMNS", "300")

    assert run_points([point(*TINY, "dry_run=true")], results_dir=tmp_path) == 0

    assert "run; num_comm_ctas: 7" in capsys.readouterr().out


def test_a_file_of_which_a_library_dies_is_named(point, tmp_path, monkeypatch):
    monkeypatch.setattr(describing, "describe", entries.dies_of_its_file)
    path = tmp_path / "trace.parquet"

    with closing(Describing(Stopping())) as one:
        status, sentence = one.fault(point(*TINY, "routing=trace", f"routing.path={path}"))

    assert status is Status.refused
    assert sentence == (
        f"routing.path={path}: reading it ended the process by SIGABRT: its content is damaged; "
        "write the file again"
    )


def test_what_is_no_fault_of_the_user_is_left_to_the_ranks_and_their_logs(point, monkeypatch):
    monkeypatch.setattr(describing, "describe", entries.raises_a_key_error)
    words = (*TINY, "kernel.capacity_factor=9")

    with closing(Describing(Stopping())) as one:
        assert one.fault(point(*words)) is None
        with pytest.raises(Undescribed, match="ended with code 1: a fault of ours"):
            one.described(point(*words))
