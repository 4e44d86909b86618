"""The experiment of a whole layer on a CPU, plain products and sums in place of kernels."""

from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")

from tests.experiments.cuda import plain  # noqa: E402
from tests.experiments.cuda.plain import LAUNCH, experts, push, reduce, run, session_of  # noqa: E402
from tilepipe.experiments.cuda import moe_layer  # noqa: E402
from tilepipe.experiments.cuda.beside_layer import BesideTorchLayer  # noqa: E402
from tilepipe.experiments.cuda.entry import symmetric_bytes_of  # noqa: E402
from tilepipe.experiments.cuda.moe_layer import CudaMoeLayer  # noqa: E402
from tilepipe.experiments.cuda.payload import fill_rows  # noqa: E402
from tilepipe.experiments.cuda.session import CudaSession  # noqa: E402
from tilepipe.fabric.table import Slot, Word  # noqa: E402
from tilepipe.kernels.gemm.choices import Epilogue  # noqa: E402
from tilepipe.kernels.group import DeviceGroup  # noqa: E402
from tilepipe.kernels.overlap.home import HomePlan  # noqa: E402
from tilepipe.schedule.packed import SLOT_BITS, TOKEN_BITS  # noqa: E402


def config_of(*words):
    return plain.config_of("moe_layer", plain.CTAS, *words)


def group_of(config):
    return plain.group_of(config, CudaMoeLayer)


class Plain:
    """What kernels do, with all rows of a group in one place."""

    group: ClassVar[DeviceGroup]
    made: ClassVar[list["PlainLaunch"]]
    flaw: ClassVar[str | None]

    @classmethod
    def dispatch(cls):
        ids = cls.group.routing.topk_idx
        for rank, number, rows in experts(cls.group):
            x, homes = [], []
            for source, own in enumerate(ids):
                for token, slot in zip(*(own == number).nonzero(), strict=True):
                    x.append(cls.group.tensor(source, Slot.x)[int(token)])
                    home = source << (TOKEN_BITS + SLOT_BITS) | int(token) << SLOT_BITS | int(slot)
                    homes.append(home)
            if x:
                cls.group.tensor(rank, Slot.recv_x)[rows] = torch.stack(x)
                cls.group.tensor(rank, Slot.row_home)[rows] = torch.tensor(homes)

    @classmethod
    def multiply(cls, rank_rows, weights, out, epilogue):
        for rank, number, rows in experts(cls.group):
            part = rank_rows(rank)[rows].float() @ weights[number].float().T
            if epilogue is not Epilogue.none:
                gate, up = part.chunk(2, dim=1)
                if cls.flaw == "swapped":
                    gate, up = up, gate
                part = torch.nn.functional.silu(gate) * up
            out(rank)[rows] = part.to(torch.bfloat16)

    @classmethod
    def push(cls):
        push(cls.group)

    @classmethod
    def reduce(cls, slot):
        reduce(cls.group, slot, flawed=cls.flaw == "token")


class PlainLaunch:
    """Stands for a fused launch, or for the GEMM of both ranks alone."""

    def __init__(self, plan, split, *, limit_ns, pace_gbps, pace_latency_ns):
        self.plan, self.split = plan, split
        self.comes_home = isinstance(plan, HomePlan)
        Plain.made.append(self)

    def bind(self, table, sending, *, first_rank, a, b, d):
        group, epilogue = Plain.group, self.plan.gemm.problem.epilogue
        assert torch.equal(table, sending)

        def launch():
            h, product = (getattr(Plain, name) for name in ("h", "product"))
            fuses = self.split.num_comm_ctas > 0
            if self.comes_home:
                own = lambda rank: group.tensor(rank, Slot.y).view(torch.bfloat16)  # noqa: E731
                Plain.multiply(lambda rank: h[rank], b, own, epilogue)
                if fuses:
                    Plain.push()
                    Plain.reduce(Slot.out)
                return
            if fuses:
                Plain.dispatch()
            rows = lambda rank: group.tensor(rank, Slot.recv_x).view(torch.bfloat16)  # noqa: E731
            out = product if epilogue is Epilogue.none else h
            Plain.multiply(rows, b, lambda rank: out[rank], epilogue)

        return launch


@pytest.fixture
def trial(monkeypatch):
    steps = {
        "dispatch": Plain.dispatch,
        "push": Plain.push,
        "reduce": lambda: Plain.reduce(Slot.reduced),
    }
    session = session_of(config_of(), CudaMoeLayer, monkeypatch, launch=PlainLaunch, steps=steps)
    monkeypatch.setattr(moe_layer, "bind_swiglu", lambda product, out, num_sms: lambda: None)
    for name, value in (("group", session.group), ("made", []), ("flaw", None)):
        monkeypatch.setattr(Plain, name, value, raising=False)
    session.fill_rows_to_send = lambda launch: CudaSession.fill_rows_to_send(session, launch)
    trial = CudaMoeLayer(session)
    monkeypatch.setattr(Plain, "h", trial._h, raising=False)
    monkeypatch.setattr(Plain, "product", trial._product, raising=False)
    return trial


