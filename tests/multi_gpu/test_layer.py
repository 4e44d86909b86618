"""Whole layers with a rank on each of several GPUs: a rank that is ahead pushes rows home early."""

import pytest

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(900)]

torch = pytest.importorskip("torch")
if torch.cuda.device_count() < 2:
    pytest.skip("needs two or more NVIDIA GPUs", allow_module_level=True)
pytest.importorskip("nvshmem")

from tests.gpu.processes import faults_of  # noqa: E402
from tests.launch.points import compose_point  # noqa: E402
from tilepipe.config.detect import hardware_option  # noqa: E402
from tilepipe.launch.driver import run_points  # noqa: E402
from tilepipe.validate import main as validate  # noqa: E402

NAME = hardware_option()
if NAME.endswith("_x1"):
    pytest.skip("needs GPUs that have a hardware option of several", allow_module_level=True)
NUM_GPUS = int(NAME.rpartition("_x")[2])
SIZES = (
    *("workload.hidden=4096", "workload.intermediate=512"),
    *("workload.num_tokens=1024", "workload.num_experts=32", "workload.num_topk=4"),
)
CASES = [
    ("measure.baselines=[torch]",),
    ("kernel.num_comm_ctas=8",),
    ("kernel.copy=tma", "kernel.granularity=expert", "kernel.order=random"),
    ("kernel.granularity=token", "kernel.roles=fixed", "routing=masked"),
    ("kernel.layout=packed", "kernel.home_granularity=rank", "routing=ragged"),
    # Ranks that are done at very different times.
    ("routing=hot_rank", "kernel.copy=tma"),
]


def test_layers_equal_the_oracle_between_gpus(tmp_path):
    shared = (f"hardware={NAME}", f"launch.num_ranks={NUM_GPUS}", "workload=tiny")
    few = ("measure=quick", "measure.num_iters=5", "launch.time_limit_s=200")
    points = [compose_point(*shared, "kernel=moe_layer", *SIZES, *few, *words) for words in CASES]

    code = run_points(points, results_dir=tmp_path)

    assert faults_of(tmp_path, num_ranks=NUM_GPUS) == []
    assert (code, validate([str(tmp_path)])) == (0, 0)
