"""What a warp of bulk copies finds around it: an engine that does everything as late as it may.

Knows nothing of the order in which the warp works; every call says what must hold by then.
"""

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from tests.kernels.warp import LANES, lane_functions, run_warp
from tilepipe.config.choices import Copy, Granularity
from tilepipe.config.limits import max_flag_batch
from tilepipe.kernels.constants import Constants
from tilepipe.kernels.edges import Edge
from tilepipe.kernels.track import Event

__all__ = [
    "CLAIM_ROWS",
    "NUM_AHEAD",
    "ROW_BYTES",
    "TEXT",
    "Engine",
    "constants_of",
    "functions_of",
    "moved",
]

TEXT = (Path(__file__).resolve().parents[2] / "tilepipe/kernels/bulk.py").read_text("utf-8")
# Addresses that need more than 32 bits, the lower half with its sign.
SOURCES, TARGETS, FLAGS = 0x7F_F000_0000, 0x12_A000_0000, 0x5_8000_0000
RING, BARRIERS = 4096, 128
LATENCY_NS = 700
EPOCH = 9
# Rows of a claim, by what is moved, and claims that a warp works ahead.
CLAIM_ROWS = {Edge.dispatch: 4, Edge.opening: 1}
NUM_AHEAD = 3
# Of one, two and three pieces, the last of them shorter.
ROW_BYTES = {1: 48, 2: 14_352, 3: 28_704}


def constants_of(stages, pieces=1, batch=4, *, paced=False, by_epoch=False):
    constants = Constants(
        num_ranks=2,
        num_experts_per_rank=1,
        num_topk=1,
        row_bytes=ROW_BYTES[pieces],
        granularity=Granularity.token if by_epoch else Granularity.tile,
        copy=Copy.tma,
        num_stages=stages,
        flag_batch=batch,
        paced=paced,
    )
    assert constants.num_pieces == pieces
    return constants


def int32(value):
    return (int(value) + 2**31) % 2**32 - 2**31


