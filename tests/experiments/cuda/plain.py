"""Trials of the cuda executor on a CPU, plain copies, products and sums in place of kernels.

Each test file says what its launches do; what they have in common is here.
"""

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.launch.points import compose_point  # noqa: E402
from tilepipe.config.schemas import config_from_dict  # noqa: E402
from tilepipe.experiments.cuda import layer  # noqa: E402
from tilepipe.experiments.cuda.session import knobs_of  # noqa: E402
from tilepipe.experiments.setting import placed_routing, plan_settings, shape_of  # noqa: E402
from tilepipe.fabric.table import Slot  # noqa: E402
from tilepipe.kernels.group import DeviceGroup  # noqa: E402
from tilepipe.kernels.overlap import group as fused  # noqa: E402
from tilepipe.schedule.packed import SLOT_BITS, TOKEN_BITS  # noqa: E402

LAUNCH = 3
NUM_SMS = 132
CTAS = "kernel.num_comm_ctas=12"


def config_of(kernel: str, *words: str) -> Any:
    """Two ranks of the smallest workload that share one GPU."""
    named = ("hardware=h200_x1", f"kernel={kernel}", "workload=tiny", "measure=quick")
    return config_from_dict(compose_point(*named, "launch.num_ranks=2", *words).config)


def group_of(config: Any, trial: Any, **how: Any) -> DeviceGroup:
    """The group in which a kind of trial runs, its memory on the CPU."""
    placed = placed_routing(config)
    return DeviceGroup(
        plan_settings(config, placed),
        shape_of(config, placed.physical, trial.memory(config)),
        knobs_of(config),
        watchdog_s=1.0,
        device=torch.device("cpu"),
        **how,
    )


def session_of(
    config: Any,
    trial: Any,
    monkeypatch: pytest.MonkeyPatch,
    *,
    launch: type,  # stands for FusedLaunch
    steps: Mapping[str, Callable[[], None]],  # launches of communication alone, by name
) -> SimpleNamespace:
    """What a trial asks of its session, kernels stood in for."""
    group, placed = group_of(config, trial), placed_routing(config)
    group.set_routing(placed.physical)
    group.launcher = PlainLauncher(steps)
    monkeypatch.setattr(fused, "FusedLaunch", launch)
    monkeypatch.setattr(group, "launcher_on", lambda *_, **__: PlainLauncher(steps))
    properties = SimpleNamespace(multi_processor_count=NUM_SMS)
    monkeypatch.setattr(layer.torch.cuda, "get_device_properties", lambda _: properties)
    return SimpleNamespace(
        config=config,
        placed=placed,
        group=group,
        ranks=group.ranks,
        device=group.device,
        routing=placed.physical,
    )


class PlainLauncher:
    """Stands for launches of communication alone; one that has no step does nothing."""

    def __init__(self, steps: Mapping[str, Callable[[], None]]) -> None:
        self._steps = steps

    def prepare(self, *names: str) -> None:
        pass

    def launch(self, name: str) -> None:
        self._steps.get(name, lambda: None)()


def run(trial: Any, contender: str) -> list[Any]:
    """Verdicts of one launch on poisoned memory."""
    trial.prepare(contender, LAUNCH)
    trial.poison(contender)
    trial.run(contender)
    return [
        verdict
        for rank in trial.session.ranks
        for verdict in trial.check(contender, rank, LAUNCH, "before")
    ]


def spare_sums(trial: Any, monkeypatch: Any, slot: Slot) -> tuple[int, list[int]]:
    """What counters of all ranks that are not zero sum up to: as they are, and as `fused` and then
    `gemm_contended` find them when their launch is opened."""
    group = trial.session.group
    for rank in trial.session.ranks:
        group.tensor(rank, slot).fill_(7)

    def spare_sum() -> int:
        return sum(int(group.tensor(rank, slot).sum()) for rank in trial.session.ranks)

    opened: list[int] = []
    monkeypatch.setattr(group, "open", lambda **_: opened.append(spare_sum()))
    before = spare_sum()
    for contender in ("fused", "gemm_contended"):
        trial.prepare(contender, LAUNCH)
        trial.run(contender)
    return before, opened


def experts(group: DeviceGroup) -> Iterator[tuple[int, int, slice]]:
    """Rank, number of an expert in the group, and its receive rows there."""
    num_local = group.settings.num_experts_per_rank
    for rank in group.ranks:
        layout = group.plans[rank].layout
        for expert, count in enumerate(layout.expert_rows.tolist()):
            first = int(layout.expert_first_row[expert])
            yield rank, rank * num_local + expert, slice(first, first + count)


def push(group: DeviceGroup) -> None:
    """Bring home what the GEMM has left in y."""
    for rank, _, rows in experts(group):
        homes = group.tensor(rank, Slot.row_home)[rows].tolist()
        for row, home in zip(range(rows.start, rows.stop), homes, strict=True):
            peer, token = home >> (TOKEN_BITS + SLOT_BITS), (home >> SLOT_BITS) & 0xFFFFFFFF
            place = token * group.settings.num_topk + (home & 0xFFFF)
            group.tensor(peer, Slot.home_y)[place] = group.tensor(rank, Slot.y)[row]


def reduce(group: DeviceGroup, slot: Slot, *, flawed: bool) -> None:
    """Sum what is home; the first token wrong where that is asked for."""
    routing = group.routing
    for rank in group.ranks:
        ids, weights = (
            torch.from_numpy(part[rank]) for part in (routing.topk_idx, routing.topk_weights)
        )
        rows = group.tensor(rank, Slot.home_y).view(torch.bfloat16).float()
        rows = rows.view(-1, ids.shape[1], rows.shape[1])[: len(ids)] * weights[..., None]
        total = torch.where(ids[..., None] >= 0, rows, torch.zeros(())).sum(1)
        if flawed:
            total[0] += 1
        group.tensor(rank, slot).view(torch.bfloat16)[: len(total)] = total.bfloat16()
