"""A sweep ends with a row a point, a true exit code, and what was measured earlier still there."""

import json
import os
import signal
import threading

import pyarrow.parquet as pq
import pytest

from tilepipe import validate
from tilepipe.config import detect
from tilepipe.launch import driver
from tilepipe.launch.driver import run_points
from tilepipe.launch.ranks import RanksFailed
from tilepipe.records import RankRecord, Status, Verdict
from tilepipe.results.files import StoreError

TINY = ("workload=tiny", "measure=quick", "launch.num_ranks=2")


def rows(folder):
    table = pq.read_table(folder / "tiny" / "summary.parquet")
    return {(row["status"], row["reason"]) for row in table.to_pylist()}


def statuses(folder):
    found = [json.loads(path.read_text()) for path in folder.glob("tiny/*/point.json")]
    return sorted(document["status"] for document in found)


def test_good_points_leave_valid_files_and_exit_code_0(point, tmp_path, capsys):
    code = run_points([point(*TINY), point(*TINY, "kernel=combine")], results_dir=tmp_path)

    assert code == 0
    assert statuses(tmp_path) == ["ok", "ok"]
    assert validate.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "[2/2] ok: workload=tiny measure=quick launch.num_ranks=2 kernel=combine" in out
    assert "2 points valid, 0 faults" in out


# Words -> how the row ends and begins.
WRONG = {
    ("workload.num_experts=9",): ("refused", "workload.num_experts=9: must be a multiple of"),
    ("workload.num_topk=99",): ("refused", "workload.num_topk=99: must be at most"),
    ("workload.hidden=1001",): ("refused", "workload.hidden=1001: "),
    ("kernel.copy=tma",): ("refused", "kernel.copy=tma: the host executor has no copies"),
    ("kernel.num_comm_ctas=8",): (
        "refused",
        "kernel.num_comm_ctas=8: the host executor has no CTAs",
    ),
    ("routing=trace", "routing.path=/nowhere.jsonl"): (
        "refused",
        "routing.path=/nowhere.jsonl: ",
    ),
    ("kernel.capacity_factor=0.01",): ("refused", "kernel.capacity_factor=0.01: gives "),
    ("placement=file", "placement.path=/no.json"): (
        "refused",
        "placement.path=/no.json: no such file",
    ),
}


def test_a_wrong_value_is_a_row_with_one_sentence_and_the_other_points_run(point, tmp_path):
    points = [point(*TINY, *words) for words in WRONG]

    code = run_points([*points, point(*TINY)], results_dir=tmp_path)

    assert code == 1
    ended = rows(tmp_path)
    assert {reason for status, reason in ended if status == "ok"} == {""}
    failed = [row for row in ended if row[0] != "ok"]
    assert len(failed) == len(WRONG)
    for status, sentence in WRONG.values():
        (reason,) = (reason for found, reason in failed if reason.startswith(sentence))
        assert (status, reason) in failed
        assert "\n" not in reason
    assert validate.main([str(tmp_path)]) == 0


NO_GPU_HERE = "type hardware=cpu to run it on the host executor"


@pytest.mark.parametrize(
    ("words", "status", "reason"),
    [
        (
            ("hardware=h200_x8", "kernel=gemm_combine"),
            "skipped",
            f"hardware=h200_x8 needs 8 GPUs and this machine shows 0; {NO_GPU_HERE}",
        ),
        (
            ("hardware=h200_x1", "kernel=grouped_gemm"),
            "skipped",
            f"hardware=h200_x1 needs 1 GPU and this machine shows 0; {NO_GPU_HERE}",
        ),
        (
            ("hardware=h200_x1", "kernel=dispatch", "kernel.copy=tma"),
            "skipped",
            f"hardware=h200_x1 needs 1 GPU and this machine shows 0; {NO_GPU_HERE}",
        ),
        (
            ("hardware=h200_x2", "kernel=combine"),
            "skipped",
            f"hardware=h200_x2 needs 2 GPUs and this machine shows 0; {NO_GPU_HERE}",
        ),
        (
            ("hardware=h200_x1", "kernel=combine"),
            "skipped",
            f"hardware=h200_x1 needs 1 GPU and this machine shows 0; {NO_GPU_HERE}",
        ),
        (
            ("hardware=h200_x4", "kernel=dispatch", "launch.fabric=loopback"),
            "skipped",
            f"hardware=h200_x4 needs 4 GPUs and this machine shows 0; {NO_GPU_HERE}",
        ),
    ],
)
def test_points_without_hardware_end_with_the_next_step_and_that_is_no_error(
    point, tmp_path, monkeypatch, words, status, reason
):
    monkeypatch.setattr(detect, "gpu_names", lambda: ())

    code = run_points([point(*TINY[:2], *words)], results_dir=tmp_path)

    assert code == 0
    assert rows(tmp_path) == {(status, reason)}
    assert validate.main([str(tmp_path)]) == 0


