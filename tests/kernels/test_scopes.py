"""Who may see what: the scope of every wait, fence and flag of every launch, read in its PTX.

One GPU cannot show a scope that is too narrow; neither can any test that runs on one.
"""

import re
from dataclasses import replace

import pytest

from tests.kernels.waits import waits_in
from tilepipe.config.choices import Copy, Granularity, HomeGranularity
from tilepipe.kernels.compile import memory_instructions

pytestmark = pytest.mark.filterwarnings("ignore")

QUEUES = (128, 256, 384)  # bytes into a rank's words: send, push and reduce queue
NAMES = ["open", "open_exchange", "open_preset", "open_exchange_preset"]
NAMES += ["dispatch", "push", "combine", "reduce", "plan", "plan_returns"]
# Scopes and bits of what a launch waits for; CTAs that plan together wait for 64-bit words.
COUNTER, EXCHANGED, ROUND = ("sys", 32), ("sys", 64), ("gpu", 64)
WAITS = {
    **{name: {EXCHANGED if "exchange" in name else COUNTER} for name in NAMES[:4]},
    **{name: {COUNTER} for name in ("dispatch", "push", "combine")},
    "reduce": set(),
    "plan": {EXCHANGED, ROUND},
    "plan_returns": {COUNTER, ROUND},
}


@pytest.fixture(
    scope="module",
    params=[
        (Granularity.tile, HomeGranularity.token, Copy.simt, 1),
        (Granularity.token, HomeGranularity.rank, Copy.tma, 8),
    ],
    ids=["tile-simt", "token-tma"],
)
def codes(request):
    from tilepipe.kernels.launcher import Knobs, compile_launch, constants_of, plan_constants_of
    from tilepipe.schedule.settings import PlanSettings
    from tilepipe.schedule.shape import Shape

    granularity, home_granularity, copy, num_ranks = request.param
    settings = PlanSettings(
        num_ranks=num_ranks,
        num_experts=8 * num_ranks,
        num_topk=8,
        granularity=granularity,
        home_granularity=home_granularity,
    )
    shape = Shape(max_tokens=64, num_tokens=64, dispatch_hidden=7168, home_hidden=7168)
    knobs = Knobs(num_ctas=1, copy=copy, num_warps=4)

    def constants(name):
        if name.startswith("plan"):
            return replace(plan_constants_of(settings, shape), num_ctas=4)
        return constants_of(name, settings, shape, knobs)

    return {name: compile_launch(name, constants(name)).ptx for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_whatever_orders_or_waits_does_so_for_all_peers(codes, name):
    ordered = r"(ld\.acquire|ld\.relaxed|st\.relaxed|red\.relaxed|fence\.acq_rel)\S*"
    found = re.findall(ordered, codes[name])
    scopes = set(re.findall(r"(?:ld\.acquire|relaxed|acq_rel)\.(\w+)", codes[name]))

    assert bool(found) == (name != "reduce")  # all its rows are home
    # CTAs that plan one rank together wait for 64-bit words of their own.
    assert scopes <= ({"sys", "gpu"} if name.startswith("plan") else {"sys"})
    assert not re.search(r"(ld|st|red)\.(relaxed|acquire)\.gpu\.\S*32", codes[name])
    # Who looks first, polls and fences does so in one scope.
    waits = {(wait.scope, wait.width) for wait in waits_in(codes[name])}
    assert waits == WAITS[name]


@pytest.mark.parametrize("name", NAMES)
def test_every_polling_loop_looks_at_the_abort_word_and_the_clock(codes, name):
    if name == "reduce":
        pytest.skip("waits for nothing")
    body = codes[name]
    waits = waits_in(body)

    assert waits, "no wait was found"
    for wait in waits:
        # Behind the first look, which acquires: one at the word and one at the abort word.
        looks = r"ld\.relaxed\.(?:sys|gpu)\.global\.b(?:32|64)"
        assert len(re.findall(looks, body[wait.look : wait.fence])) == 2
        assert "%globaltimer" in body[wait.stop : wait.fence]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NAMES[4:8]])
def test_a_gate_zeroes_all_queues_before_it_says_so(codes, name):
    lines = memory_instructions(codes[name])
    zeroed = {
        int(place): number
        for number, line in enumerate(lines)
        for place in re.findall(r"st\.global\.b32\s+\[%rd\d+\+(\d+)\], 0;", line)
    }

    assert set(QUEUES) <= set(zeroed)
    for queue in QUEUES:
        behind = [line.split()[0] for line in lines[zeroed[queue] :]]
        told = next(n for n, what in enumerate(behind) if what.startswith("st.relaxed.sys"))
        assert "fence.acq_rel.sys;" in behind[:told]


@pytest.mark.parametrize("name", ["combine", "reduce"])
def test_a_column_is_summed_only_once_its_copies_have_come(codes, name):
    groups = re.findall(r"cp\.async\.wait_group\s+(\d+)", codes[name])
    commits = codes[name].count("cp.async.commit_group")

    # One wait in the loop, for all but the copies that run ahead, and one for all at the end; as
    # many groups are opened ahead of the loop, and one in it.
    ahead = int(groups[0])
    assert groups == [str(ahead), "0"]
    assert commits == ahead + 1


@pytest.mark.parametrize("name", ["dispatch", "push", "combine"])
def test_lanes_agree_before_a_warp_goes_on_or_stops(codes, name):
    assert len(re.findall(r"vote\.sync\.all", codes[name])) >= 2
