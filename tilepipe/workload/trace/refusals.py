"""Sentences that refuse a recording: the file, what was found where, and the next step.

Knows nothing of any format.
"""

import json
from collections.abc import Iterable
from typing import Any

__all__ = ["Refusal", "layer_refusal", "listed", "refusal", "request_refusal", "shown"]

_RECORD_AGAIN = "record the file again or repair it there"
# Names told in a sentence before it says how many more there are.
_MAX_NAMES = 5
# Of a value that is to blame: it may be a list of thousands, or a number of as many digits.
_MAX_CHARS = 30


class Refusal(ValueError):
    """A sentence for the user, told apart from what a library raises for a broken file."""


def refusal(path: str, found: str, next_step: str = _RECORD_AGAIN) -> Refusal:
    """What is wrong with the file itself."""
    return Refusal(f"routing.path={path}: {found}; {next_step}")


def layer_refusal(path: str, layer: int | None, layers: Iterable[int]) -> Refusal:
    """A layer that is not there, or none typed where there are several."""
    typed, present = "null" if layer is None else layer, sorted(layers)
    if not present:
        return Refusal(
            f"routing.layer={typed}: {path} does not tell layers apart; type routing.layer=null"
        )
    several = len(present) > 1
    return Refusal(
        f"routing.layer={typed}: {path} holds layer{'s' if several else ''} {listed(present)}; "
        f"type routing.layer={present[0]}" + (" or another of them" if several else "")
    )


def request_refusal(path: str, request: str, requests: Iterable[str]) -> Refusal:
    """A request that is not there, or one typed where the file names none."""
    present = sorted(requests)
    if not present:
        return Refusal(
            f"routing.request={request}: {path} does not tell requests apart; "
            "type routing.request=null"
        )
    named = ", ".join(present[:_MAX_NAMES])
    more = f" and {len(present) - _MAX_NAMES} more" if len(present) > _MAX_NAMES else ""
    return Refusal(
        f"routing.request={request}: {path} holds {named}{more}; type one of them, or null for all"
    )


def shown(value: Any) -> str:
    """A value that is to blame, as JSON has it, in brackets."""
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):  # more digits, or lists in lists, than Python writes
        text = f"a {type(value).__name__}"
    return f"({text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + '...'})"


def listed(numbers: Iterable[int]) -> str:
    """Ascending numbers in words; three or more in a row as first-last."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )
