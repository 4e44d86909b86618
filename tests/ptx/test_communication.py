"""Dispatch and combine on the CPU: every word that they leave, and no two accesses unordered."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from tests.experiments.groups import random_routing  # noqa: E402
from tests.experiments.pairwise import pairwise  # noqa: E402
from tests.gpu.groups import NEVER  # noqa: E402
from tests.ptx.checked import CheckedRun, drift  # noqa: E402
from tests.ptx.machine import Pace  # noqa: E402
from tests.ptx.parse import parse  # noqa: E402
from tilepipe.config.choices import (  # noqa: E402
    Copy,
    Granularity,
    HomeGranularity,
    Layout,
    Order,
    Walk,
)
from tilepipe.experiments.cuda.oracle import poison  # noqa: E402
from tilepipe.fabric.table import Slot, Word  # noqa: E402
from tilepipe.fabric.watch import WatchdogTimeout  # noqa: E402
from tilepipe.kernels.combine import reduce_tokens  # noqa: E402
from tilepipe.kernels.compile import compile_code  # noqa: E402
from tilepipe.kernels.entries import communication_entry  # noqa: E402
from tilepipe.kernels.launcher import Knobs, constants_of, stand_ins  # noqa: E402
from tilepipe.schedule.settings import PlanSettings  # noqa: E402
from tilepipe.schedule.shape import Shape  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

# What is compiled, by copy. Rows are one vector, or several of a lane, or pieces of unlike length.
CODE = {
    Copy.simt: [
        {"num_ranks": 1, "hidden": 8, "num_topk": 1, "flag_batch": 1},
        {"num_ranks": 2, "hidden": 520, "num_topk": 3, "flag_batch": 4},
        {"num_ranks": 4, "hidden": 64, "num_topk": 2, "flag_batch": 3},
    ],
    Copy.tma: [
        {"num_ranks": 1, "hidden": 200, "num_topk": 3, "flag_batch": 1, "num_stages": 2},
        {"num_ranks": 2, "hidden": 264, "num_topk": 2, "flag_batch": 3, "num_stages": 3},
        {"num_ranks": 4, "hidden": 136, "num_topk": 1, "flag_batch": 4, "num_stages": 1},
    ],
}
PARTS = [{"copy": copy, "code": number} for copy, codes in CODE.items() for number in range(3)]
# What decides the code; order and layout, which do not, take turns over the cases.
AXES = {
    "copy": list(Copy),
    "code": [0, 1, 2],
    "granularity": list(Granularity),
    "home_granularity": list(HomeGranularity),
}
COVER = [
    {
        **case,
        "order": list(Order)[number % len(Order)],
        "layout": list(Layout)[number % 2],
        "kind": ("uniform", "masked", "one_expert")[number // 2 % 3],
        "num_ctas": 1 + number // 3 % 2,
    }
    for number, case in enumerate(pairwise(AXES, lambda case: True, parts=PARTS))
]
TWO_RANKS = {**COVER[0], "copy": Copy.simt, "code": 1, "kind": "uniform"}
# Tokens of the ranks in the first launch; some have none.
TOKENS = [9, 0, 14, 5]
NUM_LAUNCHES = 2


def run_of(case, *, tokens=TOKENS, **chosen):
    code = CODE[case["copy"]][case["code"]]
    num_ranks = code["num_ranks"]
    num_experts = 4 * num_ranks
    routings = [
        random_routing(
            [tokens[(rank + launch) % len(tokens)] for rank in range(num_ranks)],
            num_experts=num_experts,
            num_topk=code["num_topk"],
            kind=case["kind"],
            seed=launch,
        )
        for launch in range(NUM_LAUNCHES)
    ]
    settings = PlanSettings(
        num_ranks=num_ranks,
        num_experts=num_experts,
        num_topk=code["num_topk"],
        tile_m=16,
        num_n_tiles=1,
        num_chunks=1,
        seed=3,
        **{key: case[key] for key in ("order", "granularity", "home_granularity", "layout")},
    )
    knobs = Knobs(
        copy=case["copy"],
        num_ctas=case["num_ctas"],
        num_warps=2 // case["num_ctas"],
        num_loads=2,
        num_stages=code.get("num_stages", 1),
        stage_bytes=256,
        flag_batch=code["flag_batch"],
    )
    return CheckedRun(settings, knobs, routings, hidden=code["hidden"], **chosen), routings


@pytest.mark.parametrize("number", range(len(COVER)))
def test_rows_and_tokens_are_bit_for_bit_what_the_oracle_says_and_nothing_races(number):
    run, routings = run_of(COVER[number], seed=number, races=True)
    check(run, routings)


@pytest.mark.parametrize("copy", list(Copy), ids=lambda copy: copy.name)
def test_a_warp_that_moves_more_rows_than_it_has_lanes_raises_each_flag_once(copy):
    """What lanes hold is found by the row's number modulo 32, which wraps."""
    case = {**TWO_RANKS, "copy": copy, "code": 1, "granularity": Granularity.tile, "num_ctas": 1}
    run, routings = run_of(case, tokens=[80 // CODE[copy][1]["num_topk"]], seed=5)
    check(run, routings)


@pytest.mark.parametrize("number", [3, 4])
@pytest.mark.parametrize("order", [Order.edf, Order.expert], ids=lambda order: order.name)
def test_warps_and_lanes_out_of_step_change_no_bit(number, order):
    pace = Pace(apart=0.3, steps=60)
    run, routings = run_of({**COVER[number], "order": order}, seed=number, pace=pace)
    check(run, routings)


def check(run, routings):
    for launch, routing in enumerate(routings):
        run.prepare(routing, payload=11 + launch)
        assert run.dispatch() == [], f"dispatch {launch}"
        assert run.combine() == [], f"combine {launch}"


@pytest.mark.parametrize("copy", list(Copy), ids=lambda copy: copy.name)
def test_ranks_that_nothing_but_the_protocol_holds_back_never_meet_another_launch(copy):
    case = {**TWO_RANKS, "copy": copy}
    run, routings = run_of(case, seed=1, races=True, apart=True, pace=Pace(apart=0.2, steps=60))
    assert drift(run, [*routings, routings[0]]) == []


def test_a_rank_whose_peer_never_opens_its_launch_gives_up_and_says_for_whom_it_waited():
    run, routings = run_of(TWO_RANKS, apart=True, limit_ns=200_000)
    run.prepare(routings[0], payload=1)
    run.group.open(exchange=True)
    run.group.dispatch()
    run.group.drop(rank=1)
    run.group.run()
    said = r"^rank 0 waited .*: role gate: rank 1 has opened launch 0, not 1; epoch 1$"
    with pytest.raises(WatchdogTimeout, match=said):
        run.group.check()
    assert (run.tensor(0, Slot.row_home) == NEVER).all()


def test_pushes_alone_and_a_reduction_alone_make_what_combine_makes():
    chosen = {"copy": Copy.tma, "home_granularity": HomeGranularity.rank, "kind": "masked"}
    run, routings = run_of({**TWO_RANKS, **chosen}, races=True)
    group = run.group
    run.prepare(routings[0], payload=1)
    assert run.dispatch() == []
    for rank in group.ranks:
        poison(run.tensor(rank, Slot.reduced))
    group.open(exchange=False)
    group.push()
    group.open(exchange=False, preset=True)
    group.reduce()
    group.synchronize()
    assert run.wrong_tokens(Slot.reduced) == []


# Room for a list of tokens that no launch of these looks at.
LISTED = Slot.stamps


def by_parts_of(hidden, order=None):
    """Two ranks, rows of 7 tokens and of none, dispatched; a reduction that waits for parts."""
    settings = PlanSettings(
        num_ranks=2,
        num_experts=4,
        num_topk=3,
        tile_m=16,
        num_n_tiles=4,
        num_chunks=4,
        walk=Walk.chunk,
    )
    routings = [random_routing([7, 0], num_experts=4, num_topk=3, kind="masked", seed=2)]
    knobs = Knobs(num_ctas=1, num_warps=2, num_loads=2)
    shape = Shape(max_tokens=7, num_tokens=7, dispatch_hidden=hidden, home_hidden=hidden)
    constants = replace(constants_of("reduce", settings, shape, knobs), num_parts=4)
    by_parts = parse(compile_code(waiting_reduction(constants, order), stand_ins("reduce")).ptx)
    run = CheckedRun(
        settings, knobs, routings, hidden=hidden, races=True, programs={"reduce": by_parts}
    )
    run.prepare(routings[0], payload=1)
    assert run.dispatch() == []
    for rank in run.group.ranks:
        poison(run.tensor(rank, Slot.reduced))
    return run


def push_then_reduce(run):
    """Every part waits for what a whole token does, or for less."""
    run.group.open(exchange=False)
    run.group.push()
    run.group.open(exchange=False, preset=True)
    run.group.reduce()
    run.group.synchronize()


@pytest.mark.parametrize("hidden", [64, 1056])
def test_parts_of_tokens_that_wait_for_counters_of_their_own_add_up_to_whole_tokens(hidden):
    run = by_parts_of(hidden)
    group = run.group
    push_then_reduce(run)
    assert run.wrong_tokens(Slot.reduced) == []
    group.open(exchange=False)
    group.synchronize()
    assert not any(run.tensor(rank, Slot.token_ready).any() for rank in group.ranks)


def test_tokens_are_reduced_as_they_are_listed_and_those_not_listed_are_left_alone():
    run = by_parts_of(1056, LISTED)
    listed = run.tensor(0, LISTED).view(torch.int32)[:7]
    listed.copy_(torch.tensor([6, 3, 0, 1, 4, 2, 5], dtype=torch.int32))
    poisoned = run.tensor(0, Slot.reduced)[5].clone()
    run.tensor(0, Slot.words)[int(Word.num_tokens)] = 6
    push_then_reduce(run)
    assert torch.equal(run.tensor(0, Slot.reduced)[5], poisoned)
    assert len(run.wrong_tokens(Slot.reduced)) == 1
    run.tensor(0, Slot.words)[int(Word.num_tokens)] = 7
    push_then_reduce(run)
    assert run.wrong_tokens(Slot.reduced) == []


def waiting_reduction(constants, order):
    """A reduction alone that looks at counters, as the fused launch has it."""

    def body(table, rank, lane, warp, num_warps, ring, barriers, cost_ns, latency_ns, limit_ns):
        how = (constants, Slot.reduced, True, limit_ns, None, None, order)
        reduce_tokens(table, rank, lane, ring, *how)

    return communication_entry(constants, body, moves=False, reduces=True)


@pytest.mark.parametrize("granularity", list(Granularity), ids=lambda value: value.name)
def test_nothing_waits_where_counters_are_preset_and_nothing_races(granularity):
    run, routings = run_of({**TWO_RANKS, "granularity": granularity}, races=True)
    run.prepare(routings[0], payload=1)
    # Rank 0 sends nothing: without presets its peer would wait for it.
    run.tensor(0, Slot.words)[int(Word.num_sends)] = 0
    run.group.open(exchange=True, preset=True)
    run.group.dispatch()
    run.group.synchronize()
    assert [int(run.tensor(rank, Slot.words)[Word.epoch]) for rank in run.group.ranks] == [1, 1]
