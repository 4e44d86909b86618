"""The launch protocol as programs of atomic steps, and a search through all their interleavings.

Knows nothing of GPUs, processes or the code that runs the protocol; it is the protocol, in small.

A **rank** has a plan thread, one or more senders and a consumer. Each is a fixed list of **steps**.
A step is atomic: it waits for words, reads and checks words, stores words. One launch n of a rank:

1. Plan n starts once the reader of launch n-1 on this rank has ended. Its senders may still be
   busy: that is more than the kernels do, and as right.
2. It zeroes the rank's own counters, then publishes to every peer, itself included. With an
   exchange it stores its counts for all experts into `mailbox[n & 1][src]` of the peer; without
   one (combine alone, a cached plan) it stores n into `ready[src]`.
3. The **gate**: it waits until the words of every rank carry n (mailbox) or n and more (ready),
   ranks without rows included. With an exchange it then reads the counts.
4. Senders store rows into the peers' memory and raise flags there: counters per tile, by the number
   of rows, or one word per row that becomes n.
5. The consumer waits until a counter has reached the number of rows its tile has in *this* launch,
   or until a row's word is n, and reads the rows.
6. Of a layer the same rows then go home under the same gate: once a rank has read and sent its own,
   its senders store them at their sources and raise counters of their own there, and the consumer
   reads those. The plan has zeroed these counters with the others, so a rank that is ahead may
   store rows at one that has not yet read what came before.

What a word holds. The state is a string of small words: a program counter per thread, then memory.
Everything that launch n writes is the number n: a mailbox word stands for `epoch << 32 | count`, a
row's two words for that launch's row in that slot. Counts, slots and thresholds of each launch are
fixed, hence built into the steps: a rank that would plan with a wrong count is reported where it
reads it, before it could use it. A counter has one cell per launch, so that the model sees whose
flags were counted; the protocol sees their sum, and zeroing clears all cells at once.

A step touches one word, so that a rank which looks in between sees half-zeroed counters and
half-stored rows.

Why the search is exhaustive. Each step moves one program counter by one, and a wait is a step that
is not possible yet (looking again changes nothing). So states lie in levels, by the number of steps
taken, and no run returns to an earlier level: going level by level, equal states merged, visits
every reachable state. Nothing is sampled and no order of independent steps is taken for granted. A
run can only stop where no step is possible: either all threads have ended, or it is a deadlock. No
deadlock therefore means that every launch of every run ends.

Not modelled: memory order (stores of a thread are seen in program order, which publish and wait
must give), rule 6 (preset flags) and rule 7 (hash, abort).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import groupby, product

__all__ = ["Fault", "Launch", "Outcome", "Protocol", "explore"]

# Rows of a tile; a rank with three rows has two tiles and so two counters.
TILE_M = 2


class Fault(Enum):
    """One rule broken on purpose; the search must notice."""

    no_gate = "no_gate"  # nobody waits for anybody before sending
    no_zeroing = "no_zeroing"  # counters keep what earlier launches counted
    zeroing_after_publish = "zeroing_after_publish"  # ready is said before it is true
    one_mailbox_half = "one_mailbox_half"  # counts of all launches in one place
    idle_ranks_not_awaited = "idle_ranks_not_awaited"  # the gate skips ranks that send no row
    plan_before_readers_end = "plan_before_readers_end"  # a launch starts on unread rows
    flag_before_row = "flag_before_row"  # the flag is raised before the row is stored
    home_not_zeroed = "home_not_zeroed"  # of a layer: only the counters of its first half are
    home_before_there = "home_before_there"  # of a layer: rows go home that have not all come


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What one launch moves, and how its gate is passed."""

    rows: tuple[tuple[int, ...], ...]  # rows[source rank][destination rank]
    exchange: bool = True  # False: no counts are sent, the gate is `ready[src] >= n`
    returns: bool = False  # a layer: the rows go home again behind the same gate

    @property
    def home(self) -> "Launch":
        """The way home of a layer's rows."""
        return Launch(rows=tuple(zip(*self.rows, strict=True)))

    def num_received(self, rank: int) -> int:
        return sum(sent[rank] for sent in self.rows)

    def slots(self, source: int, destination: int) -> range:
        """Where the source's rows lie at the destination: in the order of source ranks."""
        first = sum(sent[destination] for sent in self.rows[:source])
        return range(first, first + self.rows[source][destination])


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Possible only while low <= sum of the words <= high."""

    addresses: tuple[int, ...]
    low: int
    high: int = 255


@dataclass(frozen=True)
class Read:
    """The word must hold `value`, or the run is wrong: `complaint` says how."""

    address: int
    value: int
    complaint: str


@dataclass(frozen=True, kw_only=True)
class Step:
    """One atomic step: waits, then reads, then stores and additions."""

    label: str
    waits: tuple[Wait, ...] = ()
    reads: tuple[Read, ...] = ()
    stores: tuple[tuple[int, int], ...] = ()  # (address, value)
    adds: tuple[tuple[int, int], ...] = ()  # (address, amount)


@dataclass(kw_only=True)
class Protocol:
    """The steps of all threads of all ranks for a sequence of launches."""

    launches: tuple[Launch, ...]
    num_senders: int = 1
    row_flags: bool = False  # False: a counter per tile; True: a word per row, never zeroed
    fault: Fault | None = None
    threads: dict[int, list[Step]] = field(default_factory=dict)  # address of pc -> steps
    num_words: int = 0
    _addresses: dict[tuple[object, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_ranks = len(self.launches[0].rows)
        self.num_slots = max(
            way.num_received(rank)
            for launch in self.launches
            for way in (launch, *[launch.home] * launch.returns)
            for rank in range(self.num_ranks)
        )
        self.num_tiles = -(-self.num_slots // TILE_M)
        for rank in range(self.num_ranks):
            plan, consumer, *senders = (
                self.threads.setdefault(self.word("pc", rank, name), [])
                for name in ("plan", "consumer", *range(self.num_senders))
            )
            for epoch, launch in enumerate(self.launches, start=1):
                readers = [] if self.fault is Fault.plan_before_readers_end else [consumer]
                plan += self._after(readers, self._plan(rank, epoch, launch))
                tickets = list(self._tickets(rank, epoch, launch))
                for index, sender in enumerate(senders):
                    mine = [step for ticket in tickets[index :: len(senders)] for step in ticket]
                    sender += self._after([plan], mine)
                consumer += self._after([plan], list(self._consume(rank, epoch, launch)))
                if launch.returns:
                    self._go_home(rank, epoch, launch.home, [plan, consumer, *senders])

    def _go_home(self, rank: int, epoch: int, home: Launch, threads: list[list[Step]]) -> None:
        """The second half of a layer, behind the first one of this rank."""
        plan, consumer, *senders = threads
        before = [plan] if self.fault is Fault.home_before_there else [consumer, *senders]
        tickets = list(self._tickets(rank, epoch, home, edge="home"))
        words = [
            self.word("row", rank, slot, half)
            for slot in range(sum(home.rows[rank]))
            for half in range(2)
        ]
        made = Step(
            label=f"rank {rank} launch {epoch}: make what goes home",
            reads=tuple(Read(word, epoch, "row of another launch") for word in words),
        )
        mine = [tickets[number :: len(senders)] for number in range(len(senders))]
        added = [
            [made, *(step for ticket in own for step in ticket)] if own else [] for own in mine
        ]
        added = [self._after(before, steps) for steps in added]
        for sender, steps in zip(senders, added, strict=True):
            sender += steps
        consumer += self._after([plan], list(self._consume(rank, epoch, home, edge="home")))

    def word(self, *name: object) -> int:
        """The address of a word, given out at its first mention."""
        if name not in self._addresses:
            self._addresses[name] = self.num_words
            self.num_words += 1
        return self._addresses[name]

    def _after(self, threads: list[list[Step]], steps: list[Step]) -> list[Step]:
        """The first of these steps waits until the threads have done all that they have so far."""
        if not steps:
            return []
        address_of = {id(thread): address for address, thread in self.threads.items()}
        waits = tuple(
            Wait(addresses=(address_of[id(thread)],), low=len(thread)) for thread in threads
        )
        return [replace(steps[0], waits=waits + steps[0].waits), *steps[1:]]

    def _plan(self, rank: int, epoch: int, launch: Launch) -> list[Step]:
        zeroing = list(self._zero(rank, epoch))
        publishing = list(self._publish(rank, epoch, launch))
        gate = list(self._pass_gate(rank, epoch, launch))
        if self.fault is Fault.no_zeroing:
            zeroing = []
        if self.fault is Fault.no_gate:
            gate = []
        if self.fault is Fault.zeroing_after_publish:
            return [*publishing, *zeroing, *gate]
        return [*zeroing, *publishing, *gate]

    def _zero(self, rank: int, epoch: int) -> Iterator[Step]:
        edges = [] if self.row_flags else ["row"]
        if any(launch.returns for launch in self.launches):
            edges += [] if self.fault is Fault.home_not_zeroed else ["home"]
        for edge, tile in product(edges, range(self.num_tiles)):
            cells = self._counter(rank, tile, edge)
            yield Step(
                label=f"rank {rank} launch {epoch}: zero {edge} counter {tile}",
                stores=tuple((cell, 0) for cell in cells),
            )

    def _publish(self, rank: int, epoch: int, launch: Launch) -> Iterator[Step]:
        for peer in range(self.num_ranks):
            label = f"rank {rank} launch {epoch}: publish to rank {peer}"
            if launch.exchange:
                words = self._mailbox(peer, epoch, rank)
            else:
                words = [self.word("ready", peer, rank)]
            yield from (Step(label=label, stores=((word, epoch),)) for word in words)

    def _pass_gate(self, rank: int, epoch: int, launch: Launch) -> Iterator[Step]:
        sources = [
            source
            for source in range(self.num_ranks)
            if sum(launch.rows[source]) or self.fault is not Fault.idle_ranks_not_awaited
        ]
        label = f"rank {rank} launch {epoch}: gate"
        if not launch.exchange:
            for source in sources:
                ready = self.word("ready", rank, source)
                yield Step(label=label, waits=(Wait(addresses=(ready,), low=epoch),))
            return
        words = [word for source in sources for word in self._mailbox(rank, epoch, source)]
        for word in words:
            yield Step(label=label, waits=(Wait(addresses=(word,), low=epoch, high=epoch),))
        for word in words:
            yield Step(
                label=f"rank {rank} launch {epoch}: read counts",
                reads=(Read(address=word, value=epoch, complaint="counts of another launch"),),
            )

    def _mailbox(self, rank: int, epoch: int, source: int) -> list[int]:
        """The words in which `source` tells `rank` its counts, one per expert; a rank has one."""
        half = 0 if self.fault is Fault.one_mailbox_half else epoch & 1
        return [
            self.word("mailbox", rank, half, source, expert) for expert in range(self.num_ranks)
        ]

    def _counter(self, rank: int, tile: int, edge: str) -> tuple[int, ...]:
        """The cells of a counter, one per launch; the protocol sees their sum."""
        return tuple(
            self.word(f"{edge} counter", rank, tile, epoch)
            for epoch in range(1, len(self.launches) + 1)
        )

    def _tickets(
        self, rank: int, epoch: int, launch: Launch, edge: str = "row"
    ) -> Iterator[list[Step]]:
        """Runs of rows with one destination tile, destinations from rank + 1 on."""
        for peer in ((rank + 1 + turn) % self.num_ranks for turn in range(self.num_ranks)):
            for tile, slots in groupby(launch.slots(rank, peer), lambda slot: slot // TILE_M):
                yield self._send(rank, epoch, peer, tile, list(slots), edge)

    def _send(
        self, rank: int, epoch: int, peer: int, tile: int, slots: list[int], edge: str
    ) -> list[Step]:
        where = f"rank {rank} launch {epoch}: to rank {peer}"
        rows, flags = [], []
        for slot in slots:
            for half in range(2):
                stored = ((self.word(edge, peer, slot, half), epoch),)
                rows.append(Step(label=f"{where} {edge} {slot}", stores=stored))
            raised = ((self.word("flag", peer, slot), epoch),)
            flags.append(Step(label=f"{where} flag of row {slot}", stores=raised))
        if not self.row_flags or edge == "home":
            cell = self._counter(peer, tile, edge)[epoch - 1]
            flags = [Step(label=f"{where} {edge} counter {tile}", adds=((cell, len(slots)),))]
        return [*flags, *rows] if self.fault is Fault.flag_before_row else [*rows, *flags]

    def _consume(self, rank: int, epoch: int, launch: Launch, edge: str = "row") -> Iterator[Step]:
        slots = range(launch.num_received(rank))
        for tile, group in groupby(slots, lambda slot: slot // TILE_M):
            tile_slots = list(group)
            if self.row_flags and edge == "row":
                yield from self._await_row_flags(rank, epoch, tile_slots)
            else:
                yield self._await_counter(rank, epoch, tile, len(tile_slots), edge)
            for slot, half in product(tile_slots, range(2)):
                word = self.word(edge, rank, slot, half)
                yield Step(
                    label=f"rank {rank} launch {epoch}: read {edge} {slot}",
                    reads=(Read(address=word, value=epoch, complaint="row of another launch"),),
                )

    def _await_counter(self, rank: int, epoch: int, tile: int, num_rows: int, edge: str) -> Step:
        cells = self._counter(rank, tile, edge)
        return Step(
            label=f"rank {rank} launch {epoch}: {num_rows} rows seen in {edge} counter {tile}",
            waits=(Wait(addresses=cells, low=num_rows),),
            reads=tuple(
                Read(
                    address=cell,
                    value=num_rows if of_launch == epoch else 0,
                    complaint="flag counted in another launch",
                )
                for of_launch, cell in enumerate(cells, start=1)
            ),
        )

    def _await_row_flags(self, rank: int, epoch: int, slots: list[int]) -> Iterator[Step]:
        for slot in slots:
            flag = self.word("flag", rank, slot)
            yield Step(
                label=f"rank {rank} launch {epoch}: flag of row {slot} seen",
                waits=(Wait(addresses=(flag,), low=epoch, high=epoch),),
            )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the search found; without a complaint every run was right and ended."""

    num_states: int
    complaint: str | None
    trace: tuple[str, ...]  # the steps of a shortest wrong run


