"""The timer on a device that is made up: no window holds the host's time."""

from itertools import chain, repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilepipe.measure.device import DeviceTimer

NS_PER_CYCLE = 0.5
SPIN_NS = 300_000
LONGEST_NS = 256 * SPIN_NS


class FakeStream:
    """A device that runs what is enqueued in order, each at once if it is idle.

    `stalls_ns` says how long the host is held before each call, in turn; then not at all.
    """

    LATENCY_NS = 3_000
    CALL_NS = 2_000

    def __init__(self, stalls_ns=()):
        self.host_ns = 1_000_000
        self.idle_from_ns = 0  # when the device is through with all there is
        self.waited_ns = []  # of each kernel: how long the device had nothing to do before it
        self.flushed = 0
        self.spins = []
        self._stalls_ns = chain(stalls_ns, repeat(0))

    def enqueue(self, duration_ns):
        self.host_ns += self.CALL_NS + next(self._stalls_ns)
        begin_ns = max(self.idle_from_ns, self.host_ns + self.LATENCY_NS)
        self.waited_ns.append(begin_ns - self.idle_from_ns)
        self.idle_from_ns = begin_ns + duration_ns

    def kernel(self, duration_ns):
        return lambda: self.enqueue(duration_ns)

    def flush(self):
        self.flushed += 1
        self.enqueue(40_000)

    def mark(self):
        self.enqueue(0)
        return self.idle_from_ns

    def spin(self, cycles):
        self.spins.append(cycles)
        self.enqueue(round(cycles * NS_PER_CYCLE))

    def elapsed_ns(self, first, last):
        self.host_ns = max(self.host_ns, last)
        return last - first

    def drain(self):
        self.host_ns = max(self.host_ns, self.idle_from_ns)

    def now_ns(self):
        return self.host_ns


def parts_of(stream, *durations_ns):
    return [
        (f"part{number}", stream.kernel(duration_ns))
        for number, duration_ns in enumerate(durations_ns)
    ]


def test_parts_are_timed_one_by_one_behind_one_spin():
    stream = FakeStream()
    timer = DeviceTimer(stream)

    found = timer.measure(parts_of(stream, 1_000, 25_000))

    assert found == {"start_ns": 1_000_000, "part0": 1_000, "part1": 25_000}
    assert stream.spins == [600_000]
    assert timer.num_repeated == 0


def test_the_flush_runs_once_before_every_window_and_outside_it():
    stream = FakeStream()
    timer = DeviceTimer(stream, flush=stream.flush)

    found = [timer.measure(parts_of(stream, 7_000)) for _ in range(3)]

    assert [window["part0"] for window in found] == [7_000] * 3
    assert stream.flushed == 3
    assert found[0]["start_ns"] < found[1]["start_ns"] < found[2]["start_ns"]


def test_a_window_in_which_the_device_waited_is_taken_again_behind_a_longer_spin():
    # The sixth call of each attempt, the second part, comes 1 ms late: twice in vain.
    stream = FakeStream([1_000_000 if call == 4 else 0 for call in range(6)] * 2)
    timer = DeviceTimer(stream)

    found = timer.measure(parts_of(stream, 1_000, 2_000))

    assert (found["part0"], found["part1"]) == (1_000, 2_000)
    assert stream.spins == [600_000, 1_200_000, 2_400_000]
    assert timer.num_repeated == 2
    assert timer.spin_cycles == 2_400_000


def test_a_launch_that_waits_for_the_device_is_taken_once_and_holds_the_wait():
    stream = FakeStream()
    timer = DeviceTimer(stream, flush=stream.flush)

    def launch():
        stream.enqueue(5_000)
        stream.drain()  # the host knows only now what to enqueue
        stream.enqueue(5_000)

    start_ns, duration_ns = timer.measure_waiting(launch)

    assert start_ns > 1_000_000
    # Two kernels, and between them the time in which the host enqueues the second.
    assert duration_ns == 2 * 5_000 + FakeStream.CALL_NS + FakeStream.LATENCY_NS
    assert (stream.spins, stream.flushed, timer.num_repeated) == ([600_000], 1, 0)


def test_start_ns_is_that_of_the_window_that_was_kept():
    stream = FakeStream([0, 0, 0, 5_000_000])

    found = DeviceTimer(stream).measure(parts_of(stream, 1_000))

    assert found["start_ns"] > 5_000_000


def test_a_spin_that_was_once_too_short_goes_back_to_normal_after_many_calm_windows():
    stream = FakeStream([0, 0, 0, 2_000_000])
    timer = DeviceTimer(stream)

    for _ in range(40):
        timer.measure(parts_of(stream, 1_000))

    assert stream.spins[:2] == [600_000, 1_200_000]
    assert stream.spins[-1] == 600_000
    assert timer.num_repeated == 1


def test_a_spin_that_is_needed_stays():
    stream = FakeStream(repeat(100_000))
    timer = DeviceTimer(stream)

    for _ in range(100):
        timer.measure(parts_of(stream, 1_000))

    assert timer.spin_cycles == 1_200_000
    assert timer.num_repeated == 1


