"""Buffers of ranks as pointers, and rows as 16-byte vectors.

Knows nothing of plans and protocols. Loads and stores here are plain ones: their order against
flags is the business of semaphore.py.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import vector

from tilepipe.fabric.table import (
    NUM_SLOTS,
    OWN_SLOTS,
    PEER_SLOTS,
    Slot,
    Word,
    near_table_bytes,
)

__all__ = [
    "LANES",
    "VECTOR_BYTES",
    "address",
    "buffer",
    "element",
    "load_shared_words",
    "load_vector",
    "load_words",
    "pointer",
    "shared_table",
    "shuffle_wide",
    "store_vector",
    "store_words",
    "word",
    "words_of",
]

LANES = 32
VECTOR_BYTES = 16
# An extent for tensors whose real one the kernel never asks for.
_ANY = 1 << 30


def pointer(byte_address: Int64, dtype, align: int) -> cute.Pointer:
    """A global address as a pointer."""
    return cute.make_ptr(dtype, byte_address, cute.AddressSpace.gmem, assumed_align=align)


def address(table: cute.Pointer, rank: Int32, slot: Slot) -> Int64:
    """Address of a buffer of a rank, by the whole table or by what `shared_table` has of it."""
    place = rank * NUM_SLOTS + int(slot)
    if table.memspace == cute.AddressSpace.smem:
        place = int(slot) - PEER_SLOTS
        if slot < PEER_SLOTS:
            place = OWN_SLOTS + rank * PEER_SLOTS + int(slot)
    return cute.make_tensor(table, cute.make_layout(_ANY))[place]


@cute.jit
def shared_table(
    table: cute.Pointer,
    rank: Int32,  # that the CTA works for
    memory: cutlass.Constexpr,  # allocator of the kernel's shared memory
    num_ranks: cutlass.Constexpr,
    thread: Int32,
    num_threads: cutlass.Constexpr,
) -> cute.Pointer:
    """The table in shared memory: every fence of a warp empties L1, and rows look up addresses.

    Of peers it has the columns that are theirs to store into, and no others, for there is a GEMM
    that could have the room. Called by all threads of a CTA, first of all.
    """
    size = near_table_bytes(num_ranks) // 8
    own = memory.allocate_array(Int64, size, byte_alignment=128)
    source, target = cute.make_tensor(table, _ANY), cute.make_tensor(own, size)
    for i in cutlass.range(thread, size, num_threads, unroll=1):
        place = rank * NUM_SLOTS + PEER_SLOTS + i
        if i >= OWN_SLOTS:
            shared = i - OWN_SLOTS
            place = shared // PEER_SLOTS * NUM_SLOTS + shared % PEER_SLOTS
        target[i] = source[place]
    cute.arch.sync_threads()
    return own


def element(byte_address: Int64, index: Int32, dtype) -> cute.Pointer:
    """Pointer to one element of an array."""
    size = dtype.width // 8
    return pointer(byte_address + Int64(index) * size, dtype, size)


def buffer(byte_address: Int64, dtype) -> cute.Tensor:
    """An array of `dtype` without a known end."""
    return cute.make_tensor(pointer(byte_address, dtype, dtype.width // 8), cute.make_layout(_ANY))


def word(words: Int64, name: Word) -> cute.Pointer:
    """A word of a rank's block."""
    return pointer(words + int(name) * 4, Int32, 4)


def load_vector(byte_address: Int64):
    """16 bytes that will not be read again: no place in L1, whole lines into L2."""
    four = ir.VectorType.get([4], Int32.mlir_type)
    return cute.arch.load(
        pointer(byte_address, Int32, VECTOR_BYTES),
        four,
        level1_eviction_priority="evict_no_allocate",
        level_prefetch_size="size_256b",
    )


def load_words(byte_address: Int64) -> tuple[Int32, ...]:
    """Four words, 16-byte aligned, at once."""
    four = cute.arch.load(
        pointer(byte_address, Int32, VECTOR_BYTES), ir.VectorType.get([4], Int32.mlir_type)
    )
    return words_of(four)


def load_shared_words(shared_address: Int32) -> tuple[Int32, ...]:
    """Four words of shared memory, 16-byte aligned, at once."""
    four = cute.arch.load(
        cute.make_ptr(Int32, shared_address, cute.AddressSpace.smem, assumed_align=VECTOR_BYTES),
        ir.VectorType.get([4], Int32.mlir_type),
        ss="cta",
    )
    return words_of(four)


def words_of(four) -> tuple[Int32, ...]:
    """The words of a vector that `load_vector` has loaded."""
    return tuple(
        Int32(vector.extract(four, dynamic_position=[], static_position=[place]))
        for place in range(4)
    )


def store_vector(byte_address: Int64, value) -> None:
    """Store what `load_vector` has loaded."""
    cute.arch.store(
        pointer(byte_address, Int32, VECTOR_BYTES),
        value,
        level1_eviction_priority="evict_no_allocate",
    )


def store_words(byte_address: Int64, values) -> None:
    """Store four words, 16-byte aligned, at once."""
    four = vector.from_elements(
        ir.VectorType.get([4], Int32.mlir_type), [Int32(value).ir_value() for value in values]
    )
    store_vector(byte_address, four)


def shuffle_wide(value: Int64, lane: Int32) -> Int64:
    """An Int64 of another lane."""
    low = cute.arch.shuffle_sync(Int32(value), lane)
    high = cute.arch.shuffle_sync(Int32(value >> 32), lane)
    return (Int64(high) << 32) | (Int64(low) & 0xFFFFFFFF)
