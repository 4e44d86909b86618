"""Waits in the text of a kernel: where each of them looks, polls and fences.

Knows nothing of what is waited for. A first look acquires; what it does not find is polled for,
beside looks at the abort word and the clock, and a fence behind the polls acquires. A text that
waits otherwise is an assertion.
"""

import re
from dataclasses import dataclass

__all__ = ["Wait", "waits_in"]

_STEP = re.compile(
    r"\b(ld|st|red|atom|cp|mbarrier)\.(?!param)"
    r"|// (acquired)|%(globaltimer)|\b(bra|bar|vote|shfl|fence)\b"
)
# A word that is there is found without a look at the clock; a look behind the abort word, the last
# before the way back, ends the loop. No other memory is touched.
_STEPS = ["ld", "acquired", "bra", "globaltimer", "ld", "bra", "bra", "ld", "globaltimer", "bra"]
_STEPS += ["fence"]


@dataclass(frozen=True)
class Wait:
    """Places in the text."""

    scope: str
    width: int  # bits of the word
    look: int  # the first: acquires
    poll: int
    stop: int  # the look at the abort word
    fence: int  # behind the polls alone
    there: int  # where it goes on if the first look has found the word
    abort: str  # register that holds the address of the abort word


def waits_in(ptx: str) -> list[Wait]:
    """All waits of a kernel, in the order of its text."""
    waits = [_wait_at(ptx, look.start()) for look in re.finditer(r"\bld\.acquire\b", ptx)]
    assert sorted(_polls_in(ptx)) == sorted(wait.poll for wait in waits)
    return waits


def _polls_in(ptx: str) -> list[int]:
    """Loads of strong words in loops that hold no other label, so that nothing else is done there;
    but for the loop that waits for a moment, at every turn of which the clock is looked at."""
    loops = re.finditer(r"^(\$\w+):\n((?:[^$].*\n)*?).*\bbra\s+\1;", ptx, re.MULTILINE)
    return [
        loop.start(2) + load.start()
        for loop in loops
        for load in re.finditer(r"ld\.(relaxed|acquire|volatile)\b", loop[2])
        if "%globaltimer" not in loop[0]
    ]


def _wait_at(ptx: str, look: int) -> Wait:
    steps = list(_STEP.finditer(ptx, look))[: len(_STEPS)]
    found = [step[step.lastindex or 0] for step in steps]
    assert found == _STEPS, ptx[look : steps[-1].end()]
    poll, stop, fence = (steps[number].start() for number in (4, 7, 10))
    first = re.match(r"ld\.acquire\.(\w+)\.global\.b(32|64)\s+(%\w+), \[(%\w+)\];", ptx[look:])
    assert first is not None
    scope, width, seen, word = first.groups()
    # One word, in one scope; what is looked at beside it is anybody's.
    assert re.match(rf"ld\.relaxed\.{scope}\.global\.b{width}\s+%\w+, \[{word}\];", ptx[poll:])
    abort = re.match(r"ld\.relaxed\.sys\.global\.b32\s+%\w+, \[(%\w+)\];", ptx[stop:])
    assert abort is not None
    assert ptx.startswith(f"fence.acq_rel.{scope};", fence)
    # Where it was there nothing of this is done.
    is_there = re.search(rf"setp\.ge\.s{width}\s+(%p\d+), {seen}, ", ptx[look : steps[2].start()])
    assert is_there is not None
    over = re.search(rf"@{is_there[1]} bra\s+(\$\w+);$", ptx[look : steps[3].start()], re.MULTILINE)
    assert over is not None
    there = ptx.index(f"\n{over[1]}:\n")
    assert fence < there
    return Wait(scope, int(width), look, poll, stop, fence, there, abort[1])
