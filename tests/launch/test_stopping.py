"""Signals that ask this process to end: once, later, or at once."""

import contextlib
import signal
import subprocess
import sys

import pytest

from tilepipe.launch.stopping import Interrupted, Stopping


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_raises_and_the_second_lets_what_follows_end(number):
    stopping = Stopping()
    ended = []

    with stopping.listening():
        try:
            signal.raise_signal(number)
        except Interrupted as error:
            signal.raise_signal(number)
            ended.append(str(error))

    assert ended == [number.name]


def test_a_signal_waits_while_something_is_held_until_the_next_look():
    stopping = Stopping()
    stored = []

    with stopping.listening():
        with stopping.held():
            signal.raise_signal(signal.SIGTERM)
            stored.append(True)
        with pytest.raises(Interrupted, match="SIGTERM"):
            stopping.check()

    assert stored == [True]


def test_what_is_heard_may_be_ended_within_what_is_held():
    stopping = Stopping()

    with stopping.listening(), stopping.held():
        with stopping.heard():
            pass
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted, match="SIGINT"), stopping.heard():
            raise AssertionError("a signal was waiting")


def test_what_a_library_swallowed_is_raised_at_the_next_look_until_all_is_held():
    stopping = Stopping()

    with stopping.listening():
        with contextlib.suppress(Exception):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted, match="SIGINT"):
            stopping.check()
        stopping.hold()
        stopping.check()


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


def test_the_third_signal_ends_the_process_whatever_it_holds():
    program = """
import signal
from tilepipe.launch.stopping import Stopping
stopping = Stopping()
with stopping.listening(), stopping.held():
    for number in range(3):
        print(number, flush=True)
        signal.raise_signal(signal.SIGINT)
    print("not reached")
"""

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert done.stdout.split() == ["0", "1", "2"]
    assert done.returncode == -signal.SIGINT
