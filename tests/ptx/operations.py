"""What PTX instructions do that touch memory, other lanes, the clock or copies under way.

Knows nothing of branches and of when lanes run. Functions here take an instruction and return what
it does for the active lanes of a stretch.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.copies import Copies
from tests.ptx.grid import LANES, Act, Active, Grid
from tests.ptx.memory import DYNAMIC_BASE, Fault
from tests.ptx.parse import Instruction
from tests.ptx.races import View

__all__ = ["Operations"]

_WIDTHS = {"8": 1, "16": 2, "32": 4, "64": 8}
_SIGNED = {4: np.int32, 8: np.int64}
# Lower halves of counters: cycles of an SM, and a timer that goes in steps.
_COUNTERS = {
    "%clock": lambda now_ns: 2 * now_ns,
    "%globaltimer_lo": lambda now_ns: now_ns // 1024 * 1024,
}
_STRONG = {"relaxed", "volatile", "acquire", "release"}


class Operations:
    """Instructions of one launch."""

    def __init__(
        self, grid: Grid, copies: Copies, now_ns: Callable[[], int], races: View | None
    ) -> None:
        self.grid, self.copies, self.now_ns, self.races = grid, copies, now_ns, races

    def of(self, instruction: Instruction) -> Act:
        """What an instruction does; raises ValueError for one that is not known."""
        name = instruction.parts[0]
        make = getattr(self, f"_{name}", None)
        if make is None:
            raise ValueError(f"not known: line {instruction.line}, {instruction.text}")
        act: Act = make(instruction)
        return act

    # Operands.

    def _lanes(self, s: slice, m: Active) -> np.ndarray:
        lanes = self.grid.lanes[s]
        return lanes if m is True else lanes[m]

    def _reader(self, operand: Any, dtype: Any) -> Callable[[np.ndarray], np.ndarray]:
        """Values of a register or a number for some lanes."""
        if isinstance(operand, str) and operand.startswith("%"):
            register = self.grid.names.register(operand)
            if register.dtype == np.bool_:
                return lambda lanes: register[lanes]
            view = register.view(np.dtype(dtype)) if register.itemsize == _size(dtype) else register
            return lambda lanes: view[lanes]
        number = int(str(operand), 0) & (2 ** (8 * _size(dtype)) - 1)
        value = np.array(number, f"u{_size(dtype)}").view(dtype)
        return lambda lanes: np.broadcast_to(value, len(lanes))

    def _address(self, operand: Any) -> Callable[[np.ndarray], np.ndarray]:
        name, offset = operand
        register = self.grid.names.register(name)
        added = np.array(offset & (2 ** (8 * register.itemsize) - 1), register.dtype)
        return lambda lanes: register[lanes] + added

    def _registers(self, operand: Any) -> list[np.ndarray]:
        names = operand if isinstance(operand, tuple) else (operand,)
        return [self.grid.names.register(name) for name in names]

    def _nop(self, instruction: Instruction) -> Act:
        return lambda s, m: None

    # Registers from elsewhere.

    def _mov(self, instruction: Instruction) -> Act:
        target, source = instruction.operands
        register = self.grid.names.register(str(target))
        if source == "%globaltimer":

            def read_clock(s: slice, m: Active) -> None:
                register[self._lanes(s, m)] = self.now_ns()

            return read_clock
        if source in _COUNTERS:
            of_time = _COUNTERS[source]

            def read_counter(s: slice, m: Active) -> None:
                register[self._lanes(s, m)] = of_time(self.now_ns()) & 0xFFFFFFFF

            return read_counter
        if not str(source).startswith("__dynamic_shmem"):
            raise ValueError(f"not known: line {instruction.line}, {instruction.text}")

        def take_address(s: slice, m: Active) -> None:
            register[self._lanes(s, m)] = DYNAMIC_BASE

        return take_address

    # Loads, stores, atomics.

    def _ld(self, instruction: Instruction) -> Act:
        parts = instruction.parts
        width, count = _WIDTHS[parts[-1][1:]], _count(parts)
        targets = self._registers(instruction.operands[0])
        if "param" in parts:
            value = self.grid.arguments[instruction.operands[1][0]]
            bits = np.array(value & (2 ** (8 * width) - 1), f"u{width}")

            def load_param(s: slice, m: Active) -> None:
                targets[0][self._lanes(s, m)] = bits

            return load_param
        address, load = self._address(instruction.operands[1]), self._load(parts, width, count)

        def act(s: slice, m: Active) -> None:
            lanes = self._lanes(s, m)
            values = load(lanes, address(lanes))
            for place, target in enumerate(targets):
                target[lanes] = values if count == 1 else values[:, place]

        return act

    def _load(self, parts: list[str], width: int, count: int) -> Callable[..., np.ndarray]:
        grid, races = self.grid, self.races
        if "global" in parts:
            strong, acquires = bool(_STRONG & set(parts)), "acquire" in parts

            def load(lanes: np.ndarray, addresses: np.ndarray) -> np.ndarray:
                values = grid.memory.load(addresses, width, count)
                if races is not None:
                    races.read(lanes, addresses, width * count, strong, acquires)
                return values

            return load
        assert any(part.startswith("shared") for part in parts), parts

        def load_shared(lanes: np.ndarray, addresses: np.ndarray) -> np.ndarray:
            values = grid.shared.load(grid.cta_of[lanes], addresses, width, count)
            if races is not None:
                ctas = grid.cta_of[lanes]
                places = grid.shared.check(ctas, addresses, width * count)
                races.read_shared(lanes, places, width * count)
            return values

        return load_shared

    def _st(self, instruction: Instruction) -> Act:
        parts, (place, source) = instruction.parts, instruction.operands
        width, count = _WIDTHS[parts[-1][1:]], _count(parts)
        sources = source if isinstance(source, tuple) else (source,)
        readers = [self._reader(part, f"u{width}") for part in sources]
        address, store = self._address(place), self._store(parts, width, count)

        def act(s: slice, m: Active) -> None:
            lanes = self._lanes(s, m)
            values = [read(lanes) for read in readers]
            store(lanes, address(lanes), values[0] if count == 1 else np.stack(values, 1))

        return act

    def _store(self, parts: list[str], width: int, count: int) -> Callable[..., None]:
        grid, races = self.grid, self.races
        if "global" in parts:
            strong = bool(_STRONG & set(parts))
            assert "release" not in parts, "releases are fences here"

            def store(lanes: np.ndarray, addresses: np.ndarray, values: np.ndarray) -> None:
                grid.memory.store(addresses, values, width, count)
                if races is not None:
                    races.write(lanes, addresses, width * count, strong)

            return store
        assert any(part.startswith("shared") for part in parts), parts

        def store_shared(lanes: np.ndarray, addresses: np.ndarray, values: np.ndarray) -> None:
            grid.shared.store(grid.cta_of[lanes], addresses, values, width, count)
            if races is not None:
                ctas = grid.cta_of[lanes]
                places = grid.shared.check(ctas, addresses, width * count)
                races.write_shared(lanes, places, width * count)

        return store_shared

    def _atom(self, instruction: Instruction) -> Act:
        target, place, source = instruction.operands
        return self._atomic(instruction, place, source, self._registers(target)[0])

    def _red(self, instruction: Instruction) -> Act:
        return self._atomic(instruction, *instruction.operands, None)

    def _atomic(
        self, instruction: Instruction, place: Any, source: Any, target: np.ndarray | None
    ) -> Act:
        """Lanes one by one: the order of their numbers is as good as any."""
        parts, grid, races = instruction.parts, self.grid, self.races
        width = _WIDTHS[parts[-1][1:]]
        dtype = np.dtype(f"{'i' if parts[-1][0] == 's' else 'u'}{width}")
        change = {"add": np.add, "max": np.maximum, "min": np.minimum}[parts[-2]]
        if "global" not in parts:
            raise ValueError(f"not known: line {instruction.line}, {instruction.text}")
        address, read = self._address(place), self._reader(source, dtype)

        def act(s: slice, m: Active) -> None:
            lanes = self._lanes(s, m)
            addresses, values = address(lanes), read(lanes)
            if races is not None:
                races.change(lanes, addresses, width)
            for number in range(len(lanes)):
                at = addresses[number : number + 1]
                old = grid.memory.load(at, width).view(dtype)
                if target is not None:
                    target[lanes[number]] = old.view(f"u{width}")[0]
                new = change(old, values[number : number + 1], dtype=dtype)
                grid.memory.store(at, new.view(f"u{width}"), width)

        return act

    def _fence(self, instruction: Instruction) -> Act:
        races, kind = self.races, instruction.parts[1]
        if races is not None and kind == "acq_rel":
            return lambda s, m: races.fence(self._lanes(s, m))
        if races is not None and kind == "proxy":
            return lambda s, m: races.fence_proxy(self._lanes(s, m))
        return lambda s, m: None

    # Whole warps. Masks other than all lanes are not emitted.

    def _shfl(self, instruction: Instruction) -> Act:
        target, source, other, clamp, mask = instruction.operands
        _all_lanes(mask, instruction)
        mode = instruction.parts[2]
        register = self._registers(target)[0]
        values, amount = self._reader(source, np.uint32), self._reader(other, np.int32)
        limit = int(str(clamp))
        if limit != {"idx": 31, "up": 0, "down": 31, "bfly": 31}[mode]:
            raise ValueError(f"not known: line {instruction.line}, {instruction.text}")
        grid = self.grid

        def act(s: slice, m: Active) -> None:
            lanes = self._lanes(s, m)
            lane, first = lanes % LANES, lanes - lanes % LANES
            by = amount(lanes) & 31
            asked = {"idx": by, "up": lane - by, "down": lane + by, "bfly": lane ^ by}[mode]
            asked = np.where((asked < 0) | (asked > 31), lane, asked) + first
            if grid.ended[asked].any():
                raise Fault("a lane is asked that has ended")
            register[lanes] = values(asked)

        return act

    def _vote(self, instruction: Instruction) -> Act:
        target, source, mask = instruction.operands
        _all_lanes(mask, instruction)
        register, votes = self._registers(target)[0], self._reader(source, np.bool_)
        decide = {"all": np.all, "any": np.any}[instruction.parts[2]]
        grid = self.grid

        def act(s: slice, m: Active) -> None:
            lanes = self._lanes(s, m)
            yes = np.full(grid.num_lanes, instruction.parts[2] == "all")
            yes[lanes] = votes(lanes)
            register[lanes] = decide(yes.reshape(-1, LANES), 1)[lanes // LANES]

        return act

    def _match(self, instruction: Instruction) -> Act:
        target, source, mask = instruction.operands
        _all_lanes(mask, instruction)
        register, read = self._registers(target)[0], self._reader(source, np.uint32)
        assert instruction.parts[1] == "any"

        def act(s: slice, m: Active) -> None:
            lanes = self._lanes(s, m)
            values = read(lanes)
            bits = np.uint32(1) << (lanes % LANES).astype(np.uint32)
            same = (values[:, None] == values[None, :]) & (
                lanes[:, None] // LANES == lanes[None, :] // LANES
            )
            register[lanes] = (same * bits[None, :]).sum(1).astype(np.uint32)

        return act

    def _bar(self, instruction: Instruction) -> Act:
        _all_lanes(instruction.operands[0], instruction)
        races = self.races
        if races is None:
            return lambda s, m: None

        def act(s: slice, m: Active) -> None:
            lanes = self._lanes(s, m)
            for warp in np.unique(lanes // LANES):
                races.meet(lanes[lanes // LANES == warp])

        return act

    # Copies.

    def _cp(self, instruction: Instruction) -> Act:
        parts, operands = instruction.parts, instruction.operands
        bulk = "bulk" in parts
        if "commit_group" in parts or "wait_group" in parts:
            count = int(str(operands[0])) if operands else None
            return self._group(count, bulk=bulk, read="read" in parts)
        if not bulk:
            target, source = self._address(operands[0]), self._address(operands[1])
            size = self._reader(operands[3] if len(operands) > 3 else operands[2], np.uint32)
            assert operands[2] == "16"

            def copy(s: slice, m: Active) -> None:
                lanes = self._lanes(s, m)
                self.copies.start(lanes, target(lanes), source(lanes), size(lanes))

            return copy
        loads = parts[3].startswith("shared")
        target, source = self._address(operands[0]), self._address(operands[1])
        size = self._reader(operands[2], np.uint32)
        barrier = self._address(operands[3]) if loads else None

        def copy_bulk(s: slice, m: Active) -> None:
            for lane in self._lanes(s, m):
                one = np.array([lane])
                args = int(lane), int(target(one)[0]), int(source(one)[0]), int(size(one)[0])
                if barrier is None:
                    self.copies.store_bulk(*args)
                else:
                    self.copies.load_bulk(*args, int(barrier(one)[0]))

        return copy_bulk

    def _group(self, count: int | None, *, bulk: bool, read: bool) -> Act:
        copies = self.copies

        def act(s: slice, m: Active) -> None:
            lanes = self._lanes(s, m)
            if count is None:
                copies.commit(lanes, bulk=bulk)
            else:
                copies.wait(lanes, count, bulk=bulk, read=read)

        return act

    def _mbarrier(self, instruction: Instruction) -> Act:
        kind, operands, copies = instruction.parts[1], instruction.operands, self.copies
        has_result = kind in ("try_wait", "arrive")
        result = self._registers(operands[0])[0] if has_result else None
        address = self._address(operands[1 if has_result else 0])
        last = operands[-1]
        value = None if isinstance(last, tuple) else self._reader(last, np.uint32)

        def act(s: slice, m: Active) -> None:
            for lane in self._lanes(s, m):
                one = np.array([lane])
                at, given = int(address(one)[0]), int(value(one)[0]) if value else 0
                if kind == "init":
                    copies.init_barrier(int(lane), at, given)
                elif kind == "inval":
                    copies.drop_barrier(int(lane), at)
                elif kind == "arrive":
                    copies.expect(int(lane), at, given)
                elif kind == "try_wait":
                    assert result is not None
                    result[lane] = copies.has_passed(int(lane), at, given)
                else:
                    raise Fault(f"mbarrier.{kind} is not known")

        return act


def _size(dtype: Any) -> int:
    return int(np.dtype(dtype).itemsize)


def _count(parts: list[str]) -> int:
    return next((int(part[1:]) for part in parts if part in ("v2", "v4")), 1)


def _all_lanes(mask: Any, instruction: Instruction) -> None:
    if mask != "-1":
        raise ValueError(f"a part of a warp meets, not known: {instruction.text}")
