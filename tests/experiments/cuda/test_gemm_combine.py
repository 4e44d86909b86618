"""The experiment of GEMM -> combine on a CPU, plain products and sums in place of kernels."""

from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")

from tests.experiments.cuda import plain  # noqa: E402
from tests.experiments.cuda.plain import LAUNCH, experts, push, reduce, run, session_of, spare_sums  # noqa: E402
from tilepipe.config.choices import Roles  # noqa: E402
from tilepipe.experiments.cuda.entry import symmetric_bytes_of  # noqa: E402
from tilepipe.experiments.cuda.gemm_combine import CudaGemmCombine  # noqa: E402
from tilepipe.experiments.cuda.oracle import DeviceOracle  # noqa: E402
from tilepipe.experiments.cuda.session import CudaSession  # noqa: E402
from tilepipe.fabric.table import Slot, Word  # noqa: E402
from tilepipe.kernels.overlap.group import spare_table  # noqa: E402
from tilepipe.kernels.overlap.home import Reduces  # noqa: E402
from tilepipe.schedule.packed import SLOT_BITS, TOKEN_BITS  # noqa: E402


def config_of(*words):
    return plain.config_of("gemm_combine", plain.CTAS, *words)


def group_of(config):
    return plain.group_of(config, CudaGemmCombine)


def test_symmetric_bytes_are_what_a_group_reserves_spare_buffers_included():
    config = config_of()
    group = group_of(config)

    assert symmetric_bytes_of(config) == group.heap.rank_bytes
    for slot, spare in (
        (Slot.home_y, Slot.spare_y),
        (Slot.token_ready, Slot.spare_token_ready),
        (Slot.rank_ready, Slot.spare_rank_ready),
    ):
        assert group.tensor(1, slot).shape == group.tensor(1, spare).shape


def test_rows_pushed_aside_find_home_by_what_dispatch_has_left():
    heap = group_of(config_of()).heap

    table = spare_table(heap)

    changed = {Slot(place) for place in (table != heap.table).any(0).nonzero().flatten().tolist()}
    assert changed == {Slot.home_y, Slot.token_ready, Slot.rank_ready}


class PlainLaunch:
    """Multiplies, brings home what it made and sums it, as far as its plan does."""

    made: ClassVar[list["PlainLaunch"]] = []
    flaw: ClassVar[str | None] = None

    def __init__(self, plan, split, *, limit_ns, pace_gbps, pace_latency_ns):
        self.plan, self.split = plan, split
        self.made.append(self)

    def bind(self, table, sending, *, first_rank, a, b, d):
        self.sends_aside = not torch.equal(table, sending)

        def launch():
            group, operands = PlainLaunch.group, PlainLaunch.operands
            multiply(group, operands, b)
            if self.split.num_comm_ctas and not self.sends_aside:
                push(group)
            if self.plan.reduces:
                PlainLaunch.reduce(Slot.out)

        return launch

    @classmethod
    def reduce(cls, slot):
        reduce(cls.group, slot, flawed=cls.flaw == "token")


def multiply(group, operands, b):
    for rank, number, rows in experts(group):
        part = operands[rank][rows].float() @ b[number].float().T
        group.tensor(rank, Slot.y).view(torch.bfloat16)[rows] = part.to(torch.bfloat16)


def let_rows_know_home(group):
    """What a dispatch without payload leaves."""
    homes = group._homes()
    for rank in group.ranks:
        _, held = group.plans[rank].layout.held_rows()
        source, token = (torch.from_numpy(part[held]).long() for part in homes[rank])
        ids = [torch.from_numpy(part) for part in group.routing.topk_idx]
        first = rank * group.settings.num_experts_per_rank
        tile_of, _ = group.plans[rank].layout.held_rows()
        experts = group.plans[rank].layout.tiles[tile_of, 0] + first
        slots = [
            int((ids[int(s)][int(t)] == e).nonzero()[0][0])
            for s, t, e in zip(source, token, experts.tolist(), strict=True)
        ]
        group.tensor(rank, Slot.row_home)[torch.from_numpy(held)] = (
            source << (TOKEN_BITS + SLOT_BITS) | token << SLOT_BITS | torch.tensor(slots)
        )


