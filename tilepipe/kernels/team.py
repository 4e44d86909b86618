"""The CTAs of one rank that plan together: who they are, and how they wait for each other.

Knows nothing of what they plan. Every member has a word of its own that it raises once a round,
when it has written what the others wait for; nobody else writes it, and it is never reset: a
launch goes on from where the one before has left it. All members run the same rounds, and all are
resident. The first one, the leader, opens the launch for all.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from tilepipe.fabric.table import Role, Slot, Stamp, Word
from tilepipe.kernels.memory import address, buffer, element
from tilepipe.kernels.plan_constants import PlanConstants
from tilepipe.kernels.protocol import open_launch
from tilepipe.kernels.semaphore import Scope, load_relaxed, publish_set, wait_at_least
from tilepipe.kernels.watchdog import abort_word, give_up, leave_stamp

__all__ = ["Member", "all_meet", "arrive", "lead", "member_of"]


@dataclass(frozen=True)
class Member:
    """One CTA of a rank, as its threads see it."""

    table: Any
    rank: Int32
    number: Int32  # 0: the leader
    thread: Int32
    stopped: cute.Tensor  # (1,) Int32 of shared memory: whether a wait of the CTA has failed
    round: Int64  # that the launch before has ended with
    plan: PlanConstants
    limit_ns: Int64  # of one wait

    @property
    def first(self) -> Int32:
        """Number of this thread among those of all members."""
        return self.number * self.plan.num_threads + self.thread

    @property
    def step(self) -> int:
        """Threads of all members."""
        return self.plan.num_ctas * self.plan.num_threads

    def at(self, slot: Slot, dtype: Any) -> cute.Tensor:
        """A buffer of the rank."""
        return buffer(address(self.table, self.rank, slot), dtype)

    def stamp(self, stamp: Stamp) -> None:
        """Leave the moment of the leader, which is written by one thread."""
        leave_stamp(self.table, self.rank, self.first, stamp)

    def part(self, parts: Any, name: str) -> cute.Tensor:
        """What the plan keeps in scratch under a name."""
        before = list(parts)[: list(parts).index(name)]
        begin = address(self.table, self.rank, Slot.scratch) + 4 * sum(parts[p] for p in before)
        return buffer(begin, Int32)


def member_of(
    table: Any, rank: Int32, number: Int32, thread: Int32, memory: Any, plan: Any, limit_ns: Int64
) -> Member:
    """This CTA. Called by all threads of it, before anything of this launch is written."""
    stopped = cute.make_tensor(
        memory.allocate_array(Int32, 4, byte_alignment=16), cute.make_layout(1)
    )
    member = Member(table, rank, number, thread, stopped, Int64(0), plan, limit_ns)
    return replace(member, round=_begin(member))


@cute.jit
def _begin(member: cutlass.Constexpr) -> Int64:
    stopped = member.stopped
    if member.thread == 0:
        stopped[0] = Int32(0)
    own = _word(member, member.number)
    latest = load_relaxed(own, Int64, Scope.gpu)
    cute.arch.sync_threads()  # everybody has read it
    return latest


def _word(member: Member, number: Int32) -> cute.Pointer:
    return element(address(member.table, member.rank, Slot.plan_rounds), number, Int64)


@cute.jit
def arrive(member: cutlass.Constexpr, number: cutlass.Constexpr):
    """End round `number` of this launch: publish to the team what all threads have written."""
    cute.arch.sync_threads()
    if member.thread == 0 and member.plan.num_ctas > 1:
        publish_set(_word(member, member.number), member.round + number, Scope.gpu)


@cute.jit
def all_meet(member: cutlass.Constexpr, number: cutlass.Constexpr) -> Boolean:
    """Wait until all members have arrived in round `number`; False, for the whole CTA, where one
    has not. Nothing may be read or written after False."""
    if cutlass.const_expr(member.plan.num_ctas == 1):
        return Boolean(True)
    return _await(member, 0, member.plan.num_ctas, number, member.limit_ns)


@cute.jit
def lead(
    member: cutlass.Constexpr,
    gather: cutlass.Constexpr,  # called once the others have arrived
    exchange: cutlass.Constexpr,
) -> Boolean:
    """Pass the gate: round 1, which the leader alone ends, for all; the others have arrived.

    With an exchange the leader first waits for the others and gathers what it sends. False, for the
    whole CTA, where the launch has failed.
    """
    table, rank, plan, limit_ns = member.table, member.rank, member.plan, member.limit_ns
    passed, stopped = Boolean(True), member.stopped
    if member.number == 0:
        if cutlass.const_expr(exchange):
            passed = _await(member, 1, plan.num_ctas, 1, limit_ns)
            if passed:
                gather()
                cute.arch.sync_threads()
        if passed:
            threads = plan.num_threads
            open_launch(table, rank, member.thread, threads, plan.gate, exchange, False, limit_ns)
            cute.arch.sync_threads()
            if member.thread == 0 and abort_word(table, rank) != 0:
                stopped[0] = Int32(1)
            cute.arch.sync_threads()
            passed = stopped[0] == 0
            if passed:
                arrive(member, 1)
    else:
        # The leader's own wait comes to an end before this one.
        passed = _await(member, 0, 1, 1, 2 * limit_ns)
    return passed


@cute.jit
def _await(
    member: cutlass.Constexpr,
    begin: cutlass.Constexpr,
    end: cutlass.Constexpr,
    number: cutlass.Constexpr,
    limit_ns: Int64,
) -> Boolean:
    """Wait for members begin..end. Each is waited for by one thread, for the whole CTA."""
    table, rank = member.table, member.rank
    other, stopped = begin + member.thread, member.stopped
    if other < end:
        word, expected = _word(member, other), member.round + number
        abort = element(address(table, rank, Slot.abort), Int32(0), Int32)
        if not wait_at_least(word, expected, abort, limit_ns, Scope.gpu, False, dtype=Int64):
            stopped[0] = Int32(1)
            seen = Int32(load_relaxed(word, Int64, Scope.gpu) - member.round)
            epoch = buffer(address(table, rank, Slot.words), Int32)[int(Word.epoch)]
            ranks = member.plan.settings.num_ranks
            give_up(table, rank, ranks, Role.plan, other, Int32(-1), epoch, Int32(number), seen)
    cute.arch.sync_threads()
    return stopped[0] == 0
