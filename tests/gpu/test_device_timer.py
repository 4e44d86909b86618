"""The timer, the flush and the watch on a real device: spins of known length, late hosts, L2."""

import time

import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from tilepipe.measure.clocks import ClockWatch  # noqa: E402
from tilepipe.measure.device import CudaStream, DeviceTimer, L2Flush  # noqa: E402

CYCLES = 2_000_000  # about a millisecond


@pytest.fixture
def stream():
    return torch.cuda.Stream()


def spin(stream, cycles=CYCLES):
    def launch():
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)

    return launch


def host_time_ns(launch):
    """Of one launch on an idle device, the host's part included."""
    torch.cuda.synchronize()
    begin_ns = time.monotonic_ns()
    launch()
    torch.cuda.synchronize()
    return time.monotonic_ns() - begin_ns


def test_a_spin_takes_as_long_as_the_host_sees_it_take(stream):
    timer = DeviceTimer(CudaStream(stream))
    launch = spin(stream, 20 * CYCLES)
    host_time_ns(launch)

    found = timer.measure([("spin", launch)])
    expected_ns = min(host_time_ns(launch) for _ in range(3))

    assert found["spin"] == pytest.approx(expected_ns, rel=0.02)


def test_parts_take_their_own_time_and_a_chain_takes_the_sum(stream):
    timer = DeviceTimer(CudaStream(stream))
    parts = [("short", spin(stream)), ("long", spin(stream, 3 * CYCLES))]
    timer.measure(parts)

    found = timer.measure(parts)
    chained = timer.measure_chained(parts, 5)

    assert found["long"] == pytest.approx(3 * found["short"], rel=0.02)
    assert chained.period_ns == pytest.approx(found["short"] + found["long"], rel=0.02)
    assert not chained.host_bound
    assert chained.start_ns > found["start_ns"]


def test_a_late_host_is_never_part_of_a_window(stream):
    timer = DeviceTimer(CudaStream(stream))
    launch = spin(stream)
    expected_ns = timer.measure([("spin", launch)])["spin"]

    def late():
        time.sleep(0.004)
        launch()

    found = timer.measure([("first", late), ("second", late)])

    assert timer.num_repeated > 0
    assert found["first"] == pytest.approx(expected_ns, rel=0.02)
    assert found["second"] == pytest.approx(expected_ns, rel=0.02)


def test_a_chain_of_short_launches_is_no_longer_than_the_device_takes(stream):
    timer = DeviceTimer(CudaStream(stream))
    words = torch.zeros(1024, device="cuda")

    def add():
        with torch.cuda.stream(stream):
            words.add_(1)

    timer.measure([("add", add)])
    found = timer.measure_chained([("add", add)], 200)

    assert not found.host_bound
    assert 300 < found.period_ns < 5_000


def test_a_flush_makes_the_next_read_come_from_memory(stream):
    quarter_bytes = torch.cuda.get_device_properties(0).L2_cache_size // 4
    source, target = (
        torch.ones(quarter_bytes // 4, dtype=torch.int32, device="cuda") for _ in range(2)
    )
    torch.cuda.synchronize()

    def copy():
        with torch.cuda.stream(stream):
            target.copy_(source)

    def fastest_ns(timer):
        return min(timer.measure([("copy", copy)])["copy"] for _ in range(20))

    warm_ns = fastest_ns(DeviceTimer(CudaStream(stream)))
    cold_ns = fastest_ns(DeviceTimer(CudaStream(stream), flush=L2Flush(stream)))

    assert cold_ns > 1.2 * warm_ns, (cold_ns, warm_ns)


def test_a_watch_sees_a_busy_device(stream):
    uuid = str(torch.cuda.get_device_properties(0).uuid)

    with ClockWatch(uuid) as watch:
        for _ in range(20):
            spin(stream, 10 * CYCLES)()
        torch.cuda.synchronize()

    clocks = watch.clocks
    assert clocks is not None
    assert clocks.num_samples > 3
    assert 300 < clocks.sm_mhz_min <= clocks.sm_mhz <= clocks.sm_mhz_max < 5_000
    assert clocks.power_w_max > 10
    assert clocks.temperature_c_max > 10