# The steps that led to a state, last one first, each with what led to it.
_History = tuple[str, "_History"] | None


def explore(protocol: Protocol) -> Outcome:
    """Go through every reachable state, level by level; stop at the first wrong one."""
    threads = [(pc, _compiled(steps)) for pc, steps in protocol.threads.items()]
    level: dict[bytes, _History] = {bytes(protocol.num_words): None}
    num_states = 0
    while level:
        num_states += len(level)
        below: dict[bytes, _History] = {}
        for state, history in level.items():
            stuck = True
            for pc, steps in threads:
                if state[pc] == len(steps):
                    continue
                label, waits, reads, stores, adds = steps[state[pc]]
                if not _possible(state, waits):
                    continue
                stuck = False
                for address, value, complaint in reads:
                    if state[address] != value:
                        return _wrong(num_states, complaint, (label, history))
                words = bytearray(state)
                words[pc] += 1
                for address, value in stores:
                    words[address] = value
                for address, amount in adds:
                    words[address] += amount
                below.setdefault(bytes(words), (label, history))
            if stuck and any(state[pc] < len(steps) for pc, steps in threads):
                return _wrong(num_states, "deadlock", history)
        level = below
    return Outcome(num_states=num_states, complaint=None, trace=())


def _compiled(steps):
    """Plain tuples: the search reads each step millions of times."""
    return [
        (
            step.label,
            tuple((wait.addresses, wait.low, wait.high) for wait in step.waits),
            tuple((read.address, read.value, read.complaint) for read in step.reads),
            step.stores,
            step.adds,
        )
        for step in steps
    ]


def _possible(state: bytes, waits: tuple[tuple[tuple[int, ...], int, int], ...]) -> bool:
    for addresses, low, high in waits:
        seen = 0
        for address in addresses:
            seen += state[address]
        if not low <= seen <= high:
            return False
    return True


def _wrong(num_states: int, complaint: str, history: _History) -> Outcome:
    trace = []
    while history is not None:
        label, history = history
        trace.append(label)
    return Outcome(num_states=num_states, complaint=complaint, trace=tuple(reversed(trace)))
