"""`python -m tilepipe.export DIR` writes the stored tables, and nothing is lost on the way."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compare.runs import TIMES, store
from tests.results.older import make_older
from tests.results.spans import two_ranks
from tilepipe.export import main, meanings, to_csv, to_json
from tilepipe.records import Status
from tilepipe.results.reading import read_results
from tilepipe.results.schema import BREAKDOWN, SAMPLES, SUMMARY

TERMS = {"e2e": (999_875, 999_000, 1_000_000), "late": (999_875, 999_000, 1_000_000)}


@pytest.fixture
def root(tmp_path):
    """Two experiments; one point of the first failed."""
    store(tmp_path / "outputs", {"fused": TIMES}, terms=TERMS.items(), spans=two_ranks())
    store(tmp_path / "outputs", config_id="c2", status=Status.timeout)
    store(tmp_path / "outputs", {"dispatch": TIMES[:8]}, name="other")
    return tmp_path / "outputs"


def exported(capsys, *arguments):
    assert main([*map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("table", ["summary", "breakdown", "samples", "timeline"])
def test_json_holds_the_rows_of_the_table_as_they_are(root, capsys, table):
    text = exported(capsys, root, "--table", table, "--format", "json")

    want = getattr(read_results(root), table).to_pylist()
    assert len(want) > 1
    assert json.loads(text) == want
    assert list(json.loads(text)[0]) == list(want[0])


@pytest.mark.parametrize("table", ["summary", "breakdown", "samples", "timeline"])
def test_csv_read_with_the_columns_types_is_the_table_again(root, capsys, table):
    text = exported(capsys, root, "--table", table)

    want = getattr(read_results(root), table)
    assert read_csv(text, want.schema).equals(want.cast(nullable(want.schema)))


def read_csv(text, schema):
    """What a reader gets who knows the types and that a null is not quoted."""
    options = pyarrow.csv.ConvertOptions(
        column_types=nullable(schema), strings_can_be_null=True, quoted_strings_can_be_null=False
    )
    return pyarrow.csv.read_csv(io.BytesIO(text.encode()), convert_options=options)


def nullable(schema):
    return pa.schema([pa.field(field.name, field.type) for field in schema])


def test_null_is_empty_and_an_integer_stays_one(root, capsys):
    text = exported(capsys, root, "--columns", "config_id,reason,contender,median_ns,spread")

    assert text.splitlines() == [
        '"config_id","reason","contender","median_ns","spread"',
        '"c1","","fused",999875,0.008001000125015627',
        '"c2","too slow",,,',
        '"c1","","dispatch",999875,0.009751218902362795',
    ]


@given(
    integers=st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5),
    words=st.lists(
        st.none() | st.text(st.characters(exclude_categories=["Cs", "Cc"])), min_size=5, max_size=5
    ),
    figure=st.none() | st.floats(allow_nan=False, allow_infinity=False),
)
@settings(max_examples=150, deadline=None)
def test_any_value_comes_back(integers, words, figure):
    count = len(integers)
    schema = pa.schema([("i", pa.int64()), ("w", pa.string()), ("f", pa.float64())])
    columns = {"i": integers, "w": words[:count], "f": [figure] * count}
    table = pa.table(columns, schema=schema)

    assert json.loads(to_json(table)) == table.to_pylist()
    assert read_csv(to_csv(table).decode(), schema).equals(table)


def test_rows_are_chosen_by_name_and_status(root, capsys):
    columns = ("--columns", "name,config_id")

    by_name = exported(capsys, root, *columns, "--name", "other")
    by_status = exported(capsys, root, *columns, "--status", "timeout,oom")
    neither = exported(capsys, root, *columns, "--name", "other", "--status", "oom")

    assert list(csv.reader(io.StringIO(by_name)))[1:] == [["other", "c1"]]
    assert list(csv.reader(io.StringIO(by_status)))[1:] == [["exp", "c2"]]
    assert list(csv.reader(io.StringIO(neither))) == [["name", "config_id"]]


def test_the_file_and_what_its_columns_mean_lie_side_by_side(root, tmp_path, capsys):
    rows, told = tmp_path / "rows.json", tmp_path / "told.csv"

    out = exported(
        capsys, root, "--columns", "status,median_ns", "--output", rows, "--meanings", told
    )

    assert out == ""
    assert [row["status"] for row in json.loads(rows.read_text())] == ["ok", "timeout", "ok"]
    heading, status, median_ns = csv.reader(io.StringIO(told.read_text()))
    assert heading == ["column", "type", "unit", "meaning", "window", "allowed"]
    assert status[:4] == ["status", "string", "none", "how the point ended"]
    assert status[5].split(",")[:2] == ["ok", "incorrect"]
    assert median_ns[:4] == ["median_ns", "int64", "ns", "median over iterations"]


@pytest.mark.parametrize("schema", [SUMMARY, BREAKDOWN, SAMPLES])
def test_every_column_has_a_meaning(schema):
    rows = meanings(schema).to_pylist()

    assert [row["column"] for row in rows] == schema.names
    assert all(row["meaning"] and row["unit"] and row["window"] for row in rows)


def test_an_older_version_is_written_with_empty_later_columns(root, capsys):
    make_older(root, 1)

    text = exported(capsys, root, "--name", "exp", "--columns", "schema_version,l2,median_ns")

    assert text.splitlines()[1:] == ["1,,999875", "1,,"]


def test_a_spoilt_point_is_said_and_the_others_are_written(root, capsys):
    (root / "exp" / "c1-b1" / "breakdown.parquet").write_bytes(b"")

    assert main([str(root), "--columns", "name,config_id"]) == 1

    captured = capsys.readouterr()
    assert captured.out.splitlines()[1:] == ['"exp","c2"', '"other","c1"']
    assert captured.err.startswith(f"{root}/exp/c1-b1/breakdown.parquet: cannot be read: ")


@pytest.mark.parametrize("broken", ["none", "a file", "empty"])
def test_a_folder_that_holds_nothing_is_one_sentence(tmp_path, capsys, broken):
    path = tmp_path / "place"
    if broken == "a file":
        path.write_text("")
    elif broken == "empty":
        path.mkdir()

    assert main([str(path)]) == 2

    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert captured.err.startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--columns", "median"], "--columns median: summary has no such column: did you mean "),
        (
            ["--columns", "zzz"],
            "--columns zzz: summary has no such column: see python -m tilepipe.list columns",
        ),
        (["--columns", "name,name"], "--columns name,name: names a column twice: name each once"),
        (["--table", "samples", "--columns", "status"], "--columns status: samples has no such"),
        (["--name", "lost"], "--name lost: must be one of exp, other"),
        (["--status", "fine"], "--status fine: must be one of ok, incorrect, "),
        (
            ["--output", "/none/x.csv"],
            "--output /none/x.csv: No such file or directory: name a file that can be written",
        ),
        (
            ["--output", "x.csv", "--meanings", "x.csv"],
            "--meanings x.csv: is --output too: name another file",
        ),
    ],
)
def test_a_mistyped_word_is_one_sentence(root, capsys, words, told):
    assert main([str(root), *words]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(told)
    assert captured.err.count("\n") == 1


def test_output_to_the_name_of_a_pipe_goes_through_it(root):
    command = f"{sys.executable} -m tilepipe.export {root} --output /dev/stdout | head -n 1"

    done = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith('"schema_version","name",')


def test_a_reader_who_leaves_ends_nothing_with_a_traceback(root):
    repository = Path(__file__).resolve().parents[1]
    command = f"{sys.executable} -m tilepipe.export {root} --table samples | head -n 1"

    done = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(repository)},
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith('"schema_version","name",')
