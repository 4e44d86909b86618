"""Spans of a stamped launch of a group: what its ranks had been told, and what its warps left.

Knows nothing of when launches are stamped and of how long they take.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tilepipe.config.choices import Push
from tilepipe.fabric.table import Slot, Word
from tilepipe.kernels.group import DeviceGroup
from tilepipe.kernels.overlap.home import HomePlan
from tilepipe.kernels.overlap.launch import BoundLaunch
from tilepipe.kernels.spans import Stamped, dispatched, returned, spans_of_tracks
from tilepipe.kernels.track import read_tracks
from tilepipe.records import Span

__all__ = [
    "LostStampsError",
    "clear_tracks",
    "known_of",
    "most_stamps",
    "spans_of_launch",
    "words_of",
]


class LostStampsError(RuntimeError):
    """Stamps found no room; the message says how many."""


def clear_tracks(bound: BoundLaunch) -> None:
    """Forget the stamps of the launch before; enqueued on torch's current stream."""
    assert bound.tracks is not None, "a launch that leaves no stamps"
    bound.tracks[:, :, 0].zero_()


def most_stamps(bound: BoundLaunch) -> int:
    """Stamps that the busiest warp of the latest launch has made, room or no room."""
    assert bound.tracks is not None, "a launch that leaves no stamps"
    return int(bound.tracks[:, :, 0, 0].max())


def words_of(bound: BoundLaunch) -> NDArray[np.int32]:  # see `read_tracks`
    """What the latest launch has left, without what lies behind the longest track."""
    assert bound.tracks is not None, "a launch that leaves no stamps"
    return bound.tracks[:, :, : 1 + most_stamps(bound)].cpu().numpy()


def known_of(group: DeviceGroup, bound: BoundLaunch, rank: int) -> Stamped:
    """What the latest launch has been told of one rank of this process."""
    fused, plan, words = bound.plan, group.plans[rank], group.tensor(rank, Slot.words)
    multiplying = (4, 8) if fused.gemm.is_ping_pong else (4,)
    stamped = partial(Stamped, plan=plan, settings=group.settings, multiplying=multiplying)
    if not isinstance(fused, HomePlan):
        num_first = int(words[int(Word.num_first)]) if fused.opens else 0
        return stamped(sending=dispatched(plan), num_first=num_first)
    # Who sends a tile home as it is made tells of the tile alone.
    num_units = 0 if fused.push is Push.epilogue else int(words[int(Word.num_units)])
    units = group.tensor(rank, Slot.push_units)[:num_units]
    sending = returned(
        *(plan, group.settings, units.cpu().numpy()),
        num_groups=fused.num_groups,
        by_chunk=fused.num_pieces > 1,
    )
    return stamped(sending=sending, homewards=True)


def spans_of_launch(
    words: NDArray[np.int32],  # see `words_of`
    bound: BoundLaunch,
    known: Mapping[int, Stamped],  # by rank, in the order of the launch's ranks
    *,
    base_ns: int,  # when the kernel began, on the clock that spans are told by
) -> dict[int, tuple[Span, ...]]:
    """Spans of each rank; all of them begin and end together, with the launch.

    Raises LostStampsError where a warp has made more than it had room for.
    """
    tracks, lost = read_tracks(words)
    if lost:
        raise LostStampsError(f"{lost} stamps found no room, of {bound.plan.num_stamps} a warp")
    start_ns, end_ns = min(t.start_ns for t in tracks), max(t.end_ns for t in tracks)
    plan = bound.plan
    return {
        rank: spans_of_tracks(
            # Clusters of a launch are dealt to its ranks in turn.
            [t for t in tracks if t.cta // plan.cluster_m % plan.num_launch_ranks == local],
            stamped,
            base_ns=base_ns,
            start_ns=start_ns,
            end_ns=end_ns,
        )
        for local, (rank, stamped) in enumerate(known.items())
    }
