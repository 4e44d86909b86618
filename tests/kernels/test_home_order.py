"""GEMM -> combine, everybody of a launch in small: whatever comes first, every part of every token
is reduced once, and nobody waits for what only those who wait could bring.

Clusters that multiply, warps that tell of tiles, warps that push and warps that reduce follow the
tickets, units and lists of tokens that the real plans make, on all ranks at once. Counters only
grow, so whoever may go on may do so later too: a run stands still only where a launch would.
"""

from collections import Counter, deque
from dataclasses import replace
from enum import Enum
from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule.cases import draw_choices, sent_rows
from tilepipe.config.choices import Granularity, HomeGranularity, Layout, Push, Roles, Walk
from tilepipe.kernels.constants import Constants
from tilepipe.kernels.gemm.tiles import TileWord, pack_cluster_tiles, place_of_ticket
from tilepipe.kernels.overlap.home import order_units
from tilepipe.kernels.reduction import num_units_of, unit_at
from tilepipe.schedule.completion import order_tokens
from tilepipe.schedule.plan import make_plan, plan_home
from tilepipe.schedule.settings import PlanSettings

TILE_M = 4


class Fault(Enum):
    """A rule broken on purpose; runs must notice."""

    reduces_between = "reduces_between"  # a cluster turns to tokens before its tiles are out
    reduces_first = "reduces_first"  # communication CTAs reduce before they push


