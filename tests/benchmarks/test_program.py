"""How benchmarks end: without a GPU in a sentence, interrupted with what they have measured."""

import csv
import pkgutil
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

import benchmarks
from benchmarks import program
from benchmarks.program import EXIT_LATE, NotHere, job_code, need_gpus, num_started
from tilepipe.stopping import Interrupted

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

ROOT = Path(benchmarks.__file__).resolve().parents[1]
# Of the program modules those that measure on a GPU.
ON_GPU = [
    *("beside_limit", "beside_tiles", "comm_ctas", "depths", "gemm_peers", "home_times"),
    *("home_ways", "overlap_times", "plan_times", "stamps_agree"),
]


def programs():
    modules = [found.name for found in pkgutil.iter_modules(benchmarks.__path__)]
    return [name for name in modules if "__main__" in (ROOT / f"benchmarks/{name}.py").read_text()]


def test_every_program_is_started_and_ended_alike():
    for name in programs():
        assert (ROOT / f"benchmarks/{name}.py").read_text().endswith("    run(main)\n"), name


CHECKED = [path.stem for path in sorted((ROOT / "tests/gpu").glob("sanitized*.py"))]


@pytest.mark.parametrize("name", [*CHECKED, "handshake"])
def test_a_program_for_sanitizers_that_finds_no_gpu_says_so(name, monkeypatch):
    module = __import__(f"tests.gpu.{name}", fromlist=["main"])
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert Path(module.__file__).read_text().endswith(("    run(main)\n", ".run(main)\n"))
    with pytest.raises(NotHere, match="this program needs 1 NVIDIA GPU"):
        module.main()


@pytest.mark.parametrize("name", ON_GPU)
def test_a_benchmark_that_finds_no_gpu_says_so_and_writes_nothing(name, tmp_path, monkeypatch):
    module = __import__(f"benchmarks.{name}", fromlist=["main"])
    monkeypatch.setattr(sys, "argv", [f"{name}.py", str(tmp_path / "out")])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(NotHere, match="this program needs 1 NVIDIA GPU"):
        module.main()

    assert list(tmp_path.iterdir()) == []


def test_too_few_gpus_are_told_with_their_number(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    need_gpus(2)
    with pytest.raises(NotHere, match=r"needs 4 NVIDIA GPUs and torch finds 2; start it on a host"):
        need_gpus(4)


def test_processes_that_were_not_started_together_are_told_how(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", ["/anywhere/benchmarks/home_links.py", "FOLDER"])
    sentence = (
        "WORLD_SIZE is not set: start a process a GPU, as in python -m torch.distributed.run "
        "--nproc-per-node 2 -m benchmarks.home_links FOLDER"
    )

    with pytest.raises(NotHere, match=f"^{re.escape(sentence)}$"):
        num_started()


def ended(body, *, cwd):
    program = f"""
import signal, time
from benchmarks.program import NotHere, run
from pathlib import Path
def main():
{body}
run(main)
"""
    return subprocess.run(
        [sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("    return 3", 3, ""),
        ("    return 'failed: a'", 1, "failed: a\n"),
        ("    raise NotHere('no GPU')", 2, "no GPU\n"),
        (
            "    for _ in range(3): signal.raise_signal(signal.SIGTERM)",
            130,
            "stopped by SIGTERM: what was measured before is written\n",
        ),
    ],
)
def test_a_benchmark_ends_with_a_sentence_and_never_a_traceback(body, code, said, tmp_path):
    done = ended(body, cwd=ROOT)

    assert (done.returncode, done.stderr) == (code, said)


WRITES = """
import signal, sys, time
from pathlib import Path
def end(*_):
    Path(sys.argv[1]).write_text("measured")
    sys.exit(3)
signal.signal(signal.SIGTERM, end)
Path(sys.argv[1]).write_text("began")
time.sleep(60)
"""


def test_a_job_that_is_late_may_write_what_it_has(tmp_path):
    out = tmp_path / "out"
    begin = time.monotonic()

    words = [sys.executable, "-c", WRITES, str(out)]
    code = job_code(words, errors=tmp_path / "errors", limit_s=1.5)

    assert code == EXIT_LATE
    assert out.read_text() == "measured"
    assert time.monotonic() - begin < 30


def measured_lines(path):
    with path.open(newline="") as file:
        return [(row["num_comm_ctas"], row["median_us"]) for row in csv.DictReader(file)]


def test_jobs_that_are_interrupted_leave_the_lines_of_those_that_ran(tmp_path, monkeypatch):
    from benchmarks import comm_ctas

    out = tmp_path / "out.csv"
    jobs = comm_ctas.JOBS[:3]
    stale = out.with_suffix(f".{jobs[2]}.csv")
    comm_ctas.write(stale, [["of an earlier run", *[""] * 4, "9", *[""] * 5]])

    def fake(words, *, errors, limit_s):
        if jobs[1] in words:
            comm_ctas.write(Path(words[3]), [[*[""] * 5, "4", "5.0", *[""] * 4]])
            raise Interrupted("SIGINT")
        comm_ctas.write(Path(words[3]), [[*[""] * 5, "2", "7.0", *[""] * 4]])
        return 0

    monkeypatch.setattr(comm_ctas, "job_code", fake)
    monkeypatch.setattr(comm_ctas, "need_gpus", lambda: None)
    words = [part for job in jobs for part in ("--job", job)]
    monkeypatch.setattr(sys, "argv", ["comm_ctas.py", str(out), *words])

    with pytest.raises(Interrupted):
        comm_ctas.main()

    assert measured_lines(out) == [("2", "7.0"), ("4", "5.0")]


def test_a_job_that_is_interrupted_leaves_what_it_has_compared_and_timed(tmp_path, monkeypatch):
    from benchmarks import comm_ctas

    class Bench:
        num_sms = 8
        session = types.SimpleNamespace(
            config=types.SimpleNamespace(
                kernel=types.SimpleNamespace(copy=types.SimpleNamespace(name="simt"))
            )
        )

        def __init__(self, stack, operation, *, num_ranks, cluster_m):
            pass

        def prepare(self, way):
            return "does not fit" if way.num_ctas == 6 else "ok"

        def timed(self, way, number):
            if number == 11:  # of 2 counts with 2 warm-ups: the fourth iteration
                raise Interrupted("SIGTERM")
            return {"stage": (0, 1000 * way.num_ctas)}

    monkeypatch.setattr(comm_ctas, "Bench", Bench)
    out = tmp_path / "part.csv"

    ways = [comm_ctas.Way(count) for count in (2, 4, 6, 64)]

    with pytest.raises(Interrupted):
        comm_ctas.run_job("dispatch_gemm-1-1", out, 12, ways)

    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["num_comm_ctas"], row["median_us"], row["verdict"]) for row in rows] == [
        ("2", "2.0", "ok"),
        ("4", "4.0", "ok"),
        ("6", "", "does not fit"),
    ]


