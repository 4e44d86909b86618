"""Code from the disk launches as code that has just been compiled."""

import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from tests.gpu.gemms import Case  # noqa: E402
from tilepipe.kernels.gemm import launch  # noqa: E402
from tilepipe.kernels.gemm.plan import GemmTuning  # noqa: E402
from tilepipe.kernels.kept import codes_kept  # noqa: E402


@pytest.fixture
def forget():
    """Forgets what this process has compiled, as a process that begins."""
    launch._compile_any.cache_clear()
    yield launch._compile_any.cache_clear
    launch._compile_any.cache_clear()


def products(cluster_m):
    """Rows of the same GEMM on all SMs and on some."""
    found = []
    for num_gemm_ctas in (132, 20):
        case = Case(
            [130, 0, 64, 257], tuning=GemmTuning(cluster_m=cluster_m), num_gemm_ctas=num_gemm_ctas
        )
        case.run()
        assert case.verdict().passed, case.picture()
        found.append(case.d[case.held].view(torch.int16))
    return found


@pytest.mark.parametrize("cluster_m", [1, 2])
def test_a_gemm_from_the_disk_makes_the_same_bits(forget, tmp_path, monkeypatch, cluster_m):
    with codes_kept(tmp_path):
        compiled = products(cluster_m)
        forget()
        monkeypatch.setattr(launch, "compile_code", None)  # compiling again would fail
        loaded = products(cluster_m)

    assert all(torch.equal(compiled[0], other) for other in (compiled[1], *loaded))
