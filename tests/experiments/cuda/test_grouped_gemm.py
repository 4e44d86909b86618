"""The grouped GEMM's experiment on a CPU, a plain product in place of every kernel."""

from types import SimpleNamespace
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")

from tests.experiments.cuda import plain  # noqa: E402
from tests.experiments.cuda.plain import LAUNCH  # noqa: E402
from tilepipe.baselines.products import Operands  # noqa: E402
from tilepipe.config.choices import Granularity, StoreMode  # noqa: E402
from tilepipe.experiments.cuda import grouped_gemm  # noqa: E402
from tilepipe.experiments.cuda.entry import symmetric_bytes_of  # noqa: E402
from tilepipe.experiments.cuda.grouped_gemm import CudaGroupedGemm  # noqa: E402
from tilepipe.experiments.cuda.oracle import DeviceOracle  # noqa: E402
from tilepipe.experiments.cuda.session import plans_on_device  # noqa: E402
from tilepipe.experiments.setting import placed_routing  # noqa: E402
from tilepipe.fabric.table import Slot, Word  # noqa: E402


def config_of(*words):
    return plain.config_of("grouped_gemm", *words)


def group_of(config):
    return plain.group_of(config, CudaGroupedGemm, plans_on_device=plans_on_device(config))


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_symmetric_bytes_are_what_a_group_reserves(layout):
    config = config_of("workload.num_tokens=77", f"kernel.layout={layout}")

    assert symmetric_bytes_of(config) == group_of(config).heap.rank_bytes


# A trial, kernels stood in for.


class PlainGemm:
    """Multiplies the rows of the layout that was uploaded, all others it leaves alone."""

    made: ClassVar[list["PlainGemm"]] = []
    flaw = None

    def __init__(self, plan, *, num_ranks, limit_ns):
        self.plan, self._num_ranks, self._limit_ns = plan, num_ranks, limit_ns
        self.made.append(self)

    def bind(self, heap, rank, *, a, b, d):
        def launch():
            records = heap.tensor(rank, Slot.gemm_tiles)
            num = int(heap.tensor(rank, Slot.words)[int(Word.num_gemm_tiles)])
            for first, valid, expert, *_ in records[:num].tolist():
                rows = slice(first, first + valid)
                d[rows] = (a[rows].float() @ b[expert].float().T).to(torch.bfloat16)
            if self.flaw is not None:
                self.flaw(d)

        return launch


def grouped_product(name, operands, *, config="default"):
    assert isinstance(operands, Operands)

    def product():
        begin = 0
        for expert, end in enumerate(operands.ends.tolist()):
            rows = operands.a[begin:end].float()
            operands.out[begin:end] = (rows @ operands.b[expert].float().T).to(torch.bfloat16)
            begin = end
        return operands.out

    return product


def trial_of(config, monkeypatch):
    group, placed = group_of(config), placed_routing(config)
    routing = placed.physical
    group.set_routing(routing)
    session = SimpleNamespace(
        config=config,
        placed=placed,
        group=group,
        ranks=group.ranks,
        device=torch.device("cpu"),
        timer=SimpleNamespace(measure=lambda parts: {parts[0][0]: parts[0][1]() or 1}),
        oracle=lambda rank: DeviceOracle(routing, rank=rank, device=torch.device("cpu")),
    )
    monkeypatch.setattr(PlainGemm, "made", [])
    monkeypatch.setattr(grouped_gemm, "GroupedGemm", PlainGemm)
    monkeypatch.setattr(grouped_gemm, "product_of", grouped_product)
    monkeypatch.setattr(grouped_gemm, "has_quack", lambda: True)
    sms = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sms)
    return CudaGroupedGemm(session)


@pytest.mark.parametrize(
    "words",
    [
        ("kernel.layout=padded",),
        ("kernel.layout=packed",),
        ("placement=balanced", "placement.num_redundant=2"),
    ],
    ids=" ".join,
)
def test_every_contender_multiplies_the_same_rows_wherever_they_lie(words, monkeypatch):
    trial = trial_of(config_of(*words), monkeypatch)

    assert trial.contenders == (
        *("gemm_all", "gemm_flags", "torch_grouped_mm", "quack", "cublas_dense"),
    )
    assert trial.checked == trial.contenders[:-1]
    for contender in trial.checked:
        found = plain.run(trial, contender)
        assert [verdict.detail for verdict in found] == ["", ""]
        # 2 ranks x 32 tokens x 2 slots, each a row of 2 x intermediate columns.
        columns = 2 * trial.session.config.workload.intermediate
        assert sum(verdict.num_values for verdict in found) == 128 * columns


def test_the_flagged_kernel_alone_waits_and_both_take_the_ctas_that_were_typed(monkeypatch):
    trial_of(config_of("kernel.num_gemm_ctas=100", "kernel.store=direct"), monkeypatch)

    plans = [made.plan for made in PlainGemm.made]

    # Of two ranks each.
    assert [plan.problem.wait for plan in plans] == [None] * 2 + [Granularity.tile] * 2
    assert {plan.num_gemm_ctas for plan in plans} == {100}
    assert {plan.tuning.store for plan in plans} == {StoreMode.direct}


def test_a_value_that_is_wrong_or_was_never_written_is_found(monkeypatch):
    trial = trial_of(config_of(), monkeypatch)

    def one_off(d):
        d[0, 3] += 1

    monkeypatch.setattr(PlainGemm, "flaw", staticmethod(one_off))
    wrong = plain.run(trial, "gemm_all")
    assert [verdict.passed for verdict in wrong] == [False] * 2
    assert wrong[0].detail.startswith("1 of ")
    assert "the first at [0, 3]" in wrong[0].detail

    # Outputs of the launch before are stale, as every row differs from launch to launch.
    monkeypatch.setattr(PlainGemm, "flaw", None)
    plain.run(trial, "gemm_all")
    (stale,) = trial.check("gemm_all", 0, LAUNCH + 1, "after")
    assert stale.num_wrong > stale.num_values // 2


def test_rows_that_arrived_are_those_a_dispatch_would_have_left(monkeypatch):
    trial = trial_of(config_of(), monkeypatch)
    group = trial.session.group

    trial.prepare("gemm_all", LAUNCH)

    for rank in trial.session.ranks:
        verdict = trial.session.oracle(rank).check_dispatched(
            LAUNCH,
            group.tensor(rank, Slot.recv_x),
            group.plans[rank].layout,
            contender="gemm_all",
            stage="before",
        )
        assert verdict.passed, verdict.detail
