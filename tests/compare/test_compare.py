"""`python -m tilepipe.compare A B` pairs points, says what differs and judges every contender."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compare.runs import TIMES, config_of, store
from tests.results.older import make_older
from tilepipe.compare.__main__ import main
from tilepipe.records import Status
from tilepipe.results.schema import SCHEMA_VERSION

SLOWER = tuple(round(1.03 * time) for time in TIMES)
FASTER = tuple(round(0.97 * time) for time in TIMES)
NEAR = tuple(round(1.01 * time) for time in TIMES)
GPU = {"gpus": ["NVIDIA H200"]}


@pytest.fixture
def a(tmp_path):
    return tmp_path / "a"


@pytest.fixture
def b(tmp_path):
    return tmp_path / "b"


def judged(capsys, *arguments):
    """Exit code and document of a comparison."""
    code = main([*map(str, arguments), "--json", "-"])
    return code, json.loads(capsys.readouterr().out)


def verdicts(document):
    return [(row["name"], row["contender"], row["verdict"]) for row in document["verdicts"]]


def test_a_run_against_itself_is_the_same_throughout(a, capsys):
    store(a, {"fused": TIMES, "sequential": SLOWER})

    assert main([str(a), str(a), "--fail-on", "ambiguous"]) == 0

    out = capsys.readouterr().out
    assert "build, libraries, machine and clocks are the same" in out
    assert out.count("the same samples") == 2
    assert out.endswith("2 comparisons, tolerance 1.00%: 2 SAME, 0 FASTER, 0 SLOWER, 0 AMBIGUOUS\n")


@pytest.mark.parametrize(
    ("times", "word", "codes"),
    [
        (SLOWER, "SLOWER", (0, 1, 1)),
        (FASTER, "FASTER", (0, 0, 0)),
        (NEAR, "AMBIGUOUS", (0, 0, 1)),
        (TIMES[::-1], "SAME", (0, 0, 0)),
    ],
)
def test_fail_on_decides_the_exit_code(a, b, capsys, times, word, codes):
    store(a)
    store(b, {"fused": times})

    for options, code in zip(([], ["slower"], ["ambiguous"]), codes, strict=True):
        typed = ["--fail-on", *options] if options else []
        found, document = judged(capsys, a, b, *typed)

        assert (found, verdicts(document)) == (code, [("exp", "fused", word)])
        assert document["counts"][word] == 1


def test_the_slowest_rank_of_each_iteration_is_compared(a, capsys):
    store(a)

    _, document = judged(capsys, a, a)

    (row,) = document["verdicts"]
    # The other rank is 10 ns faster throughout.
    assert row["median_ns"] == {"A": 999_875, "B": 999_875}
    assert row["num_iters"] == {"A": 40, "B": 40}
    assert (row["ratio"], row["low"], row["high"], row["method"]) == (1.0, 1.0, 1.0, "same_samples")


def test_a_wider_tolerance_is_taken_at_its_word(a, b, capsys):
    store(a)
    store(b, {"fused": SLOWER})

    _, document = judged(capsys, a, b, "--tolerance", "0.05")

    assert verdicts(document) == [("exp", "fused", "SAME")]


def test_points_of_one_side_only_are_counted_and_told_by_their_keys(a, b, capsys):
    store(a)
    store(b)
    for number, tokens in enumerate((128, 256)):
        store(a, config_id=f"a{number}", config=config_of(num_tokens=tokens))
    store(b, config_id="b0", config=config_of(num_tokens=512, order="random"))

    assert main([str(a), str(b)]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[2:5] == [
        "1 points in both",
        "2 points only in A: the nearest of B differ in workload.num_tokens (128, 256; there 64)",
        "1 points only in B: the nearest of A differ in kernel.order (random; there edf), "
        "workload.num_tokens (512; there 128)",
    ]


def test_of_many_values_of_one_side_some_are_told_and_the_others_counted(a, b, capsys):
    store(a)
    store(b)
    for number, tokens in enumerate(range(128, 128 + 7)):
        store(a, config_id=f"a{number}", config=config_of(num_tokens=tokens))

    main([str(a), str(b)])

    assert (
        "7 points only in A: the nearest of B differ in workload.num_tokens "
        "(128, 129, 130, 131 and 3 more; there 64)"
    ) in capsys.readouterr().out.splitlines()


def test_equal_settings_are_paired_by_experiment_first_then_across(a, b, capsys):
    store(a, name="dispatch")
    store(a, {"fused": SLOWER}, name="again")
    store(b, {"fused": SLOWER}, name="again")
    store(b, name="renamed")

    _, document = judged(capsys, a, b)

    assert verdicts(document) == [("again", "fused", "SAME"), ("dispatch", "fused", "SAME")]


def test_what_differs_in_the_build_is_said_before_the_times(a, b, capsys):
    store(a)
    store(
        b,
        build_id="b2",
        build={"sources": {"host": "aaaa", "kernels": "cccc"}},
        provenance={"git": {"commit": "c1", "dirty": True, "diff_hash": "d1"}},
    )

    _, document = judged(capsys, a, b)

    assert document["facts"] == [
        {"fact": "build_id", "A": ["b1"], "B": ["b2"]},
        {"fact": "commit", "A": ["c0"], "B": ["c1"]},
        {"fact": "uncommitted changes", "A": ["none"], "B": ["d1"]},
        {"fact": "sources of kernels", "A": ["bbbb"], "B": ["cccc"]},
    ]
    main([str(a), str(b)])
    out = capsys.readouterr().out
    assert out.index("sources of kernels") < out.index("time of B over that of A")


def test_executors_are_never_compared(a, b, capsys):
    store(a)
    store(b, executor="cuda", build=GPU)

    assert main([str(a), str(b), "--unlike", "allow"]) == 2

    assert capsys.readouterr().err == (
        "A holds points of executor host, B of cuda: executors are never compared, "
        "name runs of one\n"
    )


def test_a_mixed_folder_pairs_each_executor_with_its_own(a, capsys):
    store(a)
    store(a, config_id="c2", executor="cuda", build=GPU)

    code, document = judged(capsys, a, a)

    assert (code, document["counts"]["SAME"]) == (0, 2)
    assert [row["executor"] for row in document["verdicts"]] == ["host", "cuda"]


def test_unlike_devices_are_refused_unless_allowed(a, b, capsys):
    store(a, executor="cuda", build=GPU)
    store(b, executor="cuda", build={"gpus": ["NVIDIA H100"]})

    assert main([str(a), str(b)]) == 2
    assert capsys.readouterr().err == (
        "A ran on NVIDIA H200, B on NVIDIA H100: times of unlike devices say nothing of the build; "
        "--unlike allow compares them all the same\n"
    )
    code, document = judged(capsys, a, b, "--unlike", "allow")
    assert (code, document["counts"]["SAME"]) == (0, 1)


def test_unlike_hardware_is_refused_though_it_changes_the_config_id(a, b, capsys):
    small = config_of(hardware__num_sms=132)
    store(a, config=small, build={"cpu": "an old CPU"})
    store(b, config_id="c2", config=config_of(hardware__num_sms=148))

    assert main([str(a), str(b)]) == 2
    assert "A ran on an old CPU with 2 cores, B on a CPU with 2 cores" in capsys.readouterr().err
    code, document = judged(capsys, a, b, "--unlike", "allow")
    assert (code, document["num_pairs"]) == (0, 1)


def test_a_key_that_one_side_does_not_know_keeps_points_paired(a, b, capsys):
    for number, tokens in enumerate((64, 128)):
        store(a, config_id=f"a{number}", config=config_of(num_tokens=tokens))
        more = config_of(num_tokens=tokens, kernel__placement="linear")
        store(b, config_id=f"b{number}", config=more)

    _, document = judged(capsys, a, b)

    assert (document["num_pairs"], document["only_in"]) == (2, [])
    assert document["notes"][0] == (
        "2 points are paired although their config_ids differ: what differs is "
        "kernel.placement only in B (linear)"
    )


def test_whether_a_launch_was_recorded_afterwards_is_no_setting(a, b, capsys):
    store(a, config_id="c1", config=config_of(measure__timeline=False))
    store(b, config_id="c2", config=config_of(order="token", measure__timeline=True))

    assert main([str(a), str(b)]) == 2

    assert "have no point in common, the nearest differ in kernel.order: name" in (
        capsys.readouterr().err
    )


def test_a_new_key_that_was_swept_pairs_nothing(a, b, capsys):
    store(a, config_id="a0")
    for place in ("linear", "spread"):
        store(b, config_id=place, config=config_of(kernel__placement=place))

    assert main([str(a), str(b)]) == 2

    assert capsys.readouterr().err == (
        "A and B have no point in common, the nearest differ in kernel.placement: "
        "name runs of the same settings\n"
    )


def test_of_several_builds_the_newest_is_taken_or_the_one_named(a, b, capsys):
    store(a, {"fused": SLOWER}, build_id="new", ended="2026-11-29T12:00:00.000+00:00")
    store(a, build_id="old", ended="2026-11-29T11:00:00.000+00:00")
    store(b)

    _, newest = judged(capsys, a, b)
    _, named = judged(capsys, a, b, "--build-a", "old")
    _, both = judged(capsys, a, a, "--build-a", "old", "--build-b", "new")

    assert verdicts(newest) == [("exp", "fused", "FASTER")]
    assert newest["notes"][0] == (
        "A holds several builds (new, old): the newest run of each point is taken, 1 older ones "
        "are not; --build-a ID chooses"
    )
    assert verdicts(named) == [("exp", "fused", "SAME")]
    assert verdicts(both) == [("exp", "fused", "SLOWER")]
    assert main([str(a), str(b), "--build-b", "lost"]) == 2
    assert capsys.readouterr().err == ("--build-b lost: B has no such build, name one of b1\n")


def test_a_time_that_b_lost_fails_a_gate(a, b, capsys):
    store(a)
    store(a, config_id="c2", config=config_of(num_tokens=128))
    store(b)
    lost = config_of(num_tokens=128)
    store(b, config_id="c2", config=lost, status=Status.timeout)

    assert judged(capsys, a, b)[0] == 0
    code, document = judged(capsys, a, b, "--fail-on", "slower")
    back, _ = judged(capsys, b, a, "--fail-on", "slower")

    assert (code, back) == (1, 0)
    (lost,) = document["not_judged"]
    assert (lost["config_id"], lost["reason"], lost["is_loss"]) == (
        "c2",
        "A ended ok, B ended timeout: too slow",
        True,
    )


def test_a_contender_of_one_side_is_said_and_not_judged(a, b, capsys):
    store(a, {"fused": TIMES, "push": TIMES})
    store(b, {"fused": TIMES, "reduce": TIMES})

    code, document = judged(capsys, a, b, "--fail-on", "slower")

    assert (code, verdicts(document)) == (1, [("exp", "fused", "SAME")])
    assert [(each["contender"], each["is_loss"]) for each in document["not_judged"]] == [
        ("push", True),
        ("reduce", False),
    ]


def test_only_failures_compare_nothing(a, b, capsys):
    store(a)
    store(b, status=Status.oom)

    assert main([str(a), str(b)]) == 1

    captured = capsys.readouterr()
    assert captured.err == ("no pair of points has times on both sides: nothing was compared\n")
    assert f"note: {b}: no point is ok (1 oom), so there are no times" in captured.out


@pytest.mark.parametrize("broken", ["none", "a file", "empty"])
def test_a_folder_that_holds_nothing_is_one_sentence(a, b, capsys, broken):
    store(a)
    if broken == "a file":
        b.write_text("")
    elif broken == "empty":
        b.mkdir()

    assert main([str(a), str(b)]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"{b}: ")
    assert captured.err.count("\n") == 1


def test_a_spoilt_point_is_said_and_fails_a_gate(a, b, capsys):
    for root in (a, b):
        store(root)
        store(root, config_id="c2", config=config_of(num_tokens=128))
    (b / "exp" / "c2-b1" / "samples.parquet").write_bytes(b"PAR1")

    assert main([str(a), str(b)]) == 1
    assert capsys.readouterr().err.startswith(f"{b}/exp/c2-b1/samples.parquet: cannot be read")
    assert main([str(a), str(b), "--fail-on", "slower"]) == 1


def test_a_run_of_an_older_version_is_compared_with_one_of_today(a, b, capsys):
    store(a)
    store(b, {"fused": SLOWER})
    make_older(a, 1)

    _, document = judged(capsys, a, b)

    assert verdicts(document) == [("exp", "fused", "SLOWER")]
    assert document["notes"][0].startswith(f"{a}: 1 points are of schema version 1, columns ")
    assert {"fact": "schema version", "A": ["1"], "B": [str(SCHEMA_VERSION)]} in document["facts"]


def test_three_rounds_are_judged_together(a, b, capsys):
    for repetition in range(3):
        store(a, repetition=repetition)
        # Each run is another few percent off, as runs are.
        times = tuple(round((0.9 + 0.1 * repetition) * time) for time in TIMES)
        store(b, {"fused": times}, repetition=repetition)

    _, document = judged(capsys, a, b)
    single, alone = judged(
        capsys, a / "exp" / "c1-b1-r2", b / "exp" / "c1-b1-r2", "--fail-on", "slower"
    )

    (row,) = document["verdicts"]
    assert (row["rounds"], row["method"], row["verdict"]) == ([0, 1, 2], "rounds95", "AMBIGUOUS")
    assert row["num_iters"] == {"A": 120, "B": 120}
    assert not any("one run a side" in note for note in document["notes"])
    # The third alone would have been taken for a difference, and the note warns of that.
    assert (single, verdicts(alone)) == (1, [("exp", "fused", "SLOWER")])
    assert "1 of 1 verdicts rest on one run a side" in alone["notes"][0]


TERMS = {"e2e": (1000, 990, 1010), "plan": (100, 96, 103), "late": (900, 880, 920)}


def test_terms_of_the_breakdown_are_shown_with_an_interval(a, b, capsys):
    times = {"fused": (990, 1000, 1010, 1000, 1000, 1000)}
    store(a, times, terms=TERMS.items())
    store(
        b,
        times,
        terms={**TERMS, "plan": (140, 137, 144), "late": (860, 850, 865)}.items(),
    )

    code, document = judged(capsys, a, b, "--fail-on", "slower")
    main([str(a), str(b)])

    plan = next(term for term in document["breakdown"] if term["term"] == "plan")
    assert (code, plan["value_ns"]) == (0, {"A": 100, "B": 140})
    # 3 below and 4 above on either side: the reaches add up as squares, rounded outwards.
    assert plan["difference"] == {"value_ns": 40, "low_ns": 35, "high_ns": 46}
    out = capsys.readouterr().out
    assert "breakdown, B - A in us (not judged; ~ may be 0)" in out
    assert out.splitlines()[-3].split() == ["+0.0~", "+0.0", "-0.0"]


def test_terms_over_rounds_are_one_line(a, b, capsys):
    for repetition, plan in enumerate((100, 110, 120)):
        store(a, repetition=repetition, terms=())
        terms = {"e2e": (999_875, 999_875, 999_875), "plan": (plan, plan, plan)}
        rest = 999_875 - plan
        both = {**terms, "late": (rest, rest, rest)}
        store(b / "x", repetition=repetition, terms=both.items())
        moved = {**both, "plan": (plan + 5, plan, plan + 9), "late": (rest - 5, rest - 9, rest)}
        store(b / "y", repetition=repetition, terms=moved.items())

    _, document = judged(capsys, b / "x", b / "y")

    plan = next(term for term in document["breakdown"] if term["term"] == "plan")
    assert (plan["rounds"], plan["value_ns"]) == ([0, 1, 2], {"A": 110, "B": 115})
    assert plan["difference"] == {"value_ns": 5, "low_ns": 5, "high_ns": 5}


def test_the_document_goes_to_a_file_beside_the_tables(a, tmp_path, capsys):
    store(a)
    path = tmp_path / "found.json"

    assert main([str(a), str(a), "--json", str(path)]) == 0

    document = json.loads(path.read_text())
    assert (document["format"], document["format_version"]) == ("tilepipe.compare", 1)
    assert document["sides"]["A"] == {
        "num_points": 1,
        "builds": ["b1"],
        "executors": ["host"],
        "devices": ["a CPU with 2 cores"],
        "started_utc": "2026-11-29T10:00:00.000+00:00",
        "ended_utc": "2026-11-29T10:00:01.000+00:00",
    }
    assert "1 comparisons" in capsys.readouterr().out


def test_an_infinite_setting_is_a_word_in_the_document(a, capsys):
    store(a, config=config_of(kernel__limit=1e308))
    # point.json is strict JSON: only a reader as lax as Python's could have let it in.
    path = a / "exp" / "c1-b1" / "point.json"
    path.write_text(path.read_text().replace('"limit": 1e+308', '"limit": Infinity'))

    _, document = judged(capsys, a, a)

    assert document["verdicts"][0]["settings"]["kernel.limit"] == "inf"


def test_a_file_that_cannot_be_written_is_a_sentence(a, tmp_path, capsys):
    store(a)
    path = tmp_path / "none" / "found.json"

    assert main([str(a), str(a), "--json", str(path)]) == 2

    assert capsys.readouterr().err == (
        f"--json {path}: No such file or directory: name a file that can be written\n"
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tolerance", "1"], "1: must be a share from 0 to below 1, as 0.01"),
        (["--tolerance", "nan"], "nan: must be a share from 0 to below 1"),
        (["--tolerance", "few"], "few: must be a share from 0 to below 1"),
        (["--fail-on", "faster"], "invalid choice: 'faster'"),
        ([], "the following arguments are required: B"),
    ],
)
def test_a_mistyped_word_ends_with_two(a, capsys, words, told):
    with pytest.raises(SystemExit) as ended:
        main([str(a), str(a), *words] if words else [str(a)])

    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_it_runs_as_a_module_without_torch(a, tmp_path):
    store(a)
    block = tmp_path / "blocked" / "torch"
    block.mkdir(parents=True)
    (block / "__init__.py").write_text("raise ImportError('no torch here')")
    paths = [str(block.parent), str(Path(__file__).resolve().parents[2])]

    done = subprocess.run(
        [sys.executable, "-m", "tilepipe.compare", str(a), str(a), "--fail-on", "slower"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert "1 SAME" in done.stdout


def test_no_word_of_a_table_is_torn(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    published = Path(__file__).parents[2] / "results" / "h200_x1" / "timeline"

    assert main([str(published), str(published)]) == 0

    out = capsys.readouterr().out
    for word in ("comm_", "granularity", "epilogue", "gemm_contended", "publish_tax"):
        assert word in out
