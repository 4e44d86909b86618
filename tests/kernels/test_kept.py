"""Codes that are kept on disk: found by all that decides them, whole or not at all."""

import os
from dataclasses import dataclass

import pytest

pytest.importorskip("cutlass")

from tilepipe.config.choices import (
    Granularity,
    Layout,
)
from tilepipe.kernels import kept
from tilepipe.kernels.compile import Code
from tilepipe.kernels.constants import Constants
from tilepipe.kernels.gemm.launch import compile_gemm
from tilepipe.kernels.gemm.plan import GemmProblem, GemmTuning, plan_gemm
from tilepipe.kernels.launcher import compile_launch

GATE = Constants(
    row_bytes=0, num_topk=1, granularity=Granularity.tile, num_ranks=1, num_experts_per_rank=4
)


@dataclass(frozen=True)
class Asked:
    number: int


class Compiler:
    """Stands for a function that compiles: counts, and hands out one real code."""

    def __init__(self, code: Code) -> None:
        self.code, self.asked = code, []

    def function(self):
        """As a fresh process has it."""

        def compiled(asked, *, variant=0):
            self.asked.append((asked, variant))
            return self.code

        return kept.kept(compiled)


@pytest.fixture(scope="module")
def gate() -> Code:
    return compile_launch("open", GATE)


@pytest.fixture
def compiler(gate):
    return Compiler(gate)


def test_a_later_process_finds_what_an_earlier_one_has_compiled(compiler, tmp_path):
    with kept.codes_kept(tmp_path):
        first = compiler.function()(Asked(1))
        found = compiler.function()(Asked(1))

    assert compiler.asked == [(Asked(1), 0)]
    assert (found.ptx, found.cubin) == (first.ptx, first.cubin)
    assert callable(found.function.to)


def test_within_a_process_codes_are_compiled_once_whether_or_not_they_are_kept(compiler):
    function = compiler.function()

    assert function(Asked(1)) is function(Asked(1))
    assert len(compiler.asked) == 1


def test_other_arguments_are_other_codes(compiler, tmp_path):
    with kept.codes_kept(tmp_path):
        for asked, variant in ((Asked(1), 0), (Asked(2), 0), (Asked(1), 1)):
            compiler.function()(asked, variant=variant)

    assert len(compiler.asked) == 3


def test_outside_nothing_is_kept_and_nothing_found(compiler, tmp_path):
    with kept.codes_kept(tmp_path):
        compiler.function()(Asked(1))
    compiler.function()(Asked(1))
    compiler.function()(Asked(2))

    assert len(compiler.asked) == 3
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(kept, "_makers", lambda: "an edited source"),
        lambda patch: patch.setenv("CUTE_DSL_LINEINFO", "1"),
    ],
    ids=["sources", "settings"],
)
def test_other_sources_or_settings_of_the_compiler_compile_anew(
    compiler, tmp_path, monkeypatch, change
):
    with kept.codes_kept(tmp_path):
        compiler.function()(Asked(1))
        change(monkeypatch)
        compiler.function()(Asked(1))

    assert len(compiler.asked) == 2


def test_the_architecture_that_compiling_sets_changes_no_key(compiler, tmp_path, monkeypatch):
    monkeypatch.delenv("CUTE_DSL_ARCH", raising=False)
    with kept.codes_kept(tmp_path):
        compiler.function()(Asked(1))
        monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
        compiler.function()(Asked(1))

    assert len(compiler.asked) == 1


@pytest.mark.parametrize(
    ("part", "damage"),
    [("code.o", "gone"), ("code.o", "cut"), ("code.ptx", "cut"), ("digest", "cut")],
)
def test_a_damaged_code_is_compiled_anew_and_replaced(compiler, tmp_path, part, damage):
    with kept.codes_kept(tmp_path):
        compiler.function()(Asked(1))
        (place,) = tmp_path.iterdir()
        file = place / part
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-1])
        compiler.function()(Asked(1))
        compiler.function()(Asked(1))

    assert len(compiler.asked) == 2


def test_a_pipe_in_place_of_a_code_is_nothing_to_wait_for(compiler, tmp_path):
    with kept.codes_kept(tmp_path):
        compiler.function()(Asked(1))
        (place,) = tmp_path.iterdir()
        (place / "code.o").unlink()
        os.mkfifo(place / "code.o")
        compiler.function()(Asked(1))

    assert len(compiler.asked) == 2


def test_what_no_library_loads_is_compiled_anew_though_its_digest_is_right(compiler, tmp_path):
    with kept.codes_kept(tmp_path):
        compiler.function()(Asked(1))
        (place,) = tmp_path.iterdir()
        (place / "code.o").write_bytes(b"no object")
        parts = [(place / name).read_bytes() for name in ("code.o", "code.ptx", "code.cubin")]
        (place / "digest").write_text(kept._digest(*parts), encoding="ascii")
        compiler.function()(Asked(1))

    assert len(compiler.asked) == 2


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_keeping(compiler, tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    caplog.set_level("INFO")

    with kept.codes_kept(blocked):
        code = compiler.function()(Asked(1))

    assert code is compiler.code
    assert "code is not kept" in caplog.text


def test_the_oldest_codes_leave_a_full_folder(compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "_MOST_CODES", 2)
    with kept.codes_kept(tmp_path):
        for number in range(4):
            compiler.function()(Asked(number))

    assert len(list(tmp_path.iterdir())) == 2


def test_of_two_that_store_at_once_the_first_stays(compiler, tmp_path, gate):
    place = tmp_path / "code"
    kept.store_code(place, gate)
    before = (place / "digest").stat().st_ino

    kept.store_code(place, gate)

    assert (place / "digest").stat().st_ino == before
    assert [found.name for found in tmp_path.iterdir()] == ["code"]


def test_arguments_that_are_told_apart_by_address_are_a_fault(compiler, tmp_path):
    with kept.codes_kept(tmp_path), pytest.raises(AssertionError, match="by address"):
        compiler.function()(object())


def test_codes_lie_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept.default_folder() == tmp_path / "tilepipe" / "code"

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert kept.default_folder() == tmp_path / "home" / ".cache" / "tilepipe" / "code"


def test_one_code_serves_a_gemm_on_any_number_of_sms():
    problem = GemmProblem(n=256, k=128, num_experts=2, layout=Layout.padded, group_align=128)
    plans = [
        plan_gemm(problem, GemmTuning(), num_gemm_ctas=count, num_sms=132) for count in (132, 120)
    ]

    assert compile_gemm(plans[0]) is compile_gemm(plans[1])