def test_a_folder_of_results_that_is_shut_is_told_before_anything_runs(
    point, tmp_path, monkeypatch, capsys
):
    made = point(*TINY)
    (tmp_path / made.name).mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)

    code = run_points([made], results_dir=tmp_path)

    assert code == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / made.name}: Permission denied: name a folder that can be written" in said


@pytest.mark.parametrize(
    ("words", "names", "capability", "reason"),
    [
        (
            ("hardware=h200_x1",),
            ("NVIDIA H100 80GB HBM3",),
            (9, 0),
            "hardware=h200_x1 is for H200 and this machine has NVIDIA H100 80GB HBM3; type "
            f"hardware=auto, or {NO_GPU_HERE.removeprefix('type ')}",
        ),
        (
            ("hardware=generic_x1",),
            ("NVIDIA A100-SXM4-80GB",),
            (8, 0),
            "kernels are built for compute capability 9.0 (H100, H200), and NVIDIA A100-SXM4-80GB "
            f"has 8.0; {NO_GPU_HERE}",
        ),
    ],
)
def test_gpus_that_are_not_the_ones_are_told_before_any_rank_starts(
    point, tmp_path, monkeypatch, words, names, capability, reason
):
    monkeypatch.setattr(detect, "gpu_names", lambda: names)
    monkeypatch.setattr(detect, "capabilities", lambda: (capability,) * len(names))

    code = run_points([point(*TINY[:2], "kernel=dispatch", *words)], results_dir=tmp_path)

    assert code == 0
    assert rows(tmp_path) == {("skipped", reason)}


def test_what_is_refused_is_not_skipped_for_want_of_hardware(point, tmp_path):
    words = ("hardware=h200_x1", "kernel=dispatch", "launch.num_ranks=9", "workload.num_experts=9")

    code = run_points([point(*TINY[:2], *words)], results_dir=tmp_path)

    assert code == 1
    assert rows(tmp_path) == {
        (
            "refused",
            "launch.num_ranks=9: launch.fabric=loopback takes 1..8: its ranks share one GPU",
        )
    }


def test_a_point_runs_where_as_many_gpus_are_seen_as_its_hardware_names(
    point, tmp_path, monkeypatch
):
    monkeypatch.setattr(detect, "gpu_names", lambda: ("NVIDIA H200",))
    started = []

    def start(at, **kwargs):
        started.append(at.executor)
        raise RanksFailed(Status.compile_error, "dispatch: no registers", "")

    monkeypatch.setattr(driver, "start_ranks", start)

    code = run_points(
        [point(*TINY[:2], "hardware=h200_x1", "kernel=dispatch")], results_dir=tmp_path
    )

    assert (code, started) == (1, ["cuda"])
    assert rows(tmp_path) == {("compile_error", "dispatch: no registers")}


def fake_record(rank, *, passed):
    verdict = Verdict(
        contender="fused",
        stage="after",
        passed=passed,
        num_values=8,
        num_wrong=0 if passed else 3,
        max_error=0.0 if passed else 1.5,
        detail="" if passed else "3 of 8 values differ",
    )
    names = ("all_rows", "max_expert_rows", "max_rank_rows", "max_physical_rows")
    counts = dict.fromkeys((*names, "num_physical", "logical_bytes", "num_tokens"), 4)
    return RankRecord(rank=rank, samples=(), verdicts=(verdict,), counts=counts)


def test_a_failed_gate_leaves_a_row_incorrect_and_no_time(point, tmp_path, monkeypatch):
    records = (fake_record(0, passed=True), fake_record(1, passed=False))
    monkeypatch.setattr(driver, "start_ranks", lambda *_, **__: records)

    code = run_points([point(*TINY)], results_dir=tmp_path)

    assert code == 1
    assert rows(tmp_path) == {
        (
            "incorrect",
            "fused on rank 1 differs from the oracle after timing: 3 of 8 values differ",
        )
    }
    (samples,) = tmp_path.glob("tiny/*/samples.parquet")
    assert pq.read_table(samples).num_rows == 0


def test_a_sweep_goes_on_after_a_failed_point_and_keeps_its_log(point, tmp_path, monkeypatch):
    real = driver.start_ranks

    def fails_first(at, **kwargs):
        if "kernel=dispatch" in at.overrides:
            raise RanksFailed(Status.runtime_error, "rank 0 died by SIGSEGV", "last lines")
        return real(at, **kwargs)

    monkeypatch.setattr(driver, "start_ranks", fails_first)

    code = run_points([point(*TINY, "kernel=dispatch"), point(*TINY)], results_dir=tmp_path)

    assert code == 1
    assert statuses(tmp_path) == ["ok", "runtime_error"]
    (log,) = tmp_path.glob("tiny/*/logs/first_failure.log")
    assert log.read_text() == "last lines\n"


