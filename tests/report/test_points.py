"""From point folders, sound, old, broken and repeated, to the two tables of a report."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.report.made_up import fused_times, launch_of, steady
from tilepipe.records import Status
from tilepipe.report.points import POINTS, SETTINGS, TERMS, find_points
from tilepipe.results.schema import SCHEMA_VERSION
from tilepipe.results.versions import ADDED_IN


def make_old(folder):
    """Rewrite a point's files as schema version 1 wrote them."""
    document = json.loads((folder / "point.json").read_text())
    document["schema_version"] = 1
    del document["left_out"]
    for entry in document["ranks"]:
        del entry["clocks"]
    (folder / "point.json").write_text(json.dumps(document))
    for name in ("samples.parquet", "breakdown.parquet"):
        table = pq.ParquetFile(folder / name).read()
        table = table.drop_columns([c for c in ADDED_IN if c in table.column_names])
        place = table.column_names.index("schema_version")
        field = table.schema.field(place)
        table = table.set_column(place, field, pa.array([1] * table.num_rows, field.type))
        meta = {**table.schema.metadata, b"schema_version": b"1"}
        pq.write_table(table.replace_schema_metadata(meta), folder / name)


def test_a_row_carries_the_time_of_the_work_with_its_interval_and_its_origin(store):
    store.add({"dispatch": launch_of(100, 2_000)}, commit="abc", dirty=True)

    found = find_points(store.root)

    (row,) = found.points.to_pylist()
    assert found.points.schema == POINTS
    assert (row["work_low_ns"], row["work_ns"], row["work_high_ns"]) == (1_970, 2_000, 2_030)
    assert (row["median_ns"], row["plan_ns"]) == (2_100, 100)
    want = {
        "machine": "NVIDIA H200",
        "commit": "abc",
        "dirty": True,
        "num_gpus": 1,
        "link_gbps": 450.0,
        "hbm_gbps": 4800.0,
        "folder": "dispatch/c001-b1",
        "command": "python -m tilepipe.run +experiment=dispatch",
    }
    assert {key: row[key] for key in want} == want


def test_chained_launches_are_told_by_their_period(store):
    store.add({"dispatch": launch_of(100, 2_000)}, measure={"regime": "chained", "l2": "warm"})

    (row,) = find_points(store.root).points.to_pylist()

    assert row["work_ns"] == 2_100


def test_terms_carry_the_settings_of_their_point(store):
    store.add(fused_times(), operation="dispatch_gemm", kernel={"order": "random"})

    terms = find_points(store.root).terms

    assert terms.schema == TERMS
    values = {row["term"]: row["value_ns"] for row in terms.to_pylist()}
    assert values == {
        "e2e": 1_100,
        "plan": 100,
        "gemm_all": 600,
        "sm_tax": None,
        "sync_tax": 50,
        "contention": 150,
        "late": 200,
    }
    assert set(terms.column("order").to_pylist()) == {"random"}


def test_settings_leave_out_what_a_point_gave():
    assert {"num_comm_ctas", "law", "routing_exponent", "machine", "name"} <= set(SETTINGS)
    assert not {"status", "median_ns", "build_id", "sm_clock_mhz", "contender"} & set(SETTINGS)


def test_an_older_schema_version_is_shown_with_what_was_added_since_empty(store):
    make_old(store.add(fused_times(), operation="dispatch_gemm"))
    store.add(fused_times(fused_ns=3_000), operation="dispatch_gemm", kernel={"order": "token"})

    found = find_points(store.root)

    assert found.faults == ()
    (note,) = found.notes
    assert note.startswith(
        "1 points are of schema version 1, columns clock_reasons, dedup_wire_bytes, flag_batch and "
    )
    assert note.endswith(" more are null")
    rows = {r["order"]: r for r in found.points.to_pylist() if r["contender"] == "fused"}
    assert (rows["edf"]["work_ns"], rows["token"]["work_ns"]) == (1_000, 3_000)
    assert rows["edf"]["sm_clock_mhz"] is None
    assert found.terms.num_rows == 14


