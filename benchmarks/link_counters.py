"""What the links of a GPU count by themselves: bytes sent and received, and errors put right.

Knows nothing of who sends. Asks NVML; what it refuses is None, and no error.
"""

from dataclasses import dataclass, fields
from typing import Any

import pynvml

__all__ = ["LinkCounts", "read_links"]

# All links of a device at once.
_ALL_LINKS = 0xFFFFFFFF
_KIB = 1024


@dataclass(frozen=True, kw_only=True)
class LinkCounts:
    """Counters of all links of a GPU, which only grow."""

    sent_bytes: int | None  # of payload
    received_bytes: int | None
    replays: int | None  # packets sent again
    recoveries: int | None  # links trained again

    def since(self, before: "LinkCounts") -> dict[str, int | None]:
        """What each has grown by; None where either reading has none."""
        grown: dict[str, int | None] = {}
        for field in fields(self):
            now, then = getattr(self, field.name), getattr(before, field.name)
            grown[field.name] = None if now is None or then is None else now - then
        return grown


def read_links(uuid: str, *, nvml: Any = pynvml) -> LinkCounts:
    """Counters of a GPU now; `uuid` as torch reports it, with or without NVML's prefix."""
    nvml.nvmlInit()
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        sent, received = (
            _field(nvml, handle, number, _ALL_LINKS)
            for number in (
                nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
                nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
            )
        )
        return LinkCounts(
            sent_bytes=None if sent is None else sent * _KIB,
            received_bytes=None if received is None else received * _KIB,
            replays=_field(nvml, handle, nvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, 0),
            recoveries=_field(nvml, handle, nvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL, 0),
        )
    finally:
        nvml.nvmlShutdown()


def _field(nvml: Any, handle: Any, number: int, scope: int) -> int | None:
    """One counter; None where this GPU or driver does not tell."""
    try:
        (value,) = nvml.nvmlDeviceGetFieldValues(handle, [(number, scope)])
    except nvml.NVMLError:
        return None
    if value.nvmlReturn != nvml.NVML_SUCCESS:
        return None
    members = {
        nvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
        nvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    }
    return int(getattr(value.value, members[value.valueType]))
