"""The code of every launch, in a cover of its constants: what it must hold and must not.

Compiled for sm_90a; needs no GPU.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.experiments.pairwise import pairwise
from tests.kernels.sass import MachineCode, disassemble
from tilepipe.config.choices import Granularity, HomeGranularity
from tilepipe.fabric.table import RECORD_FIELDS
from tilepipe.kernels.compile import memory_instructions
from tilepipe.kernels.constants import Constants
from tilepipe.schedule.settings import PlanSettings
from tilepipe.schedule.shape import Shape

pytestmark = pytest.mark.filterwarnings("ignore")

# Of one SM, shared by all threads of a CTA.
NUM_REGISTERS = 65_536

PLAIN = {
    "num_ranks": 8,
    "paced": False,
    "hidden": 7168,
    "warps, loads": (16, 14),
    "flag_batch": 4,
    "granularity": Granularity.tile,
    "home_granularity": HomeGranularity.token,
    "num_topk": 8,
}
GROUP = {"num_ranks": [1, 8], "paced": [False, True]}
ROWS = {"hidden": [2880, 4096, 7168, 14_336]}
# 32 warps: as many as the launch takes.
COPY = {**ROWS, "warps, loads": [(16, 14), (32, 7), (8, 14)], "flag_batch": [1, 4, 32]}
HOME = {"home_granularity": list(HomeGranularity)}
SUM = {"num_topk": [1, 2, 6, 8, 16]}
SENDERS = ("dispatch", "push", "combine")
SUMMERS = ("combine", "reduce")
GATES = ("open", "open_preset", "open_exchange", "open_exchange_preset")
AXES = {
    **dict.fromkeys(GATES, GROUP),
    "dispatch": {**GROUP, **COPY, "granularity": list(Granularity)},
    "push": {**GROUP, **COPY, **HOME},
    "combine": {**GROUP, **COPY, **HOME, **SUM},
    # What it sums is summed by combine too.
    "reduce": {"hidden": [2880, 14_336], **SUM},
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

    def _parts(self) -> tuple[list[str], list[str]]:
        # Without rows, and without loads and claims: they publish nothing.
        dull = ("ld.", "atom.global.add.", "atom.global.sys.add.u64", "atom.global.sys.max.")
        lines = [line for line in self.memory if not line.startswith(dull) and ".v4." not in line]
        stop = "atom.global.sys.add.u32"
        place = lines.index(stop) if stop in lines else len(lines)
        return lines[:place], lines[place + 1 :]


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, axes in AXES.items():
        for case in pairwise(axes, lambda case: True):
            yield name, case


def case_id(case: tuple[str, dict[str, Any]]) -> str:
    def word(value: Any) -> str:
        if isinstance(value, tuple):
            return "x".join(map(str, value))
        return getattr(value, "name", str(value))

    return "-".join([case[0], *map(word, case[1].values())])


def constants_for(name: str, case: dict[str, Any]) -> Constants:
    from tilepipe.kernels.launcher import MAX_COMBINE_WARPS, Knobs, constants_of

    chosen = {**PLAIN, **case}
    num_warps, num_loads = chosen["warps, loads"]
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
        num_warps=num_warps,
        num_loads=num_loads,
        flag_batch=chosen["flag_batch"],
        pace_latency_ns=int(chosen["paced"]),
    )
    return constants_of(name, settings, shape, knobs)


@pytest.fixture(scope="module", params=list(cases()), ids=case_id)
def compiled(request):
    # Only where it is wanted: the import takes two seconds.
    from tilepipe.kernels.launcher import compile_launch

    name, case = request.param
    constants = constants_for(name, case)
    code = compile_launch(name, constants)
    return Compiled(name, constants, code.ptx, disassemble(code.cubin))


def test_every_launch_has_its_cover():
    from tilepipe.kernels.launcher import LAUNCHES

    assert set(AXES) == set(LAUNCHES)


def copied_in(constants: Constants) -> list[str]:
    """Loads and stores that a lane issues for one row: so many loads, then their stores."""
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

    copies = re.findall(r"cp\.async(\S+) \[\S+\], \[\S+\], (\d+)", compiled.ptx)
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
    assert machine.num_registers <= NUM_REGISTERS // (32 * num_warps)


def test_products_and_sums_are_rounded_apart(compiled):
    products, sums = compiled.ptx.count("mul.rn.f32"), compiled.ptx.count("add.f32")

    assert not re.search(r"\bfma\b", compiled.ptx)
    assert [code for code in compiled.machine.opcodes if code.startswith("FFMA")] == []
    assert products == sums
    assert (products > 0) == (compiled.name in SUMMERS)


def test_flags_of_rows_follow_a_warp_barrier_and_one_fence(compiled):
    constants, working = compiled.constants, compiled.working
    by_epoch = compiled.name == "dispatch" and constants.granularity is Granularity.token
    flag = FLAG_STORE if by_epoch else "red.relaxed.sys.global.add.s32"
    # In the loop, and behind it for what is still owed, which is nothing where each row has a
    # fence of its own.
    num_raised = 1 if constants.flag_batch == 1 and not constants.paced else 2

    if compiled.name in SENDERS:
        raised = [place for place, line in enumerate(working) if ".relaxed" in line]
        assert [working[place] for place in raised] == [flag] * num_raised
        for place in raised:
            assert working[place - 2 : place] == ["bar.warp.sync", "fence.acq_rel.sys"]
    elif compiled.name == "reduce":
        assert not [line for line in working if ".relaxed" in line or "fence" in line]


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
