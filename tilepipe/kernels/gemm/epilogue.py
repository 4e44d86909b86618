"""From float32 sums in registers to bf16 pairs, and from there to where a block is stored from.

Knows nothing of pipelines, tiles and semaphores.

Registers. A warp holds 16 rows of a block and all its columns. Of columns 8j .. 8j + 7 lane l holds
four sums: columns 8j + 2(l % 4) and the next one, of row l / 4 and then of row l / 4 + 8. A pair of
columns becomes one word of two bf16, the first column in its lower half: word 2j + h is that of
columns group j and row half h.

`staged_byte`, `matrix_place` and the quad's exchange are written in operators that Python integers
and device integers share: tests follow every value from its sum to its byte.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from tilepipe.kernels.gemm.choices import Epilogue
from tilepipe.kernels.memory import store_words

__all__ = [
    "matrix_place",
    "neighbours_of",
    "packed_words",
    "row_scales",
    "stage_words",
    "staged_byte",
    "store_words_directly",
    "swiglu",
    "words_kept",
    "words_to_send",
]

# exp(x) = 2 ** (x log2 e)
_LOG2_E = 1.4426950408889634


def staged_byte(row: Any, column: Any) -> Any:
    """Where an element of a 64 x 64 block of bf16 lies in its buffer.

    The 128-byte swizzle of TMA: 16-byte pieces of a row, 128 bytes long, change places by the row's
    last three bits, so that eight rows of one column lie in eight different banks' groups.
    """
    return row * 128 + ((column // 8) ^ (row % 8)) * 16 + column % 8 * 2


def matrix_place(lane: Any, warp: Any, pair: Any) -> tuple[Any, Any]:
    """Row and first column of the 8 elements whose address lane `lane` gives to `stmatrix`.

    Four 8 x 8 matrices: those of column groups 2 x pair and the next, of both row halves each.
    Lanes 8i .. 8i + 7 give the rows of matrix i; matrix i is word i of `pair`'s four.
    """
    row = warp * 16 + lane // 8 % 2 * 8 + lane % 8
    return row, pair * 16 + lane // 16 * 8


@cute.jit
def packed_words(
    sums: cute.Tensor,  # float32 of one block: 2 x 2 x column groups
    first: cutlass.Constexpr,  # output column group to begin with, of 8 columns
    count: cutlass.Constexpr,  # output column groups
    num_groups: cutlass.Constexpr,  # column groups of the block's sums
    scales: cutlass.Constexpr,  # of both row halves; None without row scale
    lane: Int32,
    epilogue: cutlass.Constexpr,
):
    """Words of the columns groups first .. first + count - 1 of the output, rounded to bf16."""
    words = cute.make_rmem_tensor(cute.make_layout(2 * count), Int32)
    values = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    for j in cutlass.range_constexpr(count):
        group = first + j
        for half in cutlass.range_constexpr(2):
            if cutlass.const_expr(epilogue is Epilogue.swiglu_interleaved):
                # Four outputs of either of two groups; word by word they must be neighbours.
                for side in cutlass.range_constexpr(2):
                    at = 4 * (2 * group + side) + 2 * half
                    values[side] = swiglu(sums[at], sums[at + 1])
                words[2 * j + half] = _neighbours(_rounded(values), lane)
            else:
                for column in cutlass.range_constexpr(2):
                    at = 4 * group + 2 * half + column
                    if cutlass.const_expr(epilogue is Epilogue.swiglu_concatenated):
                        values[column] = swiglu(sums[at], sums[at + 2 * num_groups])
                    elif cutlass.const_expr(epilogue is Epilogue.row_scale):
                        values[column] = sums[at] * scales[half]
                    else:
                        values[column] = sums[at]
                words[2 * j + half] = _rounded(values)
    return words


def _rounded(values: cute.Tensor) -> Int32:
    """Two float32 as one word of bf16, each rounded to nearest."""
    pair = cute.make_rmem_tensor(cute.make_layout(2), BFloat16)
    pair.store(values.load().to(BFloat16))
    return cute.recast_tensor(pair, Int32)[0]


def swiglu(gate: Float32, up: Float32) -> Float32:
    """silu(gate) x up; approximate exp2 and reciprocal are good to some 2^-22."""
    denominator = Float32(1.0) + cute.math.exp2(gate * Float32(-_LOG2_E), fastmath=True)
    return gate * Float32(cute.arch.rcp_approx(denominator)) * up


def neighbours_of(lane: Any) -> tuple[Any, Any, Any]:
    """Lanes whose words hold the two outputs of this lane, and which half of them: see below."""
    quad = lane % 4
    return lane - quad + quad * 2 % 4, lane - quad + quad * 2 % 4 + 1, quad // 2


def _neighbours(word: Int32, lane: Int32) -> Int32:
    """Outputs 2q and 2q + 1 of eight, for lane q of a quad.

    Lane q has made outputs q (lower half) and 4 + q (upper half) of them.
    """
    low_lane, high_lane, upper = neighbours_of(lane)
    low = cute.arch.shuffle_sync(word, low_lane)
    high = cute.arch.shuffle_sync(word, high_lane)
    selector = Int32(0x5410) + upper * Int32(0x2222)
    return Int32(cute.arch.prmt(low, high, selector))


@cute.jit
def row_scales(scale: cute.Pointer, row: Int32, num_rows: Int32, warp: Int32, lane: Int32):
    """Factors of the two rows of a block that this lane holds; rows that do not exist have none."""
    scales = cute.make_tensor(scale, cute.make_layout(1 << 30))
    pair = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    for half in cutlass.range_constexpr(2):
        within = warp * 16 + lane // 4 + 8 * half
        pair[half] = Float32(0.0)
        if within < num_rows:
            pair[half] = scales[row + within]
    return pair


@cute.jit
def stage_words(
    words: cute.Tensor,  # 16 words: 64 columns of two row halves
    buffer_address: Int32,  # shared memory of the block's buffer, at a multiple of 1024 bytes
    warp: Int32,  # of the warpgroup
    lane: Int32,
):
    """Write a block of 64 rows x 64 columns. Called by all lanes of a warpgroup's four warps."""
    for pair in cutlass.range_constexpr(4):
        row, column = matrix_place(lane, warp, pair)
        cute.arch.inline_ptx(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[
                buffer_address + staged_byte(row, column),
                *(words[4 * pair + i] for i in range(4)),
            ],
        )


