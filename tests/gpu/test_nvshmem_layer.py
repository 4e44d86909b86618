"""Whole layers of ranks in processes of their own that take turns on one GPU."""

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
pytest.importorskip("nvshmem")

from tests.gpu.processes import faults_of  # noqa: E402
from tests.launch.points import compose_point  # noqa: E402
from tilepipe.launch.driver import run_points  # noqa: E402
from tilepipe.validate import main as validate  # noqa: E402

NAME = "h200_x1" if "H200" in torch.cuda.get_device_name() else "generic_x1"
# Both GEMMs in tiles of all experts, rows home in chunks.
SIZES = ("workload.hidden=4096", "workload.intermediate=256", "workload.num_tokens=200")
CASES = [
    (),
    ("kernel.copy=tma", "kernel.granularity=expert", "kernel.order=random"),
    ("kernel.granularity=token", "kernel.roles=fixed", "routing=masked"),
    ("kernel.layout=packed", "kernel.home_granularity=rank", "routing=ragged"),
]


def point_of(*words):
    shared = (f"hardware={NAME}", "launch.fabric=nvshmem", "launch.num_ranks=2", "workload=tiny")
    few = ("measure=quick", "measure.num_warmups=1", "measure.num_iters=2")
    limits = ("launch.time_limit_s=400", "kernel.num_comm_ctas=4")
    return compose_point(*shared, "kernel=moe_layer", *SIZES, *few, *limits, *words)


def test_layers_equal_the_oracle_between_processes(tmp_path):
    code = run_points([point_of(*words) for words in CASES], results_dir=tmp_path)

    assert faults_of(tmp_path, num_ranks=2) == []
    assert (code, validate([str(tmp_path)])) == (0, 0)
