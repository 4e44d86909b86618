"""Memory-order faults on a real device; what one GPU cannot show is recorded, not claimed."""

import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

import cuda.bindings.driver as cuda  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from cutlass import Int32, Int64  # noqa: E402
from cutlass.cute.runtime import make_ptr  # noqa: E402

from tests.gpu import faults  # noqa: E402

LIMIT_NS = 2_000_000_000
LAUNCHES = 300


def wrong_words(*, fenced):
    size = faults.ROWS * faults.THREADS
    rows, out = (torch.zeros(size, dtype=torch.int32, device="cuda") for _ in range(2))
    words = torch.zeros(4, dtype=torch.int32, device="cuda")
    pointers = [
        make_ptr(Int32, tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=128)
        for tensor in (rows, out, words)
    ]
    stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    entry = faults.relay_to_bulk_reader(fenced=fenced)
    launch = cute.compile(entry, *pointers, Int32(0), Int64(LIMIT_NS), stream)
    numbers = torch.arange(size, dtype=torch.int32, device="cuda")
    wrong = 0
    for value in range(1, LAUNCHES + 1):
        words.zero_()
        launch(*pointers, Int32(value), Int64(LIMIT_NS), stream)
        wrong += int((out != numbers + value).sum())
    return wrong


def test_a_bulk_reader_behind_the_proxy_fence_reads_what_was_published():
    assert wrong_words(fenced=True) == 0


def test_a_bulk_reader_without_the_proxy_fence(record_testsuite_property):
    """The async proxy of an H200 reads from L2, where stores of another SM are as soon as they are
    published: a missing fence need not show between SMs. The figure is recorded."""
    record_testsuite_property("proxy_fence_dropped", wrong_words(fenced=False))
