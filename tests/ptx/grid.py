"""One launch of one kernel, lanes as NumPy arrays: branches, meetings, and which lanes run next.

Knows nothing of what instructions do to memory (operations.py) and of other launches (machine.py).

Every lane has its own program counter. Of a stretch of lanes those with the lowest one run, up to
where others wait, so lanes that have parted meet again; an instruction of a whole warp (`.sync`)
holds lanes until all of the warp that have not ended are there, `bar.sync` those of the CTA.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

import numpy as np

from tests.ptx.alu import HELPERS, Namer, statement
from tests.ptx.memory import Fault, Memory, Shared
from tests.ptx.parse import Instruction, Program
from tests.ptx.races import View

__all__ = ["LANES", "Active", "Grid", "Step"]

LANES = 32
_NEVER = np.int32(2**31 - 1)
_BARRIER = -2  # what a lane waits for at `bar.sync`; others wait at an instruction
_RUNS = -1

# Which lanes of a stretch are active; True: all.
Active = Any
Act = Callable[[slice, Active], None]


@dataclass(frozen=True)
class Step:
    """What is done at once, and where it goes on."""

    kind: str  # plain, branch, meet, barrier, end
    act: Act | None
    following: int
    cost: int = 1  # instructions
    target: int = 0  # of a branch
    guard: np.ndarray | None = None
    negated: bool = False


class Grid:
    """State of a launch."""

    def __init__(
        self,
        name: str,  # for messages
        program: Program,
        memory: Memory,
        arguments: tuple[int, ...],
        *,
        num_ctas: int,
        shared_bytes: int,
    ) -> None:
        assert program.num_threads % LANES == 0, "whole warps only"
        self.name, self.program, self.memory = name, program, memory
        self.arguments = dict(zip((p for p, _ in program.params), arguments, strict=True))
        self.num_ctas, self.num_threads = num_ctas, program.num_threads
        self.num_lanes = num_ctas * program.num_threads
        self.shared = Shared(num_ctas, shared_bytes)
        self.lanes = np.arange(self.num_lanes)
        self.cta_of = self.lanes // self.num_threads
        self.pc = np.zeros(self.num_lanes, np.int32)
        self.waits = np.full(self.num_lanes, _RUNS, np.int32)
        self.ended = np.zeros(self.num_lanes, bool)
        self.names = Namer(self.num_lanes)
        self.num_executed = 0
        self.steps: list[Step | None] = []
        self.races: View | None = None  # told of meetings

    def prepare(self, operation: Callable[[Instruction], Act]) -> None:
        """Decode; `operation` gives what an instruction beyond registers and branches does."""
        instructions, labels = self.program.instructions, self.program.labels
        self.steps = [None] * len(instructions)
        starts, texts = set(labels.values()), []
        blocks: list[tuple[int, int]] = []
        index = 0
        while index < len(instructions):
            begin, lines = index, []
            while index < len(instructions) and (index == begin or index not in starts):
                line = statement(instructions[index], self.names)
                if line is None:
                    break
                lines.append(line)
                index += 1
            if lines:
                texts.append(f"def block_{begin}(s, m):\n    " + "\n    ".join(lines))
                blocks.append((begin, index))
            else:
                self.steps[index] = self._step(index, instructions[index], operation)
                index += 1
        special = {
            "tid": (self.lanes % self.num_threads).astype(np.uint32),
            "ctaid": self.cta_of.astype(np.uint32),
            "nctaid": np.full(self.num_lanes, self.num_ctas, np.uint32),
            "smid": (131 - self.cta_of).astype(np.uint32),
            "laneid": (self.lanes % LANES).astype(np.uint32),
        }
        namespace = {**HELPERS, **special, **self.names.values}
        exec(_compiled("\n".join(texts)), namespace)  # text of alu.py
        for begin, end in blocks:
            self.steps[begin] = Step("plain", namespace[f"block_{begin}"], end, end - begin)

    def _step(
        self, index: int, instruction: Instruction, operation: Callable[[Instruction], Act]
    ) -> Step:
        name, guard = instruction.parts[0], None
        if instruction.guard is not None:
            guard = self.names.register(instruction.guard)
        if name == "bra":
            target = self.program.labels[str(instruction.operands[0])]
            negated = instruction.guard_is_negated
            return Step("branch", None, index + 1, target=target, guard=guard, negated=negated)
        meets = name in ("shfl", "vote", "match") or instruction.opcode == "bar.warp.sync"
        kinds = {"ret": "end", "exit": "end", "bar": "meet" if meets else "barrier"}
        kind = "meet" if meets else kinds.get(name, "plain")
        if kind in ("end", "barrier"):
            if guard is not None or (kind == "barrier" and instruction.operands != ("0",)):
                raise ValueError(f"not known: {instruction.text}")
            return Step(kind, None, index + 1)
        act = operation(instruction)
        if guard is not None:
            if meets:
                raise ValueError(f"not known: {instruction.text}")
            act = _guarded(act, guard, instruction.guard_is_negated)
        return Step(kind, act, index + 1)

    # Which lanes run.

    @property
    def is_done(self) -> bool:
        return bool(self.ended.all())

    def runnable(self) -> np.ndarray:
        """Lowest program counter of each warp, of lanes that wait for nobody."""
        counters = np.where((self.waits == _RUNS) & ~self.ended, self.pc, _NEVER)
        return counters.reshape(-1, LANES).min(1)

    def run(self, warps: slice, budget: int, *, front: Callable[[np.ndarray], int]) -> int:
        """Run some neighbouring warps for about `budget` steps; returns instructions executed.

        `front` chooses among the program counters of lanes that could run.
        """
        s = slice(warps.start * LANES, warps.stop * LANES)
        before = self.num_executed
        while budget > 0:
            ready = (self.waits[s] == _RUNS) & ~self.ended[s]
            counters = self.pc[s][ready]
            if not len(counters):
                break
            pc = front(counters)
            active = ready & (self.pc[s] == pc)
            others = counters[counters > pc]
            meeting = int(others.min()) if len(others) else int(_NEVER)
            mask = True if active.all() else active
            budget = self._straight(s, mask, pc, meeting, budget)
        return self.num_executed - before

    def _straight(self, s: slice, m: Active, pc: int, meeting: int, budget: int) -> int:
        """Run lanes as long as they stay together and meet no others."""
        steps = self.steps
        while True:
            step = steps[pc]
            assert step is not None, f"{self.name}: a jump into the middle of a block"
            self.num_executed += step.cost
            budget -= 1
            if step.kind == "plain":
                try:
                    step.act(s, m)
                except Fault as fault:
                    raise self.fault(pc, s, m, str(fault)) from None
                pc = step.following
            elif step.kind == "branch":
                taken = self._taken(step, s, m)
                if taken is None:
                    pc = step.following
                elif taken is True:
                    pc = step.target
                else:
                    self._keep(s, m, step.following)
                    self.pc[s][taken] = step.target
                    return budget
            elif not self._meet(step, s, m, pc):
                return budget
            else:
                pc = step.following
            if budget <= 0 or pc >= meeting:
                self._keep(s, m, pc)
                return budget

    def _taken(self, step: Step, s: slice, m: Active) -> np.ndarray | bool | None:
        """Lanes that jump: True for all, None for none."""
        if step.guard is None:
            return True
        taken = ~step.guard[s] if step.negated else step.guard[s]
        if m is not True:
            taken = taken & m
        number = np.count_nonzero(taken)
        if number == 0:
            return None
        if number == (s.stop - s.start if m is True else np.count_nonzero(m)):
            return True
        return taken

    def _keep(self, s: slice, m: Active, pc: int) -> None:
        if m is True:
            self.pc[s] = pc
        else:
            self.pc[s][m] = pc

    # Meetings. True where the lanes go on together at once.

    def _meet(self, step: Step, s: slice, m: Active, pc: int) -> bool:
        self._keep(s, m, pc)
        if step.kind == "end":
            if m is True:
                self.ended[s] = True
            else:
                self.ended[s] |= m
            self._let_go(s)
            return False
        if step.kind == "meet":
            if m is True or self._are_whole(s, m):
                self._act(step, s, m, pc)
                return True
            self.waits[s][m] = pc
            self._release_warps(s, pc)
            return False
        if m is True:
            self.waits[s] = _BARRIER
        else:
            self.waits[s][m] = _BARRIER
        self._release_ctas(s)
        return False

    def _act(self, step: Step, s: slice, m: Active, pc: int) -> None:
        try:
            step.act(s, m)
        except Fault as fault:
            raise self.fault(pc, s, m, str(fault)) from None

    def _are_whole(self, s: slice, m: np.ndarray) -> bool:
        """Whether of each warp all lanes that have not ended are active, or none is."""
        rows = m.reshape(-1, LANES)
        here = (m | self.ended[s]).reshape(-1, LANES).all(1)
        return bool((here | ~rows.any(1)).all())

    def _release_warps(self, s: slice, pc: int) -> None:
        """Let warps go on whose lanes have all come to the instruction at `pc`."""
        waiting = self.waits[s] == pc
        rows = waiting.reshape(-1, LANES)
        here = (waiting | self.ended[s]).reshape(-1, LANES).all(1) & rows.any(1)
        if here.any():
            m = (rows & here[:, None]).reshape(-1)
            step = self.steps[pc]
            assert step is not None
            self._act(step, s, m, pc)
            self.waits[s][m] = _RUNS
            self.pc[s][m] = step.following

    def _release_ctas(self, s: slice) -> None:
        for cta in range(s.start // self.num_threads, -(-s.stop // self.num_threads)):
            own = slice(cta * self.num_threads, (cta + 1) * self.num_threads)
            waiting = self.waits[own] == _BARRIER
            if waiting.any() and (waiting | self.ended[own]).all():
                self.waits[own][waiting] = _RUNS
                self.pc[own][waiting] += 1
                if self.races is not None:
                    self.races.meet(self.lanes[own][waiting])

    def _let_go(self, s: slice) -> None:
        """Lanes that have ended are waited for no more."""
        self._release_ctas(s)
        for pc in set(self.waits[s][self.waits[s] >= 0].tolist()):
            self._release_warps(s, pc)

    # What to say.

    def fault(self, pc: int, s: slice, m: Active, what: str) -> Fault:
        lanes = self.lanes[s] if m is True else self.lanes[s][m]
        cta, thread = divmod(int(lanes[0]), self.num_threads)
        instruction = self.program.instructions[pc]
        return Fault(
            f"{self.name}, line {instruction.line}, `{instruction.text}`, CTA {cta}, thread "
            f"{thread} and {len(lanes) - 1} others: {what}"
        )

    def where(self) -> list[str]:
        """Where lanes are that have not ended, most of them first."""
        places: dict[tuple[int, int, bool], int] = {}
        for lane in np.flatnonzero(~self.ended):
            key = (int(self.cta_of[lane]), int(self.pc[lane]), bool(self.waits[lane] != _RUNS))
            places[key] = places.get(key, 0) + 1
        lines = []
        for (cta, pc, waits), number in sorted(places.items(), key=lambda item: -item[1]):
            instruction = self.program.instructions[pc]
            lines.append(
                f"{self.name}: {number} lanes of CTA {cta} {'wait' if waits else 'are'} at line "
                f"{instruction.line}, `{instruction.text}`"
            )
        return lines


@cache
def _compiled(text: str) -> CodeType:
    return compile(text, "<ptx>", "exec")


def _guarded(act: Act, guard: np.ndarray, negated: bool) -> Act:
    def guarded(s: slice, m: Active) -> None:
        chosen = (~guard[s] if negated else guard[s]) & m
        if chosen.any():
            act(s, chosen)

    return guarded