@pytest.fixture
def trial(monkeypatch):
    steps = {
        "push": lambda: push(PlainLaunch.group),
        "reduce": lambda: PlainLaunch.reduce(Slot.reduced),
    }
    session = session_of(config_of(), CudaGemmCombine, monkeypatch, launch=PlainLaunch, steps=steps)
    group = session.group
    for name, value in (("made", []), ("flaw", None), ("group", group)):
        monkeypatch.setattr(PlainLaunch, name, value, raising=False)
    session.exchange_homes = lambda: let_rows_know_home(group)
    session.received_homes = lambda rank: CudaSession.received_homes(session, rank)
    session.oracle = lambda rank: DeviceOracle(session.routing, rank=rank, device=group.device)
    trial = CudaGemmCombine(session)
    PlainLaunch.operands = trial._a
    return trial


@pytest.mark.parametrize("contender", CudaGemmCombine.checked)
def test_sums_of_rows_that_came_home_pass_on_poisoned_memory(trial, contender):
    verdicts = run(trial, contender)

    assert [verdict.detail for verdict in verdicts] == ["", ""]
    assert sum(verdict.num_values for verdict in verdicts) > 0


@pytest.mark.parametrize("contender", CudaGemmCombine.checked)
def test_one_wrong_token_fails(trial, contender):
    PlainLaunch.flaw = "token"

    assert not any(verdict.passed for verdict in run(trial, contender))


def test_rows_of_another_launch_fail(trial):
    trial.prepare("fused", LAUNCH + 1)
    trial.run("fused")

    assert not any(trial.check("fused", rank, LAUNCH, "after")[0].passed for rank in (0, 1))


def test_rungs_differ_in_who_has_sms_who_tells_of_tiles_and_where_rows_go(trial):
    told = [
        (
            made.split.num_comm_ctas,
            made.split.num_gemm_ctas,
            made.plan.gemm.problem.publish,
            made.plan.reduces,
            made.sends_aside,
        )
        for made in PlainLaunch.made
    ]

    # Two ranks share the chip: 66 SMs each, of which 12 communicate.
    assert told == [
        (0, 66, False, Reduces.none, False),  # gemm_all, also the first part of sequential
        (12, 54, True, Reduces.all, False),  # fused
        (0, 54, False, Reduces.none, False),  # gemm_split
        (0, 54, True, Reduces.none, False),  # gemm_publish
        (12, 54, True, Reduces.beside, True),  # gemm_contended
    ]
    together = [made.plan.roles for made in PlainLaunch.made if made.plan.reduces is Reduces.all]
    assert set(together) == {Roles.switch}


def test_the_whole_launch_is_timed_of_operations_and_the_stage_of_rungs(trial):
    asked = []
    trial.session.time = lambda parts, whole: asked.append(whole)

    for contender in trial.contenders:
        trial.time(contender)

    wholes = {name for name, whole in zip(trial.contenders, asked, strict=True) if whole}
    assert wholes == {"fused", "sequential", "push"}


@pytest.mark.parametrize("contender", CudaGemmCombine.contenders)
def test_units_of_every_rank_are_uploaded_ahead_of_each_launch(trial, contender):
    trial.prepare(contender, LAUNCH)

    group = trial.session.group
    for rank in trial.session.ranks:
        words, layout = group.tensor(rank, Slot.words), group.plans[rank].layout
        num_units = int(words[int(Word.num_units)])
        assert num_units == layout.num_tiles * group.settings.num_chunks > 0
        assert int(words[int(Word.max_stored)]) == len(group.tensor(rank, Slot.tile_stored))


def test_no_token_is_said_to_be_home_in_the_counters_of_a_contended_gemm(trial, monkeypatch):
    before, opened = spare_sums(trial, monkeypatch, Slot.spare_token_ready)

    assert opened == [before, 0]
    assert before > 0