def test_a_point_is_run_once_however_often_it_is_listed(point, tmp_path, monkeypatch):
    ran = []

    def count(at, **kwargs):
        ran.append(at.folder)
        raise RanksFailed(Status.timeout, "too long", "")

    monkeypatch.setattr(driver, "start_ranks", count)

    run_points([point(*TINY), point(*TINY)], results_dir=tmp_path)

    assert len(ran) == 1


@pytest.fixture
def ctrl_c():
    """Sends SIGINT as a terminal does: any thread may get it, the main one handles it."""
    wanted, sent = threading.Semaphore(0), threading.Semaphore(0)

    def send():
        while wanted.acquire() and not done:
            signal.raise_signal(signal.SIGINT)
            sent.release()

    def press():
        wanted.release()
        sent.acquire()

    done = []
    # Begun before anything could keep signals off the threads that come later.
    thread = threading.Thread(target=send)
    thread.start()
    yield press
    done.append(True)
    wanted.release()
    thread.join()


def test_a_second_ctrl_c_leaves_the_summary_of_what_was_measured(
    point, tmp_path, monkeypatch, capsys, ctrl_c
):
    ranks, write = driver.start_ranks, driver.write_summary

    def interrupted(at, **kwargs):
        if "kernel=dispatch" in at.overrides:
            ctrl_c()
        return ranks(at, **kwargs)

    def interrupted_again(*args):
        ctrl_c()
        return write(*args)

    monkeypatch.setattr(driver, "start_ranks", interrupted)
    monkeypatch.setattr(driver, "write_summary", interrupted_again)

    code = run_points([point(*TINY), point(*TINY, "kernel=dispatch")], results_dir=tmp_path)

    assert code == 130
    assert statuses(tmp_path) == ["ok"]
    captured = capsys.readouterr()
    assert "stopped by SIGINT: 1 of 2 points did not run" in captured.err
    assert "summary.parquet" in captured.out
    rows = pq.read_table(tmp_path / "tiny" / "summary.parquet").to_pylist()
    assert {row["operation"] for row in rows} == {"dispatch_gemm"}


def test_a_point_that_has_just_been_measured_is_stored_before_the_sweep_ends(
    point, tmp_path, monkeypatch, capsys
):
    real = driver.start_ranks

    def measured(at, **kwargs):
        records = real(at, **kwargs)
        signal.raise_signal(signal.SIGINT)
        return records

    monkeypatch.setattr(driver, "start_ranks", measured)

    code = run_points([point(*TINY), point(*TINY, "kernel=dispatch")], results_dir=tmp_path)

    assert code == 130
    assert statuses(tmp_path) == ["ok"]
    assert "stopped by SIGINT: 1 of 2 points did not run" in capsys.readouterr().err


def test_an_unwritable_results_folder_is_said_before_anything_runs(point, tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("no folder")

    code = run_points([point(*TINY)], results_dir=blocked / "outputs")

    assert code == 2
    assert capsys.readouterr().err == (
        f"{blocked}/outputs: Not a directory: name a folder that can be written with results_dir=\n"
    )


def test_on_a_full_disk_the_sweep_ends_with_a_sentence_and_earlier_points_stay(
    point, tmp_path, monkeypatch, capsys
):
    run_points([point(*TINY)], results_dir=tmp_path)
    write = driver.write_outcome

    def full(folder, outcome, facts):
        if outcome.status is Status.ok:
            raise StoreError(28, f"{folder}: No space left on device: free some space")
        write(folder, outcome, facts)

    monkeypatch.setattr(driver, "write_outcome", full)

    points = [point(*TINY, "kernel=dispatch"), point(*TINY, "kernel=combine")]
    code = run_points(points, results_dir=tmp_path)

    assert code == 1
    assert statuses(tmp_path) == ["ok"]
    error = capsys.readouterr().err
    assert "No space left on device: free some space; 2 of 2 points are not stored" in error


def test_a_point_run_again_keeps_the_folder_of_the_first_run(point, tmp_path):
    run_points([point(*TINY)], results_dir=tmp_path)
    run_points([point(*TINY, "resume=none")], results_dir=tmp_path)

    folders = sorted(path.name for path in (tmp_path / "tiny").iterdir() if path.is_dir())
    assert len(folders) == 2
    assert folders[1] == f"{folders[0]}.1"


def test_iterations_end_at_the_limit_where_no_interval_is_ever_narrow_enough(point, tmp_path):
    words = ("measure.num_iters=6", "measure.max_iters=9", "measure.interval=1e-9")

    code = run_points([point(*TINY, "kernel=dispatch", *words)], results_dir=tmp_path)

    assert code == 0
    (samples,) = tmp_path.glob("tiny/*/samples.parquet")
    iterations = pq.read_table(samples).column("iteration").to_pylist()
    assert sorted(set(iterations)) == list(range(9))
