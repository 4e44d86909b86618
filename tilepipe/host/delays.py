"""Delays that tests and studies add to a launch, to see the right term of a breakdown move.

Knows nothing of what is delayed.
"""

import time
from dataclasses import dataclass

__all__ = ["NO_DELAYS", "Delays", "pause"]


@dataclass(frozen=True, kw_only=True)
class Delays:
    """Milliseconds added on one rank; zero everywhere in a measurement."""

    entry_ms: float = 0.0  # before the launch gate
    send_ms: float = 0.0  # before every send ticket
    mid_send_ms: float = 0.0  # once, halfway through the tickets
    check_ms: float = 0.0  # at every look at a flag by the GEMM
    gemm_ms: float = 0.0  # at every M tile of the GEMM
    publish_ms: float = 0.0  # at every M tile, where the GEMM raises flags
    contended_ms: float = 0.0  # at every M tile, beside communication into a spare buffer
    last_read_ms: float = 0.0  # before the last received rows are read
    hold_last_send: bool = False  # keep the last ticket until this rank has computed a tile
    hold_last_tile: bool = False  # keep the last M tile until this rank has pushed a ticket


NO_DELAYS = Delays()


def pause(milliseconds: float) -> None:
    """Sleep, or do nothing at all for zero."""
    if milliseconds:
        time.sleep(milliseconds / 1e3)
