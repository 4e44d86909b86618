"""What is taken out of a kernel is missed: the race finder sees order that is not there."""

import re

import pytest

torch = pytest.importorskip("torch")


from tests.ptx.checked import drift  # noqa: E402
from tests.ptx.faults import (  # noqa: E402
    find,
    looking_again,
    looking_late,
    spoiled,
    without,
    without_order,
)
from tests.ptx.group import program_of  # noqa: E402
from tests.ptx.machine import Launch, Machine  # noqa: E402
from tests.ptx.memory import Fault, Memory  # noqa: E402
from tests.ptx.parse import parse  # noqa: E402
from tests.ptx.test_communication import TWO_RANKS, run_of  # noqa: E402
from tilepipe.config.choices import Copy, Granularity, HomeGranularity, Order  # noqa: E402
from tilepipe.kernels import protocol  # noqa: E402
from tilepipe.kernels.launcher import compile_launch, constants_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

RELEASE, PROXY = "fence.acq_rel", "fence.proxy.async"
ACQUIRE = "ld.acquire"
WARP, CTA = "bar.warp.sync", "bar.sync"
ARRIVED = "cp.async.bulk.wait_group"
RECORD = "st.relaxed.sys.global.b64"
KINDS = (RELEASE, PROXY, ACQUIRE, WARP, CTA, ARRIVED)
# launch, copy -> of each kind of instruction those, by number, without which nothing here is wrong
NEEDLESS = {
    ("open_exchange", Copy.simt): {},
    ("dispatch", Copy.simt): {},
    ("combine", Copy.simt): {},
    # The barrier behind the address table: the one behind the rings' barriers stands for it, too.
    ("dispatch", Copy.tma): {CTA: {0}},
}


def case_of(copy, home=HomeGranularity.token):
    # The flags that a warp raises last order all that it has sent: by expert, the last rows of a
    # rank go to another one than those before, which see its earlier flags alone.
    order = Order.expert
    chosen = {"order": order, "granularity": Granularity.tile, "home_granularity": home}
    return {**TWO_RANKS, **chosen, "copy": copy}


def program_in(case, name):
    run, _ = run_of(case)
    group = run.group
    return program_of(name, constants_of(name, group.settings, group.shape, group.knobs))


def said_of(case, name, program, *, num_seeds=3):
    """What is found in launches of which one has this code; nothing where all is well."""
    for seed in range(num_seeds):
        run, routings = run_of(
            case, tokens=[11, 10], seed=seed, races=True, apart=True, programs={name: program}
        )
        try:
            wrong = drift(run, routings)
        except Fault as fault:
            return str(fault)
        if wrong:
            return wrong[0]
    return ""


def tells_of_giving_up(program, place):
    """Whether a fence is that of a record, which no launch here writes."""
    after = (one.opcode for one in program.instructions[place + 1 :])
    return next((one for one in after if one.startswith(("st", "ld", "red"))), "") == RECORD


@pytest.mark.parametrize(
    ("name", "copy"), NEEDLESS, ids=lambda value: getattr(value, "name", value)
)
def test_every_fence_acquire_barrier_and_wait_of_a_launch_is_missed(name, copy):
    program = program_in(case_of(copy), name)
    missed = {}
    for kind in KINDS:
        for number, place in enumerate(find(program, kind)):
            if tells_of_giving_up(program, place) or number in NEEDLESS[name, copy].get(kind, ()):
                continue
            missed[kind, number] = said_of(case_of(copy), name, spoiled(program, place))
    assert len(missed) > 3
    assert (ACQUIRE, 0) in missed
    assert [fault for fault, said in missed.items() if not said] == []


