"""Which points are run again, in which order, and what is said about those that look alike."""

import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.launch import entries
from tilepipe.config import detect
from tilepipe.config.choices import L2, Resume
from tilepipe.config.schemas import Measure
from tilepipe.launch import console, describing, driver, worker, wrapped
from tilepipe.launch.driver import run_points
from tilepipe.launch.ranks import RanksFailed
from tilepipe.launch.reuse import in_order, reusable, stale_because
from tilepipe.records import RankRecord, Status, Verdict

TINY = ("workload=tiny", "measure=quick", "launch.num_ranks=2")


@pytest.fixture
def runs(monkeypatch):
    """Folders of the points that were really started; those of dispatch fail."""
    started, real = [], driver.start_ranks

    def count(at, **kwargs):
        started.append(at.folder)
        if at.operation == "dispatch":
            raise RanksFailed(Status.timeout, "too long", "")
        return real(at, **kwargs)

    monkeypatch.setattr(driver, "start_ranks", count)
    return started


def test_a_point_that_ended_ok_is_reused_and_the_first_line_says_so(point, tmp_path, runs, capsys):
    run_points([point(*TINY)], results_dir=tmp_path)
    capsys.readouterr()

    code = run_points([point(*TINY)], results_dir=tmp_path, announcement="CPU: 1 point")

    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert len(runs) == 1
    assert lines[0] == "CPU: 1 point; 1 of 1 reused (resume=none runs them again)"
    assert lines[1].startswith("[1/1] ok, reused: ")


@pytest.mark.parametrize(("resume", "num_runs"), [("ok", 2), ("any", 1), ("none", 2)])
def test_a_failed_point_is_run_again_unless_any_end_will_do(
    point, tmp_path, runs, resume, num_runs
):
    for _ in range(2):
        code = run_points(
            [point(*TINY, "kernel=dispatch", f"resume={resume}")], results_dir=tmp_path
        )
        assert code == 1

    assert len(runs) == num_runs


def test_a_point_whose_files_are_damaged_is_run_again(point, tmp_path, runs):
    run_points([point(*TINY)], results_dir=tmp_path)
    (samples,) = tmp_path.glob("tiny/*/samples.parquet")
    samples.write_bytes(samples.read_bytes()[:-7])

    run_points([point(*TINY)], results_dir=tmp_path)

    assert len(runs) == 2
    assert reusable(tmp_path, point(*TINY), Resume.ok) is not None


def test_another_build_is_measured_anew_and_every_change_is_named(point, tmp_path, runs, capsys):
    run_points([point(*TINY)], results_dir=tmp_path)
    build = {"sources": {"host": "b", "measure": "x"}, "versions": {"torch": "2"}, "cpu": "new"}
    other = replace(point(*TINY), build_id="1" * 8, build=build)
    capsys.readouterr()

    run_points([other], results_dir=tmp_path)

    assert len(runs) == 2
    assert capsys.readouterr().out.splitlines()[0] == (
        "measured before, but not reused: cpu changed, sources of tilepipe/host changed, sources "
        "of tilepipe/measure changed, torch 1 -> 2"
    )


def test_a_trace_with_other_content_is_measured_anew_and_said(point, tmp_path, runs):
    trace = tmp_path / "trace.npy"
    words = (*TINY, "kernel=combine", "routing=trace", f"routing.path={trace}")
    words += ("workload.num_topk=1",)
    np.save(trace, np.zeros((8, 1), np.int64))
    results_dir = tmp_path / "results"
    run_points([point(*words)], results_dir=results_dir)
    np.save(trace, np.ones((8, 1), np.int64))
    from tilepipe.config import identity

    identity._content.cache_clear()  # another process would read the file anew

    changed = point(*words)

    assert stale_because(results_dir, [changed]) == [f"{trace} has other content"]
    assert reusable(results_dir, changed, Resume.any) is None


