"""What can be said of a point before any rank starts.

Knows nothing of how points run or are stored.
"""

from tilepipe.config import detect
from tilepipe.config.checks import check_config
from tilepipe.config.schemas import config_from_dict
from tilepipe.records import Point

__all__ = ["missing_hardware", "refusal"]

# sm_90a code loads on nothing else.
_CAPABILITY = (9, 0)

_ON_HOST = "hardware=cpu to run it on the host executor"


def refusal(point: Point) -> str:
    """Why the point's settings are refused, in a sentence; empty where they are not."""
    try:
        check_config(config_from_dict(point.config))
    except ValueError as error:
        return str(error)
    return ""


def missing_hardware(point: Point) -> str:
    """Why this machine cannot run the point, in a sentence; empty where it can."""
    hardware, names = point.config["hardware"], detect.gpu_names()
    needed, found = int(hardware["num_gpus"]), len(names)
    if needed and found >= needed:
        return _other_gpu(hardware["name"], hardware["gpu"], names[:needed])
    if found >= needed:
        return ""
    count = f"{needed} GPU{'s' if needed > 1 else ''}"
    return (
        f"hardware={hardware['name']} needs {count} and this machine shows {found}; type {_ON_HOST}"
    )


def _other_gpu(option: str, wanted: str | None, names: tuple[str, ...]) -> str:
    """Why the GPUs that are here are not the ones to run on; empty where they are."""
    other = [name for name in names if wanted is not None and wanted not in name]
    if other:
        return (
            f"hardware={option} is for {wanted} and this machine has {other[0]}; type "
            f"hardware=auto, or {_ON_HOST}"
        )
    capabilities = detect.capabilities()[: len(names)]
    unlike = [place for place, found in enumerate(capabilities) if found != _CAPABILITY]
    if unlike:
        major, minor = capabilities[unlike[0]]
        return (
            f"kernels are built for compute capability 9.0 (H100, H200), and {names[unlike[0]]} "
            f"has {major}.{minor}; type {_ON_HOST}"
        )
    return ""
