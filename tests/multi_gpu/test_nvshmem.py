"""A rank on each of several GPUs: rows, flags and aborts cross links, bit for bit."""

import re

import pyarrow.parquet as pq
import pytest

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(900)]

torch = pytest.importorskip("torch")
if torch.cuda.device_count() < 2:
    pytest.skip("needs two or more NVIDIA GPUs", allow_module_level=True)
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
from tilepipe.config.detect import hardware_option  # noqa: E402
from tilepipe.launch.driver import run_points  # noqa: E402
from tilepipe.validate import main as validate  # noqa: E402

NAME = hardware_option()
if NAME.endswith("_x1"):
    pytest.skip("needs GPUs that have a hardware option of several", allow_module_level=True)
NUM_GPUS = int(NAME.rpartition("_x")[2])

FEW = ("measure=quick", "measure.num_iters=3", "launch.time_limit_s=200")
BULK = "kernel.copy=tma"
# A few MB a rank, of full-size rows.
LARGE = ("workload.hidden=7168", "workload.num_tokens=512", "workload.num_experts=32")
CASES = [
    ("kernel=dispatch",),
    ("kernel=dispatch", BULK),
    ("kernel=dispatch", "kernel.granularity=token", "routing=masked", *LARGE),
    ("kernel=dispatch", "kernel.granularity=expert", "routing=hot_rank", BULK, *LARGE),
    ("kernel=dispatch", "kernel.layout=packed", "routing=ragged", "kernel.order=random", *LARGE),
    ("kernel=dispatch", "routing=all_remote", "measure.regime=chained", "measure.l2=warm", *LARGE),
    ("kernel=combine",),
    ("kernel=combine", BULK, *LARGE),
    ("kernel=combine", "kernel.home_granularity=rank", "routing=masked", *LARGE),
    ("kernel=combine", "measure.regime=chained", "measure.l2=warm", BULK, *LARGE),
]


def point_of(*words, num_ranks=NUM_GPUS):
    group = (f"hardware={NAME}", f"launch.num_ranks={num_ranks}", "workload=tiny", *FEW)
    return compose_point(*group, "kernel.num_comm_ctas=8", *words)


def test_dispatch_and_combine_equal_the_oracle_between_gpus(tmp_path):
    code = run_points([point_of(*words) for words in CASES], results_dir=tmp_path)

    assert faults_of(tmp_path, num_ranks=NUM_GPUS) == []
    assert (code, validate([str(tmp_path)])) == (0, 0)
    rows = pq.read_table(tmp_path / "tiny" / "summary.parquet").to_pylist()
    moving = [row for row in rows if row["contender"] in ("dispatch", "combine", "push")]
    assert moving
    assert all(0 < row["link_share"] < 1 for row in moving)


def test_two_ranks_on_a_host_with_more_gpus_use_two_of_them(tmp_path):
    points = [point_of(kernel, num_ranks=2) for kernel in ("kernel=dispatch", "kernel=combine")]

    code = run_points(points, results_dir=tmp_path)

    assert faults_of(tmp_path, num_ranks=2) == []
    assert code == 0


def test_all_ranks_stop_after_the_same_iteration(tmp_path):
    words = ("measure.num_warmups=3", "measure.num_iters=10", "measure.max_iters=200")
    point = point_of("kernel=combine", *words, "measure.interval=0.02", *LARGE)

    code = run_points([point], results_dir=tmp_path)

    assert faults_of(tmp_path, num_ranks=NUM_GPUS) == []
    assert code == 0


def test_a_rank_that_sends_nothing_is_missed_and_the_next_point_runs(tmp_path):
    tokens = (SPOILED_TOKENS, SPOILED_TOKENS + 1)
    words = ("kernel=dispatch", "launch.watchdog_ms=500")
    points = [point_of(*words, f"workload.num_tokens={count}") for count in tokens]

    code = run_points(points, results_dir=tmp_path, entry=rank_0_sends_nothing)

    assert code == 1
    status, reason = told(tmp_path)[tokens[0]]
    assert status == "timeout"
    pattern = (
        r"rank \d waited 0\.5 s \(launch\.watchdog_ms\): role receive, counter \d+: "
        r"expected \d+ rows, seen \d+; epoch 1"
    )
    assert re.fullmatch(pattern, reason), reason
    assert told(tmp_path)[tokens[1]] == ("ok", "")


def test_a_rank_that_fails_alone_stops_its_peers_kernels_and_the_next_point_runs(tmp_path):
    tokens = (SPOILED_TOKENS, SPOILED_TOKENS + 1)
    # Beyond the point's own limit: nothing but the word of rank 1 ends what waits for it.
    words = ("kernel=dispatch", "launch.watchdog_ms=400000")
    points = [point_of(*words, f"workload.num_tokens={count}") for count in tokens]

    code = run_points(points, results_dir=tmp_path, entry=rank_1_fails_in_the_loop)

    assert code == 1
    assert told(tmp_path) == {
        tokens[0]: ("runtime_error", "rank 1: IndexError: made up"),
        tokens[1]: ("ok", ""),
    }
    assert [line for path in tmp_path.glob("*/*") for line in unfinished(path)] == []