@dataclass(repr=False)
class Engine:
    """Memory, copies and barriers around one warp; every call says who may make it, and when.

    A load is there, a stage is read and a row has arrived no sooner than the warp waits for it.
    """

    constants: Constants
    count: int  # rows of the rank
    bases: deque  # first places of this warp's claims; those past the end at last
    edge: Edge = Edge.dispatch
    aborted_at: int | None = None  # look at the abort word that finds it raised
    lost_load: int | None = None  # load that never comes
    lane: int = 0
    is_ring_free: bool = True  # all lanes may know that no store reads the ring
    num_looks: int = 0
    now_ns: int = 0
    num_loaded: int = 0
    num_stored: int = 0
    most_loading: int = 0
    most_reading: int = 0
    loading: dict = field(default_factory=dict)  # stage -> its piece, on its way
    filled: dict = field(default_factory=dict)  # stage -> its piece, there
    phases: dict = field(default_factory=dict)  # stage -> phases of its barrier that are complete
    open_group: list = field(default_factory=list)  # (stage, piece) of stores
    unread: list = field(default_factory=list)  # groups whose stages may still be read
    unwritten: list = field(default_factory=list)  # groups whose rows may not be there yet
    arrived: set = field(default_factory=set)  # pieces
    noted: set = field(default_factory=set)  # rows beside which a lane has stored the way home
    met: set = field(default_factory=set)  # of those, before a barrier of the warp
    known: set = field(default_factory=set)  # pieces that had arrived before one
    released: dict = field(default_factory=dict)  # lane -> rows that its fence has ordered
    due_ns: dict = field(default_factory=dict)  # row -> when its flag may be raised
    told: list = field(default_factory=list)  # rows whose flags were raised
    held: dict = field(default_factory=dict)  # lane -> row that it holds

    def __post_init__(self):
        of_claim = range(CLAIM_ROWS[self.edge])
        self.rows = [base + i for base in self.bases for i in of_claim if base + i < self.count]
        self.pieces = [
            (row, part) for row in self.rows for part in range(self.constants.num_pieces)
        ]

    @property
    def busy(self):
        """Stages with a load that nobody has waited for, and stores that may be under way."""
        return sorted({*self.loading, *self.filled}), self.unwritten

    # What lanes look up.

    def first_of(self, edge, table, rank, place, count):
        before = self.held.get(self.lane)
        assert before is None or before in self.told, f"lane {self.lane} forgets row {before}"
        self.held[self.lane] = place if place < count else None
        row = max(min(place, count - 1), 0)
        return row, row, row, row

    def way_of(self, edge, constants, table, rank, first, second):
        assert self.count > 0, "the way of a row that does not exist"
        return SimpleNamespace(
            peer=second,
            source=SOURCES + first[0] * constants.row_bytes,
            target=TARGETS + second * constants.row_bytes,
            flag=FLAGS + second * 4,
        )

    def claim(self, queue, amount, scope):
        assert (self.lane, amount) == (0, CLAIM_ROWS[self.edge])
        return self.bases.popleft()

    def abort_word(self, table, rank):
        self.num_looks += self.lane == 0
        return int(self.aborted_at is not None and self.num_looks > self.aborted_at)

    # Copies.

    def _bulk_load(self, source, stage, barrier, num_bytes):
        place, piece = self._stage(stage, barrier), self.pieces[self.num_loaded]
        assert self._piece(source - SOURCES, num_bytes) == piece
        assert place not in self.loading, "a second load on its way to one stage"
        assert place not in self.filled, "a load into a stage that nobody has stored"
        reading = {stage for group in self.unread for stage, _ in group}
        assert place not in reading, "a load into a stage that a store may still read"
        self.loading[place] = piece
        self.num_loaded += 1
        self.most_loading = max(self.most_loading, len(self.loading))
        self.most_reading = max(self.most_reading, len(reading))

    def _wait_load(self, barrier, phase, limit_ns):
        assert self.lane == 0
        place = (barrier - BARRIERS) // 8
        assert place in self.loading, "a wait for a load that was not started"
        assert self.phases.setdefault(place, 0) % 2 == phase, "a wait for another phase"
        if self.loading[place] == self._lost:
            return False
        self.filled[place] = self.loading.pop(place)
        self.phases[place] += 1
        return True

    @property
    def _lost(self):
        known = self.lost_load is not None and self.lost_load < len(self.pieces)
        return self.pieces[self.lost_load] if known else None

    def _bulk_store(self, stage, target, num_bytes):
        place, piece = self._stage(stage), self.pieces[self.num_stored]
        self.is_ring_free = False
        assert self.filled.pop(place) == piece == self._piece(target - TARGETS, num_bytes)
        self.open_group.append((place, piece))
        self.num_stored += 1

    def commit(self):
        assert self.lane == 0
        for groups in (self.unread, self.unwritten):
            groups.append(list(self.open_group))
        self.open_group.clear()

    def wait_group(self, count, *, read):
        assert self.lane == 0
        del self.unread[: max(0, len(self.unread) - count)]
        while not read and len(self.unwritten) > count:
            self.arrived |= {piece for _, piece in self.unwritten.pop(0)}

    def _stage(self, stage, barrier=None):
        assert self.lane == 0, "bulk groups belong to the thread that has committed them"
        place, rest = divmod(stage - RING, self.constants.piece_bytes)
        assert rest == 0
        assert 0 <= place < self.constants.num_stages
        assert barrier in (None, BARRIERS + 8 * place)
        return place

    def _piece(self, offset, num_bytes):
        row, within = divmod(offset, self.constants.row_bytes)
        part, rest = divmod(within, self.constants.piece_bytes)
        left = self.constants.row_bytes - within
        assert (rest, num_bytes) == (0, min(left, self.constants.piece_bytes))
        return row, part

    # Flags.

    def note_beside(self, edge, table, rank, first):
        assert self.held[self.lane] == first[0], "another lane notes a row than holds it"
        assert first[0] not in self.noted, "a row is noted twice"
        self.noted.add(first[0])

    def enter(self, lane):
        self.lane = lane

    def meet(self, operation):
        """A barrier orders what all lanes have stored before what each does next; others do not."""
        if operation == "sync_warp":
            self.met |= self.noted
            self.known |= self.arrived
            self.is_ring_free = not self.unread

    def wait_for_link(self, table, source, target, lane, constants, cost_ns, latency_ns):
        if lane == 0:
            assert target == self.pieces[self.num_stored][0], "another row's link"
            assert target not in self.due_ns, "a row crosses the link twice"
            # Some rows stay on their rank, where nothing is waited for.
            crossed = 1000 * len(self.due_ns) + latency_ns
            self.due_ns[target] = crossed if target % 3 else 0
        return self.due_ns[target]

    def sleep_until(self, table, rank, moment_ns):
        if self.lane == 0:
            self.now_ns = max(self.now_ns, moment_ns)

    def release_bulk_fence(self, scope):
        assert scope == "sys"
        parts = range(self.constants.num_pieces)
        here = {row for row in self.rows if all((row, part) in self.known for part in parts)}
        self.released[self.lane] = here & self.met

    def add_relaxed(self, word, value, scope):
        row, rest = divmod(word - FLAGS, 4)
        assert (rest, value, scope) == (0, EPOCH, "sys")
        assert self.held[self.lane] == row, "another lane tells of a row than holds it"
        assert row not in self.told, "a row is told twice"
        fenced = self.released.get(self.lane, set())
        assert row in fenced, f"row {row} is told before it is known to be there"
        assert not self.constants.paced or self.now_ns >= self.due_ns[row]
        assert self.aborted_at is None or self.num_looks <= self.aborted_at
        self.told.append(row)

    set_relaxed = add_relaxed


