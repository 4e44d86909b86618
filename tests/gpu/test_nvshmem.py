"""Ranks in processes of their own that take turns on one GPU: the real NVSHMEM, bit for bit.

Nothing here is timed in earnest: a flag takes milliseconds from one process to the next.
"""

import re
import time

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
pytest.importorskip("nvshmem")

from tests.gpu.groups import rank_0_sends_nothing  # noqa: E402
from tests.gpu.processes import (  # noqa: E402
    SPOILED_TOKENS,
    faults_of,
    rank_1_fails_in_the_loop,
    told,
    unfinished,
)
from tests.launch.points import compose_point  # noqa: E402
from tilepipe.launch.driver import run_points  # noqa: E402
from tilepipe.validate import main as validate  # noqa: E402

NAME = "h200_x1" if "H200" in torch.cuda.get_device_name() else "generic_x1"
FEW = ("measure=quick", "measure.num_warmups=1", "measure.num_iters=2", "launch.time_limit_s=400")
BULK = "kernel.copy=tma"
CASES = {
    1: [("kernel=dispatch",), ("kernel=combine",)],
    2: [
        ("kernel=dispatch", "kernel.granularity=token", "routing=masked"),
        ("kernel=dispatch", "kernel.layout=packed", "routing=ragged", BULK),
        ("kernel=combine",),
        ("kernel=combine", "kernel.home_granularity=rank", BULK),
        ("kernel=dispatch", "measure.regime=chained", "measure.l2=warm"),
    ],
    8: [("kernel=dispatch",), ("kernel=combine",)],
}


def point_of(num_ranks, *words):
    shared = (f"hardware={NAME}", "launch.fabric=nvshmem", f"launch.num_ranks={num_ranks}")
    return compose_point(*shared, "workload=tiny", *FEW, "kernel.num_comm_ctas=3", *words)


@pytest.mark.parametrize("num_ranks", CASES)
def test_dispatch_and_combine_equal_the_oracle_between_processes(num_ranks, tmp_path):
    points = [point_of(num_ranks, *words) for words in CASES[num_ranks]]

    code = run_points(points, results_dir=tmp_path)

    assert faults_of(tmp_path, num_ranks=num_ranks) == []
    assert (code, validate([str(tmp_path)])) == (0, 0)


def test_a_rank_that_sends_nothing_is_missed_and_the_next_point_runs(tmp_path):
    tokens = (SPOILED_TOKENS, SPOILED_TOKENS + 1)
    # A thousandth of what a wait gets here.
    words = ("kernel=dispatch", "launch.watchdog_ms=5")
    points = [point_of(2, *words, f"workload.num_tokens={count}") for count in tokens]

    code = run_points(points, results_dir=tmp_path, entry=rank_0_sends_nothing)

    assert code == 1
    status, reason = told(tmp_path)[tokens[0]]
    assert status == "timeout"
    pattern = (
        r"rank [01] waited 5 s \(launch\.watchdog_ms\): role receive, counter \d+: "
        r"expected \d+ rows, seen \d+; epoch 1"
    )
    assert re.fullmatch(pattern, reason), reason
    assert told(tmp_path)[tokens[1]] == ("ok", "")


def test_a_rank_that_fails_alone_stops_its_peers_kernel_and_the_next_point_runs(tmp_path):
    tokens = (SPOILED_TOKENS, SPOILED_TOKENS + 1)
    # Far beyond the point's own limit: nothing but the word of rank 1 ends what waits for it.
    words = ("kernel=dispatch", "launch.watchdog_ms=2000", "launch.time_limit_s=200")
    points = [point_of(2, *words, f"workload.num_tokens={count}") for count in tokens]
    begin = time.monotonic()

    code = run_points(points, results_dir=tmp_path, entry=rank_1_fails_in_the_loop)

    assert code == 1
    assert told(tmp_path) == {
        tokens[0]: ("runtime_error", "rank 1: IndexError: made up"),
        tokens[1]: ("ok", ""),
    }
    assert time.monotonic() - begin < 150
    # All ranks were fine, so they ended NVSHMEM together.
    assert [line for path in tmp_path.glob("*/*") for line in unfinished(path)] == []


def test_what_no_rank_can_run_is_told_once_by_its_sentence(tmp_path):
    code = run_points(
        [point_of(2, "kernel=dispatch", "kernel.num_comm_ctas=100000")], results_dir=tmp_path
    )

    assert code == 1
    ((status, reason),) = told(tmp_path).values()
    assert status == "runtime_error"
    # Of one rank: the others' CTAs run in turns of their own.
    begin = r"kernel\.num_comm_ctas=100000: \d+ SMs hold \d+ CTAs of 16 warps a rank"
    assert re.match(begin, reason)
    assert [line for path in tmp_path.glob("*/*") for line in unfinished(path)] == []
