"""Data races of interpreted kernels, by the order that fences, flags and barriers make.

Knows nothing of instructions. Two accesses of one word by two lanes, one of them a write and not
both strong (relaxed at a scope, volatile), must be ordered: by `bar.sync`, `bar.warp.sync`, the
end of a launch, or by a fence, a strong write, a strong read that has seen it, and, unless that
read acquires, a fence. What a run of one order of steps shows holds for all orders in which the
same flags are seen, so a fence that is missing is found though the interpreter itself never
reorders anything.

Bulk copies run in a proxy of their own: one reads what others have stored only behind a proxy
fence of its lane, and what one has stored is known to whoever comes after its wait and, behind
that, a proxy fence of any lane. Only first lanes of warps may issue bulk stores.

Lenient where it does not matter here: scopes count as system, the proxies of writes that meet are
not told apart, and of many readers of a word two are remembered.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from tests.ptx.memory import Fault, Memory

__all__ = ["Races", "View"]

_WORD = 4
_WARP = 32
_NOT_YET = 2**30  # clock of a write that nobody has waited for


class _Shadow:
    """The latest accesses of each word."""

    def __init__(self, num_words: int) -> None:
        self.write, self.read, self.other_read = (_Latest(num_words) for _ in range(3))


class _Latest:
    """One access of each word: who, at which of its clocks, and whether it was strong."""

    def __init__(self, num_words: int) -> None:
        self.lane = np.full(num_words, -1, np.int32)
        self.clock = np.zeros(num_words, np.int32)
        self.strong = np.zeros(num_words, bool)

    def keep(self, words: np.ndarray, lanes: np.ndarray, clocks: np.ndarray, strong: bool) -> None:
        self.lane[words] = lanes
        self.clock[words] = clocks
        self.strong[words] = strong


class Races:
    """Clocks of the lanes of all streams of a run; whoever starts it is ordered before all."""

    def __init__(self, memory: Memory, lanes_of_streams: Sequence[int]) -> None:
        self.memory = memory
        ends = np.cumsum([0, *lanes_of_streams])
        self._ranges = [slice(int(a), int(b)) for a, b in pairwise(ends)]
        size = int(ends[-1])
        # Columns: lanes, and the bulk stores of every warp.
        self.num_lanes, columns = size, size + size // _WARP
        # Row: what a lane knows of all; what it knew at its latest fence; what a fence will tell;
        # what its bulk copies know.
        self.clock, self.released, self.seen, self.proxy = (
            np.zeros((size, columns), np.int32) for _ in range(4)
        )
        own = np.arange(size)
        self.clock[own, own] = 1
        self.shadow = _Shadow(memory.num_words)
        # Of words that were written strongly.
        self._row_of = np.full(memory.num_words, -1, np.int32)
        self._carried = np.zeros((64, columns), np.int32)  # what a word tells those who read it
        self._num_rows = 0

    def begin(self, stream: int) -> slice:
        """A launch of a stream begins: all lanes of the one before have ended."""
        lanes = self._ranges[stream]
        numbers = np.arange(lanes.start, lanes.stop)
        if len(numbers):
            self.meet(numbers)
            # Of its own launches the bulk stores are there; what comes from others needs a fence.
            own = slice(self.num_lanes + lanes.start // _WARP, self.num_lanes + lanes.stop // _WARP)
            self.clock[lanes, own] = self.clock[lanes, lanes.start : lanes.stop : _WARP]
            self.proxy[lanes] = self.clock[lanes]
            self.clock[numbers, numbers] += 1
        return lanes

    def meet(self, lanes: np.ndarray) -> None:
        rows = _rows(lanes)
        self.clock[rows] = self.clock[rows].max(0)
        self.clock[lanes, lanes] += 1

    def fence(self, lanes: np.ndarray) -> None:
        rows = _rows(lanes)
        known = np.maximum(self.clock[rows], self.seen[rows])
        self.released[rows] = known
        self.clock[rows] = known
        self.clock[lanes, lanes] += 1

    def fence_proxy(self, lanes: np.ndarray) -> None:
        rows, size = _rows(lanes), self.num_lanes
        known = np.maximum(self.clock[rows, size:], self.clock[rows, :size:_WARP])
        self.clock[rows, size:] = known
        self.proxy[rows] = self.clock[rows]
        self.clock[lanes, lanes] += 1

    # Words that carry order.

    def tell(self, lanes: np.ndarray, words: np.ndarray, *, adds: bool) -> None:
        """Strong writes: `adds` keeps what others have told before."""
        for lane, word in zip(lanes.tolist(), words[:, 0].tolist(), strict=True):
            row = self._row(word)
            if adds:
                self.seen[lane] = np.maximum(self.seen[lane], self._carried[row])
                np.maximum(self._carried[row], self.released[lane], out=self._carried[row])
            else:
                self._carried[row] = self.released[lane]

    def hear(self, lanes: np.ndarray, words: np.ndarray, *, acquires: bool) -> None:
        """Strong reads: who `acquires` knows what it has seen without a fence behind."""
        rows = self._row_of[words[:, 0]]
        told = rows >= 0
        if told.any():
            lanes, known = lanes[told], self.clock if acquires else self.seen
            known[lanes] = np.maximum(known[lanes], self._carried[rows[told]])

    def hush(self, words: np.ndarray) -> None:
        """Weak writes tell nothing."""
        rows = self._row_of[words]
        if (rows >= 0).any():
            self._carried[rows[rows >= 0]] = 0

    def _row(self, word: int) -> int:
        if self._row_of[word] < 0:
            if self._num_rows == len(self._carried):
                self._carried = np.concatenate([self._carried, np.zeros_like(self._carried)])
            self._row_of[word] = self._num_rows
            self._num_rows += 1
        return int(self._row_of[word])


def _rows(lanes: np.ndarray) -> slice | np.ndarray:
    """Rising numbers as an index: neighbours as a slice, which copies nothing."""
    first, last = int(lanes[0]), int(lanes[-1])
    return slice(first, last + 1) if last - first + 1 == len(lanes) else lanes


class View:
    """What the lanes of one launch do."""

    def __init__(self, races: Races, stream: int, num_lanes: int, shared_bytes: int) -> None:
        self.races = races
        lanes = races.begin(stream)
        assert num_lanes <= lanes.stop - lanes.start
        self._first = lanes.start
        self._shared = _Shadow(shared_bytes // _WORD)
        self._late: dict[int, list[tuple[int, np.ndarray]]] = {}  # by lane: group and words

    def meet(self, lanes: np.ndarray) -> None:
        self.races.meet(lanes + self._first)

    def fence(self, lanes: np.ndarray) -> None:
        self.races.fence(lanes + self._first)

    def fence_proxy(self, lanes: np.ndarray) -> None:
        self.races.fence_proxy(lanes + self._first)

    def end(self) -> None:
        """The launch has ended, and so have its copies."""
        for lane in list(self._late):
            self.written(lane, _NOT_YET)

    # Barriers in shared memory: what lanes tell when they arrive and hear when they have waited.

    def arrive(self, lane: int, told: np.ndarray | None) -> np.ndarray:
        own = lane + self._first
        known = self.races.clock[own].copy()
        self.races.clock[own, own] += 1
        return known if told is None else np.maximum(known, told)

    def pass_barrier(self, lane: int, told: np.ndarray) -> None:
        own = self.races.clock[lane + self._first]
        np.maximum(own, told, out=own)

    # Global memory.

    def read(
        self,
        lanes: np.ndarray,
        addresses: np.ndarray,
        size: int,
        strong: bool,
        acquires: bool = False,
    ) -> None:
        words, lanes = self._words(addresses, size), lanes + self._first
        self._note_read(self.races.shadow, lanes, words, strong)
        if strong:
            self.races.hear(lanes, words, acquires=acquires)

    def write(self, lanes: np.ndarray, addresses: np.ndarray, size: int, strong: bool) -> None:
        words, lanes = self._words(addresses, size), lanes + self._first
        self._note_write(self.races.shadow, lanes, words, strong)
        if strong:
            self.races.tell(lanes, words, adds=False)
        else:
            self.races.hush(words)

    def change(self, lanes: np.ndarray, addresses: np.ndarray, size: int) -> None:
        """Atomics, which are strong."""
        words, lanes = self._words(addresses, size), lanes + self._first
        self._note_write(self.races.shadow, lanes, words, True)
        self.races.tell(lanes, words, adds=True)

    def read_range(self, lane: int, address: int, size: int, *, bulk: bool) -> None:
        words = self._words(np.array([address], np.uint64), size)
        self._note_read(self.races.shadow, np.array([lane + self._first]), words, False, bulk)

    def write_later(self, lane: int, group: int, address: int, size: int) -> None:
        """A bulk store has begun; its bytes are anybody's once `written`."""
        words = self._words(np.array([address], np.uint64), size)
        self._note_write(self.races.shadow, np.array([lane + self._first]), words, False)
        latest = self.races.shadow.write
        latest.lane[words], latest.clock[words] = self._bulk(lane), _NOT_YET
        self._late.setdefault(lane, []).append((group, words))

    def written(self, lane: int, num_groups: int) -> None:
        """A lane has waited until its first groups of bulk stores are there."""
        agent, latest = lane + self._first, self.races.shadow.write
        late = self._late.pop(lane, [])
        for group, words in late:
            if group < num_groups:
                own = words[latest.lane[words] == self._bulk(lane)]
                latest.clock[own] = self.races.clock[agent, agent]
        self._late[lane] = [(group, words) for group, words in late if group >= num_groups]

    def _bulk(self, lane: int) -> int:
        """Column of the bulk stores of a lane."""
        warp, place = divmod(lane + self._first, _WARP)
        assert place == 0, "bulk stores of other lanes are not told apart"
        return self.races.num_lanes + warp

    def _words(self, addresses: np.ndarray, size: int) -> np.ndarray:
        first = self.races.memory.word_numbers(addresses)
        return first[:, None] + np.arange(-(-size // _WORD))

    # Shared memory: places are bytes from the beginning of that of all CTAs.

    def read_shared(
        self, lanes: np.ndarray, places: np.ndarray, size: int, *, bulk: bool = False
    ) -> None:
        words = (places // _WORD)[:, None] + np.arange(size // _WORD)
        self._note_read(self._shared, lanes + self._first, words, False, bulk)

    def write_shared(self, lanes: np.ndarray, places: np.ndarray, size: int) -> None:
        words = (places // _WORD)[:, None] + np.arange(size // _WORD)
        self._note_write(self._shared, lanes + self._first, words, False)

    # Order.

    def _note_read(
        self,
        shadow: _Shadow,
        lanes: np.ndarray,
        words: np.ndarray,
        strong: bool,
        bulk: bool = False,
    ) -> None:
        mine = lanes.repeat(words.shape[1]).reshape(words.shape)
        clocks = self.races.clock[mine, mine]
        self._check(shadow, shadow.write, mine, words, strong, "read", "written", bulk)
        beside = self._unordered(shadow.read, mine, words)
        if not beside.any():
            shadow.read.keep(words, mine, clocks, strong)
            return
        shadow.read.keep(words[~beside], mine[~beside], clocks[~beside], strong)
        shadow.other_read.keep(words[beside], mine[beside], clocks[beside], strong)

    def _note_write(
        self, shadow: _Shadow, lanes: np.ndarray, words: np.ndarray, strong: bool
    ) -> None:
        mine = lanes.repeat(words.shape[1]).reshape(words.shape)
        self._check(shadow, shadow.write, mine, words, strong, "written", "written")
        self._check(shadow, shadow.read, mine, words, strong, "written", "read")
        self._check(shadow, shadow.other_read, mine, words, strong, "written", "read")
        # A strong write counts as part of the release before it.
        clocks = (self.races.released if strong else self.races.clock)[mine, mine]
        shadow.write.keep(words, mine, clocks, strong)
        if not strong and (shadow.write.lane[words] != mine).any():
            raise Fault("a race: lanes write one word at once")

    def _unordered(
        self, latest: _Latest, mine: np.ndarray, words: np.ndarray, bulk: bool = False
    ) -> np.ndarray:
        """Where another lane's access is not known to come before."""
        other = latest.lane[words]
        clock = self.races.proxy if bulk else self.races.clock
        known = clock[mine, np.maximum(other, 0)]
        return (other >= 0) & (other != mine) & (latest.clock[words] > known)

    def _check(
        self,
        shadow: _Shadow,
        latest: _Latest,
        mine: np.ndarray,
        words: np.ndarray,
        strong: bool,
        doing: str,
        done: str,
        bulk: bool = False,
    ) -> None:
        wrong = self._unordered(latest, mine, words, bulk)
        if strong:
            wrong &= ~latest.strong[words]
        if wrong.any():
            lane, by = mine[wrong][0], int(latest.lane[words[wrong]][0])
            where = self._name(shadow, int(words[wrong][0]))
            warp = by - self.races.num_lanes
            other = f"lane {by}" if warp < 0 else f"a bulk copy of lane {warp * _WARP}"
            raise Fault(
                f"a race: {where} is {doing} by {'a bulk copy of ' * bulk}lane {lane} and was "
                f"{done} by {other}, which nothing orders"
            )

    def _name(self, shadow: _Shadow, word: int) -> str:
        if shadow is self._shared:
            return f"word {word} of shared memory"
        return self.races.memory.named_word(word)