def test_a_newer_schema_version_is_named_with_the_next_step(store):
    folder = store.add({"dispatch": launch_of(10, 100)})
    document = json.loads((folder / "point.json").read_text())
    (folder / "point.json").write_text(json.dumps({**document, "schema_version": 99}))

    found = find_points(store.root)

    assert found.points.num_rows == 0
    (fault,) = found.faults
    assert str(folder) in fault
    assert f"schema_version is 99, want {SCHEMA_VERSION} or older" in fault
    assert "a newer TilePipe wrote it, read it with that one" in fault


@pytest.mark.parametrize("version", [SCHEMA_VERSION, 1])
@pytest.mark.parametrize("name", ["samples.parquet", "breakdown.parquet"])
def test_a_half_written_table_costs_its_own_point_only(store, name, version):
    broken = store.add({"dispatch": launch_of(10, 100)})
    store.add({"dispatch": launch_of(10, 200)}, kernel={"order": "token"})
    if version == 1:
        make_old(broken)
    content = (broken / name).read_bytes()
    (broken / name).write_bytes(content[: len(content) // 2])

    found = find_points(store.root)

    assert [row["work_ns"] for row in found.points.to_pylist()] == [200]
    assert any(f"{broken}/{name}: cannot be read" in fault for fault in found.faults)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "point.json"),
        (b"[]", "is no JSON object"),
        (b'{"schema_version": "x"}', "schema_version is 'x'"),
        (b'{"schema_version": 1, "ranks": 7}', "point.json"),
        (b'{"schema_version": 1, "ranks": [3]}', "point.json"),
    ],
)
def test_whatever_a_document_holds_is_a_sentence(store, content, said):
    folder = store.add({"dispatch": launch_of(10, 100)})
    (folder / "point.json").write_bytes(content)

    found = find_points(store.root)

    assert found.points.num_rows == 0
    assert all(str(folder) in fault for fault in found.faults)
    assert any(said in fault for fault in found.faults), found.faults


def test_of_equal_settings_the_last_point_counts_and_the_other_is_counted(store):
    store.add({"dispatch": launch_of(10, 100)})
    store.add({"dispatch": launch_of(10, 200)})

    found = find_points(store.root)

    assert [row["work_ns"] for row in found.points.to_pylist()] == [200]
    assert found.num_replaced == 1


def test_a_failure_after_a_success_is_told_beside_it(store):
    store.add({"dispatch": launch_of(10, 100)})
    store.add(status=Status.timeout, reason="rank 0 waits")

    rows = find_points(store.root).points.to_pylist()

    assert [(row["status"], row["work_ns"]) for row in rows] == [("ok", 100), ("timeout", None)]


def test_a_success_after_a_failure_replaces_it(store):
    store.add(status=Status.timeout, reason="rank 0 waits")
    store.add({"dispatch": launch_of(10, 100)})

    rows = find_points(store.root).points.to_pylist()

    assert [(row["status"], row["work_ns"]) for row in rows] == [("ok", 100)]


def test_folders_set_aside_under_way_or_of_tools_are_passed_over(store):
    folder = store.add({"dispatch": launch_of(10, 100)})
    for name in (f"{folder.name}.1", f"{folder.name}.new"):
        shutil.copytree(folder, folder.with_name(name))
    shutil.copytree(folder, store.root / "wrapped" / "dispatch" / folder.name)

    found = find_points(store.root)

    assert (found.points.num_rows, found.faults) == (1, ())


def test_a_point_s_own_folder_and_an_experiment_s_are_read_too(store):
    folder = store.add({"gemm_all": steady(50)}, operation="grouped_gemm")

    names = [
        find_points(place).points.column("folder").to_pylist() for place in (folder, folder.parent)
    ]

    assert names == [[folder.name], [folder.name]]
