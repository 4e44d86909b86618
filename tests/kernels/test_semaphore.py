"""The PTX of publish, wait and claim, read line by line: what must stay on which side of what.

Compiled for sm_90a; needs no GPU.
"""

import re
import warnings
from pathlib import Path

import pytest

# CuTe DSL reads the architecture once, when it is imported.
from tilepipe.kernels.compile import compile_code, memory_instructions

pytestmark = pytest.mark.filterwarnings("ignore")

KERNELS = Path(__file__).resolve().parents[2] / "tilepipe" / "kernels"


@pytest.fixture(scope="module")
def programs():
    import os

    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tests.kernels import programs as module
    return module


def instructions(program):
    return [re.sub(r"\s+.*", "", line) for line in memory_instructions(compile_code(*program).ptx)]


@pytest.mark.parametrize("scope", ["gpu", "sys"])
@pytest.mark.parametrize(
    ("how", "flags"),
    [
        ("add", ["red.relaxed.{}.global.add.s32"]),
        ("set", ["st.relaxed.{}.global.b32"]),
        ("batch", ["red.relaxed.{}.global.add.s32"] * 4),
        ("batch_set", ["st.relaxed.{}.global.b32"] * 4),
    ],
)
def test_rows_are_stored_before_one_fence_and_flags_after_it(programs, how, flags, scope):
    found = instructions(programs.publishing(how, programs.Scope(scope)))

    assert found == [
        "st.global.b32",
        f"fence.acq_rel.{scope};",
        *(flag.format(scope) for flag in flags),
        "st.global.b32",
    ]


@pytest.mark.parametrize("scope", ["gpu", "sys"])
@pytest.mark.parametrize("async_reader", [False, True])
@pytest.mark.parametrize("width", [32, 64])
def test_a_wait_polls_relaxed_and_fences_before_the_first_read(
    programs, scope, async_reader, width
):
    found = instructions(programs.waiting(programs.Scope(scope), async_reader, width))

    polls = f"ld.relaxed.{scope}.global.b{width}"
    fences = [f"fence.acq_rel.{scope};"]
    fences += ["fence.proxy.async.global;"] if async_reader else []
    assert found == [
        "ld.global.b32",  # read early by the program itself
        polls,  # before the loop
        polls,  # in the loop: not hoisted out of it
        "ld.relaxed.sys.global.b32",  # the abort word
        *fences,
        "ld.global.b32",  # read late: not merged with the early one
        "st.global.b32",
    ]


def test_a_wait_looks_at_the_clock_before_its_loop_and_inside(programs):
    ptx = compile_code(*programs.waiting(programs.Scope.sys, True)).ptx

    wait = ptx[: ptx.index("fence.acq_rel.sys")]
    steps = re.findall(r"(ld\.relaxed)\.sys|%(globaltimer)|(bra) ", wait)
    # A word that is there is found without a look at the clock; a look behind the abort word, the
    # last before the way back, ends the loop.
    assert ["".join(step) for step in steps] == [
        *("ld.relaxed", "bra", "globaltimer"),
        *("ld.relaxed", "bra", "bra"),
        *("ld.relaxed", "globaltimer", "bra"),
    ]


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize(("scope", "suffix"), [("gpu", ""), ("sys", ".sys")])
def test_a_claim_is_one_relaxed_atomic_of_its_scope_and_none_is_merged(
    programs, scope, suffix, width
):
    claims = instructions(programs.claiming(programs.Scope(scope), width))
    raises = instructions(programs.raising(programs.Scope(scope), width))

    # PTX spells the defaults by leaving them out: relaxed, and scope gpu.
    assert claims == [f"atom.global{suffix}.add.u{width}", "st.global.b32"] * 2
    assert raises == [f"atom.global{suffix}.max.s{width}"]


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("scope", ["gpu", "sys"])
def test_relaxed_accesses_stay_as_many_as_were_written(programs, scope, width):
    loads = instructions(programs.looking_twice(programs.Scope(scope), width))
    stores = instructions(programs.setting_twice(programs.Scope(scope), width))

    assert loads == [f"ld.relaxed.{scope}.global.b{width}", "st.global.b32"] * 2
    assert stores == [f"st.relaxed.{scope}.global.b{width}"] * 2


def test_the_holes_that_the_module_avoids_are_still_there(programs):
    """When this fails, the DSL has been mended: then, and not before, the rules may be eased."""
    acquire = instructions(programs.naked_acquire())
    release = instructions(programs.naked_release())

    # Both plain loads became one, before the acquire; the first store is gone.
    assert acquire[:2] == ["ld.global.b64", "ld.acquire.sys.global.b32"]
    assert release == ["st.release.sys.global.b32", "st.global.b32"]


def test_no_other_kernel_module_orders_memory_or_trusts_block_dim():
    for path in sorted(KERNELS.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        code = "\n".join(line.partition("#")[0] for line in text.splitlines())
        if path.name != "semaphore.py":
            assert "sem=" not in code, path
        # CuTe DSL 4.8.1 miscomputes with block_dim() at 1024 threads.
        assert "block_dim(" not in code, path