@pytest.mark.parametrize(
    ("name", "copy"), [("open_exchange", Copy.simt), ("dispatch", Copy.tma), ("combine", Copy.simt)]
)
def test_words_are_acquired_by_the_first_look_or_by_the_fence_behind_polls(name, copy):
    """Dice decide which of them a run needs; here each stands alone."""
    case = case_of(copy)
    program = program_in(case, name)
    looks, fences = find(program, ACQUIRE), find(program, RELEASE)
    late, again = looking_late(program), looking_again(program)
    assert looks
    for sound in (late, again):
        assert said_of(case, name, sound, num_seeds=1) == ""
    for look in looks:
        fence = next(place for place in fences if place > look)
        assert "a race: " in said_of(case, name, without(late, fence))
        assert "a race: " in said_of(case, name, without_order(again, look))


def test_rows_that_other_lanes_have_acquired_are_not_this_lane_s_without_a_warp_barrier():
    case = case_of(Copy.simt, HomeGranularity.rank)
    program = program_in(case, "combine")
    said = said_of(case, "combine", without(program, find(program, WARP)[-1]))
    assert re.search(r"a race: home_y of rank \d\+\d+ is read by lane \d+ and was written", said)


def test_a_gate_that_nobody_waits_at_lets_launches_meet(monkeypatch):
    case = case_of(Copy.simt)
    run, _ = run_of(case)
    group = run.group
    constants = constants_of("open_exchange", group.settings, group.shape, group.knobs)
    monkeypatch.setattr(protocol, "pass_gate", lambda *_: None)
    program = parse(compile_launch.__wrapped__("open_exchange", constants).ptx)
    assert re.search(r"a race: \w+ of rank \d", said_of(case, "open_exchange", program))


# CTA 0 stores a word and raises a flag; CTA 1 waits for it and fetches the word by a bulk copy.
RELAY = """
.visible .entry relay(.param .u64 relay_param_0, .param .u64 relay_param_1)
.reqntid 32
{
    ld.param.b64 %rd1, [relay_param_0];
    ld.param.b64 %rd2, [relay_param_1];
    mov.b32 %r1, %ctaid.x;
    mov.b32 %r2, %tid.x;
    setp.ne.b32 %p1, %r2, 0;
    @%p1 bra $end;
    setp.eq.b32 %p2, %r1, 1;
    @%p2 bra $reader;
    st.global.b32 [%rd1], 7;
    fence.acq_rel.sys;
    red.relaxed.sys.global.add.u32 [%rd2], 1;
    bra $end;
$reader:
    mov.b32 %r3, __dynamic_shmem__0;
    add.s32 %r5, %r3, 16;
    mbarrier.init.shared.b64 [%r3], 1;
$poll:
    ld.relaxed.sys.global.b32 %r4, [%rd2];
    setp.eq.b32 %p3, %r4, 0;
    @%p3 bra $poll;
    fence.acq_rel.sys;
    fence.proxy.async.global;
    mbarrier.arrive.expect_tx.shared.b64 %rd3, [%r3], 16;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5], [%rd1], 16, [%r3];
$wait:
    mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p4, [%r3], 0;
    @%p4 bra $come;
    bra $wait;
$come:
    ld.shared.b32 %r6, [%r5];
    st.global.b32 [%rd1+16], %r6;
$end:
    ret;
}
"""
_POLL = "    ld.relaxed.sys.global.b32 %r4, [%rd2];\n"
_FENCES = "    fence.acq_rel.sys;\n    fence.proxy.async.global;\n"
# The same where looks acquire; and one that fences the proxy ahead of them.
ACQUIRING = RELAY.replace(_POLL, _POLL.replace("relaxed", "acquire")).replace(
    _FENCES, "    fence.proxy.async.global;\n"
)
TOO_EARLY = ACQUIRING.replace("    fence.proxy.async.global;\n", "").replace(
    "$poll:\n", "    fence.proxy.async.global;\n$poll:\n"
)
# CTA 0 stores a word and raises a flag; CTA 1 waits for it and raises another; CTA 2 reads the word
# once it has seen that one.
CHAIN = """
.visible .entry chain(.param .u64 chain_param_0, .param .u64 chain_param_1)
.reqntid 32
{
    ld.param.b64 %rd1, [chain_param_0];
    ld.param.b64 %rd2, [chain_param_1];
    mov.b32 %r1, %ctaid.x;
    mov.b32 %r2, %tid.x;
    setp.ne.b32 %p1, %r2, 0;
    @%p1 bra $end;
    setp.eq.b32 %p2, %r1, 1;
    @%p2 bra $second;
    setp.eq.b32 %p3, %r1, 2;
    @%p3 bra $third;
    st.global.b32 [%rd1], 7;
    fence.acq_rel.gpu;
    st.relaxed.gpu.global.b32 [%rd2], 1;
    bra $end;
$second:
    ld.acquire.gpu.global.b32 %r3, [%rd2];
    setp.eq.b32 %p4, %r3, 0;
    @%p4 bra $second;
    fence.acq_rel.gpu;
    st.relaxed.gpu.global.b32 [%rd2+4], 1;
    bra $end;
$third:
    ld.acquire.gpu.global.b32 %r4, [%rd2+4];
    setp.eq.b32 %p5, %r4, 0;
    @%p5 bra $third;
    ld.global.b32 %r5, [%rd1];
    st.global.b32 [%rd1+16], %r5;
$end:
    ret;
}
"""


