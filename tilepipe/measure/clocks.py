"""Watch what a GPU does while something is timed: clock, power, heat and what holds it back.

Knows nothing of what is timed; asks NVML, makes no CUDA context. Where NVML refuses anything there
is no record, and never an error in what is measured.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import pynvml

from tilepipe.records import Clocks

__all__ = ["ClockWatch"]

_INTERVAL_S = 0.02
# A query takes well under a millisecond; one that hangs must not hold the measurement with it.
_PATIENCE_S = 2.0

_REASONS = {
    "nvmlClocksEventReasonApplicationsClocksSetting": "applications_clocks_setting",
    "nvmlClocksEventReasonDisplayClockSetting": "display_clocks_setting",
    "nvmlClocksEventReasonGpuIdle": "gpu_idle",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "hw_power_brake",
    "nvmlClocksEventReasonHwSlowdown": "hw_slowdown",
    "nvmlClocksEventReasonHwThermalSlowdown": "hw_thermal_slowdown",
    "nvmlClocksEventReasonSwPowerCap": "sw_power_cap",
    "nvmlClocksEventReasonSwThermalSlowdown": "sw_thermal_slowdown",
    "nvmlClocksEventReasonSyncBoost": "sync_boost",
}


@dataclass(frozen=True, kw_only=True)
class _Reading:
    sm_mhz: int
    power_mw: int
    temperature_c: int
    reasons: int  # a bit each


class ClockWatch:
    """Reads one GPU at entry, every 20 ms and at exit; `clocks` then says what it did.

    A thread of its own does all of it: NVML's calls let go of Python's lock.
    """

    def __init__(self, uuid: str, *, nvml: Any = pynvml) -> None:
        """`uuid` as torch reports it, with or without NVML's prefix; an index would depend on
        CUDA_VISIBLE_DEVICES."""
        self._uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        self._nvml = nvml
        self._begun, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="clocks", daemon=True)
        self._clocks: Clocks | None = None

    @property
    def clocks(self) -> Clocks | None:
        """None before the exit, and where NVML refused anything."""
        return self._clocks

    def __enter__(self) -> Self:
        self._thread.start()
        self._begun.wait(_PATIENCE_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join(_PATIENCE_S)

    def _watch(self) -> None:
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            try:
                self._clocks = self._summary(self._readings())
            finally:
                nvml.nvmlShutdown()
        except nvml.NVMLError:
            return
        finally:
            self._begun.set()

    def _readings(self) -> list[_Reading]:
        handle = self._nvml.nvmlDeviceGetHandleByUUID(self._uuid)
        readings = [self._read(handle)]
        self._begun.set()
        while not self._over.wait(_INTERVAL_S):
            readings.append(self._read(handle))
        readings.append(self._read(handle))
        return readings

    def _read(self, handle: Any) -> _Reading:
        nvml = self._nvml
        return _Reading(
            sm_mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            power_mw=nvml.nvmlDeviceGetPowerUsage(handle),
            temperature_c=nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            reasons=nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
        )

    def _summary(self, readings: Sequence[_Reading]) -> Clocks:
        clocks_mhz = [reading.sm_mhz for reading in readings]
        reasons = int(np.bitwise_or.reduce([reading.reasons for reading in readings]))
        return Clocks(
            sm_mhz=int(np.median(clocks_mhz)),
            sm_mhz_min=min(clocks_mhz),
            sm_mhz_max=max(clocks_mhz),
            power_w_max=max(reading.power_mw for reading in readings) / 1e3,
            temperature_c_max=max(reading.temperature_c for reading in readings),
            reasons=self._words(reasons),
            num_samples=len(readings),
        )

    def _words(self, reasons: int) -> tuple[str, ...]:
        """One word a bit, sorted; bits that NVML has named since are `other`."""
        words = set()
        for constant, word in _REASONS.items():
            bit = getattr(self._nvml, constant)
            if reasons & bit:
                words.add(word)
                reasons &= ~bit
        return tuple(sorted(words | ({"other"} if reasons else set())))
