"""Publish and wait between CTAs of a real device: rows arrive whole, waits are bounded."""

import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

import cuda.bindings.driver as cuda  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from cutlass import Int32, Int64  # noqa: E402
from cutlass.cute.runtime import make_ptr  # noqa: E402

from tests.gpu import programs  # noqa: E402
from tilepipe.kernels.semaphore import Scope  # noqa: E402

LIMIT_NS = 2_000_000_000


def pointer(tensor):
    return make_ptr(Int32, tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=16)


def stream():
    return cuda.CUstream(torch.cuda.current_stream().cuda_stream)


@pytest.mark.parametrize("scope", list(Scope))
def test_rows_arrive_whole_and_fresh_in_a_thousand_launches(scope):
    size = programs.ROWS * programs.THREADS
    rows, out = (torch.zeros(size, dtype=torch.int32, device="cuda") for _ in range(2))
    words = torch.zeros(4, dtype=torch.int32, device="cuda")
    arguments = (pointer(rows), pointer(out), pointer(words))
    launch = cute.compile(programs.relay(scope), *arguments, Int32(0), Int64(LIMIT_NS), stream())
    numbers = torch.arange(size, dtype=torch.int32, device="cuda")

    wrong = 0
    for value in range(1, 1001):
        words.zero_()
        launch(*arguments, Int32(value), Int64(LIMIT_NS), stream())
        wrong += int((out != numbers + value).sum())

    assert wrong == 0


@pytest.mark.parametrize(
    ("present", "abort", "came", "microseconds"),
    [
        (1, 0, 1, (0, 1_000)),  # it is there
        (0, 0, 2, (20_000, 40_000)),  # it never comes: the limit ends the wait
        (0, 1, 2, (0, 5_000)),  # somebody gave up: the abort word ends it at once
    ],
)
def test_a_wait_ends_by_its_word_its_limit_or_the_abort_word(present, abort, came, microseconds):
    words = torch.tensor([present, abort, 0, 0], dtype=torch.int32, device="cuda")
    launch = cute.compile(programs.wait_alone, pointer(words), Int64(20_000_000), stream())

    launch(pointer(words), Int64(20_000_000), stream())

    found = words.tolist()
    assert found[2] == came
    assert microseconds[0] <= found[3] <= microseconds[1]
