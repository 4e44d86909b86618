"""Compile a grouped GEMM, bind it to tensors, launch it; and the memory it needs beside them.

Knows nothing of who fills its operands.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import numpy as np
import torch
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_ptr

from tilepipe.fabric.device_heap import DeviceHeap
from tilepipe.fabric.host import ArraySpec
from tilepipe.fabric.table import NUM_WORDS, Slot
from tilepipe.kernels.compile import Code, compile_code
from tilepipe.kernels.gemm.choices import Epilogue, Major
from tilepipe.kernels.gemm.grouped_sm90 import NUM_THREADS, gemm_entry
from tilepipe.kernels.gemm.plan import TILE_K, KernelPlan, check_workspace
from tilepipe.kernels.gemm.tiles import RECORD_WORDS, num_to_cut, pack_cluster_tiles
from tilepipe.kernels.kept import kept
from tilepipe.kernels.residency import Residency, residency_of
from tilepipe.schedule.layout import ReceiveLayout

__all__ = ["GroupedGemm", "alone_specs", "compile_gemm", "upload_tiles", "wide_descriptor"]


def _pointer(dtype: Any, address: int, align: int) -> Any:
    return make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)


def compile_gemm(plan: KernelPlan, *, num_ranks: int = 1) -> Code:
    """Compile for stand-in arguments; needs no GPU. One code serves any number of CTAs."""
    return _compile_any(replace(plan, num_gemm_ctas=plan.cluster_m, workspace_bytes=0), num_ranks)


@kept
def _compile_any(plan: KernelPlan, num_ranks: int) -> Code:
    return compile_code(
        gemm_entry(plan, num_ranks=num_ranks),
        (
            *(_pointer(Int64, 0, 16), Int32(0)),
            *(_pointer(BFloat16, 0, 16) for _ in range(3)),
            *(_pointer(Float32, 0, 4), _pointer(Int64, 0, 128), _pointer(Int64, 0, 128)),
            *(Int32(1), Int32(1), Int64(1), make_fake_stream()),
        ),
    )


def alone_specs(
    *, num_tiles: int, num_chunks: int, num_counters: int, num_rows: int
) -> dict[Slot, ArraySpec]:
    """Buffers of a rank that does nothing but multiply, for a heap.

    `num_tiles` are M tiles of the Plan; there is room for tiles of half their height.
    """
    words = {
        Slot.words: NUM_WORDS,
        Slot.abort: 1,
        Slot.ready: max(num_counters, 1),
        Slot.ready_expected: max(num_counters, 1),
        Slot.row_flag: max(num_rows, 1),
        Slot.tile_stored: max(num_tiles * num_chunks, 1),
    }
    specs = {slot: ArraySpec(shape=(size,), dtype=np.int32) for slot, size in words.items()}
    specs[Slot.gemm_tiles] = ArraySpec(shape=(2 * max(num_tiles, 1), RECORD_WORDS), dtype=np.int32)
    return specs


def upload_tiles(
    heap: DeviceHeap, rank: int, layout: ReceiveLayout, plan: KernelPlan
) -> np.ndarray:  # (num_cluster_tiles, RECORD_WORDS) int32
    """Tell the launches that follow which tiles there are; returns their records.

    Raises ValueError where the heap has no room for them.
    """
    num_cut = 0
    if plan.cuts_tail:
        num_cut = num_to_cut(
            layout,
            tile_m=plan.tile_m,
            raster_m=plan.tuning.raster_m,
            num_n_tiles=plan.num_n_tiles,
            num_chunks=plan.num_chunks,
            num_clusters=plan.num_gemm_ctas,
        )
    records = pack_cluster_tiles(
        layout,
        num_cut=num_cut,
        tile_m=plan.tile_m,
        cluster_m=plan.cluster_m,
        raster_m=plan.tuning.raster_m,
        walk=plan.tuning.walk,
        plan_tile_m=plan.problem.group_align,
    )
    heap.fill(rank, plan.tiles_slot, records)
    heap.tensor(rank, Slot.words)[int(plan.tiles_word)] = len(records)
    return records


def wide_descriptor(plan: KernelPlan, b: torch.Tensor) -> torch.Tensor:  # (128,) uint8
    """What loads of B are told, like the kernel's own but for fetches of 256 bytes from memory.

    CuTe has no name for their width. The next 64 columns of K, which every tile takes next, come
    along into L2.
    """
    k, n = plan.problem.k, plan.problem.n
    pitch = k * b.element_size()
    failed, found = cuda.cuTensorMapEncodeTiled(
        cuda.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        *(3, b.data_ptr()),
        [cuda.cuuint64_t(size) for size in (k, n, len(b))],
        [cuda.cuuint64_t(size) for size in (pitch, n * pitch)],
        [cuda.cuuint32_t(size) for size in (TILE_K, plan.tile_n // plan.num_b_parts, 1)],
        [cuda.cuuint32_t(1)] * 3,
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if failed != cuda.CUresult.CUDA_SUCCESS:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled: {failed.name} for B {tuple(b.shape)} at {b.data_ptr():#x}; "
            "plan with wide_b=False"
        )
    words = np.array([int(word) for word in found.opaque], np.uint64)
    descriptor = torch.from_numpy(words.view(np.uint8)).to(b.device)
    # Launches may go to another stream.
    torch.cuda.current_stream().synchronize()
    return descriptor


class GroupedGemm:
    """The kernel of one plan, loaded on the current device."""

    def __init__(self, plan: KernelPlan, *, num_ranks: int = 1, limit_ns: int) -> None:
        """`limit_ns`: of one wait for rows. Raises ValueError where a CTA would find no place."""
        self.plan = plan
        self._limit_ns = limit_ns
        code = compile_gemm(plan, num_ranks=num_ranks)
        self.residency: Residency = residency_of(
            code, num_threads=NUM_THREADS, dynamic_bytes=plan.smem_bytes
        )
        if self.residency.ctas_per_sm < 1:
            raise ValueError(
                f"num_stages={plan.num_stages}: a CTA with {plan.smem_bytes} bytes of shared "
                "memory finds no SM on this GPU; choose fewer stages"
            )
        self._function = code.function.to(torch.cuda.current_device())
        self._slots: dict[int, torch.Tensor] = {}

    def bind(
        self,
        heap: DeviceHeap,
        rank: int,
        *,
        a: torch.Tensor,  # (rows, k) bf16
        b: torch.Tensor,  # (experts, n, k) bf16; with b_major=n (experts, k, n)
        d: torch.Tensor,  # (rows, out_n) bf16
        scale: torch.Tensor | None = None,  # (rows,) float32, of Epilogue.row_scale
        workspace: torch.Tensor | None = None,  # bytes; None: one of its own
    ) -> Callable[[], None]:
        """A launch on torch's current stream; raises ValueError for tensors it was not made for.

        The tensors must outlive it.
        """
        self._check(a, b, d, scale)
        if workspace is None:
            workspace = torch.zeros(
                max(self.plan.workspace_bytes, 128), dtype=torch.uint8, device=a.device
            )
        check_workspace(
            self.plan,
            num_bytes=workspace.numel() * workspace.element_size(),
            address=workspace.data_ptr(),
        )
        b_descriptor = workspace
        if self.plan.widens_b:
            b_descriptor = wide_descriptor(self.plan, b)
        for slot in (workspace, b_descriptor):
            self._slots[slot.data_ptr()] = slot
        arguments = (
            *(_pointer(Int64, heap.table.data_ptr(), 16), Int32(rank)),
            *(_pointer(BFloat16, tensor.data_ptr(), 16) for tensor in (a, b, d)),
            _pointer(Float32, 0 if scale is None else scale.data_ptr(), 4),
            *(_pointer(Int64, slot.data_ptr(), 128) for slot in (workspace, b_descriptor)),
            *(Int32(len(a)), Int32(self.plan.num_gemm_ctas), Int64(self._limit_ns)),
        )

        def launch() -> None:
            self._function(*arguments, cuda.CUstream(torch.cuda.current_stream().cuda_stream))

        return launch

    def _check(
        self, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, scale: torch.Tensor | None
    ) -> None:
        plan, problem = self.plan, self.plan.problem
        inner = (problem.n, problem.k) if problem.b_major is Major.k else (problem.k, problem.n)
        wanted = {
            "A": (a, (len(a), problem.k), (plan.a_pitch, 1)),
            "B": (b, (problem.num_experts, *inner), (problem.n * problem.k, inner[1], 1)),
            "D": (d, (len(a), plan.out_n), (plan.d_pitch, 1)),
        }
        for name, (tensor, shape, stride) in wanted.items():
            if tuple(tensor.shape) != shape or tensor.stride() != stride:
                raise ValueError(
                    f"{name} is {tuple(tensor.shape)} with strides {tensor.stride()}: the plan has "
                    f"{shape} with {stride}; plan for what is there"
                )
            if tensor.dtype is not torch.bfloat16 or tensor.data_ptr() % 16:
                raise ValueError(
                    f"{name} is {tensor.dtype} at {tensor.data_ptr():#x}: bf16 at a multiple of 16 "
                    "bytes is multiplied; convert or copy it"
                )
        scaled = problem.epilogue is Epilogue.row_scale
        fits = scale is not None and (scale.dtype, len(scale)) == (torch.float32, len(a))
        if scaled and not fits:
            raise ValueError("scale: epilogue=row_scale takes a float32 of every row; pass it")
