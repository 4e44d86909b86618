"""The ranks of one process on the cuda executor: memory, plans, and the launches of communication.

Knows nothing of configuration files, oracle or clocks. Every launch opens with the gate, a kernel
of its own; the work follows on the same stream. The Plan comes from NumPy and is uploaded where the
routing changes, in place: addresses stay, so a captured graph replays with other routing.
"""

import zlib
from dataclasses import replace

import numpy as np
import torch

from tilepipe.config.choices import Order
from tilepipe.config.limits import MAX_TOPK
from tilepipe.fabric.device_heap import DeviceHeap
from tilepipe.fabric.loopback import LoopbackHeap
from tilepipe.fabric.table import Slot, Word
from tilepipe.kernels.buffers import buffer_specs, counter_capacity
from tilepipe.kernels.launcher import Knobs, Launcher
from tilepipe.schedule.layout import check_capacity, count_rows, overflow_sentence
from tilepipe.schedule.packed import pack_returns, pack_sends, pack_tiles
from tilepipe.schedule.plan import RankPlan, make_rank_plan, plan_home, plan_returns
from tilepipe.schedule.settings import PlanSettings
from tilepipe.schedule.shape import Shape, capacity_of
from tilepipe.workload.routing import Routing

__all__ = ["DeviceGroup"]