def test_a_map_with_other_content_is_measured_anew_and_said(point, tmp_path, runs):
    experts = tmp_path / "map.json"
    words = (*TINY, "placement=file", f"placement.path={experts}", "kernel=dispatch")
    experts.write_text("[0, 1, 2, 3, 4, 5, 6, 7]")
    results_dir = tmp_path / "results"
    run_points([point(*words)], results_dir=results_dir)
    experts.write_text("[7, 6, 5, 4, 3, 2, 1, 0]")
    from tilepipe.config import identity

    identity._content.cache_clear()  # another process would read the file anew

    changed = point(*words)

    assert stale_because(results_dir, [changed]) == [f"{experts} has other content"]
    assert reusable(results_dir, changed, Resume.any) is None


def test_equal_points_are_listed_once_and_each_round_begins_one_later(point):
    a, b, c = (point(*TINY, f"workload.num_tokens={tokens}") for tokens in (1, 2, 3))

    listed = in_order([a, b, a, c], repetitions=2)

    tokens = [(p.config["workload"]["num_tokens"], p.repetition) for p in listed]
    assert tokens == [(1, 0), (2, 0), (3, 0), (2, 1), (3, 1), (1, 1)]
    assert len({p.folder for p in listed}) == 6
    assert listed[3].folder == f"{b.folder}-r1"


def test_a_value_that_is_refused_is_an_error_even_where_a_result_is_there(point, tmp_path, runs):
    run_points([point(*TINY)], results_dir=tmp_path)

    code = run_points([point(*TINY, "launch.time_limit_s=2e6")], results_dir=tmp_path)

    assert code == 1
    assert len(runs) == 1


def screen_width(monkeypatch, columns):
    """So wide that no sentence of a table wraps."""
    monkeypatch.setattr(console, "_PIPED_WIDTH", columns)


def test_a_dry_run_lists_points_with_their_memory_and_starts_nothing(
    point, tmp_path, runs, capsys, monkeypatch
):
    points = [
        point(*TINY, "dry_run=true"),
        point(*TINY, "dry_run=true", "kernel=combine", "workload.num_tokens=4000"),
        point("hardware=h200_x8", "dry_run=true", "kernel=moe_layer", "workload.num_tokens=8"),
    ]
    screen_width(monkeypatch, 400)

    code = run_points(points, results_dir=tmp_path)

    out = capsys.readouterr().out
    assert code == 0
    assert runs == []
    assert "3 points, nothing is run" in out
    assert "skipped: hardware=h200_x8 needs 8 GPUs" in out
    # 8000 tokens x topk 2, 8 experts of 2 ranks: recv rows 16000 + 4 x 127 gaps, 24 B each
    # (home and flag words), and 8000 home rows of 128 B.
    sizes = [
        float(word) for line in out.splitlines() for word in line.split("│")[-2:-1] if _num(word)
    ]
    assert sizes[0] < sizes[1]
    assert sizes[1] == pytest.approx(((16000 + 508) * 16 + 8000 * 128) / 2**20, rel=0.15)


def _num(word):
    try:
        float(word)
    except ValueError:
        return False
    return True


