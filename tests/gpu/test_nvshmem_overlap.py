"""Both fused operations of ranks in two processes that take turns on one GPU, bit for bit.

The real NVSHMEM, its peers mapped; nothing here is timed in earnest.
"""

import re

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
pytest.importorskip("nvshmem")

from tests.gpu.fused_points import (  # noqa: E402
    CASES,
    FINE,
    NO_SENDS,
    NO_TILE,
    SIZES,
    fused_equals_sequential,
    spoiled,
)
from tests.gpu.processes import faults_of, told  # noqa: E402
from tests.launch.points import compose_point  # noqa: E402
from tilepipe.launch.driver import run_points  # noqa: E402
from tilepipe.validate import main as validate  # noqa: E402

NAME = "h200_x1" if "H200" in torch.cuda.get_device_name() else "generic_x1"
FEW = ("measure=quick", "measure.num_warmups=1", "measure.num_iters=2", "launch.time_limit_s=400")
# A thousandth of what a wait gets where processes take turns.
WAITED = r"rank [01] waited 5 s \(launch\.watchdog_ms\): role "


def point_of(*words):
    group = (f"hardware={NAME}", "launch.fabric=nvshmem", "launch.num_ranks=2", "workload=tiny")
    return compose_point(*group, *FEW, "kernel.num_comm_ctas=4", *SIZES, *words)


@pytest.mark.parametrize(
    "name", ["out_plain", "out_bulk_token_fixed", "home_plain", "home_bulk_token"]
)
def test_a_fused_launch_equals_oracle_and_sequence_between_processes(name, tmp_path):
    code = run_points([point_of(*CASES[name])], results_dir=tmp_path, entry=fused_equals_sequential)

    assert faults_of(tmp_path, num_ranks=2) == []
    assert (code, validate([str(tmp_path)])) == (0, 0)


@pytest.mark.parametrize(
    ("words", "tokens", "role"),
    [
        (CASES["out_plain"], NO_SENDS, r"gemm_receive, counter \d+: expected \d+ rows"),
        (CASES["home_plain"], NO_TILE, r"(push, M tile|reduce, token) \d+: expected \d+ rows"),
    ],
    ids=["no_sends", "no_tile"],
)
def test_what_one_rank_leaves_out_is_missed_and_the_next_point_runs(words, tokens, role, tmp_path):
    limits = (*words, "launch.watchdog_ms=5")
    points = [point_of(*limits, f"workload.num_tokens={count}") for count in (tokens, FINE)]

    code = run_points(points, results_dir=tmp_path, entry=spoiled)

    assert code == 1
    status, reason = told(tmp_path)[tokens]
    assert status == "timeout"
    assert re.match(WAITED + role, reason), reason
    assert told(tmp_path)[FINE] == ("ok", "")