def relayed(program, num_ctas=2):
    words, flags = torch.zeros(8, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    named = {"words": words, "flags": flags}
    memory = Memory({name: (one.data_ptr(), one.nbytes) for name, one in named.items()})
    launch = Launch(
        name="relay",
        program=program,
        arguments=(words.data_ptr(), flags.data_ptr()),
        num_ctas=num_ctas,
        shared_bytes=32,
    )
    Machine(memory, races=True).run([[launch]])
    return words[4].item()


UNORDERED = "read by a bulk copy of lane 32 and was written by lane 0, which nothing"


@pytest.mark.parametrize(
    ("text", "kind", "number", "said"),
    [
        (RELAY, RELEASE, 0, UNORDERED),
        (RELAY, RELEASE, 1, UNORDERED),
        (RELAY, PROXY, 0, UNORDERED),
        (RELAY, "mbarrier.try_wait", 0, "shared memory is read that nobody has written"),
        (ACQUIRING, RELEASE, 0, UNORDERED),
        (ACQUIRING, PROXY, 0, UNORDERED),
        (ACQUIRING, ACQUIRE, 0, UNORDERED),
    ],
    ids=lambda value: "" if isinstance(value, str) and "\n" in value else None,
)
def test_a_bulk_copy_reads_what_others_have_stored_only_behind_both_fences(
    text, kind, number, said
):
    """Or behind a load that acquires and the fence of its proxy."""
    program = parse(text)
    assert relayed(program) == 7
    faulty = spoiled(program, find(program, kind)[number])
    if kind == "mbarrier.try_wait":
        faulty = without(faulty, *find(faulty, "bra")[-1:])
    with pytest.raises(Fault, match=said):
        relayed(faulty)


def test_a_fence_of_the_proxy_ahead_of_an_acquiring_load_orders_no_bulk_copy_behind_it():
    assert (TOO_EARLY.count(PROXY), ACQUIRING.count(RELEASE)) == (1, 1)
    with pytest.raises(Fault, match=UNORDERED):
        relayed(parse(TOO_EARLY))


@pytest.mark.parametrize(("kind", "number"), [(RELEASE, 0), (RELEASE, 1), (ACQUIRE, 1)])
def test_an_acquiring_load_passes_nothing_on_without_a_fence(kind, number):
    program = parse(CHAIN)
    assert relayed(program, num_ctas=3) == 7
    faulty = spoiled(program, find(program, kind)[number])
    with pytest.raises(Fault, match=r"words\+0 is read by lane 64 and was written by lane 0"):
        relayed(faulty, num_ctas=3)


def test_a_fence_that_releases_acquires_what_a_relaxed_load_has_seen():
    program = parse(CHAIN)
    assert relayed(without_order(program, find(program, ACQUIRE)[0]), num_ctas=3) == 7