class Launch:
    """One launch on all ranks; threads are generators that yield what they wait for, or None."""

    def __init__(
        self, topk_idx, plan_settings, *, push, roles, cluster_m=1, num_cut=0, wide=1, fault=None
    ):
        self.settings, self.push, self.roles, self.fault = plan_settings, push, roles, fault
        self.topk_idx = topk_idx
        self.plans = make_plan(topk_idx, plan_settings)
        self.gemm = SimpleNamespace(
            tile_m=TILE_M,
            cluster_m=cluster_m,
            num_n_tiles=plan_settings.num_n_tiles,
            num_chunks=plan_settings.num_chunks,
        )
        self.constants = Constants(
            num_ranks=plan_settings.num_ranks,
            num_experts_per_rank=plan_settings.num_experts_per_rank,
            num_topk=plan_settings.num_topk,
            row_bytes=16 * wide * plan_settings.num_parts,
            granularity=plan_settings.granularity,
            num_parts=plan_settings.num_parts,
        )
        self.records, self.units, self.orders, self.homes = [], [], [], []
        for rank, plan in enumerate(self.plans):
            self._plan_rank(rank, plan, cluster_m, num_cut)
        self.stored, self.ready, self.reduced, self.queues = (Counter() for _ in range(4))

    def _plan_rank(self, rank, plan, cluster_m, num_cut):
        walk = self.settings.walk
        records = pack_cluster_tiles(
            plan.layout,
            tile_m=TILE_M,
            cluster_m=cluster_m,
            raster_m=2,
            plan_tile_m=TILE_M,
            num_cut=num_cut if walk is Walk.expert and cluster_m == 2 else 0,
            walk=walk,
        )
        self.records.append(records)
        units = order_units(records, plan.layout, self.gemm, self.settings.granularity)
        self.units.append(units.tolist())
        order = order_tokens(
            plan,
            [its.layout.num_tiles for its in self.plans],
            num_tokens=len(self.topk_idx[rank]),
            num_parts=self.settings.num_parts,
        )
        self.orders.append(order.tolist())
        home = {}
        for source in self.plans:
            home |= {sent.row: sent for sent in sent_rows(source) if sent.peer == rank}
        self.homes.append(home)

    def claim(self, queue, rank):
        """The next number of a queue of a rank."""
        self.queues[queue, rank] += 1
        return self.queues[queue, rank] - 1

    def multiply(self, rank, staged):
        """A cluster: tile after tile, then, where roles switch, tokens."""
        records = self.records[rank].tolist()
        num_n = self.gemm.num_n_tiles
        while (ticket := self.claim("tiles", rank)) < len(records) * num_n:
            own = records[ticket // num_n]
            there = place_of_ticket(
                ticket,
                own[TileWord.group_place],
                own[TileWord.group_size],
                num_n_tiles=num_n,
                num_chunks=self.gemm.num_chunks,
            )
            yield None
            staged.append((records[there.cluster_tile], there.n_tile))
            if self.fault is Fault.reduces_between:
                yield from self.reduce(rank)
        staged.append(None)
        if self.roles is not Roles.fixed:
            yield from self.reduce(rank)

    def tell(self, rank, staged):
        """The warp of a cluster that counts rows of its tiles, some time after they are made."""
        while True:
            yield lambda: staged
            if (found := staged.popleft()) is None:
                return
            record, n_tile = found
            chunk = n_tile * self.gemm.num_chunks // self.gemm.num_n_tiles
            for above in range(0, record[TileWord.valid], TILE_M):
                tile = record[TileWord.m_tile] + above // TILE_M
                self.stored[rank, tile, chunk] += min(TILE_M, record[TileWord.valid] - above)
                if self.push is Push.epilogue and self.is_stored(rank, tile, chunk):
                    self.bring_home(rank, tile, [chunk])

    def is_stored(self, rank, tile, chunk):
        num_n, num_chunks = self.gemm.num_n_tiles, self.gemm.num_chunks
        width = sum(n * num_chunks // num_n == chunk for n in range(num_n))
        _, _, valid = self.plans[rank].layout.tiles[tile].tolist()
        return self.stored[rank, tile, chunk] == valid * width

    def bring_home(self, rank, tile, chunks):
        """Raise the counters of a tile's rows at their homes."""
        _, first, valid = self.plans[rank].layout.tiles[tile].tolist()
        for row in range(first, first + valid):
            sent = self.homes[rank][row]
            for chunk in chunks:
                part = chunk if self.settings.num_parts > 1 else 0
                self.ready[sent.source, part, sent.token] += 1
                self.ready["rank", sent.source] += 1

    def push_units(self, rank):
        """A warp of a communication CTA: unit after unit, each once its tiles are stored."""
        by_tile = self.settings.granularity is Granularity.tile
        every = range(self.gemm.num_chunks)
        while (place := self.claim("units", rank)) < len(self.units[rank]):
            tile, chunk, first, count = self.units[rank][place]
            chunks = [chunk] if by_tile else every
            yield lambda first=first, count=count, chunks=chunks: all(
                self.is_stored(rank, other, part)
                for other in range(first, first + count)
                for part in chunks
            )
            self.bring_home(rank, tile, chunks)

    def communicate(self, rank):
        if self.fault is Fault.reduces_first:
            yield from self.reduce(rank)
        if self.push is Push.ctas:
            yield from self.push_units(rank)
        yield from self.reduce(rank)

    def reduce(self, rank, beside=False):
        """A warp that reduces: it waits for the unit after its own before its own is out; not so
        the one that reduces beside tiles."""
        home = plan_home(self.topk_idx[rank], self.settings)
        if home.by_rank:
            total = int(home.rank_expected.sum())
            yield lambda: self.ready["rank", rank] == total
        num_tokens = len(self.topk_idx[rank])
        num_units = num_units_of(self.constants, num_tokens)
        expected = home.token_expected // self.settings.num_parts

        def unit_of(number):
            unit = unit_at(self.constants, number, max(num_tokens, 1))
            return self.orders[rank][unit.token], unit.part, unit.begin

        def is_home(number):
            token, part, _ = unit_of(number)
            return home.by_rank or self.ready[rank, part, token] == expected[token]

        if beside:
            while (here := self.claim("tokens", rank)) < num_units:
                yield partial(is_home, here)
                self.reduced[rank, *unit_of(here)] += 1
            return
        here, coming = self.claim("tokens", rank), self.claim("tokens", rank)
        if here < num_units:
            yield partial(is_home, here)
        while here < num_units:
            following = self.claim("tokens", rank)
            yield partial(is_home, coming) if coming < num_units else None
            self.reduced[rank, *unit_of(here)] += 1
            here, coming = coming, following

    def run(self, rng, *, num_clusters=2, num_comm=2):
        """Let threads go on one at a time, some far ahead of others; how many never end."""
        threads = []
        for rank in range(self.settings.num_ranks):
            for _ in range(num_clusters):
                staged = deque()
                threads += [self.multiply(rank, staged), self.tell(rank, staged)]
                if self.roles is Roles.beside:
                    threads += [self.reduce(rank, beside=True)]
            if self.roles is Roles.beside:
                continue
            threads += [self.communicate(rank) for _ in range(num_comm)]
        haste = dict(zip(threads, rng.random(len(threads)), strict=True))
        waits = dict.fromkeys(threads)
        while able := [one for one, wait in waits.items() if wait is None or wait()]:
            hasty = rng.random() < 0.7
            one = max(able, key=haste.get) if hasty else able[rng.integers(len(able))]
            try:
                waits[one] = next(one)
            except StopIteration:
                del waits[one]
        return len(waits)

    def every_unit(self):
        """What is reduced, each once."""
        return {
            (rank, self.orders[rank][unit.token], unit.part, unit.begin): 1
            for rank, ids in enumerate(self.topk_idx)
            for number in range(num_units_of(self.constants, len(ids)))
            for unit in [unit_at(self.constants, number, len(ids))]
        }


WAYS = [*product(Push, [Roles.fixed, Roles.switch]), (Push.epilogue, Roles.beside)]


@st.composite
def plans(draw, push):
    """Routing of up to four ranks, ragged and dropped, and settings that go with a way home."""
    num_ranks, num_n_tiles = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4, 5, 7, 8, 14]))
    num_experts = num_ranks * draw(st.integers(1, 3))
    walk = draw(st.sampled_from(Walk))
    by_tile = push is Push.epilogue or walk is Walk.chunk
    chosen = PlanSettings(
        num_ranks=num_ranks,
        num_experts=num_experts,
        num_topk=draw(st.integers(1, min(num_experts, 4))),
        tile_m=TILE_M,
        num_n_tiles=num_n_tiles,
        num_chunks=draw(st.sampled_from(range(1, num_n_tiles + 1))),
        walk=walk,
        layout=draw(st.sampled_from(Layout)),
        granularity=Granularity.tile if by_tile else draw(st.sampled_from(Granularity)),
        home_granularity=draw(st.sampled_from(HomeGranularity)),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    popularity = rng.permutation(num_experts) * draw(st.sampled_from([0.0, 3.0]))
    dropped = draw(st.sampled_from([0.0, 0.3, 1.0]))
    most = draw(st.sampled_from([0, 3, 12, 30]))
    topk_idx = tuple(
        draw_choices(rng, int(count), chosen, popularity)
        for count in rng.integers(0, most, num_ranks, endpoint=True)
    )
    for ids in topk_idx:
        ids[rng.random(ids.shape) < dropped] = -1
    return topk_idx, chosen


@pytest.mark.parametrize("cluster_m", [1, 2])
@pytest.mark.parametrize(("push", "roles"), WAYS)
@settings(max_examples=30)
@given(data=st.data())
def test_every_part_of_every_token_is_reduced_once_and_nobody_waits_for_ever(
    push, roles, cluster_m, data
):
    topk_idx, chosen = data.draw(plans(push))
    if roles is Roles.beside:
        chosen = replace(chosen, home_granularity=HomeGranularity.token)
    launch = Launch(
        *(topk_idx, chosen),
        push=push,
        roles=roles,
        cluster_m=cluster_m,
        num_cut=data.draw(st.integers(0, 2)),
        wide=data.draw(st.sampled_from([1, 300])),  # 16-byte vectors of a part: one unit, or two
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))

    num_stuck = launch.run(
        rng, num_clusters=data.draw(st.integers(1, 4)), num_comm=data.draw(st.integers(1, 3))
    )

    assert num_stuck == 0
    assert launch.reduced == launch.every_unit()