class DeviceGroup:
    """Standing state of the ranks of this process between launches, and the plans of all ranks."""

    def __init__(
        self,
        settings: PlanSettings,
        shape: Shape,
        knobs: Knobs,
        *,
        watchdog_s: float,
        plans_on_device: bool = False,
        heap: DeviceHeap | None = None,  # of `buffer_specs`
        device: torch.device | None = None,
    ) -> None:
        """Compiles nothing yet. Without `heap` memory is reserved for all ranks, on `device` or the
        current one. Raises torch.OutOfMemoryError or ValueError."""
        if settings.num_topk > MAX_TOPK:
            raise ValueError(
                f"workload.num_topk={settings.num_topk}: kernels hold at most {MAX_TOPK} slots of "
                "a token; lower it, or type hardware=cpu"
            )
        self.settings, self.shape, self.knobs = settings, shape, knobs
        self.capacity = capacity_of(settings, shape)
        self.watchdog_s, self.plans_on_device = watchdog_s, plans_on_device
        if heap is None:
            device = device or torch.device("cuda", torch.cuda.current_device())
            specs = buffer_specs(settings, shape)
            heap = LoopbackHeap(specs, num_ranks=settings.num_ranks, device=device)
        assert heap.num_ranks == settings.num_ranks
        room = heap.tensor(heap.ranks[0], Slot.token_ready).numel()
        assert room >= max(shape.max_tokens, 1) * settings.num_parts, "counters of another plan"
        self.heap, self.device = heap, heap.device
        self.launcher = self.launcher_on(knobs.num_ctas or self._num_sms())
        self._epoch = 0
        fingerprint = zlib.crc32(repr((settings, shape)).encode()) & 0x7FFFFFFF
        for rank in self.ranks:
            self._set_words(
                rank,
                {
                    Word.fingerprint: fingerprint,
                    Word.max_counters: counter_capacity(settings, shape),
                    Word.max_tokens: max(shape.max_tokens, 1),
                    Word.max_parts: max(shape.max_tokens, 1) * settings.num_parts,
                },
            )

    def _num_sms(self) -> int:
        """SMs of each rank of this process."""
        found: int = torch.cuda.get_device_properties(self.device).multi_processor_count
        return found // len(self.ranks)

    def launcher_on(self, num_ctas: int) -> Launcher:
        """Launches on the memory of the group, with its knobs but for the CTAs of each rank."""
        return Launcher(
            *(self.heap.table, self.settings, self.shape, replace(self.knobs, num_ctas=num_ctas)),
            ranks=self.ranks,
            limit_ns=int(self.watchdog_s * 1e9),
        )

    @property
    def ranks(self) -> range:
        """Ranks of this process; launches hold these and no others."""
        return self.heap.ranks

    def tensor(self, rank: int, slot: Slot) -> torch.Tensor:
        """A buffer of a rank of this process."""
        return self.heap.tensor(rank, slot)

    @property
    def epoch(self) -> int:
        """Number of the latest launch that was opened; 0 before the first."""
        return self._epoch

    # Plans.

    def set_routing(self, routing: Routing, *, epoch: int | None = None) -> None:
        """Plan the launches that follow and upload the plan, in place.

        `epoch` is that of the launch the plan is for, the next one where it is not given; only
        Order.random depends on it. Raises ValueError where rows would not fit.
        """
        epoch = self._epoch + 1 if epoch is None else epoch
        counts = np.stack([count_rows(ids, self.settings.num_experts) for ids in routing.topk_idx])
        check_capacity(counts, self.settings, self.capacity)
        self.routing = routing
        self.plans: list[RankPlan] = [
            make_rank_plan(rank, ids, counts, self.settings, epoch=epoch)
            for rank, ids in enumerate(routing.topk_idx)
        ]
        homes = self._homes()
        for rank in self.ranks:
            self._upload(rank, routing, homes[rank], epoch)

    def refresh_plan(self) -> None:
        """Make the plan of the next launch, where it depends on which launch that is."""
        if self.settings.order is Order.random:
            self.set_routing(self.routing)

    def _homes(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Source rank and token of every receive row, by rank of this process."""
        extents = {rank: self.plans[rank].layout.extent for rank in self.ranks}
        homes = {
            rank: (np.zeros(extent, np.int32), np.zeros(extent, np.int32))
            for rank, extent in extents.items()
        }
        for plan in self.plans:
            tickets = plan.tickets
            ticket = np.repeat(np.arange(len(tickets)), tickets.num_rows)
            start = np.cumsum(tickets.num_rows) - tickets.num_rows
            within = np.arange(len(ticket)) - start[ticket]
            peer, row = tickets.peer[ticket], tickets.first_row[ticket] + within
            token = plan.row_token[tickets.source_start[ticket] + within]
            for rank, (source, tokens) in homes.items():
                here = peer == rank
                source[row[here]], tokens[row[here]] = plan.rank, token[here]
        return homes

    def _upload(
        self,
        rank: int,
        routing: Routing,
        home: tuple[np.ndarray, np.ndarray],
        epoch: int,
    ) -> None:
        self.heap.fill(rank, Slot.topk_idx, routing.topk_idx[rank])
        self.heap.fill(rank, Slot.topk_weights, routing.topk_weights[rank])
        self._set_words(rank, {Word.num_tokens: len(routing.topk_idx[rank])})
        if self.plans_on_device:
            return
        for slot, values in self._sending_plan(rank).items():
            self.heap.fill(rank, slot, values)
        self.heap.fill(rank, Slot.returns, self._returning_plan(rank, home, epoch))
        self._set_words(rank, self._plan_words(rank))

    def _sending_plan(self, rank: int) -> dict[Slot, np.ndarray]:
        """What NumPy's plan of a rank is as buffers, but for the way back."""
        plan, topk_idx = self.plans[rank], self.routing.topk_idx[rank]
        at_home = plan_home(topk_idx, self.settings)
        return {
            Slot.sends: pack_sends(plan, self.settings),
            Slot.tiles: pack_tiles(plan.layout),
            Slot.ready_expected: plan.readiness.expected.astype(np.int32),
            Slot.rows_to: count_rows(topk_idx, self.settings.num_experts),
            Slot.token_expected: at_home.token_expected.astype(np.int32),
            Slot.rank_expected: at_home.rank_expected.astype(np.int32),
        }

    def _returning_plan(
        self, rank: int, home: tuple[np.ndarray, np.ndarray], epoch: int
    ) -> np.ndarray:
        layout = self.plans[rank].layout
        return pack_returns(plan_returns(layout, *home, self.settings, epoch=epoch))

    def _plan_words(self, rank: int) -> dict[Word, int]:
        plan = self.plans[rank]
        return {
            Word.num_sends: plan.num_sent,
            Word.num_tiles: plan.layout.num_tiles,
            Word.num_counters: len(plan.readiness.expected),
            Word.num_returns: plan.layout.num_rows,
        }

    def plan_differences(self, rank: int, *, returns_epoch: int | None = None) -> list[str]:
        """Buffers of a rank in which the latest plan on the device differs from NumPy's.

        The way back is compared where the launch that planned it, `returns_epoch`, is given. For
        an idle device.
        """
        wanted = self._sending_plan(rank)
        if returns_epoch is not None:
            home = self._homes()[rank]
            wanted[Slot.returns] = self._returning_plan(rank, home, returns_epoch)
        words = self.tensor(rank, Slot.words).tolist()
        return [
            *(word.name for word, value in self._plan_words(rank).items() if words[word] != value),
            *(
                slot.name
                for slot, values in wanted.items()
                if not np.array_equal(self.tensor(rank, slot)[: len(values)].cpu(), values)
            ),
        ]

    def _set_words(self, rank: int, words: dict[Word, int]) -> None:
        block = self.tensor(rank, Slot.words)
        for name, value in words.items():
            block[int(name)] = value

    # Launches, on torch's current stream; none waits for the device.

    def open(self, *, exchange: bool, preset: bool = False) -> None:
        """Open the next launch: the gate of all ranks, with an exchange of counts or without.

        With `preset` counters start at their thresholds, so that nothing waits (rule 6). Where the
        device makes the plan, it is made behind the gate, but for a preset launch.
        """
        self.launcher.launch(self.opening(exchange=exchange, preset=preset))
        self._epoch += 1

    def opening(self, *, exchange: bool, preset: bool = False) -> str:
        """Name of the launch by which `open` opens."""
        if self.plans_on_device and not preset:
            return "plan" if exchange else "plan_returns"
        return f"open{'_exchange' * exchange}{'_preset' * preset}"

    def meet(self) -> None:
        """Let the device wait for all ranks: a launch that is opened and does nothing."""
        self.launcher.launch("open")
        self._epoch += 1

    def dispatch(self) -> None:
        """Send every row and wait for all that come."""
        self.launcher.launch("dispatch")

    def combine(self) -> None:
        """Push every row home and reduce tokens as they complete."""
        self.launcher.launch("combine")

    def push(self) -> None:
        """Push every row home and wait for all that come; nothing is reduced."""
        self.launcher.launch("push")

    def reduce(self) -> None:
        """Reduce rows that are all home, on as many SMs as there are."""
        self.launcher.launch("reduce")

    def check(self) -> None:
        """Raise for a rank that gave up or runs with other settings; the device is idle."""
        self.heap.check(limit_s=self.watchdog_s)
        for rank in self.ranks:
            words = self.tensor(rank, Slot.words).tolist()
            if other := words[Word.mismatch]:
                raise ValueError(
                    f"rank {other - 1} runs with other plan settings than rank {rank}: start all "
                    "ranks from one configuration"
                )
            if self.plans_on_device:
                self._check_plan(rank, words)
        self.heap.check_peers()

    def _check_plan(self, rank: int, words: list[int]) -> None:
        """Raise for what the plan kernel of a rank has refused."""
        if place := words[Word.bad_expert]:
            bad = int(self.tensor(rank, Slot.topk_idx).flatten()[place - 1])
            raise ValueError(
                f"topk_idx of rank {rank} holds {bad}: allowed is -1 (dropped) or "
                f"0..{self.settings.num_experts - 1}; correct the routing or workload.num_experts"
            )
        if rows := words[Word.overflow_rows]:
            raise ValueError(overflow_sentence(self.capacity, words[Word.overflow_rank], rows))

    def synchronize(self) -> None:
        """Wait for all launches, bounded, and check them."""
        done = torch.cuda.Event()
        done.record()
        self.heap.wait(done.query, limit_s=self.watchdog_s)
        self.check()