def test_counts_are_neighbours_of_their_own_kind_and_no_count_has_none():
    from benchmarks import comm_ctas
    from benchmarks.comm_ctas import Way

    ways = [Way(0), *(Way(count, joins) for count in (2, 4, 6) for joins in (True, False))]
    assert list(comm_ctas.ways_of("dispatch_gemm-8-1", (0, 2, 4, 6), at_once=True)) == ways
    assert list(comm_ctas.ways_of("dispatch_gemm-8-2", (0, 2), at_once=False)) == [Way(2)]
    assert list(comm_ctas.ways_of("gemm_combine-8-1", (0, 2), at_once=True)) == [Way(0), Way(2)]
    taken = {way: [1000 * (way.num_ctas + 10 * (way == Way(4)) or 7)] for way in ways}

    lines = comm_ctas.lines_of(["op", "8", "1", "simt"], dict.fromkeys(ways, "ok"), taken)

    columns = comm_ctas.COLUMNS
    told = [dict(zip(columns, line, strict=True)) for line in lines]
    assert [(row["roles"], row["num_comm_ctas"], row["over_line"]) for row in told] == [
        ("beside", "0", ""),
        ("switch", "2", ""),
        ("switch_at_once", "2", ""),
        ("switch", "4", "3.5000"),
        ("switch_at_once", "4", "1.0000"),
        ("switch", "6", ""),
        ("switch_at_once", "6", ""),
    ]


def test_rows_stand_in_the_file_as_soon_as_they_are_known(tmp_path, capsys):
    from benchmarks.beside_limit import write_as_measured

    def rows():
        yield {"a": 1, "b": 2}
        raise Interrupted("SIGINT")

    with pytest.raises(Interrupted):
        write_as_measured(tmp_path / "out.csv", rows())

    assert (tmp_path / "out.csv").read_text() == "a,b\n1,2\n"


def test_children_of_stamps_agree_end_with_it_and_what_ended_is_told(tmp_path, monkeypatch):
    from benchmarks import stamps_agree

    monkeypatch.setattr(stamps_agree, "need_gpus", lambda: None)
    monkeypatch.setattr(sys, "argv", ["stamps_agree.py", str(tmp_path), "dispatch_switch"])

    def interrupted(names, folder, limit_s, lock):
        (folder / "one.json").write_text("{}")
        raise Interrupted("SIGINT")

    monkeypatch.setattr(stamps_agree, "_run_all", interrupted)

    with pytest.raises(Interrupted):
        stamps_agree.main()

    assert len((tmp_path / "agreement.csv").read_text().splitlines()) == 2


@pytest.mark.parametrize("is_ready", [True, False])
def test_jobs_of_stamps_agree_wait_for_each_other_and_not_for_ever(tmp_path, monkeypatch, is_ready):
    from benchmarks import stamps_agree

    rests = []
    monkeypatch.setattr(stamps_agree, "_READY_S", 0.3)
    monkeypatch.setattr(stamps_agree.time, "sleep", rests.append)
    (tmp_path / "jobs").write_text("one\nother")
    if is_ready:
        (tmp_path / "other.ready").touch()

    stamps_agree._await_others("one", tmp_path)

    assert (tmp_path / "one.ready").exists()
    assert bool(rests) != is_ready


@pytest.mark.parametrize(
    ("codes", "total_s", "said", "failed"),
    [
        ((0, 0), 60.0, "one: ended with 0 after 0 s\nother: ended with 0 after 0 s\n", False),
        ((1, 0), 60.0, "one: ended with 1 after 0 s\nother: ended with 0 after 0 s\n", True),
        ((), 5.0, "one: found no time\nother: found no time\n", True),
    ],
)
def test_jobs_run_one_after_the_other_and_one_that_fails_is_told(
    codes, total_s, said, failed, tmp_path, monkeypatch, capsys
):
    left, started = list(codes), []

    def code_of(words, *, errors, limit_s):
        started.append((words[1:], errors.name, limit_s <= 30.0))
        return left.pop(0)

    monkeypatch.setattr(program, "job_code", code_of)
    found = program.run_jobs(
        *("benchmarks.x", ["one", "other"], tmp_path),
        more=("--iters", "2"),
        total_s=total_s,
        limit_s=30.0,
        least_s=10.0,
    )

    assert (found, capsys.readouterr().out) == (failed, said)
    assert [job for _, job, _ in started] == ["one.stderr", "other.stderr"][: len(codes)]
    assert all(words[:2] == ["-m", "benchmarks.x"] for words, *_ in started)
    assert all(limited for *_, limited in started)