def full_case(num_ranks, num_chunks):
    """Every rank with rows for every expert of every rank; 14 N tiles, chunk after chunk."""
    chosen = PlanSettings(
        num_ranks=num_ranks,
        num_experts=2 * num_ranks,
        num_topk=2,
        tile_m=TILE_M,
        num_n_tiles=14,
        num_chunks=num_chunks,
        walk=Walk.chunk,
    )
    rng = np.random.default_rng(5)
    return tuple(draw_choices(rng, 10 * num_ranks, chosen) for _ in range(num_ranks)), chosen


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_chunks", [1, 2, 4, 5, 7, 14])
def test_no_number_of_chunks_and_ranks_lets_anybody_wait_for_ever(num_chunks, num_ranks):
    topk_idx, chosen = full_case(num_ranks, num_chunks)
    for (push, roles), cluster_m in product(WAYS, [1, 2]):
        launch = Launch(topk_idx, chosen, push=push, roles=roles, cluster_m=cluster_m)

        num_stuck = launch.run(np.random.default_rng(num_chunks))

        assert num_stuck == 0
        assert launch.reduced == launch.every_unit()


@pytest.mark.parametrize(
    ("fault", "push"), [(Fault.reduces_between, Push.epilogue), (Fault.reduces_first, Push.ctas)]
)
@pytest.mark.parametrize("num_chunks", [1, 4, 7])
def test_who_waits_for_tokens_before_own_tiles_or_pushes_are_out_waits_for_ever(
    fault, push, num_chunks
):
    topk_idx, chosen = full_case(2, num_chunks)

    launch = Launch(topk_idx, chosen, push=push, roles=Roles.switch, fault=fault)

    assert launch.run(np.random.default_rng(5)) > 0
