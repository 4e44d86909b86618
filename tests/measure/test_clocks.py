"""Watching a GPU's clock with an NVML that is made up: what is kept, and what a refusal leaves."""

import threading
import time

import pynvml
import pytest

from tilepipe.measure.clocks import ClockWatch
from tilepipe.records import Clocks

UUID = "7a1b0c2d-0000-1111-2222-333344445555"


class Nvml:
    """Readings in order, the last one for ever; refuses the call of a given name."""

    NVMLError = pynvml.NVMLError
    NVML_CLOCK_SM = pynvml.NVML_CLOCK_SM
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU

    def __init__(self, *readings, refused=None, after=0):
        self.readings = list(readings)  # (MHz, mW, degrees, reasons)
        self.refused, self.after = refused, after
        self.num_read = self.num_open = 0
        self.threads = set()

    def __getattr__(self, name):
        if name.startswith("nvmlClocksEventReason"):
            return getattr(pynvml, name)
        raise AttributeError(name)

    def _call(self, name):
        self.threads.add(threading.current_thread())
        if name == self.refused and self.num_read >= self.after:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def _reading(self):
        return self.readings[min(self.num_read, len(self.readings) - 1)]

    def nvmlInit(self):
        self._call("nvmlInit")
        self.num_open += 1

    def nvmlShutdown(self):
        self._call("nvmlShutdown")
        self.num_open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self._call("nvmlDeviceGetHandleByUUID")
        return uuid

    def nvmlDeviceGetClockInfo(self, handle, kind):
        self._call("nvmlDeviceGetClockInfo")
        assert (handle, kind) == (f"GPU-{UUID}", pynvml.NVML_CLOCK_SM)
        return self._reading()[0]

    def nvmlDeviceGetPowerUsage(self, handle):
        self._call("nvmlDeviceGetPowerUsage")
        return self._reading()[1]

    def nvmlDeviceGetTemperature(self, handle, sensor):
        self._call("nvmlDeviceGetTemperature")
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._reading()[2]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        self._call("nvmlDeviceGetCurrentClocksEventReasons")
        reasons = self._reading()[3]
        self.num_read += 1
        return reasons


def wait_until(condition):
    limit = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


def test_a_watch_keeps_median_extremes_and_every_reason():
    nvml = Nvml(
        (1980, 400_500, 50, pynvml.nvmlClocksEventReasonGpuIdle),
        (1755, 699_250, 61, pynvml.nvmlClocksEventReasonSwPowerCap),
        (1900, 650_000, 62, pynvml.nvmlClocksEventReasonNone),
        (1900, 650_000, 60, pynvml.nvmlClocksEventReasonNone),
    )

    with ClockWatch(UUID, nvml=nvml) as watch:
        wait_until(lambda: nvml.num_read >= 4)
        assert watch.clocks is None

    assert watch.clocks == Clocks(
        sm_mhz=1900,
        sm_mhz_min=1755,
        sm_mhz_max=1980,
        power_w_max=699.25,
        temperature_c_max=62,
        reasons=("gpu_idle", "sw_power_cap"),
        num_samples=nvml.num_read,
    )
    assert watch.clocks.throttled
    assert nvml.num_open == 0


def test_a_short_watch_reads_at_its_start_and_at_its_end_and_on_a_thread_of_its_own():
    nvml = Nvml((1980, 100_000, 40, 0), (1200, 100_000, 40, 0))

    with ClockWatch(f"GPU-{UUID}", nvml=nvml) as watch:
        assert nvml.num_read >= 1

    assert (watch.clocks.sm_mhz_min, watch.clocks.sm_mhz_max) == (1200, 1980)
    assert watch.clocks.num_samples == nvml.num_read >= 2
    assert not watch.clocks.throttled
    assert threading.current_thread() not in nvml.threads


@pytest.mark.parametrize(
    ("constant", "word", "throttled"),
    [
        ("ApplicationsClocksSetting", "applications_clocks_setting", False),
        ("DisplayClockSetting", "display_clocks_setting", False),
        ("GpuIdle", "gpu_idle", False),
        ("HwPowerBrakeSlowdown", "hw_power_brake", True),
        ("HwSlowdown", "hw_slowdown", True),
        ("HwThermalSlowdown", "hw_thermal_slowdown", True),
        ("SwPowerCap", "sw_power_cap", True),
        ("SwThermalSlowdown", "sw_thermal_slowdown", True),
        ("SyncBoost", "sync_boost", True),
    ],
)
def test_each_reason_has_a_word_and_slows_down_or_not(constant, word, throttled):
    bit = getattr(pynvml, f"nvmlClocksEventReason{constant}")

    with ClockWatch(UUID, nvml=Nvml((1980, 1, 1, bit))) as watch:
        pass

    assert watch.clocks.reasons == (word,)
    assert watch.clocks.throttled == throttled


def test_a_reason_without_a_name_is_not_dropped():
    bits = 1 << 40 | pynvml.nvmlClocksEventReasonSwPowerCap

    with ClockWatch(UUID, nvml=Nvml((1980, 1, 1, bits))) as watch:
        pass

    assert watch.clocks.reasons == ("other", "sw_power_cap")


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize(
    "refused",
    [
        "nvmlInit",
        "nvmlDeviceGetHandleByUUID",
        "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetCurrentClocksEventReasons",
    ],
)
def test_whatever_is_refused_there_is_no_record_and_no_error(refused, after):
    if refused in ("nvmlInit", "nvmlDeviceGetHandleByUUID"):
        after = 0  # called once
    nvml = Nvml((1980, 1, 1, 0), refused=refused, after=after)

    with ClockWatch(UUID, nvml=nvml) as watch:
        pass

    assert watch.clocks is None
    assert nvml.num_open == 0


def test_an_error_in_what_is_timed_passes_and_ends_the_watch():
    nvml = Nvml((1980, 1, 1, 0))

    with pytest.raises(KeyError, match="timed"), ClockWatch(UUID, nvml=nvml):
        raise KeyError("timed")

    assert nvml.num_open == 0


def test_without_a_driver_there_is_no_record():
    with ClockWatch("00000000-0000-0000-0000-000000000000") as watch:
        pass

    assert watch.clocks is None
