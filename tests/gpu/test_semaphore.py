"""Publish, wait and claim between CTAs of a real device: rows whole, waits bounded, no place
claimed twice."""

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
TORCH = {Int32: torch.int32, Int64: torch.int64}


def pointer(tensor, dtype=Int32):
    return make_ptr(dtype, tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=16)


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


LATE = (20_000, 40_000)  # microseconds of a wait that reaches its limit


@pytest.mark.parametrize(
    ("dtype", "present", "expected", "abort", "came", "microseconds"),
    [
        (Int32, 1, 1, 0, 1, (0, 1_000)),  # it is there
        (Int32, 0, 1, 0, 2, LATE),  # it never comes: the limit ends the wait
        (Int32, 0, 1, 1, 2, (0, 5_000)),  # somebody gave up: the abort word ends it at once
        (Int64, 3 << 32 | 7, 3 << 32, 0, 1, (0, 1_000)),
        (Int64, 2 << 32 | 0xFFFF_FFFF, 3 << 32, 0, 2, LATE),  # both halves count
        (Int64, 2 << 32, 3 << 32, 1, 2, (0, 5_000)),
    ],
)
def test_a_wait_ends_by_its_word_its_limit_or_the_abort_word(
    dtype, present, expected, abort, came, microseconds
):
    word = torch.tensor([present], dtype=TORCH[dtype], device="cuda")
    stop, found = (torch.tensor(v, dtype=torch.int32, device="cuda") for v in ([abort], [0, 0]))
    arguments = (
        *(pointer(word, dtype), dtype(expected), pointer(stop), pointer(found)),
        *(Int64(20_000_000), stream()),
    )
    launch = cute.compile(programs.wait_alone(dtype), *arguments)

    launch(*arguments)

    answer, took_us = found.tolist()
    assert answer == came
    assert microseconds[0] <= took_us <= microseconds[1]


@pytest.mark.parametrize("dtype", [Int32, Int64])
def test_no_place_is_claimed_twice_and_the_highest_number_stays(dtype):
    size = 64 * programs.THREADS
    queue, highest = (
        torch.full((1,), start, dtype=TORCH[dtype], device="cuda") for start in (0, -5)
    )
    marks = torch.zeros(size, dtype=torch.int32, device="cuda")
    arguments = (pointer(queue, dtype), pointer(highest, dtype), pointer(marks), stream())
    launch = cute.compile(programs.claims(dtype, 64), *arguments)

    launch(*arguments)

    assert (queue.item(), highest.item()) == (size, size - 1)
    # Every thread has left its number plus one at a place of its own.
    assert marks.sort().values.tolist() == list(range(1, size + 1))
