"""What the two communication edges say of their rows; both copy backends ask nothing else.

Knows nothing of how rows are copied and of who waits for them.

A row is known in two steps, each a load that hangs on the one before: `first_of`, four words found
by the row's place in the sending order, and `second_of`, found by those. `way_of` turns both into
addresses. All is traced into the kernel that asks; values belong to the lane that computes them.
"""

from dataclasses import dataclass
from enum import Enum

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from tilepipe.config.choices import Granularity
from tilepipe.fabric.table import Slot, Word
from tilepipe.kernels.constants import Constants
from tilepipe.kernels.memory import address, buffer, load_words
from tilepipe.schedule.packed import SLOT_BITS, TOKEN_BITS

__all__ = [
    "Edge",
    "Way",
    "count_of",
    "first_of",
    "flag_value",
    "has_single_writers",
    "note_beside",
    "place_in_order",
    "queue_of",
    "second_of",
    "token_flag",
    "way_of",
]

_SEND_BYTES = 16

# Dispatch: token, peer << 16 | slot, row there, readiness counter there. Home: the receive row, 0s.
First = tuple[Int32, Int32, Int32, Int32]


class Edge(Enum):
    """Which rows go to peers."""

    dispatch = "dispatch"  # rows to their experts, beside each the 8 bytes that tell its way home
    opening = "opening"  # of those, the ones that GEMMs begin with
    rest = "rest"  # of those, all others
    home = "home"  # rows of combine to the tokens that they belong to


# The word that counts claimed rows, and the one that holds their number.
_QUEUES = {
    Edge.dispatch: (Word.send_queue, Word.num_sends),
    Edge.opening: (Word.first_queue, Word.num_first),
    Edge.rest: (Word.send_queue, Word.num_rest),
    Edge.home: (Word.push_queue, Word.num_returns),
}


@dataclass(frozen=True)
class Way:
    """Addresses of one row."""

    peer: Int32
    source: Int64
    target: Int64
    flag: Int64  # what it raises at the peer


def queue_of(edge: Edge) -> Word:
    """The word that counts claimed rows."""
    return _QUEUES[edge][0]


def count_of(edge: Edge) -> Word:
    """The word that holds the number of rows."""
    return _QUEUES[edge][1]


def has_single_writers(edge: Edge, constants: Constants) -> bool:
    """Whether flags are words of one writer each, which are set; others are counters."""
    return edge is not Edge.home and constants.granularity is Granularity.token


def place_in_order(edge: Edge) -> int:
    """What the stamp of a sent row says of its place: 1 where that counts behind the opening."""
    return int(edge is Edge.rest)


def flag_value(edge: Edge, constants: Constants, epoch: Int32) -> Int32:
    """What a row's flag is set to, or raised by."""
    if has_single_writers(edge, constants):
        return epoch
    return Int32(constants.num_chunks if edge is Edge.home else 1)


def first_of(edge: Edge, table: cute.Pointer, rank: Int32, place: Int32, count: Int32) -> First:
    """Words of the row at a place of the sending order; of the last one past the end."""
    place = cutlass.max(cutlass.min(place, count - 1), 0)
    if edge is Edge.rest:
        place += buffer(address(table, rank, Slot.words), Int32)[int(Word.num_first)]
    if edge is not Edge.home:
        return load_words(address(table, rank, Slot.sends) + Int64(place) * _SEND_BYTES)
    row = buffer(address(table, rank, Slot.returns), Int32)[place]
    return row, Int32(0), Int32(0), Int32(0)


def second_of(edge: Edge, table: cute.Pointer, rank: Int32, row: Int32) -> Int64:
    """Home: source rank, token and slot of a receive row, as dispatch has stored them; else 0."""
    if edge is not Edge.home:
        return Int64(0)
    return buffer(address(table, rank, Slot.row_home), Int64)[row]


def way_of(
    edge: Edge,
    constants: Constants,
    table: cute.Pointer,
    rank: Int32,
    first: First,
    second: Int64,
) -> Way:
    """Addresses of a row."""
    kind = _home_way if edge is Edge.home else _dispatch_way
    return kind(constants, table, rank, first, second)


def _dispatch_way(
    constants: Constants, table: cute.Pointer, rank: Int32, first: First, second: Int64
) -> Way:
    token, peer_slot, row, counter = first
    peer = peer_slot >> SLOT_BITS
    if has_single_writers(Edge.dispatch, constants):
        flag = address(table, peer, Slot.row_flag) + Int64(row) * 4
    else:
        flag = address(table, peer, Slot.ready) + Int64(counter) * 4
    return Way(
        peer=peer,
        source=address(table, rank, Slot.x) + Int64(token) * constants.row_bytes,
        target=address(table, peer, Slot.recv_x) + Int64(row) * constants.row_bytes,
        flag=flag,
    )


def _home_way(
    constants: Constants, table: cute.Pointer, rank: Int32, first: First, second: Int64
) -> Way:
    peer, token = Int32(second >> (TOKEN_BITS + SLOT_BITS)), Int32(second >> SLOT_BITS)
    home_row = Int64(token) * constants.num_topk + (Int32(second) & ((1 << SLOT_BITS) - 1))
    if constants.by_rank:
        flag = address(table, peer, Slot.rank_ready) + Int64(rank) * 4
    else:
        flag = address(table, peer, Slot.token_ready) + Int64(token) * 4
    return Way(
        peer=peer,
        source=address(table, rank, Slot.y) + Int64(first[0]) * constants.row_bytes,
        target=address(table, peer, Slot.home_y) + home_row * constants.row_bytes,
        flag=flag,
    )


def note_beside(edge: Edge, table: cute.Pointer, rank: Int32, first: First) -> None:
    """Store what travels beside a row; called by one lane, before the row's flag."""
    if edge is not Edge.home:
        token, peer_slot, row, _ = first
        slot = peer_slot & ((1 << SLOT_BITS) - 1)
        home = (Int64(rank) << (TOKEN_BITS + SLOT_BITS)) | (Int64(token) << SLOT_BITS) | slot
        buffer(address(table, peer_slot >> SLOT_BITS, Slot.row_home), Int64)[row] = home


def token_flag(
    constants: Constants, table: cute.Pointer, rank: Int32, peer: Int32, token: Int32, chunk: Int32
) -> Int64:
    """Address of the counter at home that a chunk of a row of `token` raises.

    Every rank has room for as many tokens in a part, so a rank's own words say how many.
    """
    place = Int64(token)
    if constants.num_parts > 1:
        assert constants.num_parts == constants.num_chunks, "a part is a chunk"
        words = buffer(address(table, rank, Slot.words), Int32)
        place += Int64(chunk) * words[int(Word.max_tokens)]
    return address(table, peer, Slot.token_ready) + place * 4
