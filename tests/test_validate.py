"""`python -m tilepipe.validate DIR` names every fault of a results folder."""

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tilepipe.records import (
    BreakdownTerm,
    Interval,
    Outcome,
    Point,
    RankRecord,
    Sample,
    Status,
    Verdict,
)
from tilepipe.results.schema import SCHEMA_VERSION, SUMMARY
from tilepipe.results.store import claim_folder, write_outcome, write_summary
from tilepipe.results.versions import of_version
from tilepipe.validate import main, validate

VERDICT = Verdict(
    contender="fused",
    stage="after",
    passed=True,
    num_values=8,
    num_wrong=0,
    max_error=0.0,
    detail="",
)


def made_up(config_id="c1", status=Status.ok):
    point = Point(
        name="exp",
        operation="dispatch_gemm",
        executor="host",
        config={"launch": {"num_ranks": 2}, "kernel": {"order": "edf"}, "routing": {"law": "zipf"}},
        choices={},
        overrides=("+experiment=dispatch_gemm",),
        config_id=config_id,
        build_id="b1",
    )
    samples = [
        Sample(contender="fused", component="e2e", iteration=i, start_ns=i, duration_ns=100 + i)
        for i in range(3)
    ]
    return Outcome(
        point=point,
        status=status,
        reason="" if status is Status.ok else "the GPU is not there",
        records=tuple(
            RankRecord(
                rank=rank, samples=tuple(samples), verdicts=(VERDICT,), counts={"num_tokens": 4}
            )
            for rank in range(2)
        ),
        terms=(
            BreakdownTerm(term="e2e", interval=Interval(value=101, low=100, high=102)),
            BreakdownTerm(term="gemm_all", interval=Interval(value=90, low=90, high=90)),
            BreakdownTerm(term="sm_tax", interval=None),
            BreakdownTerm(term="late", interval=Interval(value=11, low=10, high=12)),
        ),
        figures={"flops": 1e6, "fused/tflops": 5.0},
        started_utc="2026-11-29T10:00:00.000+00:00",
        ended_utc="2026-11-29T10:00:01.000+00:00",
    )


def store(root, outcome):
    with claim_folder(root, outcome.point):
        pass
    folder = root / outcome.point.name / outcome.point.folder
    write_outcome(folder, outcome, {})
    return folder


@pytest.fixture
def root(tmp_path):
    """Two sound points and their summary."""
    swept = [made_up("c1"), made_up("c2", Status.skipped)]
    for outcome in swept:
        store(tmp_path, outcome)
    write_summary(tmp_path / "exp", swept)
    return tmp_path


def edit(folder, change):
    """Change the parsed point.json in place."""
    path = folder / "point.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def edit_table(path, change):
    table = pq.read_table(path)
    pq.write_table(change(table), path)


def with_value(table, column, row, value):
    """The table with one value replaced, metadata kept."""
    index = table.schema.get_field_index(column)
    values = table.column(column).to_pylist()
    values[row] = value
    field = table.schema.field(index)
    return table.set_column(index, field, [_array(values, field)]).cast(table.schema)


def _array(values, field):
    return pa.array(values, type=field.type)


@pytest.mark.parametrize("below", [".", "exp", "exp/c1-b1"])
def test_a_sound_folder_has_no_fault_at_any_depth(root, below, capsys):
    assert main([str(root / below)]) == 0

    num_valid = 1 if below.endswith("c1-b1") else 2
    assert capsys.readouterr().out == f"{num_valid} points valid, 0 faults\n"


