"""Every choice of the grouped GEMM by name, and what each one guarantees.

Knows nothing of CuTe, torch and sizes.
"""

from enum import Enum, IntEnum, unique

__all__ = ["Clip", "Consumers", "DescriptorSlot", "Epilogue", "Major"]


class Consumers(Enum):
    """How two warpgroups share the tiles of a CTA."""

    cooperative = "cooperative"  # each takes half of the rows of every tile
    ping_pong = "ping_pong"  # each takes every second tile: one stores while the other multiplies


class Epilogue(Enum):
    """What becomes of a float32 sum before it is rounded to bf16, once."""

    none = "none"  # nothing
    swiglu_interleaved = "swiglu_interleaved"  # columns 2i and 2i+1 are gate and up of output i
    swiglu_concatenated = "swiglu_concatenated"  # columns i and N/2+i are gate and up of output i
    row_scale = "row_scale"  # times a float32 of its row

    @property
    def is_swiglu(self) -> bool:
        """Whether two columns make one: silu(gate) x up."""
        return self in (Epilogue.swiglu_interleaved, Epilogue.swiglu_concatenated)


class Major(Enum):
    """Which index of a matrix runs along memory."""

    k = "k"
    n = "n"
    m = "m"


class Clip(Enum):
    """What ends a TMA store at the last row of an expert."""

    whole = "whole"  # nothing: whole blocks are stored, rows of padding among them
    per_group = "per_group"  # the CTA's own descriptor, patched when the expert changes
    ragged = "ragged"  # one descriptor with an extra dimension and a base shifted by one block


@unique
class DescriptorSlot(IntEnum):
    """Descriptors of 128 bytes that every CTA keeps in the workspace with Clip.per_group.

    The workspace is CTAs x len(DescriptorSlot) x 128 bytes, slots of one CTA side by side. The
    operands need none: their tiles may hold rows of the next expert, whose sums are never stored.
    """

    output = 0  # D, its extent along M ending with the last row of the CTA's current expert
