"""A routing that memory cannot hold is refused by arithmetic, before anything is drawn."""

import re
import time
from contextlib import closing

import pytest

from tilepipe.launch import drawing
from tilepipe.launch.describing import Describing
from tilepipe.launch.drawing import available_bytes, drawing_fault
from tilepipe.records import Status
from tilepipe.stopping import Stopping

GIB = 2**30
TINY = ("hardware=cpu", "workload=tiny", "measure=quick", "launch.num_ranks=4")


@pytest.mark.parametrize(
    ("words", "available", "told"),
    [
        # 4 ranks x 2 slots x 8 bytes a token are kept; on the host 4 processes keep 64 bytes and
        # draw with 80 more.
        (
            ("workload.num_tokens=1_000_000_000",),
            GIB,
            "workload.num_tokens=1000000000: their routing takes 238.4 GiB to draw, and this "
            "machine has 1.0 GiB free; type 1800000 or fewer",
        ),
        (
            ("workload.num_tokens=1000", "routing=ragged", "routing.min_share=0"),
            127_999,
            "workload.num_tokens=1000: their routing takes 0.0 GiB to draw, and this machine "
            "has 0.0 GiB free; type 280 or fewer",
        ),
        (
            ("workload.num_experts=1_000_000_000",),
            GIB,
            "workload.num_experts=1000000000: their routing takes 119.2 GiB to draw, and this "
            "machine has 1.0 GiB free; type 1500000 or fewer",
        ),
        # What just fits, what a recording decides, and a system that does not tell.
        (("workload.num_tokens=1000",), 256_000, ""),
        (("workload.num_tokens=1000", "routing=ragged", "routing.min_share=0"), 128_000, ""),
        (("routing=trace", "routing.path=F"), 1, ""),
        (("workload.num_tokens=1_000_000_000",), None, ""),
    ],
)
def test_what_is_kept_of_a_routing_is_held_against_memory(point, words, available, told):
    assert drawing_fault(point(*TINY, *words).config, available) == told


def test_the_count_that_is_told_is_accepted(point):
    fault = drawing_fault(point(*TINY, "workload.num_tokens=1_000_000_000").config, GIB)

    (most,) = re.findall(r"type (\d+) or fewer", fault)

    assert drawing_fault(point(*TINY, f"workload.num_tokens={most}").config, GIB) == ""


@pytest.mark.parametrize("words", [(), ("kernel.capacity_factor=1",)])
@pytest.mark.parametrize("key", ["num_tokens", "num_experts"])
def test_it_is_told_at_once_whatever_else_was_typed(point, monkeypatch, words, key):
    monkeypatch.setattr("tilepipe.launch.describing.available_bytes", lambda: GIB)

    def unexpected(self, container):
        raise AssertionError("a process was asked")

    monkeypatch.setattr(Describing, "_ask", unexpected)
    huge = point(*TINY, *words, f"workload.{key}=1_000_000_000")

    with closing(Describing(Stopping())) as one:
        begin_s = time.process_time()
        status, sentence = one.fault(huge)
        taken_s = time.process_time() - begin_s
        with pytest.raises(MemoryError, match=f"workload.{key}=1000000000: their routing"):
            one.described(huge)

    assert status is Status.oom
    assert sentence.startswith(f"workload.{key}=1000000000: their routing takes")
    assert taken_s < 0.5


def test_available_memory_is_read_from_the_system(monkeypatch, tmp_path):
    told = tmp_path / "meminfo"
    told.write_text(
        "MemTotal: 9 kB\nMemAvailable:       5 kB\nSwapFree:   2 kB\nHugePages_Free: 1\n"
    )
    monkeypatch.setattr(drawing, "Path", lambda _: told)

    assert available_bytes() == 7 * 1024

    told.unlink()
    assert available_bytes() is None
