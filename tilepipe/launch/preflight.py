"""What can be said of a point before any rank starts.

Knows nothing of how points run or are stored.
"""

from tilepipe.config import detect
from tilepipe.config.checks import check_config
from tilepipe.config.schemas import config_from_dict
from tilepipe.records import Point

__all__ = ["missing_hardware", "refusal", "unsupported"]

# What this version has GPU kernels for.
_OPERATIONS = ("dispatch", "combine")
_COPIES = ("simt",)
_FABRICS = ("loopback",)

_ON_HOST = "hardware=cpu to run it on the host executor"


def refusal(point: Point) -> str:
    """Why the point's settings are refused, in a sentence; empty where they are not."""
    try:
        check_config(config_from_dict(point.config))
    except ValueError as error:
        return str(error)
    return ""


def unsupported(point: Point) -> str:
    """Why this version has no code for the point, in a sentence; empty where it has.

    For points that are not refused.
    """
    if point.executor == "host":
        return ""
    hardware, fabric = point.config["hardware"]["name"], point.config["launch"]["fabric"]
    if point.operation not in _OPERATIONS:
        return (
            f"{point.operation} on hardware={hardware}: this version has GPU kernels for "
            f"{' and '.join(_OPERATIONS)} only; type kernel=dispatch, or {_ON_HOST}"
        )
    copy = point.config["kernel"]["copy"]
    if copy not in _COPIES:
        return f"kernel.copy={copy}: this version has no such kernel; type kernel.copy=simt"
    if fabric not in _FABRICS:
        return (
            f"launch.fabric={fabric}: this version moves no rows between GPUs; type "
            f"launch.fabric=loopback to let the ranks share one GPU, or {_ON_HOST}"
        )
    return ""


def missing_hardware(point: Point) -> str:
    """Why this machine cannot run the point, in a sentence; empty where it can."""
    hardware, found = point.config["hardware"], len(detect.gpu_names())
    needed = int(hardware["num_gpus"])
    if found >= needed:
        return ""
    count = f"{needed} GPU{'s' if needed > 1 else ''}"
    return (
        f"hardware={hardware['name']} needs {count} and this machine shows {found}; type {_ON_HOST}"
    )