def test_a_host_slower_than_any_spin_is_an_error_that_says_what_to_do():
    stream = FakeStream(repeat(2 * LONGEST_NS))

    with pytest.raises(RuntimeError, match=r"ms to enqueue one launch.*end that and run again"):
        DeviceTimer(stream).measure(parts_of(stream, 1_000))

    assert stream.spins[-1] * NS_PER_CYCLE == LONGEST_NS
    assert len(stream.spins) == 9


@given(
    durations_ns=st.lists(st.integers(0, 100_000), min_size=1, max_size=4),
    stalls_ns=st.lists(st.one_of(st.just(0), st.integers(0, 3_000_000)), max_size=40),
)
@settings(deadline=None)
def test_whatever_the_host_does_the_parts_take_what_they_take(durations_ns, stalls_ns):
    stream = FakeStream(stalls_ns)
    timer = DeviceTimer(stream, flush=stream.flush)

    for _ in range(3):
        found = timer.measure(parts_of(stream, *durations_ns))

        assert [found[f"part{place}"] for place in range(len(durations_ns))] == durations_ns
        # Events and parts of the window that was kept: the device went from one to the next.
        assert not any(stream.waited_ns[-2 * len(durations_ns) :])


def test_ranks_meet_between_the_spin_and_the_window():
    stream = FakeStream()
    timer = DeviceTimer(stream, meet=stream.kernel(9_000_000))

    windows = timer.measure(parts_of(stream, 1_000))
    chain = timer.measure_chained(parts_of(stream, 1_000), 20)

    # However long the others are waited for, nothing of it is in the window.
    assert windows["part0"] == chain.period_ns == 1_000
    assert timer.num_repeated == 0


def answering(*answers):
    """Another process that says no at these places of the questions it is asked, else yes."""
    asked = []

    def agree(yes):
        asked.append(yes)
        return yes and len(asked) - 1 not in answers

    agree.asked = asked
    return agree


def test_a_window_that_another_rank_throws_away_is_taken_again_here_too():
    stream = FakeStream()
    agree = answering(0, 1)
    timer = DeviceTimer(stream, agree=agree)

    found = timer.measure(parts_of(stream, 1_000))

    assert found["part0"] == 1_000
    assert stream.spins == [600_000, 1_200_000, 2_400_000]
    # Covered here each time; then whether the spin was long enough four times over.
    assert agree.asked == [True] * 4


def test_the_spin_is_shortened_only_where_it_is_for_all_ranks():
    stream = FakeStream([0, 0, 0, 2_000_000])
    # The first answer throws a window away; then two questions each, the second about calm.
    refused_once = answering(2 * 20)
    timer = DeviceTimer(stream, agree=refused_once)

    for _ in range(40):
        timer.measure(parts_of(stream, 1_000))

    assert timer.spin_cycles == 1_200_000, "a rank was not calm for 32 windows in a row"
    assert len(refused_once.asked) == 1 + 2 * 40


def test_a_chain_has_the_period_of_the_device_and_no_events_inside():
    stream = FakeStream()

    found = DeviceTimer(stream).measure_chained(parts_of(stream, 10_000, 5_000), 20)

    assert (found.period_ns, found.host_bound, found.start_ns) == (15_000, False, 1_000_000)
    # The spin between two marks, all parts, the last mark.
    assert len(stream.waited_ns) == 3 + 2 * 20 + 1
    assert stream.spins == [600_000]


def test_a_chain_of_short_launches_gets_a_spin_that_covers_it():
    # 100 launches of 1 us that take the host 12 us each: 1.1 ms to be ahead of.
    stream = FakeStream(repeat(10_000))
    timer = DeviceTimer(stream)

    found = timer.measure_chained(parts_of(stream, 1_000), 100)

    assert (found.period_ns, found.host_bound) == (1_000, False)
    assert stream.spins == [600_000, 1_200_000, 2_400_000]


def test_a_chain_that_no_spin_covers_is_marked_as_the_hosts_and_tried_once_thereafter():
    stream = FakeStream(repeat(LONGEST_NS // 10))
    timer = DeviceTimer(stream)

    first = timer.measure_chained(parts_of(stream, 1_000), 100)
    tried = len(stream.spins)
    second = timer.measure_chained(parts_of(stream, 1_000), 100)

    assert first.host_bound
    assert second.host_bound
    assert first.period_ns > 1_000
    assert (tried, len(stream.spins)) == (9, 10)


@given(
    period_ns=st.integers(0, 60_000),
    length=st.integers(1, 60),
    stalls_ns=st.lists(
        st.one_of(st.just(0), st.integers(0, 30_000), st.integers(0, 200_000_000)), max_size=300
    ),
)
@settings(deadline=None)
def test_whatever_the_host_does_a_chain_has_its_true_period_or_is_marked(
    period_ns, length, stalls_ns
):
    stream = FakeStream(stalls_ns)

    found = DeviceTimer(stream).measure_chained(parts_of(stream, period_ns), length)

    assert found.host_bound or found.period_ns == period_ns


def test_a_flush_inside_a_period_is_our_own_fault():
    stream = FakeStream()

    with pytest.raises(AssertionError, match="inside the period"):
        DeviceTimer(stream, flush=stream.flush).measure_chained(parts_of(stream, 1), 2)
