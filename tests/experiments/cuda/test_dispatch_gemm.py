"""The experiment of dispatch -> GEMM on a CPU, plain copies and products in place of kernels."""

from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")

from tests.experiments.cuda import plain  # noqa: E402
from tests.experiments.cuda.plain import LAUNCH, experts, run, session_of, spare_sums  # noqa: E402
from tilepipe.config.choices import Roles  # noqa: E402
from tilepipe.experiments.cuda.dispatch_gemm import CudaDispatchGemm  # noqa: E402
from tilepipe.experiments.cuda.entry import symmetric_bytes_of  # noqa: E402
from tilepipe.experiments.cuda.oracle import DeviceOracle  # noqa: E402
from tilepipe.experiments.cuda.payload import fill_rows  # noqa: E402
from tilepipe.fabric.table import Slot, Word  # noqa: E402
from tilepipe.kernels.overlap import group as fused  # noqa: E402


def config_of(*words):
    return plain.config_of("dispatch_gemm", plain.CTAS, *words)


def group_of(config):
    return plain.group_of(config, CudaDispatchGemm)


def test_symmetric_bytes_are_what_a_group_reserves_spare_buffers_included():
    config = config_of()
    group = group_of(config)

    assert symmetric_bytes_of(config) == group.heap.rank_bytes
    for slot, spare in (
        (Slot.recv_x, Slot.spare_x),
        (Slot.row_home, Slot.spare_row_home),
        (Slot.row_flag, Slot.spare_flag),
        (Slot.ready, Slot.spare_ready),
    ):
        assert group.tensor(1, slot).shape == group.tensor(1, spare).shape


def test_communication_by_the_spare_table_touches_nothing_that_anybody_reads():
    heap = group_of(config_of()).heap
    table = fused.spare_table(heap)

    changed = {Slot(place) for place in (table != heap.table).any(0).nonzero().flatten().tolist()}
    # What comes home is kept twice only where something comes home.
    assert changed == {Slot.recv_x, Slot.row_home, Slot.row_flag, Slot.ready}
    assert torch.equal(table[:, int(Slot.recv_x)], heap.table[:, int(Slot.spare_x)])


class PlainLaunch:
    """Sends rows where its table says, if anybody sends, and multiplies what lies there."""

    made: ClassVar[list["PlainLaunch"]] = []
    flaw: ClassVar[str | None] = None

    def __init__(self, plan, split, *, limit_ns, pace_gbps, pace_latency_ns):
        self.plan, self.split = plan, split
        self.made.append(self)

    def bind(self, table, sending, *, first_rank, a, b, d):
        self.sends_aside = not torch.equal(table, sending)

        def launch():
            group = PlainLaunch.group
            if self.split.num_comm_ctas and not self.sends_aside:
                send(group, PlainLaunch.payload)
            multiply(group, b, PlainLaunch.outs[d.data_ptr()])

        return launch


def send(group, payload):
    for rank in group.ranks:
        oracle = DeviceOracle(group.routing, rank=rank, device=group.device)
        _, held = group.plans[rank].layout.held_rows()
        rows = torch.empty(len(held), group.shape.dispatch_hidden, dtype=torch.bfloat16)
        oracle.fill_arrived(payload, rows)
        group.tensor(rank, Slot.recv_x).view(torch.bfloat16)[torch.from_numpy(held)] = rows


def multiply(group, b, outs):
    for rank, number, held in experts(group):
        rows = group.tensor(rank, Slot.recv_x).view(torch.bfloat16)[held]
        outs[rank, held] = (rows.float() @ b[number].float().T).to(torch.bfloat16)
    for rank in group.ranks:
        layout = group.plans[rank].layout
        if PlainLaunch.flaw == "tile" and layout.num_rows:
            outs[rank, int(layout.tiles[0, 1])] += 1


@pytest.fixture
def trial(monkeypatch):
    steps = {"dispatch": lambda: send(PlainLaunch.group, PlainLaunch.payload)}
    session = session_of(
        config_of(), CudaDispatchGemm, monkeypatch, launch=PlainLaunch, steps=steps
    )
    group = session.group
    for name, value in (("made", []), ("flaw", None), ("group", group)):
        monkeypatch.setattr(PlainLaunch, name, value, raising=False)

    def fill(launch):
        PlainLaunch.payload = launch
        for rank in group.ranks:
            fill_rows(group.tensor(rank, Slot.x), launch, rank, torch.arange(32))

    session.fill_rows_to_send = fill
    session.oracle = lambda rank: DeviceOracle(group.routing, rank=rank, device=group.device)
    trial = CudaDispatchGemm(session)
    PlainLaunch.outs = {out[0].data_ptr(): out for out in trial._out.values()}
    return trial


