"""The hardware option follows the GPUs a CUDA process would see."""

import pytest

from tilepipe.config import detect
from tilepipe.config.register import CONF_DIR

UUIDS = ["GPU-aa1", "GPU-ab2", "GPU-b30"]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        ("GPU-b", [2]),
        ("0,7,1", [0]),  # CUDA ignores all that follows a bad number
        ("1,1", [1]),
        ("GPU-a", []),  # names two devices
        ("GPU-aa1, 2", [0, 2]),
    ],
)
def test_visible_devices_are_those_cuda_would_take(visible, expected):
    assert detect.visible_devices(visible, UUIDS) == expected


@pytest.mark.parametrize(
    ("names", "option"),
    [
        ((), "cpu"),
        (("NVIDIA H200",), "h200_x1"),
        (("NVIDIA H200",) * 3, "h200_x2"),
        (("NVIDIA H200",) * 8, "h200_x8"),
        (("NVIDIA H100 80GB HBM3",) * 8, "h100_x8"),
        (("NVIDIA H100 PCIe",), "generic_x1"),
        (("NVIDIA B200",) * 8, "b200_x8"),
        (("NVIDIA B200",) * 4, "generic_x1"),
        (("NVIDIA H200", "NVIDIA L4"), "generic_x1"),
    ],
)
def test_the_largest_option_that_is_fully_here_is_chosen(names, option, monkeypatch):
    monkeypatch.setattr(detect, "gpu_names", lambda: names)

    assert detect.hardware_option() == option
    assert (CONF_DIR / "hardware" / f"{option}.yaml").is_file()
