"""Interpreted groups whose launches are checked in every word that they may write."""

from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Any

import torch

from tests.gpu.groups import CheckedGroup, rows_at
from tests.ptx.group import InterpretedGroup
from tilepipe.experiments.cuda.oracle import DeviceOracle
from tilepipe.experiments.cuda.payload import fill_rows
from tilepipe.fabric.table import Slot
from tilepipe.kernels.group import DeviceGroup
from tilepipe.kernels.launcher import Knobs
from tilepipe.schedule.settings import PlanSettings
from tilepipe.schedule.shape import Shape
from tilepipe.workload.routing import Routing

__all__ = ["CheckedRun", "drift"]


class CheckedRun(CheckedGroup):
    """As on a GPU, on the CPU."""

    def __init__(
        self,
        settings: PlanSettings,
        knobs: Knobs,
        routings: Sequence[Routing],  # all that will come: they decide what is reserved
        *,
        hidden: int,
        **chosen: Any,  # of InterpretedGroup
    ) -> None:
        tokens = [[len(ids) for ids in routing.topk_idx] for routing in routings]
        self.hidden = hidden
        self.group = InterpretedGroup(
            settings,
            Shape(
                max_tokens=max(map(max, tokens)),
                num_tokens=max(map(sum, tokens)),
                dispatch_hidden=hidden,
                home_hidden=hidden,
            ),
            knobs,
            **chosen,
        )
        self.num_launches = 0


def drift(run: CheckedRun, routings: Sequence[Routing]) -> list[str]:
    """Launch dispatch and combine with one routing after the other, each rank by itself.

    No rank is held back by anything but the launch protocol. What each receives, and its tokens,
    are compared as soon as its own launch has ended; returns what is not as it must be.
    """
    wrong: list[str] = []
    for number, routing in enumerate(routings, 1):
        view, uploads = _planned(run, routing, payload=number, epoch=2 * number - 1)
        for rank in run.group.ranks:
            run.group.then(rank, partial(_prepare, view, rank, uploads[rank]))
        run.group.open(exchange=True)
        run.group.dispatch()
        for rank in run.group.ranks:
            run.group.then(rank, partial(_compare, partial(_rows, view), rank, number, wrong))
        run.group.open(exchange=False)
        run.group.combine()
        for rank in run.group.ranks:
            run.group.then(rank, partial(_compare, partial(_tokens, view), rank, number, wrong))
    run.group.run()
    return wrong


def _planned(
    run: CheckedRun, routing: Routing, *, payload: int, epoch: int
) -> tuple[CheckedRun, dict[int, tuple[Any, ...]]]:
    """A view of the run that knows one launch, and what the ranks upload for it."""
    view = copy(run)
    view.group, view.routing, view.payload = copy(run.group), routing, payload
    uploads: dict[int, tuple[Any, ...]] = {}
    view.group._upload = lambda rank, *values: uploads.update({rank: values})
    view.group.set_routing(routing, epoch=epoch)
    return view, uploads


def _prepare(view: CheckedRun, rank: int, upload: tuple[Any, ...]) -> None:
    DeviceGroup._upload(view.group, rank, *upload)
    view.group.touch(rank, Slot.x, Slot.y, Slot.topk_idx, Slot.topk_weights, writes=True)
    tokens = torch.arange(len(view.routing.topk_idx[rank]))
    fill_rows(view.tensor(rank, Slot.x), view.payload, rank, tokens)
    source, token, slot = (view._moved(part) for part in rows_at(view.routing, rank))
    y, held = view.tensor(rank, Slot.y), view._held(rank)
    fill_rows(y, view.payload, source, token, slot=slot, row_idx=held)


def _rows(view: CheckedRun, rank: int) -> list[str]:
    """Of rows that have come, and of their ways home."""
    view.group.touch(rank, Slot.recv_x, Slot.row_home, writes=False)
    return view._received(rank)


def _tokens(view: CheckedRun, rank: int) -> list[str]:
    """Of reduced tokens; those beyond may be of an earlier launch."""
    view.group.touch(rank, Slot.out, writes=False)
    oracle = DeviceOracle(view.routing, rank=rank, device=view.group.device)
    out = view.tensor(rank, Slot.out)[: len(view.routing.topk_idx[rank])]
    verdict = oracle.check_combined(view.payload, out, contender="combine", stage="before")
    return [verdict.detail] * (not verdict.passed)


def _compare(check: Any, rank: int, number: int, wrong: list[str]) -> None:
    wrong.extend(f"launch {number}, rank {rank}: {fault}" for fault in check(rank))
