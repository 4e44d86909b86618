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


@pytest.fixture
def room_for_two(compiler, tmp_path, monkeypatch):
    """A folder with the codes of numbers 0 and 1, which hardly holds more; paths by number."""
    places = {}
    with kept.codes_kept(tmp_path):
        for number in range(2):
            before = set(tmp_path.iterdir())
            compiler.function()(Asked(number))
            (places[number],) = set(tmp_path.iterdir()) - before
            os.utime(places[number], (1000.0 + number, 1000.0 + number))
    size = sum(file.stat().st_size for file in places[0].iterdir())
    monkeypatch.setattr(kept, "_MOST_BYTES", 2 * size + size // 2)
    return places


def test_the_code_that_was_not_asked_for_longest_leaves_a_full_folder(
    compiler, tmp_path, room_for_two
):
    with kept.codes_kept(tmp_path):
        compiler.function()(Asked(0))  # found, and so younger than the other
        compiler.function()(Asked(2))

    assert compiler.asked == [(Asked(0), 0), (Asked(1), 0), (Asked(2), 0)]
    assert room_for_two[0].is_dir()
    assert not room_for_two[1].exists()
    assert len(list(tmp_path.iterdir())) == 2


def test_what_is_not_of_its_own_naming_is_neither_counted_nor_dropped(
    compiler, tmp_path, room_for_two
):
    others = [tmp_path / "notes.txt", tmp_path / ("f" * 63), tmp_path / ".new-made by hand"]
    for other in others:
        other.write_bytes(bytes(10**6))
        os.utime(other, (1.0, 1.0))
    link = tmp_path / ("a" * 64)
    link.symlink_to(tmp_path)
    within = room_for_two[0] / "mine"
    within.write_text("kept")
    os.utime(room_for_two[0], (1000.0, 1000.0))

    with kept.codes_kept(tmp_path):
        compiler.function()(Asked(2))

    assert all(other.is_file() for other in others)
    assert link.is_symlink()
    # The oldest code left, but for the file that somebody has put beside it.
    assert [path.name for path in room_for_two[0].iterdir()] == ["mine"]
    assert room_for_two[1].is_dir()


def test_what_a_killed_process_has_begun_leaves_after_a_day(compiler, tmp_path):
    old, young = tmp_path / ".new-abcd1234", tmp_path / ".new-abcd1235"
    for begun in (old, young):
        (begun / "code").mkdir(parents=True)
    os.utime(old, (1.0, 1.0))

    with kept.codes_kept(tmp_path):
        compiler.function()(Asked(1))

    assert not old.exists()
    assert young.is_dir()


def test_codes_in_a_folder_that_can_only_be_read_are_found(compiler, tmp_path, monkeypatch):
    with kept.codes_kept(tmp_path):
        compiler.function()(Asked(1))

        def refuses(path):
            raise PermissionError(path)

        monkeypatch.setattr(os, "utime", refuses)
        compiler.function()(Asked(1))

    assert len(compiler.asked) == 1


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