def test_it_runs_as_a_module_from_another_folder_without_torch(root, monkeypatch):
    monkeypatch.chdir(root)
    block = root.parent / "blocked" / "torch"
    block.mkdir(parents=True)
    (block / "__init__.py").write_text("raise ImportError('no torch here')")
    paths = [str(block.parent), str(Path(__file__).resolve().parent.parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    done = subprocess.run(
        [sys.executable, "-m", "tilepipe.validate", "."],
        capture_output=True,
        text=True,
        env=environment,
    )

    assert (done.returncode, done.stdout) == (0, "2 points valid, 0 faults\n"), done.stderr


def test_no_point_is_an_error(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1

    assert capsys.readouterr().out == (
        f"{tmp_path}: holds no valid point: name a folder in which points have run\n"
        "0 points valid, 0 faults\n"
    )


def test_a_folder_that_is_not_there_is_a_sentence(tmp_path, capsys):
    assert main([str(tmp_path / "none")]) == 2

    assert "no such folder: name a results folder" in capsys.readouterr().err


def test_a_file_in_place_of_the_folder_is_a_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")

    assert main([str(tmp_path / "file")]) == 2

    assert "is a file: name the folder that holds it" in capsys.readouterr().err


def test_a_folder_that_may_not_be_entered_is_a_fault(root, capsys, monkeypatch):
    entered = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "exp" and entered(path, mode))

    assert main([str(root)]) == 1

    assert "exp: cannot be read: Permission denied" in capsys.readouterr().out


def test_each_fault_is_a_line_and_the_last_one_counts_them(root, capsys):
    (root / "notes.txt").write_text("")
    (root / "exp" / "c1-b1" / "plot.png").write_bytes(b"")

    assert main([str(root)]) == 1

    assert capsys.readouterr().out.splitlines() == [
        "exp/c1-b1/plot.png: does not belong into a point folder",
        "exp/summary.parquet: row c1-b1 fused has no valid point folder",
        "notes.txt: does not belong into a results folder",
        "1 points valid, 3 faults",
    ]


def faults_of_point(root):
    """Faults but those of the summary, which a changed point contradicts too."""
    return [fault for fault in validate(root).faults if not fault.startswith("exp/summary")]


CLOCKS = {
    "sm_mhz": 1980,
    "sm_mhz_min": 1965,
    "sm_mhz_max": 1980,
    "power_w_max": 412.5,
    "temperature_c_max": 51,
    "reasons": ["gpu_idle"],
    "num_samples": 40,
}
DOCUMENT_FAULTS = {
    f"schema_version is {SCHEMA_VERSION + 1}, want {SCHEMA_VERSION}": lambda d: d.update(
        schema_version=SCHEMA_VERSION + 1
    ),
    "key status is missing": lambda d: d.pop("status"),
    "key extra is unknown": lambda d: d.update(extra=1),
    "key reason is None, want str": lambda d: d.update(reason=None),
    "status is fine, want one of": lambda d: d.update(status="fine"),
    "operation is sort, allowed are": lambda d: d.update(operation="sort"),
    "ids give folder c9-b1, it lies in c1-b1": lambda d: d.update(config_id="c9"),
    "name is other, it lies below exp": lambda d: d.update(name="other"),
    "status ok with a reason: slow": lambda d: d.update(reason="slow"),
    "status ok, but 1 comparisons failed": lambda d: d["ranks"][0]["verdicts"][0].update(
        passed=False, num_wrong=1
    ),
    "status ok, but nothing was compared": lambda d: [r["verdicts"].clear() for r in d["ranks"]],
    "verdict stages are ['never']": lambda d: [
        r["verdicts"][0].update(stage="never") for r in d["ranks"]
    ],
    "figure flops is nan, want a finite number": lambda d: d["figures"].update(flops=math.nan),
    "gives no row of the summary: ": lambda d: d["config"]["kernel"].update(tile_m="wide"),
    "figures name contenders ['quack']": lambda d: d["figures"].update({"quack/tflops": 1.0}),
    "provenance key git is 5, want an object or null": lambda d: d["provenance"].update(git=5),
    "provenance key git/commit is 5, want a word or null": lambda d: d["provenance"].update(
        git={"commit": 5}
    ),
    "build key gpus is [1, None], want a list of words or null": lambda d: d["build"].update(
        gpus=[1, None]
    ),
    "config key operation is [], want a word": lambda d: d["config"].update(operation=[]),
    "figure flops is 'many', want a finite number": lambda d: d["figures"].update(flops="many"),
    "ranks are [0, 0], want each once": lambda d: d["ranks"][1].update(rank=0),
    "count num_tokens is 1.5, want int": lambda d: d["ranks"][0]["counts"].update(num_tokens=1.5),
    "rank 0: clocks is 7, want an object or null": lambda d: d["ranks"][0].update(clocks=7),
    "rank 0: clocks key sm_mhz is 'fast', want int": lambda d: d["ranks"][0].update(
        clocks={**CLOCKS, "sm_mhz": "fast"}
    ),
    "rank 1: clocks key power_w_max is nan, want a number": lambda d: d["ranks"][1].update(
        clocks={**CLOCKS, "power_w_max": math.nan}
    ),
    "rank 1: clocks key reasons holds something else than words": lambda d: d["ranks"][1].update(
        clocks={**CLOCKS, "reasons": [3]}
    ),
    "rank 1: clocks key fan is unknown": lambda d: d["ranks"][1].update(
        clocks={**CLOCKS, "fan": 1}
    ),
    "ranks: key clocks is missing": lambda d: d["ranks"][0].pop("clocks"),
    "verdict max_error is None, want a number": lambda d: d["ranks"][0]["verdicts"][0].update(
        max_error=None
    ),
}


@pytest.mark.parametrize("fault", DOCUMENT_FAULTS)
def test_a_fault_of_point_json_is_named(root, fault):
    edit(root / "exp" / "c1-b1", DOCUMENT_FAULTS[fault])

    found = faults_of_point(root)

    assert any(f.startswith("exp/c1-b1/point.json: ") and fault in f for f in found), found


TABLE_FAULTS = {
    ("samples", "column component holds ['lunch'], allowed are"): lambda t: with_value(
        t, "component", 0, "lunch"
    ),
    ("samples", "a duration is -5 ns, want 0 or more"): lambda t: with_value(
        t, "duration_ns", 0, -5
    ),
    ("samples", "fused e2e iteration 2 lacks ranks [1]"): lambda t: t.slice(0, 5),
    ("samples", "status ok, but nothing was measured"): lambda t: t.slice(0, 0),
    ("samples", "config_id is ['c7'], point.json has c1"): lambda t: with_value(
        t, "config_id", 1, "c7"
    ),
    ("samples", "ranks [5] are not in point.json"): lambda t: with_value(t, "rank", 0, 5),
    ("samples", "num_ranks is [3], ranks are [0, 1]"): lambda t: t.set_column(
        t.schema.get_field_index("num_ranks"), t.schema.field("num_ranks"), [_threes(t)]
    ),
    ("samples", "columns missing ['rank'], unknown []"): lambda t: t.drop_columns(["rank"]),
    ("samples", f"schema_version is {SCHEMA_VERSION + 1}, want"): lambda t: (
        t.replace_schema_metadata({**t.schema.metadata, b"schema_version": str(SCHEMA_VERSION + 1)})
    ),
    ("breakdown", "terms add up to 102 ns, e2e is 101 ns"): lambda t: with_value(
        with_value(t, "value_ns", 3, 12), "high_ns", 3, 12
    ),
    ("breakdown", "term late is 11 ns outside 12..12 ns"): lambda t: with_value(t, "low_ns", 3, 12),
    ("breakdown", "e2e is 102 ns, samples give [101] ns"): lambda t: with_value(
        with_value(t, "value_ns", 0, 102), "value_ns", 3, 12
    ),
    ("breakdown", "column term holds ['luck'], allowed are"): lambda t: with_value(
        t, "term", 1, "luck"
    ),
    ("breakdown", "table is nothing, want breakdown"): lambda t: t.replace_schema_metadata(None),
}


def _threes(table):
    return _array([3] * table.num_rows, table.schema.field("num_ranks"))


@pytest.mark.parametrize(("file", "fault"), TABLE_FAULTS)
def test_a_fault_of_a_table_is_named(root, file, fault):
    edit_table(root / "exp" / "c1-b1" / f"{file}.parquet", TABLE_FAULTS[file, fault])

    found = faults_of_point(root)

    assert any(f.startswith(f"exp/c1-b1/{file}.parquet: {fault}") for f in found), found


@pytest.mark.parametrize(
    ("group", "key", "value", "fault"),
    [
        ("launch", "num_ranks", 7, "column num_ranks holds [2], point.json has 7"),
        ("launch", "num_ranks", 2.5, "column num_ranks holds [2], point.json has 2.5"),
        ("kernel", "order", None, "column order holds ['edf'], point.json has None"),
        ("kernel", "roles", "switch", "column roles holds [None], point.json has 'switch'"),
        ("routing", "law", "uniform", "column law holds ['zipf'], point.json has 'uniform'"),
    ],
)
def test_settings_beside_samples_are_those_of_the_point(root, group, key, value, fault):
    edit(root / "exp" / "c1-b1", lambda d: d["config"][group].update({key: value}))

    assert f"exp/c1-b1/samples.parquet: {fault}" in faults_of_point(root)


def test_times_of_a_point_that_is_not_ok_are_a_fault(root):
    folder = root / "exp" / "c1-b1"
    edit(folder, lambda d: d.update(status="incorrect", reason="rank 0 differs"))

    found = faults_of_point(root)

    assert found == [
        "exp/c1-b1/samples.parquet: status incorrect, but times are kept",
        "exp/c1-b1/point.json: status incorrect, but figures ['fused/tflops'] are kept",
    ]


def test_a_failure_without_a_reason_is_a_fault(root):
    edit(root / "exp" / "c2-b1", lambda d: d.update(reason=""))

    assert faults_of_point(root) == ["exp/c2-b1/point.json: status skipped without a reason"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"schema_version": 1}'])
def test_any_point_json_is_read_without_a_traceback(root, content):
    (root / "exp" / "c1-b1" / "point.json").write_bytes(content)

    assert faults_of_point(root)
    assert validate(root).num_valid == 1


def test_any_flipped_byte_of_a_table_is_found_or_changes_nothing(root):
    path = root / "exp" / "c1-b1" / "samples.parquet"
    content = path.read_bytes()
    sound = pq.read_table(path)
    for place in range(0, len(content), 211):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])

        found = faults_of_point(root)

        assert found or pq.read_table(path).equals(sound), f"byte {place}"


