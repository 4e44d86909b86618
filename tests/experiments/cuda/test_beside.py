"""Torch beside the trials of the cuda executor, its tensors on the CPU: one process, all ranks."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.experiments.groups import random_routing  # noqa: E402
from tests.host.ranks import run_ranks  # noqa: E402
from tests.launch.points import compose_point  # noqa: E402
from tilepipe.baselines.host import joined_on_host  # noqa: E402
from tilepipe.config.choices import Layout  # noqa: E402
from tilepipe.config.schemas import config_from_dict  # noqa: E402
from tilepipe.experiments.cuda.beside import BesideTorch, with_baselines  # noqa: E402
from tilepipe.experiments.cuda.oracle import DeviceOracle  # noqa: E402
from tilepipe.experiments.cuda.session import CudaSession  # noqa: E402
from tilepipe.fabric.host import ArraySpec, HostHeap  # noqa: E402
from tilepipe.workload.placement import assign, contiguous  # noqa: E402

ROUTINGS = {
    "one_rank": random_routing([40], num_experts=8, num_topk=2),
    "masked": random_routing([7, 33], num_experts=8, num_topk=3, kind="masked"),
    "ragged": random_routing([3, 0, 17, 1], num_experts=8, num_topk=2),
}
TORCH = {
    "dispatch": "torch_dispatch",
    "combine": "torch_combine",
    "dispatch_gemm": "torch_sequential",
    "gemm_combine": "torch_sequential",
}
HOMEWARD = ("combine", "gemm_combine")

# Tensors are small: more threads than cores would only wait for each other.
torch.set_num_threads(1)


class FakeTimer:
    def __init__(self):
        self.asked = []

    def measure(self, parts):
        self.asked.append([name for name, _ in parts])
        for _, launch in parts:
            launch()
        return {"start_ns": 200} | {name: 30 for name, _ in parts}

    def measure_waiting(self, launch):
        self.asked.append("waiting")
        launch()
        return 100, 12


@cache
def composed(kernel, num_ranks, num_topk, *more):
    """The container of a point on one GPU, torch beside it."""
    words = ("hardware=h200_x1", f"kernel={kernel}", "workload=tiny", "measure=quick")
    sizes = (f"workload.num_topk={num_topk}", "workload.hidden=64", "workload.intermediate=32")
    ranks = f"launch.num_ranks={num_ranks}"
    return compose_point(*words, *more, *sizes, ranks, "measure.baselines=[torch]").config


class Session:
    """What a trial is asked about its ranks, all of them here and on the CPU."""

    device = torch.device("cpu")

    def __init__(self, kernel, routing, *words):
        num_ranks = len(routing.topk_idx)
        container = composed(kernel, num_ranks, routing.topk_idx[0].shape[1], *words)
        self.config, self.routing = config_from_dict(container), routing
        self.placed = assign(contiguous(routing.num_experts, num_ranks), routing)
        self.ranks = range(num_ranks)
        self.timer = FakeTimer()
        heap = SimpleNamespace(is_whole=True)
        self.group = SimpleNamespace(heap=heap, check=lambda: None)

    def oracle(self, rank):
        return DeviceOracle(self.routing, rank=rank, device="cpu")

    def received_homes(self, rank):
        """By the routing alone."""
        num_local = self.routing.num_experts // len(self.routing.topk_idx)
        homes = [
            (source, token, slot)
            for expert in range(rank * num_local, (rank + 1) * num_local)
            for source, ids in enumerate(self.routing.topk_idx)
            for token, slot in np.argwhere(ids == expert).tolist()
        ]
        columns = torch.tensor(homes, dtype=torch.int64).reshape(-1, 3)
        return torch.arange(len(homes)), *columns.T

    def time_apart(self, plan, steps, least_ns=None):
        return CudaSession.time_apart(self, plan, steps, least_ns)


class Own:
    """The trial that torch runs beside."""

    contenders = ("own", "part")
    checked = ("own",)

    def __init__(self, session):
        self.session = session
        self.log = []

    def __getattr__(self, name):
        return lambda contender, *rest: self.log.append((name, contender, *rest)) or []


def beside(kernel, name, *words):
    trial = Own(Session(kernel, ROUTINGS[name], *words))
    with with_baselines(trial) as both:
        assert isinstance(both, BesideTorch)
        return trial, both


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("kernel", TORCH)
def test_torch_equals_the_device_oracle_on_every_rank(kernel, name):
    _, both = beside(kernel, name)
    contender = both.contenders[-1]

    for launch, run in ((1, both.run), (2, both.time)):
        both.prepare(contender, launch)
        both.poison(contender)
        run(contender)
        found = [both.check(contender, rank, launch, "before") for rank in both.session.ranks]
        assert [[v.detail for v in verdicts] for verdicts in found] == [[""]] * len(found)

    stale = [both.check(contender, rank, 1, "after") for rank in both.session.ranks]
    has_rows = [(ids >= 0).any() for ids in both.session.routing.topk_idx]
    if kernel in HOMEWARD:
        assert [not verdict.passed for (verdict,) in stale] == has_rows


def as_one_rank(rank, place, name):
    """What the oracle says of a rank that exchanges rows with others, by operation."""
    specs = {"words": ArraySpec(shape=(1,), dtype=np.int64)}
    limits = {"watchdog_s": 20, "start_limit_s": 20}
    num_ranks = len(ROUTINGS[name].topk_idx)
    heap = HostHeap(place, rank=rank, num_ranks=num_ranks, specs=specs, **limits)
    found = {}
    with joined_on_host(heap, limit_s=20, start_limit_s=20) as collective:
        for kernel in TORCH:
            session = Session(kernel, ROUTINGS[name])
            session.ranks = range(rank, rank + 1)
            both = BesideTorch(Own(session), collective)
            contender = both.contenders[-1]
            both.prepare(contender, 1)
            both.poison(contender)
            both.run(contender)
            found[kernel] = [v.detail for v in both.check(contender, rank, 1, "before")]
    return found


@pytest.mark.parametrize("name", ["masked", "ragged"])
def test_ranks_in_processes_of_their_own_get_what_the_device_oracle_expects(name):
    found = run_ranks(len(ROUTINGS[name].topk_idx), as_one_rank, name)

    assert found == [{kernel: [""] for kernel in TORCH}] * len(found)


def test_outputs_that_are_not_written_fail():
    for kernel, contender in TORCH.items():
        _, both = beside(kernel, "masked")
        both.prepare(contender, 1)
        both.poison(contender)

        verdicts = [both.check(contender, rank, 1, "before") for rank in both.session.ranks]

        assert not any(verdict.passed for (verdict,) in verdicts)


@pytest.mark.parametrize("outward", ["dispatch", "dispatch_gemm"])
@pytest.mark.parametrize("homeward", HOMEWARD)
def test_the_plan_on_the_way_out_is_timed_with_its_wait_and_the_way_home_has_none(
    outward, homeward
):
    _, dispatch = beside(outward, "ragged")
    _, combine = beside(homeward, "ragged")

    windows = [both.time(both.contenders[-1]) for both in (dispatch, combine)]

    assert windows[0] == {"e2e": (100, 42), "plan": (100, 12)}
    assert dispatch.session.timer.asked == ["waiting", ["stage"]]
    assert combine.session.timer.asked == [["stage"]]
    assert windows[1] == {"stage": (200, 30)}


def rows_of_fullest_link(routing):
    """By looking at every slot: rows that leave a rank, or come; of one rank alone, all of them."""
    num_ranks = len(routing.topk_idx)
    num_local = routing.num_experts // num_ranks
    out, into = [0] * num_ranks, [0] * num_ranks
    for source, ids in enumerate(routing.topk_idx):
        for expert in ids[ids >= 0].tolist():
            owner = expert // num_local
            if owner != source or num_ranks == 1:
                out[source] += 1
                into[owner] += 1
    return max(*out, *into)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize(
    ("kernel", "steps"),
    [
        ("dispatch", ["moved"]),
        ("combine", ["moved", "added"]),
        ("dispatch_gemm", ["moved", "multiplied"]),
        ("gemm_combine", ["multiplied", "moved", "added"]),
    ],
)
def test_on_a_paced_link_a_copy_counts_as_what_the_link_would_take(kernel, steps, name):
    link_ns = rows_of_fullest_link(ROUTINGS[name]) * 128 / 0.1  # rows of hidden 64
    _, slow = beside(kernel, name, "launch.pace_gbps=0.1")
    _, fast = beside(kernel, name, "launch.pace_gbps=10000")

    windows = [both.time(both.contenders[-1]) for both in (slow, fast)]

    outward = kernel in ("dispatch", "dispatch_gemm")
    assert slow.session.timer.asked == [*["waiting"] * outward, steps]
    stage_ns = [w["e2e"][1] - w["plan"][1] if outward else w["stage"][1] for w in windows]
    # Each step was measured to take 30 ns.
    assert stage_ns == [30 * (len(steps) - 1) + link_ns, 30 * len(steps)]


def test_our_own_contenders_are_asked_as_before():
    trial, both = beside("dispatch", "one_rank")

    both.prepare("part", 3)
    both.poison("own")
    both.run("part")
    both.time("part")
    both.check("own", 0, 3, "after")

    assert both.contenders == ("own", "part", "torch_dispatch")
    assert both.checked == ("own", "torch_dispatch")
    assert trial.log == [
        ("prepare", "part", 3),
        ("poison", "own"),
        ("run", "part"),
        ("time", "part"),
        ("check", "own", 0, 3, "after"),
    ]


def test_without_a_word_the_trial_stays_alone():
    trial = Own(Session("dispatch", ROUTINGS["one_rank"]))
    trial.session.config.measure.baselines = []

    with with_baselines(trial) as alone:
        assert alone is trial


def test_rows_lie_packed_whatever_the_layout_of_ours():
    _, both = beside("dispatch", "masked")

    layouts = [both._layouts[rank] for rank in both.session.ranks]

    assert both.session.config.kernel.layout is Layout.padded
    assert [layout.extent for layout in layouts] == [layout.num_rows for layout in layouts]
