"""A reduction through registers, alone and beside one through shared memory, interpreted."""

import re
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
import pytest
from cutlass import Int32, Int64

from tests.ptx import test_communication as base
from tilepipe.fabric.table import Slot
from tilepipe.kernels.combine import reduce_tokens
from tilepipe.kernels.compile import compile_code
from tilepipe.kernels.entries import communication_entry
from tilepipe.kernels.reduce_beside import reduce_beside

pytestmark = pytest.mark.filterwarnings("ignore")


@cute.jit
def _both(
    table: cute.Pointer,
    rank: Int32,
    lane: Int32,
    warp: Int32,
    ring: Int32,
    limit_ns: Int64,
    constants: cutlass.Constexpr,
    order: cutlass.Constexpr,
    first: cutlass.Constexpr,
):
    if warp % 2 >= first:
        reduce_beside(*(table, rank, lane, constants, Slot.reduced, limit_ns, None, None, order))
    else:
        reduce_tokens(
            *(table, rank, lane, ring, constants, Slot.reduced),
            *(True, limit_ns, None, None, order),
        )


def entry(constants, order, first):
    def body(table, rank, lane, warp, num_warps, ring, barriers, cost_ns, latency_ns, limit_ns):
        _both(table, rank, lane, warp, ring, limit_ns, constants, order, first)

    return communication_entry(constants, body, moves=False, reduces=True)


@pytest.mark.parametrize("first", [0, 1], ids=["alone", "with_ring"])
# Of the last a part has several units, and a unit a number of columns that no step divides.
@pytest.mark.parametrize("hidden", [64, 1056, 5120, 20_480])
def test_sums_are_those_of_the_reduction_through_shared_memory(hidden, first, monkeypatch):
    captured = {}

    def compiled(reduction, kinds):
        ptx = compile_code(entry(captured["constants"], None, first), kinds).ptx
        return SimpleNamespace(ptx=re.sub(r"\n[^\n]*nanosleep[^\n]*", "", ptx))

    monkeypatch.setattr(
        base, "waiting_reduction", lambda constants, order: captured.update(constants=constants)
    )
    monkeypatch.setattr(base, "compile_code", compiled)
    run = base.by_parts_of(hidden)
    base.push_then_reduce(run)

    assert run.wrong_tokens(Slot.reduced) == []