def functions_of(engine, text=TEXT):
    """The module's functions for the lanes of an engine's warp."""
    by_epoch = engine.constants.granularity is Granularity.token
    arch = SimpleNamespace(
        cp_async_bulk_commit_group=engine.commit, cp_async_bulk_wait_group=engine.wait_group
    )
    language = {
        "cute": SimpleNamespace(arch=arch),
        "cutlass": SimpleNamespace(
            const_expr=bool,
            max=max,
            range=lambda first, last, unroll: range(first, last),
        ),
        "Boolean": bool,
        "Int32": int32,
        "Int64": int,
        "Edge": Edge,
        "LANES": LANES,
        "max_flag_batch": max_flag_batch,
    }
    words = {
        "Slot": SimpleNamespace(words=0),
        "Word": SimpleNamespace(epoch=0),
        "Scope": SimpleNamespace(sys="sys", gpu="gpu"),
        "address": lambda table, rank, slot: 0,
        "buffer": lambda address, dtype: (EPOCH, engine.count),
        "word": lambda address, name: name,
        "element": lambda address, index, dtype: address,
        "count_of": lambda edge: 1,
        "queue_of": lambda edge: "queue",
        "flag_value": lambda edge, constants, epoch: epoch,
        "has_single_writers": lambda edge, constants: by_epoch,
        "second_of": lambda edge, table, rank, row: row,
        "place_in_order": lambda edge: 0,
        "Event": Event,
        "lap": lambda *what: None,
    }
    methods = (
        *("first_of", "way_of", "note_beside", "claim", "abort_word"),
        *("wait_for_link", "sleep_until", "release_bulk_fence"),
        "set_relaxed" if by_epoch else "add_relaxed",
    )
    names = lane_functions(
        text, {**language, **words, **{name: getattr(engine, name) for name in methods}}
    )
    # The instructions themselves.
    names |= {name: getattr(engine, name) for name in ("_bulk_load", "_bulk_store", "_wait_load")}
    return names


def moved(constants, count, *, bases=None, text=TEXT, edge=Edge.dispatch, **chosen):
    """An engine whose warp has run the loop; `bases`: its claims, all where none are given."""
    of_claim = CLAIM_ROWS[edge]
    bases = list(range(0, count, of_claim)) if bases is None else list(bases)
    # What a warp claims ahead lies past the end.
    end = -(-count // of_claim) * of_claim
    past = range(end, end + NUM_AHEAD * of_claim, of_claim)
    engine = Engine(constants, count, deque([*bases, *past]), edge=edge, **chosen)
    move_rows = functions_of(engine, text)["move_rows"]
    lanes = [
        move_rows(edge, "table", 0, lane, RING, BARRIERS, constants, 10, LATENCY_NS, 1000)
        for lane in range(LANES)
    ]
    run_warp(lanes, entered=engine.enter, met=engine.meet)
    return engine