def test_a_flipped_bit_inside_a_time_is_found(root):
    duration_ns = 0x1122334455667788
    records = tuple(
        replace(record, samples=(replace(record.samples[0], duration_ns=duration_ns),))
        for record in made_up().records
    )
    path = store(root, replace(made_up(), records=records, terms=())) / "samples.parquet"
    assert validate(path.parent).faults == []
    content = bytearray(path.read_bytes())
    content[content.index(duration_ns.to_bytes(8, "little"))] ^= 1
    path.write_bytes(content)

    (fault,) = validate(path.parent).faults

    assert fault.startswith("c1-b1/samples.parquet: cannot be read: ")


def test_a_name_of_a_column_that_no_text_holds_is_a_fault_in_words(root):
    path = root / "exp" / "c1-b1" / "samples.parquet"
    path.write_bytes(path.read_bytes().replace(b"iteration", b"iterat\xffon"))

    (fault,) = faults_of_point(root)

    want = "cannot be read: a column's name or text is no UTF-8"
    assert fault == f"exp/c1-b1/samples.parquet: {want}"


@pytest.mark.parametrize("length", [0, 3, 100, -1])
def test_a_table_cut_short_is_a_fault(root, length):
    path = root / "exp" / "c1-b1" / "breakdown.parquet"
    path.write_bytes(path.read_bytes()[:length])

    (fault,) = faults_of_point(root)

    assert fault.startswith("exp/c1-b1/breakdown.parquet: cannot be read: ")
    assert "\n" not in fault


