"""A small set of cases in which every pair of values meets."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

Case = dict[str, Any]
_TRIES = 60


def pairwise(
    axes: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool], *, seed: int = 0
) -> list[Case]:
    """Greedy cover: each case is the best of some random ones that hold a pair still missing.

    Pairs that no allowed case can hold are left out after a search over random completions.
    """
    random = Random(seed)
    missing = {(a, x, b, y) for a, b in combinations(axes, 2) for x, y in product(axes[a], axes[b])}
    cases = []
    while missing:
        wanted = min(missing, key=repr)
        tries = [case for _ in range(_TRIES) if (case := _complete(wanted, axes, allowed, random))]
        if not tries:
            missing.discard(wanted)
            continue
        best = max(tries, key=lambda case: len(_pairs(case) & missing))
        missing -= _pairs(best)
        cases.append(best)
    return cases


def _pairs(case: Case) -> set[tuple[str, Any, str, Any]]:
    return {(a, case[a], b, case[b]) for a, b in combinations(case, 2)}


def _complete(
    wanted: tuple[str, Any, str, Any],
    axes: Mapping[str, Sequence[Any]],
    allowed: Callable[[Case], bool],
    random: Random,
) -> Case | None:
    a, x, b, y = wanted
    for _ in range(40):
        case = {name: random.choice(values) for name, values in axes.items()}
        case[a], case[b] = x, y
        if allowed(case):
            return case
    return None
