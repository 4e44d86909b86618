"""Random routings for the plan, and where the rows of a plan end up when somebody follows it.

Follows tickets row by row; shares no arithmetic with the maker of the plan.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from tilepipe.config.choices import Granularity, HomeGranularity, Layout, Order
from tilepipe.schedule.layout import ReceiveLayout
from tilepipe.schedule.plan import RankPlan, make_plan
from tilepipe.schedule.sends import Tickets
from tilepipe.schedule.settings import PlanSettings


@dataclass(frozen=True)
class Case:
    """Routing of all ranks and the settings to plan it with."""

    topk_idx: tuple[NDArray[np.int32], ...]
    settings: PlanSettings
    epoch: int

    def plans(self, settings: PlanSettings | None = None) -> tuple[RankPlan, ...]:
        return make_plan(self.topk_idx, settings or self.settings, epoch=self.epoch)


@st.composite
def plan_settings(draw, max_local_experts=6):
    num_ranks = draw(st.integers(1, 8))
    num_experts = num_ranks * draw(st.integers(1, max_local_experts))
    num_n_tiles = draw(st.integers(1, 9))
    return PlanSettings(
        num_ranks=num_ranks,
        num_experts=num_experts,
        num_topk=draw(st.integers(1, min(num_experts, 6))),
        tile_m=draw(st.sampled_from([1, 5, 16, 32, 128])),
        num_n_tiles=num_n_tiles,
        num_chunks=draw(st.integers(1, num_n_tiles)),
        raster_m=draw(st.sampled_from([1, 2, 3, 8])),
        layout=draw(st.sampled_from(Layout)),
        granularity=draw(st.sampled_from(Granularity)),
        home_granularity=draw(st.sampled_from(HomeGranularity)),
        order=draw(st.sampled_from(Order)),
        seed=draw(st.integers(0, 2**40)),
    )


@st.composite
def cases(draw):
    """Ragged ranks, dropped slots, ranks without rows, even and very uneven experts."""
    settings = draw(plan_settings())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dropped = draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
    popularity = rng.permutation(settings.num_experts) * draw(st.sampled_from([0.0, 0.1, 3.0]))
    num_tokens = draw(
        st.lists(
            st.one_of(st.just(0), st.integers(0, 12), st.integers(0, 150)),
            min_size=settings.num_ranks,
            max_size=settings.num_ranks,
        )
    )
    topk_idx = tuple(draw_choices(rng, tokens, settings, popularity) for tokens in num_tokens)
    for ids in topk_idx:
        ids[rng.random(ids.shape) < dropped] = -1
    return Case(topk_idx, settings, epoch=draw(st.integers(1, 1000)))


def draw_choices(
    rng: np.random.Generator, num_tokens: int, settings: PlanSettings, popularity: Any = 0.0
) -> NDArray[np.int32]:  # (num_tokens, num_topk)
    """Distinct experts for every token, the popular ones first (Gumbel top-k)."""
    score = popularity + rng.gumbel(size=(num_tokens, settings.num_experts))
    return np.argsort(-score, axis=1)[:, : settings.num_topk].astype(np.int32)


@dataclass(frozen=True)
class SentRow:
    """One row as the tickets tell it."""

    source: int
    token: int
    slot: int
    peer: int
    row: int
    ticket: int  # position in the sender's order


def sent_rows(plan: RankPlan) -> Iterator[SentRow]:
    """Rows of a rank in sending order."""
    for number, ticket in enumerate(ticket_rows(plan.tickets)):
        for offset in range(ticket["num_rows"]):
            index = ticket["source_start"] + offset
            yield SentRow(
                source=plan.rank,
                token=int(plan.row_token[index]),
                slot=int(plan.row_slot[index]),
                peer=ticket["peer"],
                row=ticket["first_row"] + offset,
                ticket=number,
            )


def ticket_rows(tickets: Tickets) -> list[dict[str, int]]:
    """Tickets one by one, in order."""
    columns = {field.name: getattr(tickets, field.name).tolist() for field in fields(tickets)}
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def landed(plans: Sequence[RankPlan]) -> list[dict[int, SentRow]]:
    """Per rank: receive row -> what was put there; refuses a second row in one slot."""
    received: list[dict[int, SentRow]] = [{} for _ in plans]
    for plan in plans:
        for sent in sent_rows(plan):
            assert sent.row not in received[sent.peer], f"two rows in one slot: {sent}"
            received[sent.peer][sent.row] = sent
    return received


def tile_rows(layout: ReceiveLayout) -> list[range]:
    """Receive rows of every M tile."""
    return [range(first, first + valid) for _, first, valid in layout.tiles.tolist()]


def assert_same(a: Any, b: Any) -> None:
    """Equal in every array, value and dtype."""
    if is_dataclass(a):
        for field in fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    else:
        assert a == b
