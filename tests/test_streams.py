"""Standard streams that are closed, full, or of a terminal that has gone."""

import errno
import fcntl
import io
import os
import shutil
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tilepipe.streams import BearingStream

PUBLISHED = Path(__file__).parents[1] / "results" / "h200_x1"
POINT = ("hardware=cpu", "workload=tiny", "kernel=dispatch", "measure=quick")


def shell(words, folder):
    command = f"{sys.executable} -m {words}"
    return subprocess.run(
        ["sh", "-c", command], cwd=folder, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">/dev/full 2>/dev/full"])
def test_a_point_runs_where_nobody_can_be_told(closed, tmp_path):
    done = shell(f"tilepipe.run {' '.join(POINT)} results_dir=out {closed}", tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert len(list(tmp_path.glob("out/*/*/samples.parquet"))) == 1


@pytest.mark.parametrize(
    ("words", "code"), [("tilepipe.list keys >&-", 0), ("tilepipe.validate nowhere 2>&-", 2)]
)
def test_other_programs_bear_a_closed_stream(words, code, tmp_path):
    done = shell(words, tmp_path)

    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("run --cfg job", 1),
        ("run --help", 1),
        (f"run {' '.join(POINT)} dry_run=true", 1),
        ("list keys", 1),
        ("list kez", 2),
        ("doctor", 1),
        ("validate {root}", 1),
        ("compare {root} {root}", 1),
        ("compare {root} {root} --json -", 1),
        ("export {root}", 1),
        ("timeline --help", 1),
    ],
)
def test_output_that_cannot_be_written_is_one_sentence(words, code, tmp_path):
    words = words.format(root=PUBLISHED / "dispatch_gemm_granularity")

    done = shell(f"tilepipe.{words} >/dev/full", tmp_path)

    assert done.returncode == code
    if code == 1:
        sentences = done.stderr.splitlines()
        assert sentences[-1] == (
            "standard output: No space left on device: not all is written; lead it elsewhere"
        )
        assert not any("Traceback" in sentence for sentence in sentences)
    else:
        assert "standard output" not in done.stderr


@pytest.mark.parametrize("words", ["run --help", "run --cfg job", "list", "doctor"])
def test_a_reader_that_leaves_has_seen_enough(words, tmp_path):
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m tilepipe.{words} | true; exit ${{PIPESTATUS[0]}}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_what_a_program_makes_does_not_hang_on_being_told_of_it(tmp_path):
    (tmp_path / "runs" / "name" / "point").mkdir(parents=True)
    (tmp_path / "runs" / "name" / "point" / "point.json").write_text("{")
    shutil.copytree(PUBLISHED / "dispatch_gemm_granularity", tmp_path / "runs" / "published")

    done = shell("tilepipe.export runs --output times.csv 2>/dev/full", tmp_path)

    assert done.returncode == 1  # a file could not be read
    assert (tmp_path / "times.csv").read_text().count("\n") > 2


def test_a_report_is_written_whole_whoever_hears_of_it(tmp_path):
    root = PUBLISHED / "dispatch_gemm_granularity"

    done = shell(f"tilepipe.report {root} out={tmp_path / 'report'} | head -c 0", tmp_path)

    assert done.stderr == ""
    assert (tmp_path / "report" / "report.md").is_file()


def test_a_terminal_that_goes_ends_the_program_in_a_sentence(tmp_path):
    mine, theirs = os.openpty()
    with (tmp_path / "errors").open("w") as errors:
        program = subprocess.Popen(
            [sys.executable, "-m", "tilepipe.run", "+experiment=dispatch_gemm_order", *POINT[::3]],
            cwd=tmp_path,
            stdin=theirs,
            stdout=theirs,
            stderr=errors,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        shown = b""
        while b"dispatch_gemm_order" not in shown:  # it has begun
            shown += os.read(mine, 4096)
        time.sleep(0.5)
        os.close(mine)

        assert program.wait(timeout=60) == 130
    told = (tmp_path / "errors").read_text()
    assert told.startswith("stopped by SIGHUP: ")
    assert told.count("\n") == 1


class Full(io.StringIO):
    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


class Left(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


def test_what_cannot_be_written_is_lost_but_that_a_reader_has_left_is_told():
    assert BearingStream(Full()).write("four") == 4
    with pytest.raises(BrokenPipeError):
        BearingStream(Left()).write("four")
    assert BearingStream(Left(), reader_may_leave=True).write("four") == 4
