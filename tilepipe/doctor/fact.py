"""One line of the doctor's report.

Knows nothing of machines, libraries or GPUs.
"""

from dataclasses import dataclass
from enum import Enum

__all__ = ["Fact", "State"]


class State(Enum):
    """What a fact means for the main job."""

    ok = "ok"  # there, and fit for it
    note = "note"  # the main job runs all the same; something else is worse for it, or absent
    missing = "missing"  # the main job cannot run before this is mended


@dataclass(frozen=True)
class Fact:
    """What was found under a name, and what to do about it."""

    section: str
    name: str
    state: State
    text: str
    next_step: str = ""  # empty where there is nothing to do

    def __post_init__(self) -> None:
        assert self.next_step or self.state is not State.missing, f"{self.name}: no next step"
