"""Ctrl-C at any instant of a program's life, three times within 20 ms, as a key that bounces."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SWEEP = ("tilepipe.run", "workload=tiny", "measure=quick", "hardware=cpu", "launch.num_ranks=2")
PROGRAMS = {
    "run": (*SWEEP, "kernel.order=edf,random", "resume=none"),
    "dry run": (*SWEEP, "kernel.order=edf,random", "dry_run=true"),
    "list": ("tilepipe.list", "columns"),
    "validate": ("tilepipe.validate", "."),
}
# A program that is waited for longer than this after a signal hangs.
LIMIT_S = 20.0


def listen():
    """What runs in the background ignores SIGINT, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(words, cwd):
    """The program in a process group of its own, once it hears signals."""
    program = subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=listen,
    )
    while not hears(program.pid, signal.SIGTERM):
        assert program.poll() is None, program.stderr.read()
        time.sleep(0.001)
    return program


def hears(pid, number):
    """Whether a process has a handler for a signal; Python itself puts one only for SIGINT."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def burst(program, chance, *, whole_group):
    for _ in range(3):
        try:
            (os.killpg if whole_group else os.kill)(program.pid, signal.SIGINT)
        except ProcessLookupError:
            return
        time.sleep(chance.uniform(0.0, 0.01))


def told(program):
    """Exit code and stderr; a program that does not end is killed with all that it has started."""
    try:
        _, errors = program.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        program.communicate()
        pytest.fail("the program did not end")
    return program.returncode, errors


@pytest.mark.parametrize(
    ("what", "longest_s", "num_tries"),
    [("run", 3.0, 4), ("dry run", 1.5, 2), ("list", 0.3, 2), ("validate", 0.3, 2)],
)
def test_a_burst_at_any_instant_is_one_sentence_and_code_130(what, longest_s, num_tries, tmp_path):
    seed = time.time_ns()
    chance = random.Random(seed)
    for number in range(num_tries):
        program = start(PROGRAMS[what], tmp_path)
        after_s = longest_s * (number + chance.random()) / num_tries

        time.sleep(after_s)
        burst(program, chance, whole_group=bool(number % 2))
        code, errors = told(program)

        # Or it had ended by itself.
        ended = code == {"validate": 1}.get(what, 0) and not errors
        sentences = errors.splitlines()
        stopped = code == 130 and len(sentences) == 1 and sentences[0].startswith("stopped by SIGI")
        assert ended or stopped, (seed, after_s, code, errors)


def test_a_burst_at_the_start_leaves_no_scratch_folder(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    program = subprocess.Popen(
        [sys.executable, "-m", *PROGRAMS["run"]],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=listen,
    )

    while not list(scratch.glob("tilepipe-*")):  # tempfile tries out the folder before
        time.sleep(0.001)
    program.send_signal(signal.SIGINT)
    code, errors = told(program)

    assert (code, errors) == (130, "stopped by SIGINT before the end\n")
    assert list(scratch.iterdir()) == []