@pytest.mark.parametrize("file", ["samples.parquet", "breakdown.parquet"])
def test_a_missing_table_is_a_fault(root, file):
    (root / "exp" / "c1-b1" / file).unlink()

    assert faults_of_point(root) == [f"exp/c1-b1/{file}: missing"]


def test_a_run_that_was_cut_short_is_named_with_its_half_written_file(root):
    point = replace(made_up("c3").point)
    with claim_folder(root, point):
        pass
    folder = root / point.name / point.folder
    (folder / ".samples.parquet.77.tmp").write_bytes(b"PAR1")
    (root / "exp" / ".summary.parquet.77.tmp").write_bytes(b"PAR1")
    (root / "exp" / "c4-b1").mkdir()

    assert faults_of_point(root) == [
        "exp/.summary.parquet.77.tmp: half-written file of a run that was cut short: delete it",
        "exp/c3-b1/.samples.parquet.77.tmp: half-written file of a run that was cut short",
        "exp/c3-b1/point.json: missing, so the point never ended",
        "exp/c4-b1: empty folder, left by a run that was cut short: delete it",
    ]


def test_a_run_that_was_cut_short_and_done_again_is_forgiven(root):
    (root / "exp" / "c1-b1" / "point.json").unlink()
    store(root, made_up("c1"))

    report = validate(root)

    assert (report.num_valid, report.faults) == (2, [])


