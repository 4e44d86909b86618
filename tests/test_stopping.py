"""Signals that ask this process to end: remembered, broken off, or the end at once."""

import signal
import subprocess
import sys

import pytest

from tilepipe import stopping as stopping_module
from tilepipe.stopping import ASKING, Interrupted, Stopping, temporary_folder


@pytest.fixture
def later(monkeypatch):
    """Lets time pass, so that the next signal is no part of the same burst."""
    now = [100.0]
    monkeypatch.setattr(stopping_module.time, "monotonic", lambda: now[0])

    def pass_by():
        now[0] += 2.0

    return pass_by


@pytest.mark.parametrize("number", ASKING)
def test_a_signal_is_remembered_until_the_next_look_and_raises_nowhere_else(number):
    stopping = Stopping()
    done = []

    with stopping.listening():
        with stopping.broken_off():
            signal.raise_signal(number)
            done.append(True)
        with pytest.raises(Interrupted, match=number.name):
            stopping.check()

    assert done == [True]


def test_a_burst_counts_as_one_signal():
    stopping = Stopping()

    with stopping.listening(), stopping.broken_off():
        for _ in range(5):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted, match="SIGINT"):
            stopping.check()


def test_the_second_signal_breaks_off_what_did_not_look_for_the_first(later):
    stopping = Stopping()

    with stopping.listening():
        signal.raise_signal(signal.SIGTERM)
        later()
        with pytest.raises(Interrupted, match="SIGTERM"), stopping.broken_off():
            signal.raise_signal(signal.SIGINT)


def test_the_second_signal_lets_what_the_first_set_off_come_to_its_end(later):
    stopping = Stopping()

    with stopping.listening(), stopping.broken_off():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted):
            stopping.check()
        later()
        signal.raise_signal(signal.SIGINT)


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)

    with Stopping().listening():
        pass

    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_was_ignored_before_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stopping().listening():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_the_third_signal_ends_the_process_and_its_ranks_in_a_sentence():
    program = """
import signal, subprocess, time
from tilepipe.stopping import Stopping
stopping, rank = Stopping(), subprocess.Popen(["sleep", "60"])
stopping.ranks = [rank.pid]
print(rank.pid, flush=True)
with stopping.listening():
    for number in range(3):
        print(number, flush=True)
        signal.raise_signal(signal.SIGINT)
        time.sleep(1.1)
    print("not reached")
"""

    done = run(program)

    pid, *numbers = done.stdout.split()
    assert numbers == ["0", "1", "2"]
    assert (done.returncode, done.stderr) == (130, "stopped by SIGINT before the end\n")
    gone = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True)
    assert gone.stdout.strip()[:1] in ("", "Z")


def test_a_program_that_loads_ends_in_a_sentence_and_leaves_nothing_half_written(tmp_path):
    program = f"""
import pathlib, signal
from tilepipe.stopping import end_when_asked, half_written
end_when_asked()
file, folder = pathlib.Path({str(tmp_path)!r}, "file"), pathlib.Path({str(tmp_path)!r}, "folder")
(folder / "within").mkdir(parents=True)
file.write_text("half")
with half_written(file), half_written(folder):
    signal.raise_signal(signal.SIGTERM)
"""

    done = run(program)

    assert (done.returncode, done.stderr) == (130, "stopped by SIGTERM before the end\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["rmtree", "write"])
def test_a_program_that_ends_says_so_once_whenever_it_is_asked_again(place, tmp_path):
    program = f"""
import os, pathlib, shutil, signal
from tilepipe.stopping import ASKING, end_when_asked, half_written
module = {{"rmtree": shutil, "write": os}}[{place!r}]
real = getattr(module, {place!r})
def asked_again(*given, **named):
    done = real(*given, **named)
    [signal.raise_signal(number) for number in ASKING]
    return done
setattr(module, {place!r}, asked_again)
end_when_asked()
with half_written(pathlib.Path({str(tmp_path)!r}, "folder")):
    pathlib.Path({str(tmp_path)!r}, "folder").mkdir()
    signal.raise_signal(signal.SIGINT)
"""

    done = run(program)

    assert (done.returncode, done.stderr) == (130, "stopped by SIGINT before the end\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_temporary_folder_is_left_at_no_instant_of_its_making(place, tmp_path):
    program = f"""
import os, pathlib, signal
from tilepipe.stopping import end_when_asked, temporary_folder
make = os.mkdir
def stopped(path, *given):
    {"" if place == "before" else "make(path, *given)"}
    signal.raise_signal(signal.SIGINT)
end_when_asked()
os.mkdir = stopped
with temporary_folder("kept-", beside=pathlib.Path({str(tmp_path)!r})):
    print("not reached")
"""

    done = run(program)

    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "stopped by SIGINT before the end\n"
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_folder_is_its_users_and_goes_with_the_block(tmp_path, monkeypatch):
    monkeypatch.setattr(stopping_module.tempfile, "tempdir", str(tmp_path))

    with temporary_folder("mine-") as first, temporary_folder("mine-") as second:
        assert first.parent == second.parent == tmp_path
        assert first.name.startswith("mine-")
        assert first != second
        assert first.stat().st_mode & 0o777 == 0o700
        (first / "within").mkdir()

    assert list(tmp_path.iterdir()) == []


def test_a_program_that_has_said_all_cannot_be_stopped_any_more():
    program = """
import atexit, signal
from tilepipe.stopping import ASKING, end_when_asked, leave
end_when_asked()
atexit.register(lambda: [signal.raise_signal(number) for number in ASKING])
leave(3)
"""

    done = run(program)

    assert (done.returncode, done.stderr) == (3, "")
