"""What the cuda executor makes of a configuration, and what a trial is asked in which order."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from tests.launch.points import compose_point  # noqa: E402
from tilepipe.config.choices import Copy, Regime  # noqa: E402
from tilepipe.config.schemas import config_from_dict  # noqa: E402
from tilepipe.experiments.comm_ctas import with_comm_ctas  # noqa: E402
from tilepipe.experiments.cuda import session  # noqa: E402
from tilepipe.experiments.cuda.combine import CudaCombine  # noqa: E402
from tilepipe.experiments.cuda.dispatch import CudaDispatch  # noqa: E402
from tilepipe.experiments.cuda.entry import symmetric_bytes_of  # noqa: E402
from tilepipe.experiments.cuda.session import CudaSession, knobs_of  # noqa: E402
from tilepipe.experiments.cuda.trial import measure  # noqa: E402
from tilepipe.experiments.setting import (  # noqa: E402
    GATE_LAUNCH,
    Memory,
    placed_routing,
    plan_settings,
    shape_of,
)
from tilepipe.fabric.loopback import LoopbackHeap  # noqa: E402
from tilepipe.kernels.group import DeviceGroup  # noqa: E402
from tilepipe.kernels.launcher import Knobs  # noqa: E402
from tilepipe.measure.device import Chain  # noqa: E402
from tilepipe.records import Clocks, Verdict  # noqa: E402

KIB = 1024
TRIALS = {"dispatch": CudaDispatch, "combine": CudaCombine}


def config_of(kernel, *words):
    point = compose_point(
        *("hardware=h200_x1", f"kernel={kernel}", "workload=tiny", "measure=quick"),
        *("launch.num_ranks=2", *words),
    )
    return config_from_dict(point.config)


# Knobs.


@pytest.mark.parametrize("kernel", TRIALS)
def test_knobs_are_what_was_typed(kernel):
    config = config_of(
        kernel,
        *("kernel.num_comm_ctas=20", "kernel.num_comm_warps=8", "kernel.num_loads=7"),
        *("kernel.flag_batch=32", "launch.pace_gbps=400", "launch.pace_latency_ns=1500"),
    )

    assert knobs_of(config) == Knobs(
        num_ctas=20,
        num_warps=8,
        num_loads=7,
        flag_batch=32,
        pace_gbps=400.0,
        pace_latency_ns=1500,
    )
    assert knobs_of(config).paced


@pytest.mark.parametrize("kernel", TRIALS)
def test_knobs_of_bulk_copies_are_what_was_typed(kernel):
    words = ("kernel.copy=tma", "kernel.num_comm_ctas=16", "kernel.num_comm_warps=2")
    ring = ("kernel.num_stages=6", "kernel.stage_bytes=14336", "kernel.flag_batch=5")

    knobs = knobs_of(config_of(kernel, *words, *ring))

    assert knobs == Knobs(
        num_ctas=16, copy=Copy.tma, num_warps=2, num_stages=6, stage_bytes=14_336, flag_batch=5
    )


def test_knobs_left_null_are_those_of_the_launcher():
    words = ("kernel.num_comm_warps=null", "kernel.num_loads=null", "kernel.flag_batch=null")

    knobs = knobs_of(config_of("dispatch", "kernel.num_comm_ctas=3", *words))

    assert knobs == Knobs(num_ctas=3)
    assert not knobs.paced


@pytest.mark.parametrize(("rate", "delay_ns"), [(400.0, 0), (None, 1)])
def test_a_rate_or_a_delay_alone_is_a_pace(rate, delay_ns):
    assert Knobs(num_ctas=1, pace_gbps=rate, pace_latency_ns=delay_ns).paced


@pytest.mark.parametrize("kernel", ["dispatch_gemm", "gemm_combine", "moe_layer"])
def test_a_number_that_was_to_be_found_is_one_before_anything_is_planned(kernel, monkeypatch):
    words = "kernel.num_comm_ctas=auto", "kernel.roles=switch", "launch.pace_gbps=60"
    config = config_of(kernel, *words)
    found = with_comm_ctas(config, placed_routing(config), num_sms=132).kernel.num_comm_ctas

    @contextmanager
    def heap_on_cpu(config, specs):
        yield LoopbackHeap(specs, num_ranks=2, device=torch.device("cpu"))

    chip = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(session.torch.cuda, "get_device_properties", lambda device: chip)
    monkeypatch.setattr(session, "open_heap", heap_on_cpu)
    monkeypatch.setattr(session, "CudaSession", lambda *parts: parts)
    with session.opened_session(config, Memory(dispatch_hidden=64, home_hidden=64)) as opened:
        resolved, placed, group = opened

    assert found == resolved.kernel.num_comm_ctas == group.knobs.num_ctas
    assert config.kernel.num_comm_ctas == "auto"
    group.set_routing(placed.physical)
    made = SimpleNamespace(config=resolved, placed=placed, routing=placed.physical, group=group)
    made.timer = SimpleNamespace(num_repeated=0)
    assert CudaSession.counts(made, 0)["num_comm_ctas"] == found


# Memory.

# 2 ranks x 32 tokens x 2 slots, 4 experts a rank, tiles of 128 rows: a rank holds at most
# 64 x 2 + 4 x 127 = 636 rows in 4 + 4 tiles. Every buffer takes whole KiB.
ROWS = 80 * KIB  # 636 rows of 64 bf16
COMMON = 5 * KIB + 3 * KIB + 3 * KIB  # 8 bytes of row_home, 4 of row_flag and returns, a row
# 636 // 128 + 2 x 8 runs, 636 // 16 tickets more; two words a ticket, twice, and 33 token bins.
SCRATCH = 2 * KIB  # 4 * (2 * 59 + 2 * 59 + 33) = 1 076 bytes
SMALL = (
    20 * KIB + SCRATCH
)  # all that holds less than 1 KiB, and words and sends, which hold as much
HAND_COMPUTED = {
    # recv_x; x: 32 rows
    "dispatch": ROWS + 4 * KIB + COMMON + SMALL,
    # y; home_y: 64 rows; out and reduced: 32 rows each
    "combine": ROWS + 8 * KIB + 2 * 4 * KIB + COMMON + SMALL,
}


@pytest.mark.parametrize("kernel", TRIALS)
def test_symmetric_bytes_are_those_computed_by_hand(kernel):
    assert symmetric_bytes_of(config_of(kernel)) == HAND_COMPUTED[kernel]


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("kernel.layout=packed", "kernel.capacity_factor=1.5"),
        ("placement=balanced", "placement.num_redundant=6", "routing=zipf"),
    ],
)
@pytest.mark.parametrize("kernel", TRIALS)
def test_symmetric_bytes_are_what_a_group_reserves(kernel, words):
    config = config_of(kernel, "workload.num_tokens=77", *words)
    placed = placed_routing(config)
    shape = shape_of(config, placed.physical, TRIALS[kernel].memory(config))

    group = DeviceGroup(
        plan_settings(config, placed),
        shape,
        knobs_of(config),
        watchdog_s=1.0,
        device=torch.device("cpu"),
    )

    assert symmetric_bytes_of(config) == group.heap.rank_bytes


@pytest.mark.parametrize("kernel", TRIALS)
def test_replicas_make_room_for_themselves(kernel):
    plain = symmetric_bytes_of(config_of(kernel))
    words = ("placement=balanced", "placement.num_redundant=2", "routing=zipf")

    # A rank has 5 physical experts in place of 4: 127 more rows of gaps, each 128 bytes, and what
    # small tables grow by; every buffer is rounded up.
    grown = symmetric_bytes_of(config_of(kernel, *words)) - plain
    assert 127 * 128 <= grown < 127 * 128 + 4 * KIB


def test_more_physical_experts_than_the_plan_kernel_counts_are_refused():
    words = ("kernel.planner=device", "workload.num_experts=1024", "placement=balanced")

    with pytest.raises(
        ValueError,
        match=r"^kernel.planner=device: the plan kernel counts at most "
        r"1024 physical experts, and the placement has 1026; type kernel.planner=",
    ):
        symmetric_bytes_of(config_of("dispatch", *words))


# Windows of a launch.


class FakeTimer:
    """Windows that were made up."""

    def __init__(self, *, host_bound=False):
        self.host_bound = host_bound

    def measure(self, parts):
        return {"start_ns": 100} | {name: 10 + place for place, (name, _) in enumerate(parts)}

    def measure_chained(self, parts, length):
        return Chain(start_ns=200, period_ns=30, host_bound=self.host_bound)


PARTS = [("plan", lambda: None), ("stage", lambda: None)]


def session_with(timer, regime):
    config = SimpleNamespace(
        measure=SimpleNamespace(regime=regime), launch=SimpleNamespace(wrap=None)
    )
    checks = []
    group = SimpleNamespace(
        check=lambda: checks.append("checked"), synchronize=lambda: checks.append("synchronized")
    )
    return SimpleNamespace(config=config, timer=timer, group=group, checks=checks)


@pytest.mark.parametrize(
    ("regime", "whole", "windows"),
    [
        (Regime.isolated, True, {"e2e": (100, 21), "plan": (100, 10)}),
        (Regime.isolated, False, {"stage": (100, 11)}),
        (Regime.chained, True, {"e2e": (200, 30)}),
        (Regime.chained, False, {"stage": (200, 30)}),
    ],
)
def test_an_operation_counts_with_its_plan_and_a_part_of_it_alone(regime, whole, windows):
    session = session_with(FakeTimer(), regime)

    assert CudaSession.time(session, PARTS, whole=whole) == windows
    assert session.checks == ["checked"]


def test_a_chain_that_the_host_cannot_keep_up_with_is_no_measurement():
    session = session_with(FakeTimer(host_bound=True), Regime.chained)

    with pytest.raises(RuntimeError, match=r"slower than this GPU runs them, 30 ns each; type "):
        CudaSession.time(session, PARTS, whole=True)


@pytest.mark.parametrize("regime", Regime)
def test_under_a_tool_every_part_runs_once_and_nothing_insists_on_its_time(regime):
    session = session_with(None, regime)  # a timer that would be asked has no methods
    session.config.launch.wrap = "ncu"
    session._run_wrapped = partial(CudaSession._run_wrapped, session)
    ran = []
    parts = [(name, partial(ran.append, name)) for name in ("plan", "stage")]

    windows = CudaSession.time(session, parts, whole=True)

    assert ran == ["plan", "stage"]
    assert list(windows) == ["e2e"]
    assert session.checks == ["synchronized"]


# A trial from gate to gate.

CLOCKS = Clocks(
    sm_mhz=1980,
    sm_mhz_min=1900,
    sm_mhz_max=1980,
    power_w_max=500.0,
    temperature_c_max=50,
    reasons=(),
    num_samples=7,
)


class FakeWatch:
    """Knows the clocks once it has ended, as the real one does."""

    clocks = None

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        self.clocks = CLOCKS


class FakeSession:
    """Two ranks of one process; writes down what it is asked in `log`."""

    ranks = range(2)

    def __init__(self, log, **measured):
        defaults = {"num_warmups": 1, "num_iters": 3, "max_iters": None, "interval": None}
        defaults["timeline"] = False
        self.config = SimpleNamespace(
            measure=SimpleNamespace(**defaults | measured), launch=SimpleNamespace(wrap=None)
        )
        self.group = SimpleNamespace(
            heap=SimpleNamespace(barrier=lambda: log.append(("barrier",)), all_agree=self._agree),
            synchronize=lambda: log.append(("synchronize",)),
            refresh_plan=lambda: log.append(("refresh_plan",)),
        )
        self._log = log
        self.votes, self.peer_refuses = [], False

    def _agree(self, yes):
        """What this process says, unless another one has refused."""
        self.votes.append(yes)
        return yes and not self.peer_refuses

    def clock_watch(self):
        self._log.append(("watch",))
        return FakeWatch()

    def counts(self, rank):
        return {"num_tokens": 10 + rank}


def test_a_plan_of_the_device_is_gated_and_one_of_numpy_is_not():
    group = SimpleNamespace(
        plans_on_device=True,
        epoch=4,
        plans=[SimpleNamespace(num_sent=12)] * 2,
        plan_differences=lambda rank, returns_epoch: ["sends", "returns"] if rank else [],
    )
    session = SimpleNamespace(group=group)

    (right,) = CudaSession.check_plan(session, 0, contender="combine", returns=True)
    (wrong,) = CudaSession.check_plan(session, 1, contender="combine", returns=True)
    group.plans_on_device = False

    assert (right.passed, right.num_values, right.detail) == (True, 12, "")
    assert (wrong.passed, wrong.num_wrong) == (False, 2)
    assert wrong.detail == "the device's plan differs from NumPy's in sends, returns"
    assert CudaSession.check_plan(session, 1, contender="combine") == []


class FakeTrial:
    """Contenders one and two, of which two has no output; `wrong` names (rank, stage) that fail."""

    contenders = ("one", "two")
    checked = ("one",)
    jitter_ns = 0  # spread of the times of launches

    def __init__(self, wrong=(), **measured):
        self.log = []
        self.session = FakeSession(self.log, **measured)
        self._wrong = wrong
        self._now_ns = 0

    def prepare(self, contender, launch):
        self.log.append(("prepare", contender, launch))

    def poison(self, contender):
        self.log.append(("poison", contender))

    def run(self, contender):
        self.log.append(("run", contender))

    def time(self, contender):
        self.log.append(("time", contender))
        self._now_ns += 100
        longer_ns = self._now_ns % 7 * self.jitter_ns
        return {"e2e": (self._now_ns, 50 + longer_ns), "plan": (self._now_ns, 5)}

    def check(self, contender, rank, launch, stage):
        self.log.append(("check", contender, rank, launch, stage))
        passed = (rank, stage) not in self._wrong
        return [
            Verdict(
                contender=contender,
                stage=stage,
                passed=passed,
                num_values=8,
                num_wrong=0 if passed else 3,
                max_error=0.0,
                detail="" if passed else "3 of 8 values differ",
            )
        ]


def stages(record):
    return [(verdict.stage, verdict.passed) for verdict in record.verdicts]


def test_the_gate_runs_every_checked_contender_on_poison_before_any_is_timed():
    trial = FakeTrial()

    measure(trial)

    assert trial.log[:8] == [
        ("prepare", "one", GATE_LAUNCH),
        ("poison", "one"),
        ("barrier",),
        ("run", "one"),
        ("synchronize",),
        ("check", "one", 0, GATE_LAUNCH, "before"),
        ("check", "one", 1, GATE_LAUNCH, "before"),
        ("watch",),
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gate_that_fails_on_one_rank_leaves_no_samples_on_any(rank):
    trial = FakeTrial(wrong=[(rank, "before")])

    records = measure(trial)

    assert not [entry for entry in trial.log if entry[0] in ("time", "watch")]
    assert [record.rank for record in records] == [0, 1]
    assert [(record.samples, record.clocks) for record in records] == [((), None)] * 2
    assert [stages(record) for record in records] == [[("before", own != rank)] for own in range(2)]


def test_a_gate_that_fails_in_another_process_leaves_no_samples_here():
    trial = FakeTrial()
    trial.session.peer_refuses = True

    records = measure(trial)

    assert trial.session.votes == [True]
    assert not [entry for entry in trial.log if entry[0] in ("time", "watch")]
    assert [(record.samples, stages(record)) for record in records] == [
        ((), [("before", True)])
    ] * 2


def test_a_process_that_is_sure_goes_on_until_all_are():
    trial = FakeTrial(num_iters=8, max_iters=12, interval=0.5)

    def agree(yes):
        trial.session.votes.append(yes)
        return yes and len(trial.session.votes) == 1  # the gate

    trial.session.group.heap.all_agree = agree

    records = measure(trial)

    # The gate; then it was sure both times it was asked, after 8 and 10 iterations.
    assert trial.session.votes == [True] * 3
    assert {sample.iteration for sample in records[0].samples} == set(range(12))


def test_all_ranks_share_the_samples_of_their_launches_and_keep_their_own_counts():
    trial = FakeTrial()

    first, second = measure(trial)

    assert first == replace(second, rank=0, counts={"num_tokens": 10})
    assert second.counts == {"num_tokens": 11}
    assert first.clocks == CLOCKS
    taken = [
        (sample.contender, sample.component, sample.iteration, sample.duration_ns)
        for sample in first.samples
    ]
    assert sorted(taken) == [
        (contender, component, iteration, duration_ns)
        for contender in ("one", "two")
        for component, duration_ns in (("e2e", 50), ("plan", 5))
        for iteration in range(3)
    ]


def test_every_timed_launch_has_a_plan_and_a_payload_of_its_own():
    trial = FakeTrial()

    measure(trial)

    timed = trial.log[trial.log.index(("watch",)) + 1 : -2]
    refreshed, prepared, met, launched = (timed[place::4] for place in range(4))
    # One warm-up and three iterations of two contenders, and the one that is looked at.
    assert refreshed == [("refresh_plan",)] * 9
    assert met == [("barrier",)] * 9
    assert [launch for _, _, launch in prepared] == [
        GATE_LAUNCH + 1 + number for number in range(9)
    ]
    assert [name for _, name, _ in prepared] == [name for _, name in launched]


@pytest.mark.parametrize("measured", [{}, {"num_warmups": 0, "num_iters": 5}, {"num_iters": 6}])
def test_what_is_checked_after_timing_no_other_launch_has_overwritten(measured):
    trial = FakeTrial(**measured)

    records = measure(trial)

    *_, last = [entry[2] for entry in trial.log if entry[:2] == ("prepare", "one")]
    # Contenders share outputs: whichever iteration was the last, nothing lies between.
    assert trial.log[-3:] == [
        ("time", "one"),
        ("check", "one", 0, last, "after"),
        ("check", "one", 1, last, "after"),
    ]
    assert last == max(entry[2] for entry in trial.log if entry[0] == "prepare")
    assert [stages(record) for record in records] == [[("before", True), ("after", True)]] * 2


def test_a_gate_that_fails_after_timing_is_told_of_the_rank_that_it_failed_on():
    records = measure(FakeTrial(wrong=[(1, "after")]))

    assert [stages(record) for record in records] == [
        [("before", True), ("after", True)],
        [("before", True), ("after", False)],
    ]


def test_iterations_go_on_until_the_interval_is_reached_or_there_are_as_many_as_allowed():
    few = measure(FakeTrial(num_iters=3, max_iters=40, interval=0.01))
    none = measure(FakeTrial(num_iters=3, max_iters=3, interval=0.01))

    # Durations that are all alike are known as soon as an interval of their median exists.
    iterations = [{sample.iteration for sample in records[0].samples} for records in (few, none)]
    assert 3 < len(iterations[0]) < 40
    assert iterations[1] == set(range(3))
