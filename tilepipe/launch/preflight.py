"""What can be said of a point before any rank starts.

Knows nothing of how points run or are stored.
"""

from tilepipe.config.checks import check_config
from tilepipe.config.schemas import config_from_dict
from tilepipe.records import Point

__all__ = ["refusal", "unsupported"]


def refusal(point: Point) -> str:
    """Why the point's settings are refused, in a sentence; empty where they are not."""
    try:
        check_config(config_from_dict(point.config))
    except ValueError as error:
        return str(error)
    return ""


def unsupported(point: Point) -> str:
    """Why this version has no code for the point, in a sentence; empty where it has."""
    if point.executor == "host":
        return ""
    hardware = point.config["hardware"]["name"]
    return (
        f"{point.operation} on hardware={hardware}: this version has no GPU kernels; type "
        "hardware=cpu to run it on the host executor"
    )
