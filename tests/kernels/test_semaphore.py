"""The PTX of publish, wait and claim, read line by line: what must stay on which side of what.

Compiled for sm_90a; needs no GPU.
"""

import re
import warnings
from pathlib import Path

import pytest

# CuTe DSL reads the architecture once, when it is imported.
from tests.kernels.sass import disassemble
from tests.kernels.waits import waits_in
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


def opcodes(ptx):
    return [re.sub(r"\s+.*", "", line) for line in memory_instructions(ptx)]


def instructions(program):
    return opcodes(compile_code(*program).ptx)


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
def test_a_wait_acquires_by_its_first_look_or_by_a_fence_behind_its_polls(
    programs, scope, async_reader, width
):
    ptx = compile_code(*programs.waiting(programs.Scope(scope), async_reader, width)).ptx

    assert opcodes(ptx) == [
        "ld.global.b32",  # read early by the program itself
        f"ld.acquire.{scope}.global.b{width}",  # before the loop
        f"ld.relaxed.{scope}.global.b{width}",  # in the loop: not hoisted out of it
        "ld.relaxed.sys.global.b32",  # the abort word
        f"fence.acq_rel.{scope};",
        *(["fence.proxy.async.global;"] if async_reader else []),
        "ld.global.b32",  # read late: not merged with the early one
        "st.global.b32",
    ]
    # What the first look has found is read behind no fence but that of the proxy.
    (wait,) = waits_in(ptx)
    late = ptx.rindex("ld.global.b32")
    proxy = ptx.index("fence.proxy") if async_reader else late
    assert (wait.scope, wait.width) == (scope, width)
    assert wait.look < wait.poll < wait.stop < wait.fence < wait.there < proxy <= late


@pytest.mark.parametrize("scope", ["gpu", "sys"])
def test_the_assembler_waits_for_all_memory_only_behind_polls(programs, scope):
    code = disassemble(compile_code(*programs.waiting(programs.Scope(scope), True)).cubin)
    strong = f"LDG.E.STRONG.{scope.upper()}"

    kept = ("LDG", "STG", "CCTL", "MEMBAR", "FENCE")
    assert [opcode for opcode in code.opcodes if opcode.startswith(kept)] == [
        "LDG.E",  # read early
        *(strong, "CCTL.IVALL"),  # the first look acquires: L1 holds nothing of before
        *(strong, "LDG.E.STRONG.SYS"),  # polls
        *(f"MEMBAR.ALL.{scope.upper()}", "CCTL.IVALL"),
        "FENCE.VIEW.ASYNC.G",
        *("LDG.E", "STG.E"),  # read late
    ]


def test_a_wait_looks_at_the_clock_before_its_loop_and_inside(programs):
    ptx = compile_code(*programs.waiting(programs.Scope.sys, True)).ptx

    wait = ptx[: ptx.index("fence.acq_rel.sys")]
    steps = re.findall(r"(ld\.acquire|ld\.relaxed)\.sys|%(globaltimer)|(bra) ", wait)
    # A word that is there is found without a look at the clock; a look behind the abort word, the
    # last before the way back, ends the loop.
    assert ["".join(step) for step in steps] == [
        *("ld.acquire", "bra", "globaltimer"),
        *("ld.relaxed", "bra", "bra"),
        *("ld.relaxed", "globaltimer", "bra"),
    ]


@pytest.mark.parametrize("scope", ["gpu", "sys"])
@pytest.mark.parametrize("width", [32, 64])
def test_a_word_that_is_read_before_a_wait_is_read_again_behind_its_first_look(
    programs, scope, width
):
    assert instructions(programs.reading_again(programs.Scope(scope), width)) == [
        "ld.global.b32",
        f"ld.acquire.{scope}.global.b{width}",
        "ld.global.b32",
        "st.global.b32",
    ]


def test_without_the_barrier_behind_an_acquire_a_late_read_is_merged_with_an_early_one(
    programs, monkeypatch
):
    """The hole from which the barrier keeps: where this fails, it may be needless."""
    from tilepipe.kernels import semaphore

    monkeypatch.setattr(semaphore, "_stay_behind", lambda: None)
    assert instructions(programs.reading_again(programs.Scope.sys, 32)) == [
        "ld.global.b32",
        "ld.acquire.sys.global.b32",
        "st.global.b32",
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
def test_strong_accesses_stay_as_many_as_were_written(programs, scope, width):
    loads = instructions(programs.looking_twice(programs.Scope(scope), width))
    stores = instructions(programs.setting_twice(programs.Scope(scope), width))
    waits = instructions(programs.waiting_twice(programs.Scope(scope), width))

    assert loads == [f"ld.relaxed.{scope}.global.b{width}", "st.global.b32"] * 2
    assert waits == [f"ld.acquire.{scope}.global.b{width}", "st.global.b32"] * 2
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