def test_symmetric_bytes_are_what_a_group_reserves_and_nothing_is_kept_spare():
    config = config_of()
    group = group_of(config)

    assert symmetric_bytes_of(config) == group.heap.rank_bytes
    assert group.tensor(0, Slot.spare_x).numel() == group.tensor(0, Slot.spare_y).numel() == 0
    for slot in (Slot.recv_x, Slot.home_y, Slot.y, Slot.second_tiles, Slot.push_units):
        assert group.tensor(1, slot).numel() > 0


@pytest.mark.parametrize("contender", CudaMoeLayer.checked)
def test_tokens_that_went_through_the_layer_pass_on_poisoned_memory(trial, contender):
    verdicts = run(trial, contender)

    assert [verdict.detail for verdict in verdicts] == ["", ""]
    assert sum(verdict.num_values for verdict in verdicts) == 2 * 32 * 64


@pytest.mark.parametrize("contender", CudaMoeLayer.checked)
@pytest.mark.parametrize("flaw", ["swapped", "token"])
def test_one_wrong_token_or_gate_taken_for_up_fails(trial, contender, flaw):
    Plain.flaw = flaw

    assert not any(verdict.passed for verdict in run(trial, contender))


def test_tokens_of_another_launch_fail(trial):
    trial.prepare("fused", LAUNCH + 1)
    trial.run("fused")

    assert not any(trial.check("fused", rank, LAUNCH, "after")[0].passed for rank in (0, 1))


def test_contenders_differ_in_what_they_fuse_and_where_swiglu_is(trial):
    told = [
        (
            "home" if made.comes_home else "there",
            made.split.num_comm_ctas,
            made.plan.gemm.problem.epilogue,
            made.plan.gemm.problem.is_second,
        )
        for made in Plain.made
    ]

    # Two ranks share the chip: 66 SMs each, of which 12 communicate where communication is fused.
    assert sorted(told, key=str) == sorted(
        [
            ("home", 12, Epilogue.none, True),  # fused and gemm_combine
            ("there", 12, Epilogue.swiglu_concatenated, False),  # fused
            ("there", 0, Epilogue.swiglu_concatenated, False),  # sequential
            ("home", 0, Epilogue.none, True),
            ("there", 12, Epilogue.none, False),  # dispatch_gemm
        ],
        key=str,
    )


@pytest.mark.parametrize("contender", CudaMoeLayer.contenders)
def test_both_lists_of_tiles_are_uploaded_ahead_of_each_launch(trial, contender):
    trial.prepare(contender, LAUNCH)

    group = trial.session.group
    for rank in trial.session.ranks:
        words, layout = group.tensor(rank, Slot.words), group.plans[rank].layout
        assert int(words[int(Word.num_gemm_tiles)]) >= layout.num_tiles > 0
        assert int(words[int(Word.num_second_tiles)]) >= layout.num_tiles
        chunks = group.settings.homeward.num_chunks
        assert int(words[int(Word.num_units)]) == layout.num_tiles * chunks


def test_the_whole_launch_is_timed_of_layers_and_the_stage_of_parts(trial):
    asked = []
    trial.session.time = lambda parts, whole: asked.append((whole, [name for name, _ in parts]))

    for contender in trial.contenders:
        trial.time(contender)

    wholes = {name for name, (whole, _) in zip(trial.contenders, asked, strict=True) if whole}
    assert wholes == {"fused", "sequential"}
    assert {tuple(names) for _, names in asked} == {("plan", "stage")}


def test_torchs_layer_passes_beside_with_the_same_weights(trial):
    beside = BesideTorchLayer(trial, None)
    beside.prepare("torch_layer", LAUNCH)
    beside.poison("torch_layer")
    beside.run("torch_layer")

    found = [beside.check("torch_layer", rank, LAUNCH, "before")[0] for rank in (0, 1)]

    assert [verdict.detail for verdict in found] == ["", ""]
    assert beside.contenders == (*trial.contenders, "torch_layer")
    assert not beside.check("torch_layer", 0, LAUNCH + 1, "before")[0].passed
    x = torch.zeros(32, 64, dtype=torch.bfloat16)
    fill_rows(x, LAUNCH, 1, torch.arange(32))
    assert torch.equal(beside._inputs[32:], x)
