"""What is sound is read, of this version or an older one; the rest is a sentence each."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.results.older import COLUMNS, make_older
from tilepipe import validate
from tilepipe.records import Status
from tilepipe.results.check import load_point
from tilepipe.results.reading import read_results
from tilepipe.results.schema import BREAKDOWN, SAMPLES, SCHEMA_VERSION, SUMMARY
from tilepipe.results.store import claim_folder, write_outcome, write_summary
from tilepipe.results.versions import ADDED_IN, of_version

NEWER = SCHEMA_VERSION + 1
PUBLISHED = Path(__file__).resolve().parents[2] / "results" / "h200_x1"


def store(root, outcome):
    with claim_folder(root, outcome.point) as folder:
        write_outcome(folder, outcome, {"tilepipe": "0.1.0"})
    return root / outcome.point.name / outcome.point.folder


@pytest.fixture
def root(tmp_path, make_outcome, make_point):
    """Two points that are ok, one that is not, and their summary."""
    swept = [
        make_outcome(point=make_point("a1")),
        make_outcome(point=make_point("a2")),
        make_outcome(point=make_point("a3"), status=Status.timeout, reason="too slow"),
    ]
    for outcome in swept:
        store(tmp_path / "outputs", outcome)
    write_summary(tmp_path / "outputs" / "exp", swept[1:])
    return tmp_path / "outputs"


def ids(reading):
    return [point.outcome.point.config_id for point in reading.points]


@pytest.mark.parametrize(("below", "found"), [(".", 3), ("exp", 3), ("exp/a2-b0b", 1)])
def test_a_folder_is_read_at_any_depth(root, below, found):
    reading = read_results(root / below)

    assert (len(reading.points), reading.faults, reading.notes) == (found, (), ())


def test_points_come_with_the_rows_of_their_three_tables(root):
    reading = read_results(root)

    assert [point.is_ok for point in reading.points] == [True, True, False]
    assert [len(table) for table in (reading.summary, reading.breakdown, reading.samples)] == [
        3,
        10,
        16,
    ]
    stored = pq.ParquetFile(root / "exp" / "summary.parquet").read()
    assert reading.summary.equals(stored)
    assert reading.samples.schema.equals(SAMPLES, check_metadata=True)
    assert reading.breakdown.schema.equals(BREAKDOWN, check_metadata=True)
    assert reading.points[0].document["provenance"] == {"tilepipe": "0.1.0"}


def test_a_folder_that_was_renamed_is_read_all_the_same(root):
    moved = root / "exp" / "a1-b0b"
    moved.rename(root / "before")
    (root / "before" / "my notes.txt").write_text("fast")

    reading = read_results(root / "before")

    assert (ids(reading), reading.faults) == (["a1"], ())
    # It lies no longer beside a summary that could mark it.
    assert reading.summary.column("last_sweep").to_pylist() == [False]


def test_points_set_aside_are_left_out_unless_named(root, make_outcome, make_point):
    store(root, make_outcome(point=make_point("a1")))

    assert ids(read_results(root)) == ["a1", "a2", "a3"]
    assert ids(read_results(root / "exp" / "a1-b0b.1")) == ["a1"]


def test_a_folder_whose_name_ends_in_a_number_is_gone_through(root):
    root.rename(root.parent / "v1.2")

    assert ids(read_results(root.parent)) == ["a1", "a2", "a3"]


@pytest.mark.parametrize("version", [1, 2])
def test_older_versions_are_read_with_null_in_what_came_later(root, version):
    now = read_results(root)
    make_older(root, version)

    reading = read_results(root)

    assert reading.faults == ()
    (note,) = reading.notes
    assert note.startswith(f"{root}: 3 points are of schema version {version}")
    assert ("columns" in note) == any(added > version for added in ADDED_IN.values())
    assert {point.version for point in reading.points} == {version}
    for table, same in ((reading.samples, now.samples), (reading.summary, now.summary)):
        assert table.schema.equals(same.schema, check_metadata=True)
        later = {name for name, added in ADDED_IN.items() if added > version}
        for name in set(table.schema.names) & later:
            assert set(table.column(name).to_pylist()) == {None}, name
        assert set(table.column("schema_version").to_pylist()) == {version}
        for name in set(table.schema.names) - later - {"schema_version"}:
            assert table.column(name).equals(same.column(name)), name
    assert reading.points[0].outcome == now.points[0].outcome


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("table", [SAMPLES, BREAKDOWN, SUMMARY])
def test_added_in_names_every_column_that_a_version_had_not(table, version):
    name = table.metadata[b"table"].decode()

    assert of_version(table, version).names == COLUMNS[version][name].split()


def test_a_column_that_came_later_may_be_null():
    later = [field for table in (SAMPLES, BREAKDOWN, SUMMARY) for field in table]

    assert all(field.nullable for field in later if ADDED_IN.get(field.name, 1) > 1)
    assert set(ADDED_IN) <= {field.name for field in later}
    assert max(ADDED_IN.values()) <= SCHEMA_VERSION


@pytest.mark.parametrize("version", [1, 2])
def test_validate_accepts_an_older_version_and_says_so(root, version, capsys):
    make_older(root, version)

    assert validate.main([str(root)]) == 0

    assert capsys.readouterr().out.splitlines() == [
        f"3 points are of schema version {version}: valid as such, but not reused by a run, "
        f"which writes version {SCHEMA_VERSION}",
        "3 points valid, 0 faults",
    ]


def test_validate_compares_an_older_summary_with_its_points(root, capsys):
    make_older(root, 2)
    path = root / "exp" / "summary.parquet"
    table = pq.ParquetFile(path).read()
    place = table.schema.get_field_index("median_ns")
    wrong = pa.array([131, 130, None], pa.int64())
    pq.write_table(table.set_column(place, table.schema.field(place), wrong), path)

    assert validate.main([str(root)]) == 1

    assert capsys.readouterr().out.splitlines()[0] == (
        "exp/summary.parquet: row a1-b0b fused: median_ns is 131, the point folder gives 130"
    )


def test_a_point_of_an_older_version_is_not_reused_but_stays_in_the_summary(root):
    make_older(root, 2)

    outcome, faults = load_point(root / "exp" / "a1-b0b")
    table = pq.ParquetFile(write_summary(root / "exp", [])).read()

    assert outcome is not None
    assert faults == [f"point.json: schema_version is 2, want {SCHEMA_VERSION}"]
    assert table.column("config_id").to_pylist() == ["a1", "a2", "a3"]
    assert validate.validate(root).faults == []


def test_what_is_published_stays_readable():
    reading = read_results(PUBLISHED)

    assert reading.faults == ()
    assert len(reading.points) == len(list(PUBLISHED.glob("*/*/point.json"))) > 50
    assert reading.summary.num_rows == 456


def edit(folder, **changes):
    path = folder / "point.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rewrite(folder, change, file="samples.parquet"):
    path = folder / file
    pq.write_table(change(pq.ParquetFile(path).read()), path)


def with_metadata(table, key, value):
    return table.replace_schema_metadata({**table.schema.metadata, key: value})


SPOILT = {
    "point.json: missing, so the point never ended": lambda f: (f / "point.json").unlink(),
    "point.json: cannot be read: Expecting value": lambda f: (f / "point.json").write_text(""),
    f"point.json: schema_version is {NEWER}, want {SCHEMA_VERSION} or older": lambda f: edit(
        f, schema_version=NEWER
    ),
    f"point.json: schema_version is '2', want {SCHEMA_VERSION} or an older one": lambda f: edit(
        f, schema_version="2"
    ),
    "point.json: key planned is unknown": lambda f: edit(f, planned=1),
    "samples.parquet: missing": lambda f: (f / "samples.parquet").unlink(),
    "samples.parquet: cannot be read: Parquet file size is 0 bytes": lambda f: (
        f / "samples.parquet"
    ).write_bytes(b""),
    "samples.parquet: cannot be read: ": lambda f: (f / "samples.parquet").write_bytes(
        (f / "samples.parquet").read_bytes()[:-20]
    ),
    "breakdown.parquet: cannot be read: ": lambda f: (f / "breakdown.parquet").write_text("no"),
    "samples.parquet: columns missing ['rank'], unknown []": lambda f: rewrite(
        f, lambda t: t.drop_columns(["rank"])
    ),
    "samples.parquet: columns missing [], unknown ['extra']": lambda f: rewrite(
        f, lambda t: t.append_column("extra", t.column("rank"))
    ),
    f"samples.parquet: schema_version is 2, point.json has {SCHEMA_VERSION}": lambda f: rewrite(
        f, lambda t: with_metadata(t.select(COLUMNS[2]["samples"].split()), b"schema_version", b"2")
    ),
    "samples.parquet: table is summary, want samples": lambda f: rewrite(
        f, lambda t: with_metadata(t, b"table", b"summary")
    ),
    "samples.parquet: executor is ['cuda'], point.json has host": lambda f: rewrite(
        f,
        lambda t: t.set_column(
            t.schema.get_field_index("executor"),
            t.schema.field("executor"),
            pa.array(["cuda"] * t.num_rows),
        ),
    ),
}


@pytest.mark.parametrize("fault", SPOILT)
def test_a_spoilt_point_is_one_sentence_and_the_others_are_read(root, fault):
    SPOILT[fault](root / "exp" / "a1-b0b")

    reading = read_results(root)

    assert ids(reading) == ["a2", "a3"]
    (said,) = reading.faults
    assert said.startswith(f"{root}/exp/a1-b0b/{fault}")
    assert "\n" not in said


def test_a_spoilt_older_point_is_one_sentence_too(root):
    make_older(root, 1)
    rewrite(root / "exp" / "a1-b0b", lambda t: t.append_column("l2", t.column("law")))
    document = json.loads((root / "exp" / "a2-b0b" / "point.json").read_text())
    edit(root / "exp" / "a2-b0b", ranks=[{**e, "clocks": None} for e in document["ranks"]])

    reading = read_results(root)

    assert reading.faults == (
        f"{root}/exp/a1-b0b/samples.parquet: columns missing [], unknown ['l2']",
        f"{root}/exp/a2-b0b/point.json: ranks: key clocks is unknown",
        f"{root}/exp/a2-b0b/point.json: ranks: key clocks is unknown",
    )


def test_a_spoilt_summary_is_a_sentence_and_takes_no_point(root):
    (root / "exp" / "summary.parquet").write_bytes(b"PAR1")

    reading = read_results(root)

    assert ids(reading) == ["a1", "a2", "a3"]
    (said,) = reading.faults
    assert said.startswith(f"{root}/exp/summary.parquet: cannot be read: ")


@pytest.mark.parametrize("broken", ["empty", "a file", "none", "loop"])
def test_a_folder_without_points_is_one_sentence(tmp_path, broken):
    path = tmp_path / "place"
    if broken == "empty":
        path.mkdir()
        want = "holds no points: name a folder in which points have run"
    elif broken == "a file":
        path.write_text("")
        want = "is a file: name the folder that holds it"
    elif broken == "none":
        want = "no such folder: name a results folder, as in outputs"
    else:
        path.symlink_to(path)
        want = "no such folder: name a results folder, as in outputs"

    reading = read_results(path)

    assert (reading.points, reading.faults, reading.notes) == ((), (f"{path}: {want}",), ())
    assert reading.summary.num_rows == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("below", [".", "exp", "exp/a1-b0b"])
def test_a_folder_that_may_not_be_read_is_one_sentence(root, below):
    (root / below).chmod(0)
    try:
        reading = read_results(root)
    finally:
        (root / below).chmod(0o755)

    (said,) = reading.faults
    assert said.startswith(str(root / below))
    assert "Permission denied" in said


def test_mixed_executors_and_mere_failures_are_noted(root, make_outcome, make_point):
    store(root, make_outcome(point=replace(make_point("a4"), executor="cuda")))

    assert read_results(root).notes == (
        f"{root}: holds 3 of executor host and 1 of executor cuda points: they are never compared "
        "with each other",
    )
    for name in ("a1", "a2", "a4"):
        shutil.rmtree(root / "exp" / f"{name}-b0b")
    assert read_results(root).notes == (
        f"{root}: no point is ok (1 timeout), so there are no times",
    )