def test_a_dry_run_says_what_would_be_skipped_and_the_memory_it_would_need(
    point, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(detect, "gpu_names", lambda: ())
    monkeypatch.setattr(describing, "describe", entries.describes_its_experts)
    screen_width(monkeypatch, 400)
    words = ("hardware=h200_x1", "kernel=dispatch", "dry_run=true")

    code = run_points([point(*TINY[:2], *words)], results_dir=tmp_path)

    out = capsys.readouterr().out
    assert code == 0
    assert "skipped: hardware=h200_x1 needs 1 GPU and this machine shows 0; type hardware=" in out
    assert " 8.0 " in out


def test_a_dry_run_outlives_the_process_that_memory_did_not_suffice_for(
    point, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(describing, "describe", entries.is_killed_by_nine_tokens)
    screen_width(monkeypatch, 400)
    words = [*TINY, "dry_run=true"]

    code = run_points(
        [point(*words, f"workload.num_tokens={count}") for count in (9, 8)], results_dir=tmp_path
    )

    out = capsys.readouterr().out
    assert code == 1
    assert "workload.num_tokens=9, workload.num_experts=8: their routing does not fit into" in out
    assert " 8.0 " in out


def test_a_dry_run_with_a_wrong_value_says_it_and_fails(point, tmp_path, capsys):
    code = run_points([point(*TINY, "dry_run=true", "workload.num_topk=99")], results_dir=tmp_path)

    assert code == 1
    assert "workload.num_topk=99: must be at most" in capsys.readouterr().out


def test_fail_fast_stops_after_the_first_point_that_is_not_ok(point, tmp_path, runs, capsys):
    words = (*TINY, "fail_fast=true")

    code = run_points([point(*words, "kernel=dispatch"), point(*words)], results_dir=tmp_path)

    assert code == 1
    assert len(runs) == 1
    assert "fail_fast=true: 1 points did not run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("repetitions=0",), "repetitions=0: must be in 1..1000"),
        (("repetitions=99999999999",), "repetitions=99999999999: must be in 1..1000"),
        (("results_dir=''",), "results_dir=: must name a folder"),
    ],
)
def test_keys_of_the_sweep_are_checked_before_anything_runs(
    point, tmp_path, runs, words, sentence, capsys
):
    assert run_points([point(*TINY, *words)], results_dir=tmp_path) == 2
    assert capsys.readouterr().err.strip() == sentence


def test_a_name_that_is_no_folder_name_is_refused(point, tmp_path, capsys):
    assert run_points([point(*TINY, name="a/b")], results_dir=tmp_path) == 2
    assert "name=a/b: must be one word of letters, digits, _ and -" in capsys.readouterr().err


def test_a_name_that_no_file_system_takes_is_refused(point, tmp_path, capsys):
    assert run_points([point(*TINY, name="n" * 201)], results_dir=tmp_path) == 2
    assert "must be of at most 200 bytes: it names a folder" in capsys.readouterr().err


def test_a_folder_that_has_another_use_is_no_name(point, tmp_path, capsys):
    assert run_points([point(*TINY, name="report")], results_dir=tmp_path) == 2
    assert "name=report: has another use; take another name" in capsys.readouterr().err


def test_a_wrapped_point_runs_once_under_the_tool_and_leaves_no_time(point, tmp_path, capsys):
    tool = tmp_path / "tool.sh"
    tool.write_text('#!/bin/sh\necho "$1" > "$2/tool-$1"\nshift 2\nexec "$@"\n')
    tool.chmod(0o755)
    wrap = f"launch.wrap='{tool} {{rank}} {{dir}}'"

    code = run_points([point(*TINY, wrap)], results_dir=tmp_path / "results")

    assert code == 0
    (folder,) = (tmp_path / "results" / "wrapped" / "tiny").iterdir()
    assert sorted(path.name for path in folder.glob("tool-*")) == ["tool-0", "tool-1"]
    assert f"wrapped: {folder}" in capsys.readouterr().out
    assert not (tmp_path / "results" / "tiny").exists()


@pytest.mark.parametrize(
    ("wrap", "sentence"),
    [
        ("false", " exited with code 1; see logs/rank"),
        ("true", "launch.wrap: the tool ended without running every rank; see "),
    ],
)
def test_a_tool_that_does_not_run_the_ranks_is_a_sentence(point, tmp_path, capsys, wrap, sentence):
    code = run_points([point(*TINY, f"launch.wrap='{wrap}'")], results_dir=tmp_path)

    assert code == 1
    assert sentence in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrap", "sentence"),
    [
        ("/no/such/tool {rank}", "/no/such/tool was not found; install it or name its path"),
        ("echo {node}", "a name in braces that means nothing; quote it for a shell, with {dir}"),
    ],
)
def test_a_tool_that_cannot_start_is_told_once_and_leaves_nothing(
    point, tmp_path, capsys, wrap, sentence
):
    points = [point(*TINY, f"launch.wrap='{wrap}'", f"routing.seed={seed}") for seed in (0, 1)]

    code = run_points(points, results_dir=tmp_path / "results")

    assert code == 2
    assert capsys.readouterr().err.count(sentence) == 1
    assert not (tmp_path / "results").exists()


