"""What the warps of a grouped GEMM find around them: barriers, rings and copies of a cluster.

Knows nothing of the order in which a warp works. The text of the kernel's roles runs as it stands,
a generator a warp; which warp goes on next, and which load arrives, is drawn. Loads arrive late,
stores are read and complete no sooner than somebody waits for them, rows of a launch that waits for
them come at any time, and every use of a stage, a sum, a staging buffer or rows says what must hold
by then.
"""

from collections import Counter, defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

from tests.kernels.warp import LANES, lane_functions
from tilepipe.config.choices import Granularity, StoreMode
from tilepipe.fabric.table import Role, Slot, Word
from tilepipe.kernels.gemm import choices
from tilepipe.kernels.gemm import plan as plans
from tilepipe.kernels.gemm.tiles import RECORD_WORDS, TileWord, place_of_ticket
from tilepipe.kernels.track import Event

__all__ = ["TEXT", "Engine"]

_FOLDER = Path(__file__).resolve().parents[2] / "tilepipe/kernels/gemm"
TEXT = "\n".join(
    (_FOLDER / name).read_text("utf-8") for name in ("roles.py", "stores.py", "grouped_sm90.py")
)
BLOCK = plans.BLOCK_M
NAMED = SimpleNamespace(written=1, read=5, turn=9)


class Anything:
    """What the text may call, index and take parts of, and nothing depends on: as a mock, without
    the record that a mock keeps of its calls."""

    def __init__(self, **given):
        vars(self).update(given)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        part = Anything()
        setattr(self, name, part)
        return part

    def __call__(self, *args, **named):
        return self

    def __getitem__(self, at):
        return self

    def __iter__(self):
        return iter(())

    def __int__(self):
        return 1


@dataclass
class Barrier:
    """An mbarrier: arrivals and bytes that its phase still lacks."""

    count: int
    pending: int = field(init=False)
    num_bytes: int = 0
    phase: int = 0  # phases that are over

    def __post_init__(self):
        self.pending = self.count

    def arrive(self, num_bytes=0):
        assert self.pending > 0, "one arrival too many"
        self.num_bytes += num_bytes
        self.pending -= 1
        self.end()

    def end(self):
        if self.pending == 0 and self.num_bytes == 0:
            self.pending, self.phase = self.count, self.phase + 1


@dataclass(frozen=True)
class Ref:
    """A barrier or record of a CTA, by number."""

    kind: str
    cta: int
    index: int = 0

    def __add__(self, index):
        return replace(self, index=self.index + index)


@dataclass(frozen=True)
class View:
    """A piece of a global tensor: where it begins, and its third coordinate."""

    row: int = 0
    column: int = 0
    third: int | None = None

    def __getitem__(self, at):
        return replace(self, third=at[2])


@dataclass(frozen=True)
class Side:
    """One side of a copy, indexed by its last mode."""

    what: object
    index: int | None = None

    def __getitem__(self, at):
        return replace(self, index=at[1])


@dataclass(frozen=True)
class Sums:
    """Sums of a warp from some place on."""

    mma: "Mma"
    first: int = 0

    @property
    def iterator(self):
        return self

    def __add__(self, count):
        return replace(self, first=self.first + count)

    def __getitem__(self, at):
        return self  # products say themselves of which block they are


class RecordWord(int):
    """A word of a tile's record, beside the words that other lanes hold."""

    record: list[int]

    @classmethod
    def all_of(cls, record):
        words = [cls(word) for word in record]
        for word in words:
            word.record = record
        return words


class Mma:
    """The products of one warp: which stages they read, and of which tile they are."""

    def __init__(self):
        self.under_way = set()  # stages of products not yet in a group
        self.groups = []
        self.products = {}  # block -> (A, B of each part, step) in order, of the tile under way

    def commit(self):
        self.groups.append(self.under_way)
        self.under_way = set()

    def wait(self, count):
        del self.groups[: max(0, len(self.groups) - count)]

    @property
    def reading(self):
        return set.union(self.under_way, *self.groups)