@cute.jit
def store_words_directly(
    words: cute.Tensor,  # 8 words: 32 columns of two row halves
    address: Int64,  # of the block's first row and of its first of these columns
    pitch_bytes: cutlass.Constexpr,
    num_rows: Int32,  # of the block that exist
    num_columns: Int32,  # of these that exist, a multiple of 8
    warp: Int32,
    lane: Int32,
):
    """Store 16 bytes a lane: the four lanes of a quad first exchange words, then hold one column
    group of a row each."""
    quad = lane % 4
    for half in cutlass.range_constexpr(2):
        row = warp * 16 + lane // 4 + 8 * half
        held = [words[2 * j + half] for j in range(4)]
        for step in cutlass.range_constexpr(2):
            held = _exchanged(held, 1 << step, quad)
        if row < num_rows and quad * 8 < num_columns:
            store_words(address + Int64(row) * pitch_bytes + Int64(quad) * 16, held)


def _exchanged(held, distance: int, quad: Int32):
    """One step of the transposition of 4 words in 4 lanes."""
    got = [
        cute.arch.shuffle_sync_bfly(word, offset=distance)
        for word in words_to_send(held, distance, quad)
    ]
    return words_kept(held, got, distance, quad)


def words_to_send(held: Any, distance: int, quad: Any) -> list[Any]:
    """What lane `quad` of four gives to lane quad ^ distance: of every pair of words that lie
    `distance` apart, the upper one where the lane is the lower one, else the lower."""
    mask = -(quad // distance % 2)
    return [
        held[low + distance] ^ ((held[low] ^ held[low + distance]) & mask)
        for low in range(4)
        if low & distance == 0
    ]


def words_kept(held: Any, got: Any, distance: int, quad: Any) -> list[Any]:
    """The four words after what `words_to_send` gave has come in its place."""
    mask = -(quad // distance % 2)
    kept = list(held)
    lows = [low for low in range(4) if low & distance == 0]
    for low, came in zip(lows, got, strict=True):
        kept[low] = held[low] ^ ((held[low] ^ came) & mask)
        kept[low + distance] = came ^ ((held[low + distance] ^ came) & mask)
    return kept
