"""The code of every launch, in a cover of its constants: what it must hold and must not.

Compiled for sm_90a; needs no GPU.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from tests.experiments.pairwise import pairwise
from tests.kernels.sass import MachineCode, disassemble_all
from tests.kernels.waits import waits_in
from tilepipe.config.choices import Copy, Granularity, HomeGranularity
from tilepipe.config.limits import STAGE_BYTES
from tilepipe.fabric.table import RECORD_FIELDS
from tilepipe.kernels.compile import memory_instructions
from tilepipe.kernels.constants import Constants
from tilepipe.schedule.settings import PlanSettings
from tilepipe.schedule.shape import Shape

pytestmark = pytest.mark.filterwarnings("ignore")

# Of one SM, shared by all threads of a CTA; of one thread at most.
NUM_REGISTERS, MAX_REGISTERS = 65_536, 255
# Shared memory for rings, beside tables and barriers.
RING_BYTES = 200 * 1024

PLAIN = {
    "num_ranks": 8,
    "paced": False,
    "hidden": 7168,
    "copy": Copy.simt,
    "warps, loads": (16, 14),
    "num_stages": 3,
    "stage_bytes": STAGE_BYTES,
    "flag_batch": 4,
    "granularity": Granularity.tile,
    "home_granularity": HomeGranularity.token,
    "num_topk": 8,
}
GROUP = {"num_ranks": [1, 8], "paced": [False, True]}
ROWS = {"hidden": [2880, 4096, 7168, 14_336]}
# 32 warps: as many as the launch takes.
SIMT = {**ROWS, "warps, loads": [(16, 14), (32, 7), (8, 14)], "flag_batch": [1, 4, 32]}
# Rows of one piece and of two; as many warps and stages as there is room for.
BULK = {
    "copy": [Copy.tma],
    "paced": [False, True],
    "hidden": [2880, 7168, 14_336],
    "num_warps": [1, 4, 8],
    "num_stages": [1, 3, 6, 14],
    "stage_bytes": [STAGE_BYTES, 2048],
    "flag_batch": [1, 4, 32],
}
# The same loop with other addresses.
BULK_HOME = {
    **BULK,
    "hidden": [2880, 14_336],
    "num_warps": [2, 8],
    "num_stages": [1, 3, 6],
    "stage_bytes": [STAGE_BYTES],
    "flag_batch": [1, 4],
    "home_granularity": list(HomeGranularity),
}
GRAIN = {"granularity": list(Granularity)}
HOME = {"home_granularity": list(HomeGranularity)}
SUM = {"num_topk": [1, 2, 6, 8, 16]}
SENDERS = ("dispatch", "push", "combine")
SUMMERS = ("combine", "reduce")
GATES = ("open", "open_preset", "open_exchange", "open_exchange_preset")
# name of a launch -> axes of each cover
AXES = {
    **{name: [GROUP] for name in GATES},
    "dispatch": [{**GROUP, **SIMT, **GRAIN}, {**BULK, **GRAIN}],
    "push": [{**GROUP, **SIMT, **HOME}, BULK_HOME],
    "combine": [{**GROUP, **SIMT, **HOME, **SUM}, {**BULK_HOME, "num_topk": [1, 8]}],
    # What it sums is summed by combine too.
    "reduce": [{"hidden": [2880, 14_336], "num_topk": [1, 2, 8]}],
}
FLAG_STORE = "st.relaxed.sys.global.b32"


@dataclass(frozen=True)
class Compiled:
    """One launch, as PTX and as machine code."""

    name: str
    constants: Constants
    ptx: str
    machine: MachineCode

    @property
    def memory(self) -> list[str]:
        """Memory instructions and barriers of the PTX without their operands."""
        lines = (re.sub(r"^@!?%p\d+ ", "", line) for line in memory_instructions(self.ptx))
        return [re.sub(r"[\s;].*", "", line) for line in lines]

    @property
    def working(self) -> list[str]:
        """What a rank that works writes and orders."""
        return self._parts()[0]

    @property
    def giving_up(self) -> list[str]:
        """What a rank writes and orders once it has claimed its abort word."""
        return self._parts()[1]

    @property
    def copying(self) -> list[str]:
        """Bulk copies, their barriers and groups, and what orders and raises flags behind them."""
        kept = ("cp.async.bulk", "mbarrier", "fence", "bar.warp", "red.relaxed", FLAG_STORE)
        lines = (re.sub(r"^@!?%p\d+ ", "", line) for line in memory_instructions(self.ptx))
        # Groups with how many of them may be under way.
        short = [re.sub(r"[\s;]+(\d*).*", r" \1", line).strip() for line in lines]
        return [line for line in short if line.startswith(kept)]

    def _parts(self) -> tuple[list[str], list[str]]:
        # Without rows, and without loads and claims: they publish nothing.
        dull = ("ld.", "atom.global.add.", "atom.global.sys.add.u64", "atom.global.sys.max.")
        lines = [line for line in self.memory if not line.startswith(dull) and ".v4." not in line]
        stop = "atom.global.sys.add.u32"
        place = lines.index(stop) if stop in lines else len(lines)
        return lines[:place], lines[place + 1 :]


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, covers in AXES.items():
        for axes in covers:
            for case in pairwise(axes, fits):
                yield name, case


def fits(case: dict[str, Any]) -> bool:
    """Whether the rings of a CTA find room."""
    if case.get("copy") is not Copy.tma:
        return True
    stage_bytes = min(2 * case["hidden"], case.get("stage_bytes", STAGE_BYTES))
    return case["num_warps"] * case["num_stages"] * stage_bytes <= RING_BYTES


def case_id(case: tuple[str, dict[str, Any]]) -> str:
    def word(value: Any) -> str:
        if isinstance(value, tuple):
            return "x".join(map(str, value))
        return getattr(value, "name", str(value))

    return "-".join([case[0], *map(word, case[1].values())])


def constants_for(name: str, case: dict[str, Any]) -> Constants:
    from tilepipe.config.limits import MAX_COMBINE_WARPS
    from tilepipe.kernels.launcher import Knobs, constants_of

    chosen = {**PLAIN, **case}
    num_warps, num_loads = chosen["warps, loads"]
    num_warps = case.get("num_warps", num_warps)
    if name == "combine":
        num_warps = min(num_warps, MAX_COMBINE_WARPS)
    settings = PlanSettings(
        num_experts=32 * chosen["num_ranks"],
        **{
            key: chosen[key] for key in ("num_ranks", "num_topk", "granularity", "home_granularity")
        },
    )
    hidden = chosen["hidden"]
    shape = Shape(max_tokens=1, num_tokens=1, dispatch_hidden=hidden, home_hidden=hidden)
    knobs = Knobs(
        num_ctas=1,
        copy=chosen["copy"],
        num_warps=num_warps,
        num_loads=num_loads,
        num_stages=chosen["num_stages"],
        stage_bytes=chosen["stage_bytes"],
        flag_batch=chosen["flag_batch"],
        pace_latency_ns=int(chosen["paced"]),
    )
    return constants_of(name, settings, shape, knobs)


CASES = list(cases())
# As many as are read at once: nvdisasm starts as long as a case takes to compile.
_TOGETHER = 8


@pytest.fixture(scope="module", params=range(len(CASES)), ids=lambda number: case_id(CASES[number]))
def compiled(request):
    chunk, number = divmod(request.param, _TOGETHER)
    return _chunk(chunk)[number]


@cache
def _chunk(number: int) -> list[Compiled]:
    """Cases that follow one another, compiled."""
    # Only where it is wanted: the import takes two seconds.
    from tilepipe.kernels.launcher import compile_launch

    chosen = CASES[number * _TOGETHER : (number + 1) * _TOGETHER]
    constants = [constants_for(name, case) for name, case in chosen]
    codes = [compile_launch(name, made) for (name, _), made in zip(chosen, constants, strict=True)]
    machines = disassemble_all([code.cubin for code in codes])
    return [
        Compiled(name, made, code.ptx, machine)
        for (name, _), made, code, machine in zip(chosen, constants, codes, machines, strict=True)
    ]


def test_every_launch_has_its_cover():
    from tilepipe.kernels.launcher import LAUNCHES

    # Those of plans have a test of their own.
    assert set(AXES) == {name for name in LAUNCHES if not name.startswith("plan")}


def copied_in(constants: Constants) -> list[str]:
    """Loads and stores that a lane issues for one row: so many loads, then their stores."""
    if constants.copy is Copy.tma:
        return []
    whole, rest = divmod(constants.row_bytes // 16, 32)
    counts = [
        min(constants.num_loads, whole - first) for first in range(0, whole, constants.num_loads)
    ]
    counts += [1] * (rest > 0)
    return [kind for count in counts for kind in ["ld"] * count + ["st"] * count]


def test_rows_move_in_vectors_of_16_bytes_as_many_in_flight_as_were_asked_for(compiled):
    rows = [line for line in compiled.memory if "L1::no_allocate" in line]
    copied = copied_in(compiled.constants) if compiled.name in SENDERS else []
    summed = ["st"] if compiled.name in SUMMERS else []  # of each column that is summed

    assert [line[:2] for line in rows] == copied + summed
    assert {line.partition(".v")[2] for line in rows} <= {"4.b32"}
    narrow = [code for code in compiled.machine.opcodes if ".NA" in code and ".128" not in code]
    assert narrow == []


def test_rows_at_home_are_fetched_in_vectors_of_16_bytes_a_whole_ring_ahead(compiled):
    from tilepipe.kernels.reduction import stages_of

    copies = re.findall(r"cp\.async(\.c\S+) \[\S+\], \[\S+\], (\d+)", compiled.ptx)
    fetched = [code for code in compiled.machine.opcodes if code.startswith("LDGSTS")]
    ahead = 0
    if compiled.name in SUMMERS:
        # One column of all slots for each stage: most before the loop, one in it.
        ahead = compiled.constants.num_topk * stages_of(compiled.constants)

    assert copies == [(".cg.shared.global", "16")] * ahead
    assert len(fetched) >= ahead
    assert all("BYPASS" in code and ".128" in code for code in fetched)


def test_nothing_is_read_through_the_read_only_path(compiled):
    # A row that is written during the launch may be stale there.
    assert not re.search(r"\bld\.global\S*\.nc\b|\bldu\b|\btex\b", compiled.ptx)
    assert not [code for code in compiled.machine.opcodes if "CONSTANT" in code]


def test_every_value_has_a_register(compiled):
    machine, num_warps = compiled.machine, compiled.constants.num_warps

    assert ".local" not in compiled.ptx
    assert [code for code in machine.opcodes if code.startswith(("LDL", "STL"))] == []
    assert machine.frame_bytes == 0
    assert machine.num_registers <= min(MAX_REGISTERS, NUM_REGISTERS // (32 * num_warps))


def test_products_and_sums_are_rounded_apart(compiled):
    products, sums = compiled.ptx.count("mul.rn.f32"), compiled.ptx.count("add.f32")

    assert not re.search(r"\bfma\b", compiled.ptx)
    assert [code for code in compiled.machine.opcodes if code.startswith("FFMA")] == []
    assert products == sums
    assert (products > 0) == (compiled.name in SUMMERS)


def flag_of(compiled: Compiled) -> str:
    by_epoch = compiled.name == "dispatch" and compiled.constants.granularity is Granularity.token
    return FLAG_STORE if by_epoch else "red.relaxed.sys.global.add.s32"


def test_flags_of_rows_follow_a_warp_barrier_and_one_fence(compiled):
    constants, working = compiled.constants, compiled.working
    by_bulk = constants.copy is Copy.tma
    fences = ["fence.proxy.async.global"] * by_bulk + ["fence.acq_rel.sys"]
    # In the loop, and behind it for what is still owed, which is nothing where each row has a
    # fence of its own.
    alone = constants.flag_batch == 1 and not constants.paced and not by_bulk

    if compiled.name in SENDERS:
        raised = [place for place, line in enumerate(working) if ".relaxed" in line]
        assert [working[place] for place in raised] == [flag_of(compiled)] * (1 if alone else 2)
        for place in raised:
            before = ["bar.warp.sync", *fences]
            assert working[place - len(before) : place] == before
    elif compiled.name == "reduce":
        assert not [line for line in working if ".relaxed" in line or "fence" in line]


def test_what_others_have_written_is_acquired_before_it_is_read(compiled):
    waits = waits_in(compiled.ptx)
    width = 64 if compiled.name in GATES and "exchange" in compiled.name else 32

    assert {(wait.scope, wait.width) for wait in waits} == (
        {("sys", width)} if compiled.name != "reduce" else set()
    )
    if compiled.name == "combine":
        by_rank = compiled.constants.by_rank
        fetched = [match.start() for match in re.finditer(r"cp\.async\.cg", compiled.ptx)]
        # Of a token's rows, those fetched ahead of the loop and those in it; of a rank's, once.
        assert len(waits) == (1 if by_rank else 2)
        for wait in waits:
            first = next(place for place in fetched if place > wait.look)
            assert wait.look < wait.fence < wait.there < first
        ahead = compiled.ptx[waits[0].there : fetched[0]]
        # Each lane knows of one rank's rows until they meet; a token's have all looked at.
        assert not by_rank or "bar.warp.sync" in ahead
        assert waits[0].there < fetched[0]


def test_bulk_copies_wait_for_stages_before_they_fill_them_and_for_rows_before_they_tell(compiled):
    constants, copying = compiled.constants, compiled.copying
    behind = (constants.num_stages + 1) // 2
    fences = ("fence.proxy.async.global", "fence.acq_rel.sys")
    raised = ("bar.warp.sync", *fences, flag_of(compiled))

    if compiled.name in SENDERS and constants.copy is Copy.tma:
        expected = [
            *("mbarrier.init.shared.b64", "fence.mbarrier_init.release.cluster"),
            # A stage is free once the oldest store that is under way has read its own.
            f"cp.async.bulk.wait_group.read {behind - 1}",
            "mbarrier.arrive.expect_tx.shared.b64",
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
            # The rows that are told have arrived; younger ones may be under way.
            f"cp.async.bulk.wait_group {behind * constants.num_pieces}",
            *raised,
            "cp.async.bulk.global.shared::cta.bulk_group",
            "cp.async.bulk.commit_group",
            "cp.async.bulk.wait_group 0",
            *raised,
        ]
        found = [line for line in copying if "try_wait" not in line]
        assert found[: len(expected)] == expected
        # Behind them only peers are waited for.
        assert not [line for line in found[len(expected) :] if "bulk" in line or "proxy" in line]
        waits = {line for line in copying if "try_wait" in line}
        assert waits == {"mbarrier.try_wait.parity.acquire.cta.shared::cta.b64"}
        opcodes = [code for code in compiled.machine.opcodes if code.startswith("UBLKCP")]
        assert {"UBLKCP.S.G", "UBLKCP.G.S"} == set(opcodes)
    else:
        assert "cp.async.bulk" not in compiled.ptx
        assert "mbarrier" not in compiled.ptx


def test_a_wait_for_a_load_looks_at_the_clock_before_its_loop_and_inside(compiled):
    if compiled.name in SENDERS and compiled.constants.copy is Copy.tma:
        begin = compiled.ptx.index("mbarrier.try_wait")
        wait = compiled.ptx[begin : compiled.ptx.index("cp.async.bulk.global")]
        steps = re.findall(r"(mbarrier\.try_wait)|%(globaltimer)|(bra) ", wait)
        # What has come is found without a look at the clock; the last branch leaves out the store.
        assert ["".join(step) for step in steps] == [
            *("mbarrier.try_wait", "bra", "globaltimer"),
            *("mbarrier.try_wait", "bra", "globaltimer", "bra", "bra"),
        ]


def test_a_gate_publishes_behind_a_barrier_of_all_threads_and_one_fence(compiled):
    words = "st.relaxed.sys.global.b64" if "exchange" in compiled.name else FLAG_STORE
    links = {"st.global.b64"} if compiled.constants.paced else set()

    if compiled.name in GATES:
        # Between the barriers epoch, queues and counters: nobody hears of them before.
        *_, zeroed, published = "|".join(compiled.working).split("bar.sync|")
        assert set(zeroed.strip("|").split("|")) == {"st.global.b32"} | links
        assert published.split("|")[:2] == ["fence.acq_rel.sys", words]


def test_a_record_is_whole_before_it_is_raised_and_peers_are_stopped_after_that(compiled):
    num_fields = len(RECORD_FIELDS) - 1

    # The launches that wait for nobody leave no record.
    if compiled.name != "reduce":
        assert compiled.giving_up[: num_fields + 2] == [
            *["st.global.b64"] * num_fields,
            *("fence.acq_rel.sys", "st.relaxed.sys.global.b64"),
        ]
        stopped = compiled.giving_up[num_fields + 2 :][: compiled.constants.num_ranks]
        assert stopped == [FLAG_STORE] * compiled.constants.num_ranks
    else:
        assert compiled.giving_up == []
