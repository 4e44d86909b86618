"""Counters of links are read as NVML tells them, and not at all where it does not."""

from types import SimpleNamespace

from benchmarks.link_counters import LinkCounts, read_links


class Nvml:
    """Two counters of KiB, one of errors, and one that this driver does not know."""

    NVML_SUCCESS = 0
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 139
    NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL = 52
    NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL = 59
    NVML_VALUE_TYPE_UNSIGNED_INT = 1
    NVML_VALUE_TYPE_UNSIGNED_LONG = 2
    NVML_VALUE_TYPE_UNSIGNED_LONG_LONG = 3
    NVML_VALUE_TYPE_SIGNED_LONG_LONG = 4

    class NVMLError(Exception):
        pass

    def __init__(self, **kib):
        self.kib = kib

    def nvmlInit(self):
        self.asked = []

    def nvmlShutdown(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return uuid

    def nvmlDeviceGetFieldValues(self, handle, wanted):
        assert handle == "GPU-7"
        ((number, scope),) = wanted
        if number == 59:
            return [SimpleNamespace(nvmlReturn=3, valueType=0, value=None)]
        assert scope == (0 if number == 52 else 0xFFFFFFFF)
        names = {138: "sent", 139: "received", 52: "replays"}
        value = SimpleNamespace(ullVal=self.kib[names[number]], uiVal=0)
        return [SimpleNamespace(nvmlReturn=0, valueType=3, value=value)]


def test_counters_become_bytes_and_differences_and_what_is_not_told_stays_none():
    before = read_links("7", nvml=Nvml(sent=1, received=10, replays=5))

    now = read_links("GPU-7", nvml=Nvml(sent=4, received=30, replays=5))

    assert before == LinkCounts(sent_bytes=1024, received_bytes=10_240, replays=5, recoveries=None)
    assert now.since(before) == {
        "sent_bytes": 3072,
        "received_bytes": 20_480,
        "replays": 0,
        "recoveries": None,
    }
