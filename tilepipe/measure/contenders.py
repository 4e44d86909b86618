"""Run several contenders in one process, interleaved, so that drift hits all alike.

Knows nothing of what a contender does, of how ranks meet or of where samples go.
"""

from collections.abc import Callable, Mapping, Sequence

from tilepipe.records import Sample

__all__ = ["Contender", "rotation", "run_interleaved"]

# Takes the launch number, runs once, returns component -> (start_ns, duration_ns).
Contender = Callable[[int], Mapping[str, tuple[int, int]]]


def rotation(names: Sequence[str], num_iters: int) -> list[tuple[str, ...]]:
    """The order of the contenders in each iteration, the same on every rank.

    Each contender takes each place equally often, give or take one. A plain rotation would
    also keep the neighbours: whoever follows the one that heats the caches always would.
    These are the rows of a Williams square, in which every contender follows every other.
    """
    num_names = len(names)
    if num_names == 0:
        return [() for _ in range(num_iters)]
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
    return [orders[iteration % len(orders)] for iteration in range(num_iters)]


def run_interleaved(
    contenders: Mapping[str, Contender],
    *,
    num_warmups: int,
    num_iters: int,
    barrier: Callable[[], None],
) -> tuple[Sample, ...]:
    """Samples of every contender in the order in which they were taken; warm-ups leave none.

    All ranks must pass the same names in the same order. `barrier` is called right before each
    launch and is outside every window. Launches are numbered through from 0, warm-ups included,
    so that no two launches of the process carry the same payload.
    """
    samples: list[Sample] = []
    launch = 0
    for iteration, order in enumerate(
        rotation(list(contenders), num_warmups + num_iters), start=-num_warmups
    ):
        for name in order:
            barrier()
            components = contenders[name](launch)
            launch += 1
            if iteration < 0:
                continue
            samples.extend(
                Sample(
                    contender=name,
                    component=component,
                    iteration=iteration,
                    start_ns=start_ns,
                    duration_ns=duration_ns,
                )
                for component, (start_ns, duration_ns) in components.items()
            )
    return tuple(samples)
