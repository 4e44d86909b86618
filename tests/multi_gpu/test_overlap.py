"""Both fused operations between GPUs: products and tokens, bit for bit those of the sequence.

A rank on each GPU. Every point also passes the gate of a measurement: FP32 oracle before and after
timing.
"""

import re

import pyarrow.parquet as pq
import pytest

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(900)]

torch = pytest.importorskip("torch")
if torch.cuda.device_count() < 2:
    pytest.skip("needs two or more NVIDIA GPUs", allow_module_level=True)
pytest.importorskip("nvshmem")

from tests.gpu.fused_points import (  # noqa: E402
    CASES,
    DEAD_RANK,
    DEATH_CODE,
    FINE,
    HIGH_THRESHOLD,
    NO_SENDS,
    NO_TILE,
    SIZES,
    fused_equals_sequential,
    spoiled,
)
from tests.gpu.processes import faults_of, told  # noqa: E402
from tests.launch.points import compose_point  # noqa: E402
from tilepipe.config.detect import hardware_option  # noqa: E402
from tilepipe.launch.driver import run_points  # noqa: E402
from tilepipe.validate import main as validate  # noqa: E402

NAME = hardware_option()
if NAME.endswith("_x1"):
    pytest.skip("needs GPUs that have a hardware option of several", allow_module_level=True)
NUM_GPUS = int(NAME.rpartition("_x")[2])

FEW = ("measure=quick", "measure.num_iters=3", "launch.time_limit_s=200")
TORCH = "measure.baselines=[torch]"
# Contender of torch, and where two have a name, which -> words.
BESIDE = {
    "torch_dispatch": ("kernel=dispatch",),
    "torch_combine": ("kernel=combine", "routing=masked"),
    "torch_sequential-out": (*CASES["out_plain"], "routing=ragged"),
    "torch_sequential-home": CASES["home_bulk_token"],
}
# Far more than one rank's first launch is behind another's.
WAITED = r"rank \d waited 2 s \(launch\.watchdog_ms\): role "


def point_of(*words, num_ranks=NUM_GPUS):
    group = (f"hardware={NAME}", f"launch.num_ranks={num_ranks}", "workload=tiny", *FEW)
    return compose_point(*group, *SIZES, *words)


@pytest.mark.parametrize("name", CASES)
def test_a_fused_launch_equals_oracle_and_sequence_between_gpus(name, tmp_path):
    code = run_points([point_of(*CASES[name])], results_dir=tmp_path, entry=fused_equals_sequential)

    assert faults_of(tmp_path, num_ranks=NUM_GPUS) == []
    assert (code, validate([str(tmp_path)])) == (0, 0)


@pytest.mark.parametrize("name", ["out_plain", "home_plain"])
def test_two_ranks_on_a_host_with_more_gpus_fuse_too(name, tmp_path):
    code = run_points(
        [point_of(*CASES[name], num_ranks=2)], results_dir=tmp_path, entry=fused_equals_sequential
    )

    assert faults_of(tmp_path, num_ranks=2) == []
    assert code == 0


@pytest.mark.parametrize("contender", BESIDE)
def test_torch_over_nccl_equals_the_oracle_beside_ours(contender, tmp_path):
    code = run_points([point_of(*BESIDE[contender], TORCH)], results_dir=tmp_path)

    assert faults_of(tmp_path, num_ranks=NUM_GPUS) == []
    assert (code, validate([str(tmp_path)])) == (0, 0)
    rows = pq.read_table(tmp_path / "tiny" / "summary.parquet").to_pylist()
    (row,) = [row for row in rows if row["contender"] == contender.partition("-")[0]]
    assert row["median_ns"] > 0


@pytest.mark.parametrize(
    ("words", "tokens", "pattern"),
    [
        (CASES["out_plain"], NO_SENDS, WAITED + r"gemm_receive, counter \d+: expected \d+ rows"),
        (
            *(CASES["out_plain"], HIGH_THRESHOLD),
            WAITED + r"gemm_receive, counter 0: expected \d+ rows, seen \d+; epoch \d+$",
        ),
        (
            *(CASES["home_plain"], NO_TILE),
            WAITED + r"(push, M tile|reduce, token) \d+: expected \d+ rows",
        ),
        (CASES["home_plain"], DEAD_RANK, f"rank 1 exited with code {DEATH_CODE}"),
    ],
    ids=["no_sends", "high_threshold", "no_tile", "dead_rank"],
)
def test_a_fault_of_one_rank_is_told_and_the_next_point_runs(words, tokens, pattern, tmp_path):
    limits = (*words, "launch.watchdog_ms=2000")
    points = [point_of(*limits, f"workload.num_tokens={count}") for count in (tokens, FINE)]

    code = run_points(points, results_dir=tmp_path, entry=spoiled)

    assert code == 1
    status, reason = told(tmp_path)[tokens]
    assert status == ("runtime_error" if tokens == DEAD_RANK else "timeout")
    assert re.match(pattern, reason), reason
    assert told(tmp_path)[FINE] == ("ok", "")
