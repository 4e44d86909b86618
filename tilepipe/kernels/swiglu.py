"""SwiGLU as a pass of its own: what the first GEMM of a layer does in its epilogue for nothing.

Knows nothing of plans, experts and of who has made the rows; a layer is measured against it.
"""

from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_ptr

from tilepipe.kernels.compile import Code, compile_code
from tilepipe.kernels.gemm.epilogue import swiglu
from tilepipe.kernels.kept import kept
from tilepipe.kernels.memory import VECTOR_BYTES, load_vector, store_words, words_of
from tilepipe.kernels.reduction import two_bf16, two_floats

__all__ = ["bind_swiglu", "compile_swiglu"]

_THREADS = 512
_CTAS_OF_SM = 4
_VALUES = VECTOR_BYTES // 2  # bf16 of a vector


@cute.jit
def _activate(gate: Int32, up: Int32) -> Int32:
    """Two outputs of a word of gates and one of ups."""
    gates, ups = two_floats(gate), two_floats(up)
    return two_bf16(swiglu(gates[0], ups[0]), swiglu(gates[1], ups[1]))


def swiglu_entry(columns: int) -> Any:
    """Host function of the pass; `columns` of its output, a multiple of 8."""
    vectors = columns // _VALUES

    @cute.kernel
    def kernel(rows: Int64, out: Int64, num_rows: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        first, step = block * _THREADS + thread, blocks * _THREADS
        for i in cutlass.range(first, num_rows * vectors, step, unroll=1):
            # A row of the input is as long as two of the output.
            gates = rows + (Int64(i) + Int64(i // vectors) * vectors) * VECTOR_BYTES
            gate = words_of(load_vector(gates))
            up = words_of(load_vector(gates + vectors * VECTOR_BYTES))
            activated = [_activate(*pair) for pair in zip(gate, up, strict=True)]
            store_words(out + Int64(i) * VECTOR_BYTES, activated)

    @cute.jit
    def host(
        rows: cute.Pointer,  # (rows, 2 x columns): gates, then ups
        out: cute.Pointer,  # (rows, columns)
        num_rows: Int32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        kernel(Int64(rows.toint()), Int64(out.toint()), num_rows).launch(
            grid=[num_ctas, 1, 1], block=[_THREADS, 1, 1], stream=stream
        )

    return host


def _pointer(address: int) -> Any:
    return make_ptr(BFloat16, address, cute.AddressSpace.gmem, assumed_align=VECTOR_BYTES)


@kept
def compile_swiglu(columns: int) -> Code:
    """Compile for stand-in arguments, once in a process; needs no GPU."""
    return compile_code(
        swiglu_entry(columns), (_pointer(0), _pointer(0), Int32(1), Int32(1), make_fake_stream())
    )


def bind_swiglu(
    rows: torch.Tensor,  # (num_rows, 2 x columns) bf16: gates, then ups
    out: torch.Tensor,  # (num_rows, columns) bf16
    *,
    num_sms: int,
) -> Callable[[], None]:
    """A launch on torch's current stream, on all SMs. The tensors must outlive it.

    Raises ValueError for tensors that 16 bytes at a time do not fit.
    """
    num_rows, columns = out.shape
    whole = rows.is_contiguous() and out.is_contiguous() and columns % _VALUES == 0
    if not whole or tuple(rows.shape) != (num_rows, 2 * columns):
        raise ValueError(
            f"SwiGLU of {tuple(rows.shape)} into {tuple(out.shape)}: both without gaps, twice as "
            f"many columns as a multiple of {_VALUES}; make them so"
        )
    kept = (rows, out)
    function = compile_swiglu(columns).function.to(torch.cuda.current_device())
    arguments = (
        *(_pointer(tensor.data_ptr()) for tensor in (rows, out)),
        *(Int32(num_rows), Int32(_CTAS_OF_SM * num_sms)),
    )

    def launch() -> None:
        assert kept, "memory that the launch reads and writes"
        function(*arguments, cuda.CUstream(torch.cuda.current_stream().cuda_stream))

    return launch
