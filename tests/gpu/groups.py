"""Groups of ranks on one GPU whose launches are checked in every word that they may write.

Imported only where there is a GPU. Knows nothing of timing and of configurations.
"""

from collections.abc import Sequence

import numpy as np
import torch

from tilepipe.config.choices import Copy, Granularity, HomeGranularity
from tilepipe.experiments.cuda.oracle import DeviceOracle, poison
from tilepipe.experiments.cuda.payload import fill_rows, row_bits
from tilepipe.fabric.table import Slot, Word
from tilepipe.kernels.bulk import CLAIM_ROWS
from tilepipe.kernels.group import DeviceGroup
from tilepipe.kernels.launcher import Knobs, constants_of
from tilepipe.kernels.reduction import units_of
from tilepipe.launch.worker import Job, Records, at_job_boundary, run_point
from tilepipe.measure.gate import BF16_POISON
from tilepipe.schedule.layout import count_rows
from tilepipe.schedule.packed import SLOT_BITS, TOKEN_BITS
from tilepipe.schedule.settings import PlanSettings
from tilepipe.schedule.shape import Shape
from tilepipe.workload.routing import Routing

# What a warp has claimed when it finds its queue empty: the claims that it works ahead.
CLAIMS_AHEAD = {Word.send_queue: 3, Word.push_queue: 3, Word.reduce_queue: 2}
NEVER = torch.iinfo(torch.int64).min  # poison of a way home


