"""What launches of a way read is its own, whichever group has planned since."""

from types import SimpleNamespace

import torch

import benchmarks.home_ways as home_ways
from benchmarks.overlap_times import Contender
from tilepipe.fabric.table import Slot, Word

MEMORY = {slot: torch.zeros(4, dtype=torch.int32) for slot in home_ways._SLOTS}
MEMORY[Slot.words] = torch.zeros(len(Word), dtype=torch.int32)


class Group:
    """A group on the same memory as all others, whose plan is its number."""

    def __init__(self, number):
        self.number = number
        self.set_routing(None)

    def set_routing(self, routing):
        MEMORY[Slot.token_expected].fill_(self.number)

    def tensor(self, rank, slot):
        return MEMORY[slot]


def test_a_way_made_after_another_group_has_planned_restores_its_own_plan(monkeypatch):
    def upload(group, layer, *, num_gemm_ctas):
        MEMORY[Slot.reduce_order].fill_(group.number)
        MEMORY[Slot.words].fill_(num_gemm_ctas)

    monkeypatch.setattr(home_ways, "upload_home", upload)
    bench = SimpleNamespace(session=SimpleNamespace(routing=None), layer=None, rank=0)
    four, seven = Group(4), Group(7)

    ways = [
        home_ways.WaysBench.way(bench, group, Contender([], 100 + group.number))
        for group in (four, seven)
    ]

    for way, group in zip(ways, (four, seven), strict=True):
        way.restore()
        assert MEMORY[Slot.token_expected].tolist() == [group.number] * 4
        assert MEMORY[Slot.reduce_order].tolist() == [group.number] * 4
        assert MEMORY[Slot.words][int(Word.num_units)] == 100 + group.number