def test_inline_runs_the_point_in_this_process(point, tmp_path):
    words = (*TINY[:2], "launch.num_ranks=1", "launch.wrap=inline")

    assert run_points([point(*words)], results_dir=tmp_path) == 0
    assert not list(Path(tmp_path).glob("tiny/*"))


@pytest.fixture
def on_gpu(monkeypatch):
    """A stand-in for the cuda executor, on a machine with one GPU; keeps what it is given."""
    given = []
    stand_in = types.ModuleType("tilepipe.experiments.cuda.entry")

    def run_ranks(config):
        given.append(config)
        verdict = Verdict(
            contender="dispatch",
            stage="before",
            passed=config.workload.num_tokens != 13,
            num_values=1,
            num_wrong=int(config.workload.num_tokens == 13),
            max_error=0.0,
            detail="",
        )
        bare = {"samples": (), "counts": {}}
        return tuple(
            RankRecord(rank=rank, verdicts=(verdict,) if rank else (), **bare)
            for rank in range(config.launch.num_ranks)
        )

    stand_in.run_ranks = run_ranks
    stand_in.planned_comm_ctas = lambda config: None
    stand_in.symmetric_bytes_of = lambda config: config.workload.num_tokens * 1000
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.setattr(detect, "gpu_names", lambda: ("NVIDIA H200",))
    return given


@pytest.mark.parametrize(("tokens", "ends"), [(12, 0), (13, 1)])
def test_all_ranks_of_one_gpu_run_inline_once_whatever_was_typed_of_iterations(
    point, tmp_path, on_gpu, tokens, ends
):
    words = ("workload=tiny", "hardware=h200_x1", "kernel=dispatch", "launch.num_ranks=2")
    words += ("launch.wrap=inline", f"workload.num_tokens={tokens}", "measure.l2=warm")

    code = run_points([point(*words)], results_dir=tmp_path)

    (config,) = on_gpu
    assert code == ends
    assert config.launch.num_ranks == 2
    assert config.measure == Measure(num_warmups=0, num_iters=1, l2=L2.warm)


@pytest.mark.parametrize(("num_passed", "ends"), [(1, 0), (0, 1)])
def test_under_a_tool_all_ranks_of_one_gpu_are_one_process(
    point, tmp_path, monkeypatch, num_passed, ends
):
    monkeypatch.setattr(detect, "gpu_names", lambda: ("NVIDIA H200",))

    def start(at, *, log_dir, command, stopping):
        for rank in range(num_passed):
            (log_dir.parent / f"passed-{rank}").write_text("True")

    monkeypatch.setattr(wrapped, "start_wrapped_ranks", start)
    words = ("workload=tiny", "hardware=h200_x1", "kernel=dispatch", "launch.num_ranks=4")

    assert run_points([point(*words, "launch.wrap='true'")], results_dir=tmp_path) == ends


def test_the_memory_of_a_point_is_asked_of_its_executor(point, on_gpu):
    words = ("workload=tiny", "kernel=dispatch", "workload.num_tokens=24", "launch.num_ranks=2")
    on_host = worker.describe(point(*words).config)

    assert worker.describe(point(*words, "hardware=h200_x1").config) == (24_000, None)
    assert on_host not in ((0, None), (24_000, None))


def test_inline_with_two_ranks_is_refused(point, tmp_path, capsys):
    code = run_points([point(*TINY, "launch.wrap=inline")], results_dir=tmp_path)

    assert code == 1
    assert "launch.num_ranks=2: launch.wrap=inline runs one rank" in capsys.readouterr().out
