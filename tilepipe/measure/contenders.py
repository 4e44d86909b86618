"""Run several contenders in one process, interleaved, so that drift hits all alike.

Knows nothing of what a contender does, of how ranks meet or of where samples go.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import count

import numpy as np

from tilepipe.measure.stats import median_interval
from tilepipe.records import Sample

__all__ = ["Contender", "rotation", "run_interleaved"]

# Takes the launch number, runs once, returns component -> (start_ns, duration_ns).
Contender = Callable[[int], Mapping[str, tuple[int, int]]]


def rotation(names: Sequence[str], num_iters: int) -> list[tuple[str, ...]]:
    """The order of the contenders in each iteration, the same on every rank.

    Each contender takes each place equally often, give or take one. A plain rotation would
    also keep the neighbours: whoever follows the one that heats the caches always would.
    """
    orders = _whole_rotation(names)
    return [orders[iteration % len(orders)] for iteration in range(num_iters)]


def _whole_rotation(names: Sequence[str]) -> list[tuple[str, ...]]:
    """The rows of a Williams square, in which every contender follows every other."""
    num_names = len(names)
    if num_names < 2:
        return [tuple(names)]
    # 0, n-1, 1, n-2, …: neighbours differ by another amount each time.
    zigzag = [
        place // 2 if place % 2 == 0 else num_names - 1 - place // 2 for place in range(num_names)
    ]
    orders = [
        tuple(names[(first + shift) % num_names] for first in zigzag) for shift in range(num_names)
    ]
    if num_names % 2:
        # With an odd number one square has each neighbour twice or never; its mirror mends that.
        orders += [tuple(reversed(order)) for order in orders]
    return orders


def run_interleaved(
    contenders: Mapping[str, Contender],
    *,
    num_warmups: int,
    num_iters: int,
    barrier: Callable[[], None],
    max_iters: int | None = None,
    interval: float | None = None,  # share of the median that the 95 % interval may span each way
    agree: Callable[[bool], bool] = bool,
) -> tuple[Sample, ...]:
    """Samples of every contender in the order in which they were taken; warm-ups leave none.

    All ranks must pass the same names in the same order. `barrier` is called right before each
    launch and is outside every window. Launches are numbered through from 0, warm-ups included,
    so that no two launches of the process carry the same payload.

    With `interval`, iterations go on past num_iters until every contender is that sure of its
    median, or until another whole rotation would not fit into max_iters. `agree` makes of this
    rank's wish to stop the common decision of all: every rank calls it equally often.
    """
    assert (max_iters is None) == (interval is None), "both or neither"
    orders = _whole_rotation(list(contenders))
    numbers = count()
    samples: list[Sample] = []

    def take(iterations: range) -> None:
        for iteration in iterations:
            for name in orders[(num_warmups + iteration) % len(orders)]:
                barrier()
                components = contenders[name](next(numbers))
                if iteration >= 0:
                    samples.extend(_samples(name, iteration, components))

    take(range(-num_warmups, num_iters))
    if max_iters is None or interval is None:
        return tuple(samples)
    done = num_iters
    while (more := _iterations_more(done, max_iters, len(orders))) > 0:
        if agree(_sure(samples, contenders, interval)):
            break
        take(range(done, done + more))
        done += more
    return tuple(samples)


def _samples(
    contender: str, iteration: int, components: Mapping[str, tuple[int, int]]
) -> list[Sample]:
    return [
        Sample(
            contender=contender,
            component=component,
            iteration=iteration,
            start_ns=start_ns,
            duration_ns=duration_ns,
        )
        for component, (start_ns, duration_ns) in components.items()
    ]


def _iterations_more(done: int, max_iters: int, per_rotation: int) -> int:
    """Whole rotations up to the next look; 0 where not even one fits.

    An eighth of what is there: each look is another chance to stop by luck, and costs all ranks a
    meeting.
    """
    wanted = max(1, done // 8 // per_rotation)
    return min(wanted, (max_iters - done) // per_rotation) * per_rotation


def _sure(samples: Sequence[Sample], contenders: Mapping[str, Contender], interval: float) -> bool:
    """Whether every contender's launch is known to within `interval` of its median."""
    durations_ns: dict[tuple[str, str], list[int]] = {}
    for sample in samples:
        durations_ns.setdefault((sample.contender, sample.component), []).append(sample.duration_ns)
    for name in contenders:
        launches_ns = durations_ns.get((name, "e2e")) or durations_ns.get((name, "stage"))
        if launches_ns is None:
            return False
        found = median_interval(np.array(launches_ns, np.int64))
        reach_ns = max(found.value - found.low, found.high - found.value)
        if found.is_range or reach_ns > interval * found.value:
            return False
    return True
