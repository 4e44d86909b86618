"""A small set of cases in which every pair of values meets."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

Case = dict[str, Any]
_TRIES = 60


def pairwise(
    axes: Mapping[str, Sequence[Any]],
    allowed: Callable[[Case], bool],
    *,
    parts: Sequence[Case] = (),
    seed: int = 0,
) -> list[Case]:
    """Greedy cover: each case is the best of some random ones that hold a pair still missing.

    Pairs that no allowed case can hold are left out after a search over random completions. With
    `parts`, a cover of some of the axes, those axes take the values of one part together, but for
    pairs that no part allows.
    """
    random = Random(seed)
    missing = {(a, x, b, y) for a, b in combinations(axes, 2) for x, y in product(axes[a], axes[b])}
    cases = []

    def complete(wanted: tuple[str, Any, str, Any], parts: Sequence[Case]) -> list[Case]:
        found = (_complete(wanted, axes, allowed, parts, random) for _ in range(_TRIES))
        return [case for case in found if case]

    while missing:
        wanted = min(missing, key=repr)
        tries = complete(wanted, parts)
        if parts and not tries:
            tries = complete(wanted, ())
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
    parts: Sequence[Case],
    random: Random,
) -> Case | None:
    a, x, b, y = wanted
    fitting = [part for part in parts if part.get(a, x) == x and part.get(b, y) == y]
    if parts and not fitting:
        return None
    for _ in range(40):
        case = {name: random.choice(values) for name, values in axes.items()}
        if fitting:
            case.update(random.choice(fitting))
        case[a], case[b] = x, y
        if allowed(case):
            return case
    return None