class CheckedGroup:
    """A group that takes several routings, one after the other, in the same memory."""

    def __init__(
        self,
        settings: PlanSettings,
        knobs: Knobs,
        routings: Sequence[Routing],  # all that will come: they decide what is reserved
        *,
        hidden: int,
        watchdog_s: float = 5.0,
    ) -> None:
        tokens = [[len(ids) for ids in routing.topk_idx] for routing in routings]
        self.hidden = hidden
        self.group = DeviceGroup(
            settings,
            Shape(
                max_tokens=max(map(max, tokens)),
                num_tokens=max(map(sum, tokens)),
                dispatch_hidden=hidden,
                home_hidden=hidden,
            ),
            knobs,
            watchdog_s=watchdog_s,
        )
        self.num_launches = 0

    def tensor(self, rank: int, slot: Slot) -> torch.Tensor:
        return self.group.tensor(rank, slot)

    def prepare(self, routing: Routing, payload: int) -> None:
        """Plan the next launches, write what they move, poison what they write."""
        self.routing, self.payload = routing, payload
        self.group.set_routing(routing)
        self.oracles = [
            DeviceOracle(routing, rank=rank, device=self.group.device) for rank in self.group.ranks
        ]
        for rank in self.group.ranks:
            for slot in (Slot.x, Slot.y, Slot.recv_x, Slot.row_home, Slot.home_y, Slot.out):
                poison(self.tensor(rank, slot))
            tokens = torch.arange(len(routing.topk_idx[rank]), device=self.group.device)
            fill_rows(self.tensor(rank, Slot.x), payload, rank, tokens)
            # By the routing, so that a graph can be filled before its dispatch has run.
            source, token, slot = (self._moved(part) for part in rows_at(routing, rank))
            rows = self._held(rank)
            fill_rows(self.tensor(rank, Slot.y), payload, source, token, slot=slot, row_idx=rows)

    # Launches, checked.

    def dispatch(self) -> list[str]:
        """Open and dispatch; returns what is not as it must be."""
        self.flags = [self.tensor(rank, Slot.row_flag).clone() for rank in self.group.ranks]
        self.group.open(exchange=True)
        self.group.dispatch()
        self.group.synchronize()
        self.num_launches += 1
        return [
            *self.wrong_rows(),
            *self._each(self._gate_words, self._exchanged, self._arrivals),
            *self._each(self._queues_of({Word.send_queue: self._num_sent})),
        ]

    def combine(self) -> list[str]:
        """Open and combine rows that a dispatch has told the way home of."""
        self.group.open(exchange=False)
        self.group.combine()
        self.group.synchronize()
        self.num_launches += 1
        return self.wrong_after_combine()

    def wrong_after_combine(self) -> list[str]:
        """Of all that the latest launch, a combine, must have left."""
        queues = {Word.push_queue: self._num_held, Word.reduce_queue: self._num_units}
        return [
            *self.wrong_tokens(Slot.out),
            *self._each(self._gate_words, self._gate_ready, self._home_rows, self._home_counters),
            *self._each(self._queues_of(queues)),
        ]

    def wrong_rows(self) -> list[str]:
        """Of rows, ways home and gaps that the latest dispatch must have left."""
        return self._each(self._received, self._gaps)

    def wrong_tokens(self, slot: Slot) -> list[str]:
        """Of tokens that the latest reduction must have left in `slot`."""

        def sums(rank: int) -> list[str]:
            out = self.tensor(rank, slot)
            num_tokens = len(self.routing.topk_idx[rank])
            verdict = self.oracles[rank].check_combined(
                self.payload, out[:num_tokens], contender="combine", stage="before"
            )
            rest = _bits(out)[num_tokens:]
            return [verdict.detail] * (not verdict.passed) + _unlike(
                f"{slot.name} of no token", rest, torch.full_like(rest, BF16_POISON)
            )

        return self._each(sums)

    def _each(self, *checks) -> list[str]:
        return [
            f"rank {rank}: {fault}"
            for check in checks
            for rank in self.group.ranks
            for fault in check(rank)
        ]

    # What dispatch leaves.

    def _received(self, rank: int) -> list[str]:
        """Rows and their ways home, all experts at once: the oracle asks the device for each."""
        source, token, slot = (self._moved(part) for part in rows_at(self.routing, rank))
        held = self._held(rank)
        rows, homes = _bits(self.tensor(rank, Slot.recv_x)), self.tensor(rank, Slot.row_home)
        sent = row_bits(self.payload, source, token, self.hidden)
        ways = source << (TOKEN_BITS + SLOT_BITS) | token << SLOT_BITS | slot
        return [
            *_unlike("recv_x", rows[held], sent),
            *_unlike("row_home", homes[held], ways),
        ]

    def _gaps(self, rank: int) -> list[str]:
        """Receive rows that nobody sends to, those beyond the extent included."""
        rows, homes = _bits(self.tensor(rank, Slot.recv_x)), self.tensor(rank, Slot.row_home)
        gap = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        gap[self._held(rank)] = False
        return [
            *_unlike("recv_x in a gap", rows[gap], torch.full_like(rows[gap], BF16_POISON)),
            *_unlike("row_home in a gap", homes[gap], torch.full_like(homes[gap], NEVER)),
        ]

    def _exchanged(self, rank: int) -> list[str]:
        """Counts of all ranks, and the words that brought them."""
        experts, epoch = self.group.settings.num_experts, self.num_launches
        counts = torch.from_numpy(
            np.stack([count_rows(ids, experts) for ids in self.routing.topk_idx])
        )
        fingerprint = int(self.tensor(rank, Slot.words)[Word.fingerprint])
        mailbox = self.tensor(rank, Slot.mailbox)[epoch & 1].cpu()
        carried = torch.full_like(mailbox, epoch << 32 | fingerprint)
        carried[:, :experts] = epoch << 32 | counts.long()
        return [
            *_unlike("counts", self.tensor(rank, Slot.counts).cpu(), counts),
            *_unlike("mailbox", mailbox, carried),
        ]

    def _arrivals(self, rank: int) -> list[str]:
        """Counters at their thresholds, or flags of this launch; the others untouched."""
        ready, flags = self.tensor(rank, Slot.ready).cpu(), self.flags[rank].clone()
        expected = torch.zeros_like(ready)
        if self.group.settings.granularity is Granularity.token:
            flags[self._held(rank)] = self.num_launches
        else:
            thresholds = torch.from_numpy(self.group.plans[rank].readiness.expected)
            expected[: len(thresholds)] = thresholds
        return [
            *_unlike("ready", ready, expected),
            *_unlike("row_flag", self.tensor(rank, Slot.row_flag), flags),
        ]

    # What combine leaves.

    def _home_rows(self, rank: int) -> list[str]:
        """Rows at home, slot by slot; dropped slots and those of no token untouched."""
        home = _bits(self.tensor(rank, Slot.home_y))
        token, slot = (self._moved(part) for part in np.nonzero(self.routing.topk_idx[rank] >= 0))
        expected = torch.full_like(home, BF16_POISON)
        place = token * self.group.settings.num_topk + slot
        expected[place] = row_bits(self.payload, rank, token, self.hidden, slot=slot)
        return _unlike("home_y", home, expected)

    def _home_counters(self, rank: int) -> list[str]:
        ids, settings = self.routing.topk_idx[rank], self.group.settings
        tokens, ranks = (
            self.tensor(rank, slot).cpu() for slot in (Slot.token_ready, Slot.rank_ready)
        )
        slots, sources = torch.zeros_like(tokens), torch.zeros_like(ranks)
        if settings.home_granularity is HomeGranularity.rank:
            owners = torch.from_numpy(ids[ids >= 0] // settings.num_experts_per_rank)
            sources += torch.bincount(owners, minlength=len(sources)) * settings.num_chunks
        else:
            slots[: len(ids)] = torch.from_numpy((ids >= 0).sum(axis=1)) * settings.num_chunks
        return [*_unlike("token_ready", tokens, slots), *_unlike("rank_ready", ranks, sources)]

    def _gate_ready(self, rank: int) -> list[str]:
        ready = self.tensor(rank, Slot.gate_ready).cpu()
        return _unlike("gate_ready", ready, torch.full_like(ready, self.num_launches))

    # What both leave.

    def _gate_words(self, rank: int) -> list[str]:
        words = self.tensor(rank, Slot.words).cpu()
        found = [int(words[Word.epoch]), int(words[Word.mismatch])]
        found.append(int(self.tensor(rank, Slot.abort)))
        names = ["epoch", "mismatch", "abort"]
        expected = [self.num_launches, 0, 0]
        return [
            f"{name} is {got}, not {want}"
            for name, got, want in zip(names, found, expected, strict=True)
            if got != want
        ]

    def _queues_of(self, used):
        """A check of all queues: those in `used` are at their ends and what warps claim ahead."""
        knobs = self.group.knobs
        num_warps = knobs.num_ctas * knobs.num_warps

        def check(rank: int) -> list[str]:
            words = self.tensor(rank, Slot.words).cpu()
            expected = dict.fromkeys(CLAIMS_AHEAD, 0)
            for queue, count in used.items():
                by_bulk = knobs.copy is Copy.tma and queue is not Word.reduce_queue
                places = CLAIM_ROWS if by_bulk else 1  # of a claim
                num_claims = -(-count(rank) // places) + CLAIMS_AHEAD[queue] * num_warps
                expected[queue] = num_claims * places
            return [
                f"{queue.name} is {int(words[queue])}, not {want}"
                for queue, want in expected.items()
                if words[queue] != want
            ]

        return check

    def _num_sent(self, rank: int) -> int:
        return int((self.routing.topk_idx[rank] >= 0).sum())

    def _num_held(self, rank: int) -> int:
        return len(rows_at(self.routing, rank)[0])

    def _num_units(self, rank: int) -> int:
        group = self.group
        constants = constants_of("combine", group.settings, group.shape, group.knobs)
        return len(self.routing.topk_idx[rank]) * units_of(constants)

    def _held(self, rank: int) -> torch.Tensor:
        """Receive rows that are sent to, by (expert, source rank, token)."""
        return self._moved(self.group.plans[rank].layout.held_rows()[1])

    def _moved(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.group.device)


def rows_at(routing: Routing, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Source rank, token and slot of every row of a rank's experts: by (expert, source, token)."""
    num_local = routing.num_experts // len(routing.topk_idx)
    tokens = [len(ids) for ids in routing.topk_idx]
    ids = np.concatenate(routing.topk_idx)
    row, slot = np.nonzero(ids // num_local == rank)  # a dropped slot is of rank -1
    source, token = (
        np.concatenate(parts)
        for parts in ([np.full(n, r) for r, n in enumerate(tokens)], [np.arange(n) for n in tokens])
    )
    order = np.argsort(ids[row, slot], kind="stable")
    return source[row][order], token[row][order], slot[order]


def _bits(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.int16)


def _unlike(what: str, got: torch.Tensor, want: torch.Tensor) -> list[str]:
    """Says how many values differ and which is the first; nothing where none does."""
    assert (got.shape, got.device) == (want.shape, want.device), what
    wrong = (got != want).nonzero()
    if not len(wrong):
        return []
    place = tuple(wrong[0].tolist())
    values = f"{got[place].item()}, not {want[place].item()}"
    return [f"{what}: {len(wrong)} of {got.numel()} values differ, the first at {place}: {values}"]


# A rank entry, which elastic finds by name in a fresh process.

SPOILED_TOKENS = 33


def rank_0_sends_nothing(job: Job) -> Records:
    """Runs the point of `job`; in that of SPOILED_TOKENS tokens rank 0 owes its peers rows."""

    def body(job: Job, rank: int) -> Records:
        if rank == 0 and job["config"]["workload"]["num_tokens"] == SPOILED_TOKENS:
            DeviceGroup.set_routing = _without_sends(DeviceGroup.set_routing)
        return run_point(job, rank)

    return at_job_boundary(job, body)


def _without_sends(set_routing):
    def spoiled(group: DeviceGroup, routing: Routing, **chosen) -> None:
        set_routing(group, routing, **chosen)
        group.tensor(0, Slot.words)[int(Word.num_sends)] = 0

    return spoiled