@pytest.mark.parametrize("contender", CudaDispatchGemm.checked)
def test_products_of_rows_that_came_pass_on_poisoned_memory(trial, contender):
    verdicts = run(trial, contender)

    assert all(verdict.passed for verdict in verdicts)
    assert sum(verdict.num_values for verdict in verdicts) > 0


@pytest.mark.parametrize("contender", CudaDispatchGemm.checked)
def test_one_wrong_row_of_a_tile_fails(trial, contender):
    PlainLaunch.flaw = "tile"

    assert not all(verdict.passed for verdict in run(trial, contender))


def test_rungs_differ_in_who_has_sms_who_looks_at_flags_and_where_rows_go(trial):
    # Two ranks share the chip: 66 SMs each, of which 12 communicate.
    told = [
        (
            made.split.num_comm_ctas,
            made.split.num_gemm_ctas,
            made.plan.gemm.problem.wait is not None,
            made.sends_aside,
        )
        for made in PlainLaunch.made
    ]

    assert told == [
        (12, 54, True, False),  # fused
        (0, 66, False, False),  # the second part of sequential
        (0, 66, False, False),  # gemm_all
        (0, 54, False, False),  # gemm_split
        (0, 54, True, False),  # gemm_flags
        (12, 54, True, True),  # gemm_contended
        (12, 54, False, False),  # unsynced
    ]
    together = [made.plan.roles for made in PlainLaunch.made if made.split.num_comm_ctas]
    assert set(together) == {Roles.switch}


@pytest.mark.parametrize(
    ("contender", "opening"),
    [
        ("fused", {"exchange": True, "preset": False}),
        ("gemm_split", {"exchange": True, "preset": False}),
        ("gemm_flags", {"exchange": True, "preset": True}),
        ("gemm_contended", {"exchange": True, "preset": True}),
    ],
)
def test_flags_are_set_ahead_where_nothing_shall_wait(trial, monkeypatch, contender, opening):
    opened = []
    monkeypatch.setattr(trial.session.group, "open", lambda **words: opened.append(words))
    trial.prepare("fused", LAUNCH)

    trial.run(contender)

    assert opened == [opening]


def test_the_whole_launch_is_timed_of_operations_and_the_stage_of_rungs(trial):
    asked = []
    trial.session.time = lambda parts, whole: asked.append(([name for name, _ in parts], whole))

    for contender in trial.contenders:
        trial.time(contender)

    wholes = {name for name, (_, whole) in zip(trial.contenders, asked, strict=True) if whole}
    assert wholes == {"fused", "sequential", "dispatch"}
    assert all(names == ["plan", "stage"] for names, _ in asked)


@pytest.mark.parametrize("contender", CudaDispatchGemm.contenders)
def test_tiles_of_every_rank_are_uploaded_ahead_of_each_launch(trial, contender):
    trial.prepare(contender, LAUNCH)

    for rank in trial.session.ranks:
        words = trial.session.group.tensor(rank, Slot.words)
        layout = trial.session.group.plans[rank].layout
        assert int(words[int(Word.num_gemm_tiles)]) >= layout.num_tiles > 0
        assert int(words[int(Word.num_first)]) + int(words[int(Word.num_rest)]) == int(
            words[int(Word.num_sends)]
        )


@pytest.mark.parametrize("contender", ["fused", "gemm_contended", "unsynced"])
def test_rows_that_open_a_launch_are_those_of_ctas_that_begin_with_tiles(trial, contender):
    trial.prepare(contender, LAUNCH)

    for rank in trial.session.ranks:
        words = trial.session.group.tensor(rank, Slot.words)
        layout = trial.session.group.plans[rank].layout
        tiles = int(words[int(Word.num_first_tiles)])
        # Two experts of a rank with few rows each: the 54 CTAs begin with all its tiles.
        assert 0 < tiles <= layout.num_tiles
        assert int(words[int(Word.num_first)]) == min(
            int(words[int(Word.num_sends)]), int(layout.tiles[:tiles, 2].sum())
        )


def test_nothing_stands_in_the_counters_that_tell_when_a_contended_gemm_may_begin(
    trial, monkeypatch
):
    before, opened = spare_sums(trial, monkeypatch, Slot.spare_ready)

    assert opened == [before, 0]
    assert before > 0
