"""SwiGLU as a pass, on the CPU: every value of every row, whatever the number of CTAs."""

import numpy as np
import pytest

pytest.importorskip("cutlass")

from tests.ptx.machine import Launch, Machine
from tests.ptx.memory import Memory
from tests.ptx.parse import parse
from tilepipe.kernels.swiglu import compile_swiglu
from tilepipe.reference import moe
from tilepipe.workload import bf16

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("rows", "columns", "num_ctas"),
    [(1, 8, 1), (3, 1032, 1), (37, 264, 2)],
)
def test_a_pass_makes_silu_of_gate_times_up_and_touches_nothing_else(rows, columns, num_ctas):
    generator = np.random.default_rng(rows)
    product = bf16.to_bits(4 * generator.standard_normal((rows, 2 * columns), dtype=np.float32))
    product[0, :4] = bf16.to_bits(np.array([100, -100, 0, -0.0], np.float32))
    out = np.full((rows + 1, columns), 0x7FC1, np.uint16)
    places = {
        "product": (product.ctypes.data, product.nbytes),
        "out": (out.ctypes.data, out.nbytes),
    }
    launch = Launch(
        name="swiglu",
        program=parse(compile_swiglu(columns).ptx),
        arguments=(product.ctypes.data, out.ctypes.data, rows),
        num_ctas=num_ctas,
        shared_bytes=0,
    )

    Machine(Memory(places), races=True).run([[launch]])

    gate, up = np.split(bf16.from_bits(product), 2, axis=1)
    want = moe.swiglu(gate, up)
    error = np.abs(bf16.from_bits(out[:rows]) - want)
    # Half a unit in the last place, and what exponential and reciprocal are off; what is no normal
    # float becomes 0.
    assert bool((error <= np.abs(want) * (2**-8 + 2**-18) + 2**-120).all())
    assert bool((out[rows] == 0x7FC1).all())


def test_values_are_read_once_in_whole_vectors_and_stored_so():
    ptx = compile_swiglu(2048).ptx

    assert ptx.count("ld.global") == 2 * ptx.count("st.global.L1::no_allocate.v4.b32") == 2
    assert ptx.count("ex2.approx") == 8
    assert ".nc" not in ptx
    assert ".local" not in ptx