@dataclass
class Cta:
    """State of one CTA."""

    barriers: dict
    records: list
    filled: dict = field(default_factory=dict)  # (stage, part) -> round of the stage
    num_loads: Counter = field(default_factory=Counter)  # by part
    returned: Counter = field(default_factory=Counter)  # stage -> arrivals of its warps
    held: dict = field(default_factory=dict)  # (stage, part) -> what has arrived
    named: dict = field(default_factory=dict)  # named barrier -> warps that have arrived
    over: Counter = field(default_factory=Counter)  # named barrier -> times
    staged: dict = field(default_factory=dict)  # buffer -> {warp: block}
    unread: list = field(default_factory=list)  # buffers of stores, oldest first
    incomplete: list = field(default_factory=list)  # blocks of stores, oldest first
    sent: Counter = field(default_factory=Counter)  # block -> warps that have sent their rows


class Engine:
    """The CTAs of one cluster, all tiles of a launch, and what has become of them."""

    def __init__(self, plan, records, *, seed, text=TEXT, slow_warp=None, stopped_at=None):
        """`slow_warp`, of each CTA, goes on only when nothing else can happen; `stopped_at`: the
        abort word is raised when so many tickets have been claimed."""
        self.plan, self.random, self.slow_warp = plan, Random(seed), slow_warp
        self.stopped_at = stopped_at
        self.tiles = [[int(word) for word in record] for record in records]
        self.queue, self.loads, self.stored, self.told = 0, [], Counter(), Counter()
        self.ctas = [self._cta() for _ in range(plan.cluster_m)]
        self.mmas = {(cta, warp): Mma() for cta in range(plan.cluster_m) for warp in range(4, 12)}
        self.now = (0, 0)  # CTA and warp that runs
        self.sender = self if plan.problem.sends else None
        self.num_products = 0  # of all warps
        self.stamped = Counter()  # (warp, M tile, N tile) of stamps, rows of each
        self.claimed_at = []  # K tiles already asked for when each ticket was claimed
        self.num_handed = 0  # tiles of the cluster
        self.has_looked = False  # at the abort word, since the latest claim
        # M tiles by their first row; those whose rows have yet to come; those that a warp, or who
        # reads a record, knows to be there; those that a warp's own copies may read.
        self.m_tiles = {
            tile[TileWord.first_row] + cta * plan.tile_m: tile[TileWord.m_tile] + cta
            for tile in self.tiles
            for cta in range(plan.cluster_m)
            if tile[TileWord.valid] > cta * plan.tile_m
        }
        self.due = sorted(set(self.m_tiles.values())) if plan.problem.wait is not None else []
        self.known, self.handed, self.readable = (defaultdict(set) for _ in range(3))
        self.names = self._functions(text)

    def _cta(self):
        plan = self.plan
        readers = (8 + 1 + plan.uses_store_warp) * plan.cluster_m
        counts = {
            "full": [1] * plan.num_stages,
            "empty": [4 * plan.groups_per_tile * plan.cluster_m] * plan.num_stages,
            "handed": [1, 1],
            "taken": [readers] * 2,
        }
        barriers = {kind: [Barrier(count) for count in many] for kind, many in counts.items()}
        return Cta(barriers=barriers, records=[None, None])

    @property
    def here(self):
        return self.ctas[self.now[0]]

    # Running.

    def run(self):
        """Run every warp to its end; asserts that some warp can always go on."""
        states = {key: [warp, None, None] for key, warp in self._warps().items()}
        while states:
            able = [key for key, (_, asked, _) in states.items() if self._may_go_on(key, asked)]
            able = [key for key in able if key[1] != self.slow_warp] or able * (not self.loads)
            if self.loads and (not able or self.random.random() < 0.3):
                self._land(self.loads.pop(self.random.randrange(len(self.loads))))
                continue
            if self.due and (not able or self.random.random() < 0.02):
                self.due.pop(self.random.randrange(len(self.due)))
                continue
            assert able, f"nobody can go on: { {key: state[1] for key, state in states.items()} }"
            self.now = self.random.choice(able)
            warp, asked, answer = states[self.now]
            if asked is not None and asked[0] == "rows":
                self.known[self.now].add(asked[1])
                self.fence_proxy() if asked[2] else None
            try:
                states[self.now][1:] = self._asked(warp.send(answer))
            except StopIteration:
                del states[self.now]
        assert not any(cta.incomplete for cta in self.ctas), "a store was never waited for"

    def _warps(self):
        names, warps = self.names, {}
        for cta in range(self.plan.cluster_m):
            shared = self._shared(cta)

            def place(warp, cta=cta):
                where = {"warp": warp, "lane": 0, "cta": cta, "table": 0, "rank": 0, "limit_ns": 0}
                return SimpleNamespace(plan=self.plan, tape=None, **where)

            warps[cta, 0] = names["_load"](place(0), shared, OPERANDS)
            early = 8
            if self.plan.uses_store_warp:
                early = 9
                warps[cta, 1] = names["store_tiles"](place(1), shared, OPERANDS, self.sender)
            if cta == 0:
                warps[cta, 2] = names["_hand_out"](place(2), shared, 1)
            for warp in range(4, 12):
                mma = Anything(mma=self.mmas[cta, warp])
                warps[cta, warp] = names["_multiply"](
                    *(place(warp), shared, OPERANDS, mma, warp // 4 - 1),
                    self.sender,
                )
            for _ in range(early):  # all but the producer say so before they begin
                self.take_record(None, None, 1)
        return warps

    def _asked(self, request):
        """What the warp that runs waits for, and what it is then told."""
        operation, _, *arguments = request
        if operation == "wait":
            return ("phase", *arguments[:2]), None
        if operation == "wait_telling":
            m_tile, *_, loads = arguments
            return ("rows", m_tile, loads), (True, m_tile in self.due)
        self.arrive_named(*arguments)
        # It is over for whoever comes last.
        number, over = arguments[0], self.here.over
        came_last = not self.here.named[number]
        return ("named", number, over[number] - came_last), None

    def _may_go_on(self, key, asked):
        if asked is None:
            return True
        if asked[0] == "rows":
            return asked[1] not in self.due
        if asked[0] == "named":
            return self.ctas[key[0]].over[asked[1]] > asked[2]
        _, barrier, phase = asked
        return self.ctas[barrier.cta].barriers[barrier.kind][barrier.index].phase % 2 != phase

    def arrive_named(self, number, num_threads=5 * LANES):
        here = self.here
        arrived = here.named.setdefault(number, set())
        assert self.now not in arrived, "a warp is counted twice at a barrier"
        arrived.add(self.now)
        if len(arrived) * LANES == num_threads:
            arrived.clear()
            here.over[number] += 1

    # Records.

    def take_record(self, place, shared, count):
        self.ctas[0].barriers["taken"][count % 2].arrive()

    def place_of_ticket(self, *arguments, **named):
        self.there = place_of_ticket(*arguments, **named)
        return self.there

    def hand_word(self, slot, lane, word, cluster_m):
        record = [-1] * RECORD_WORDS
        if word >= 0:
            self.num_handed += 1
            record = list(self.tiles[self.there.cluster_tile])
            record[TileWord.n_tile] = self.there.n_tile
        for cta in self.ctas:
            cta.records[slot.index // RECORD_WORDS] = record

    def load_relaxed(self, word, dtype, scope):
        assert word is Slot.abort, "a word that is waited for is looked at without a wait"
        self.has_looked = True
        return self.abort_word()

    def abort_word(self, table=0, rank=0):
        return int(self.stopped_at is not None and self.queue >= self.stopped_at)

    def claim(self, word, amount, scope):
        waits = self.plan.problem.wait is not None
        assert self.has_looked == waits, "a claim, and no look at the abort word ahead of it"
        self.has_looked = False
        self.claimed_at.append(self.ctas[0].num_loads["b", 0])
        self.queue += 1
        return self.queue - 1

    def set_relaxed(self, word, value, scope):
        self.queue = value

    def arrive(self, barrier, cta, in_cluster):
        if barrier.kind == "handed":
            self.handed[barrier.index] = set(self.known[self.now])
        for here in self.ctas:
            here.barriers[barrier.kind][barrier.index].arrive()

    def lap(self, tape, event, item=None, part=0, num_rows=0):
        if event is Event.tile:
            self.stamped[self.now[1], item, part] += num_rows

    def fence_proxy(self, kind="async.global", **of_shared_memory):
        if kind == "async.global":
            self.readable[self.now] |= self.known[self.now]

    # Loads and products.

    def expect(self, barrier, num_bytes):
        self.here.barriers["full"][barrier.index].arrive(num_bytes)

    def copy(self, atom, source, target, tma_bar_ptr=None, mcast_mask=None, tma_desc_ptr=None):
        if atom == "d":
            self._store(source, target)
            return
        rows = self.plan.tile_n // self.plan.num_b_parts
        if atom == "a":
            rows = self.plan.tile_m // self.plan.num_a_parts
        piece = source.what
        if atom == "a" and self.plan.problem.wait is not None:
            readable = self.m_tiles[piece.row] in self.readable[self.now]
            assert readable, "rows are loaded that this warp does not know to be there"
        content = (piece.row, piece.third, source.index)
        stage, part = target.index, target.what
        warps = 4 * self.plan.groups_per_tile
        to = range(len(self.ctas)) if mcast_mask is not None else [self.now[0]]
        assert (mcast_mask is None) == (atom == "a" or self.plan.cluster_m == 1)
        for cta in to:
            here = self.ctas[cta]
            # A round ends when all warps have given the stage back; null tiles fill no A.
            turn, rest = divmod(here.returned[stage], warps)
            free = rest == 0 and here.filled.get((stage, part), -1) < turn
            assert free, f"stage {stage} of CTA {cta} is filled before it was given back"
            here.filled[stage, part] = turn
            here.num_loads[part] += 1
            here.held[stage, part] = None
            self.loads.append((cta, stage, part, content, rows * plans.TILE_K * 2))

    def _land(self, load):
        cta, stage, part, content, num_bytes = load
        here = self.ctas[cta]
        here.held[stage, part] = content
        barrier = here.barriers["full"][stage]
        barrier.num_bytes -= num_bytes
        barrier.end()

    def gemm(self, mma, sums, a, b, out):
        (block, stage, step), state = a, self.mmas[self.now]
        plan = self.plan
        own = 0
        if plan.num_a_parts > 1:
            own = block * plan.groups_per_tile + self.now[1] // 4 - 1
        parts = [("a", own), *(("b", part) for part in range(plan.num_b_parts))]
        held = [self.here.held.get((stage, part)) for part in parts]
        assert None not in held, f"a product reads stage {stage} before it has come"
        state.under_way.add(stage)
        self.num_products += 1
        state.products.setdefault(block, []).append((*held, step))

    def give_back(self, place, shared, stage):
        assert stage not in self.mmas[self.now].reading, "given back while products read it"
        self.here.returned[stage] += 1
        for cta in self.ctas:
            cta.barriers["empty"][stage].arrive()

    # Blocks.

    def packed_words(self, sums, first, count, num_groups, scales, lane, epilogue):
        """Which block and columns these are, by what was multiplied."""
        state, plan = self.mmas[self.now], self.plan
        assert not state.reading, "sums are used while products add to them"
        i = sums.first // (plan.tile_n // 2)
        products = state.products[i]
        a, b = products[0][0], products[0][1]
        expected = [
            (*((piece[0], piece[1], k) for piece in products[0][:-1]), step)
            for k in range(plan.num_k_tiles)
            for step in range(4)
        ]
        assert products == expected, "a tile is not all products of its operands in order"
        group = self.now[1] // 4 - 1 if plan.groups_per_tile == 2 else 0
        row = a[0] + (i * plan.groups_per_tile + group) * BLOCK
        column = b[0] // 2 if epilogue is choices.Epilogue.swiglu_interleaved else b[0]
        self._check_parts(products[0], epilogue)
        return (row, column + first * 8, b[1])

    def _check_parts(self, product, epilogue):
        """Gate and up, or the halves of a tile, are of one expert and their distance apart."""
        first, *others = product[1:-1]
        plan = self.plan
        apart = plan.tile_n // 2
        if epilogue is choices.Epilogue.swiglu_concatenated:
            apart = plan.problem.n // 2
        assert all(other == (first[0] + apart, *first[1:]) for other in others)

    def stage_words(self, block, buffer_idx, warp, lane):
        here = self.here
        assert buffer_idx not in here.unread, "a staged block is overwritten before it was read"
        assert buffer_idx // 2 == self.now[1] // 4 - 1, "another warpgroup's buffer"
        written = here.staged.setdefault(buffer_idx, {})
        assert warp not in written, "a warp stages twice"
        written[warp] = block

    def store_directly(self, block, address, pitch, num_rows, num_columns, warp, lane):
        at = address // 2
        assert divmod(at, self.plan.d_pitch) == block[:2], "stored at another's place"
        self.stored[block, warp] += 1

    def _store(self, source, target):
        here, view = self.here, target.what
        written = here.staged.pop(source.index)
        assert sorted(written) == [0, 1, 2, 3], "a block is stored before all warps have staged"
        (block,) = set(written.values())
        row = view.row
        if self.plan.clip is choices.Clip.ragged:
            num_rows = BLOCK - view.row
            row = view.third - num_rows
            assert num_rows == self.rows_of(block), "a block is clipped elsewhere"
        assert (row, view.column) == block[:2], "a block is stored at another's place"
        here.unread.append(source.index)
        here.incomplete.append(block)
        self.stored.update({(block, warp): 1 for warp in range(4)})

    def find_rows(self, place, first_row, valid):
        """Where a warp's rows of each block belong; known before they are multiplied."""
        assert not self.mmas[self.now].reading
        apart = BLOCK * self.plan.groups_per_tile
        return [first_row + i * apart for i in range(self.plan.blocks_per_group)]

    def send_block(self, block, buffer_idx, target, column, warp, lane):
        here = self.here
        assert buffer_idx // 2 == self.now[1] // 4 - 1, "another warpgroup's buffer"
        assert (target, column) == block[:2], "a block is sent to another's place"
        self.stored[block, warp] += 1
        here.sent[block[2], column, block[0]] += 1

    def tell(self, place, first_row, valid, n_tile, m_tile):
        """Rows are counted once all warps have sent all their blocks of the tile."""
        plan = self.plan
        for above in range(0, valid, BLOCK):
            for part in range(plan.out_tile_n // plans.STAGED_COLUMNS):
                column = n_tile * plan.out_tile_n + part * plans.STAGED_COLUMNS
                found = [key for key in self.here.sent if key[1:] == (column, first_row + above)]
                assert [self.here.sent.pop(key) for key in found] == [4], "told before it is sent"
        self.told[m_tile * plan.num_chunks + n_tile * plan.num_chunks // plan.num_n_tiles] += valid

    def rows_of(self, block):
        """Rows of a block that exist."""
        ends = [
            record[TileWord.group_end]
            for record in self.tiles
            if record[TileWord.expert] == block[2]
        ]
        return min(ends[0] - block[0], BLOCK)

    def wait_group(self, count, *, read):
        here = self.here
        del here.unread[: max(0, len(here.unread) - count)]
        if not read:
            del here.incomplete[: max(0, len(here.incomplete) - count)]

    def add_relaxed(self, counter, rows, scope):
        assert not self.here.incomplete, "rows are told before their stores have completed"
        self.told[counter] += rows

    # What the text of the roles is given.

    def _shared(self, cta):
        kinds = ("full", "empty", "handed", "taken", "records")
        refs = {kind: Ref(kind, cta) for kind in kinds}
        return SimpleNamespace(a=("a", 0), b=("b", 0), d=("d", 0), **refs)

    def _functions(self, text):
        arch = Anything()
        arch.mbarrier_arrive_and_expect_tx = self.expect
        arch.shuffle_sync = lambda value, lane: (
            value.record[lane] if isinstance(value, RecordWord) else value
        )
        arch.vote_all_sync = arch.vote_any_sync = bool
        arch.fence_proxy = self.fence_proxy
        arch.block_idx = lambda: (0, 0, 0)
        arch.elect_one = nullcontext
        arch.cp_async_bulk_wait_group = self.wait_group
        cute = Anything(arch=arch, copy=self.copy, gemm=self.gemm)
        cute.size = lambda fragment, mode: 4
        cute.make_rmem_tensor = lambda shape, dtype: Sums(self.mmas[self.now])
        cute.make_tensor = lambda where, layout: self._tensor(where)
        cute.domain_offset = lambda at, view: replace(
            view, row=view.row + at[0], column=view.column + at[1]
        )
        cute.local_tile = lambda view, shape, at: view
        cutlass = SimpleNamespace(
            const_expr=bool,
            min=min,
            max=max,
            range=lambda count, unroll: range(count),
            range_constexpr=range,
            Int16=int,
        )
        cute.append_ones = lambda tensor, up_to_rank: tensor
        warpgroup = Anything()
        warpgroup.commit_group = lambda: self.mmas[self.now].commit()
        warpgroup.wait_group = lambda count: self.mmas[self.now].wait(count)
        public = {
            name: getattr(module, name) for module in (choices, plans) for name in module.__all__
        }
        given = {
            **public,
            "cute": cute,
            "cutlass": cutlass,
            "cpasync": Anything(),
            "utils": Anything(),
            "Int32": int,
            "Int64": int,
            "Boolean": bool,
            "Float32": float,
            "BFloat16": None,
            "LANES": LANES,
            "RECORD_WORDS": RECORD_WORDS,
            "TileWord": TileWord,
            "Granularity": Granularity,
            "StoreMode": StoreMode,
            "Role": Role,
            "Slot": Slot,
            "Word": Word,
            "NUM_CONSUMERS": 2,
            "TILE_K": plans.TILE_K,
            "Named": NAMED,
            "Item": Anything(),
            "Scope": Anything(),
            "warpgroup": warpgroup,
            "make_tiled_mma": lambda plan: Anything(),
            "place_of_ticket": self.place_of_ticket,
            "arrive": self.arrive,
            "arrive_named": self.arrive_named,
            "hand_word": self.hand_word,
            "claim": self.claim,
            "set_relaxed": self.set_relaxed,
            "add_relaxed": self.add_relaxed,
            "address": lambda table, rank, slot: slot,
            "word": lambda words, name: name,
            "buffer": lambda slot, dtype: self._buffer(slot),
            "element": lambda where, index, dtype: where if where is Slot.abort else index,
            "abort_word": self.abort_word,
            "load_relaxed": self.load_relaxed,
            "Event": Event,
            "lap": self.lap,
            "release_bulk_fence": lambda scope: None,
            "release_fence": lambda scope: None,
            "packed_words": self.packed_words,
            "row_scales": Anything(),
            "stage_words": self.stage_words,
            "store_words_directly": self.store_directly,
        }
        names = lane_functions(text, given, ("wait", "wait_telling", "meet_named"))
        names |= {
            "take_record": self.take_record,
            "_give_back": self.give_back,
            "partition": lambda atom, shared, tile: (Side(shared), Side(tile)),
            "part_of": lambda ring, part, rows, plan: (ring[0], part),
            "_block_address": lambda d, buffer_idx: buffer_idx,
            "_descriptor_pointer": Anything(),
            "_multiply_tile": self._forgetting(names["_multiply_tile"]),
        }
        return names

    def _forgetting(self, function):
        """The products of a tile begin with it."""

        def multiply_tile(place, shared, sums, fragments, *rest):
            self.mmas[self.now].products = {}
            fragment = Fragment()
            yield from function(place, shared, sums, (fragment, fragment), *rest)

        return multiply_tile

    def _buffer(self, slot):
        if slot is Slot.gemm_tiles:
            return [word for record in self.tiles for word in RecordWord.all_of(record)]
        if slot is Slot.ready_expected:
            return Counter()
        return {int(Word.num_gemm_tiles): len(self.tiles), int(Word.epoch): 1}

    def _tensor(self, where):
        if isinstance(where, Ref):
            self.known[self.now] |= self.handed[where.index // RECORD_WORDS]
            return self.ctas[where.cta].records[where.index // RECORD_WORDS]
        return where


class Fragment:
    """Operands of products, indexed by (_, block, step, stage)."""

    def __getitem__(self, at):
        return at[1], at[3], at[2]


OPERANDS = SimpleNamespace(
    tma_a="a",
    a=View(),
    tma_b="b",
    b_descriptor=None,
    b=View(),
    tma_d="d",
    d=View(),
    d_address=0,
    plain_d=Anything(),
    scale=None,
    workspace=0,
)