def test_points_set_aside_are_checked_too(root):
    store(root, made_up("c1"))
    assert validate(root).num_valid == 3
    edit(root / "exp" / "c1-b1.1", lambda d: d.update(status="fine"))

    (fault,) = validate(root).faults

    assert fault.startswith("exp/c1-b1.1/point.json: status is fine, want one of")


def test_a_summary_that_contradicts_the_points_is_named(root):
    path = root / "exp" / "summary.parquet"
    edit_table(path, lambda t: with_value(t, "median_ns", 0, 1))
    store(root, made_up("c3"))

    assert validate(root).faults == [
        "exp/summary.parquet: row c1-b1 fused: median_ns is 1, the point folder gives 101",
        "exp/summary.parquet: row c3-b1 fused is missing: "
        "the next run of this experiment writes it",
    ]


def test_a_summary_row_that_is_there_twice_is_named(root):
    path = root / "exp" / "summary.parquet"
    edit_table(path, lambda t: pa.concat_tables([t, t.slice(0, 1)]))

    assert validate(root).faults == [
        "exp/summary.parquet: 3 rows for 2 points and contenders, want one each"
    ]


def test_logs_and_the_ignore_file_belong_there(root):
    (root / ".gitignore").write_text("*\n")
    (root / "exp" / "c1-b1" / "logs" / "rank0.log").write_text("hello\n")

    assert validate(root).faults == []


def test_a_summary_of_an_older_version_may_hold_a_figure_by_its_own_formula(tmp_path):
    # As a run of version 6 has left it, which made efficiency without CTAs that join the GEMM.
    published = Path(__file__).resolve().parents[1] / "results/h200_x1/dispatch_gemm"
    shutil.copytree(published, tmp_path / "dispatch_gemm")
    path = tmp_path / "dispatch_gemm" / "summary.parquet"
    table = pq.ParquetFile(path).read()
    rows = table.to_pylist()
    changed = 0
    for row in rows:
        folder = tmp_path / "dispatch_gemm" / f"{row['config_id']}-{row['build_id']}"
        document = json.loads((folder / "point.json").read_text())
        assert document["schema_version"] <= 6
        row["schema_version"] = 6
        if row["efficiency"] is not None:
            stored = document["figures"]["fused/efficiency"]
            changed += row["efficiency"] != stored
            row["efficiency"] = stored
    schema = of_version(SUMMARY, 6)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)

    assert changed == 5
    assert validate(tmp_path).faults == []
    # Any other figure must still be that of the points.
    rows[0]["median_ns"] += 1
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    assert any("median_ns is" in fault for fault in validate(tmp_path).faults)
