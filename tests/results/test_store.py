"""What is written comes back, and nothing that happens damages what was there."""

import errno
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilepipe.records import Status
from tilepipe.results.check import point_faults
from tilepipe.results.files import StoreError, check_results_dir, write_bytes
from tilepipe.results.schema import BREAKDOWN, PERFORMANCE_COLUMNS, SAMPLES, SUMMARY
from tilepipe.results.store import (
    FolderBusy,
    claim_folder,
    read_outcome,
    read_points,
    write_outcome,
    write_summary,
)

PROVENANCE = {"tilepipe": "0.1.0"}


def open_point_folder(results_dir, point):
    """The folder of a run that has ended."""
    with claim_folder(results_dir, point):
        pass
    return results_dir / point.name / point.folder


def stored(results_dir, outcome):
    folder = open_point_folder(results_dir, outcome.point)
    write_outcome(folder, outcome, PROVENANCE)
    return folder


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_outcome_comes_back_as_it_was(outcomes, tmp_path_factory, data):
    outcome = data.draw(outcomes)

    folder = stored(tmp_path_factory.mktemp("results"), outcome)

    assert point_faults(folder) == []
    assert read_outcome(folder) == outcome


def test_terms_come_back_with_their_null(tmp_path, make_outcome):
    outcome = make_outcome()

    folder = stored(tmp_path, outcome)

    assert read_outcome(folder).terms == outcome.terms
    rows = pq.read_table(folder / "breakdown.parquet").to_pylist()
    assert [(row["term"], row["value_ns"], row["interval_kind"]) for row in rows] == [
        ("e2e", 130, "range"),
        ("plan", 11, "range"),
        ("sm_tax", None, None),
        ("contention", 0, "range"),
        ("late", 119, "range"),
    ]


def test_columns_without_any_value_keep_their_type(tmp_path, make_outcome, make_record):
    outcome = make_outcome(records=(replace(make_record(0, {("a", "e2e"): (5,)}), counts={}),))

    folder = stored(tmp_path, replace(outcome, terms=(), figures={}))

    samples = pq.read_table(folder / "samples.parquet")
    assert samples.column("copy").null_count == samples.num_rows == 1
    assert samples.schema.field("num_tokens").type == pa.int64()
    for file, schema in (("samples", SAMPLES), ("breakdown", BREAKDOWN)):
        found = pq.read_schema(folder / f"{file}.parquet")
        assert found.equals(schema.remove_metadata(), check_metadata=False)
        assert found.field(0).metadata[b"meaning"] == schema.field(0).metadata[b"meaning"]


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.ok])
def test_a_point_that_is_not_ok_keeps_its_words_and_loses_its_times(tmp_path, make_outcome, status):
    outcome = make_outcome(status=status, reason="rank 1 said no")

    folder = stored(tmp_path, outcome)

    found = read_outcome(folder)
    assert (found.status, found.reason) == (status, "rank 1 said no")
    assert found.figures == {"logical_bytes": 4096.0}
    assert [record.counts for record in found.records] == [r.counts for r in outcome.records]
    assert [record.verdicts for record in found.records] == [r.verdicts for r in outcome.records]
    assert all(record.samples == () for record in found.records)
    assert found.terms == ()


def test_point_json_holds_the_command_that_repeats_it(tmp_path, make_outcome, make_point):
    point = make_point(kernel={"order": "edf_list"}, hardware={"num_sms": np.int64(132)})

    folder = stored(tmp_path, make_outcome(point=point))

    text = (folder / "point.json").read_text()
    command = "python -m tilepipe.run +experiment=dispatch_gemm 'routing.path=a b.jsonl'"
    assert f'"command": "{command}"' in text
    assert '"order": "edf_list"' in text
    assert '"num_sms": 132' in text


def test_an_existing_folder_is_renamed_and_never_overwritten(tmp_path, make_outcome):
    first = stored(tmp_path, make_outcome(figures={"flops": 1.0}))
    stored(tmp_path, make_outcome(figures={"flops": 2.0}))
    third = stored(tmp_path, make_outcome(figures={"flops": 3.0}))

    assert first == third == tmp_path / "exp" / "c0ffee-b0b"
    assert names_in(tmp_path / "exp") == ["c0ffee-b0b", "c0ffee-b0b.1", "c0ffee-b0b.2"]
    flops = [read_outcome(path).figures["flops"] for path in sorted((tmp_path / "exp").iterdir())]
    assert flops == [3.0, 1.0, 2.0]
    assert (third / "logs").is_dir()


def test_a_folder_that_a_living_run_holds_is_refused(tmp_path, make_point):
    with (
        claim_folder(tmp_path, make_point()),
        pytest.raises(FolderBusy, match="another run is measuring") as caught,
    ):
        open_point_folder(tmp_path, make_point())

    assert caught.value.errno == errno.EBUSY
    assert names_in(tmp_path / "exp") == ["c0ffee-b0b"]
    open_point_folder(tmp_path, make_point())
    assert names_in(tmp_path / "exp") == ["c0ffee-b0b", "c0ffee-b0b.1"]


def test_reading_an_unsound_folder_names_the_fault(tmp_path, make_outcome):
    folder = stored(tmp_path, make_outcome())
    (folder / "samples.parquet").write_bytes(b"PAR1")

    with pytest.raises(ValueError, match=r"samples.parquet: cannot be read: .*resume=none"):
        read_outcome(folder)


def test_an_outcome_that_cannot_be_stored_leaves_no_file(tmp_path, make_outcome, make_point):
    folder = open_point_folder(tmp_path, make_point())

    with pytest.raises(ValueError, match="figure nonsense is unknown"):
        write_outcome(folder, make_outcome(figures={"nonsense": 1.0}), PROVENANCE)

    assert names_in(folder) == ["logs"]


def test_a_point_that_would_spoil_the_summary_is_refused_when_it_is_stored(
    tmp_path, make_outcome, make_point
):
    outcome = make_outcome(point=make_point(launch={}), status=Status.oom, reason="full")

    with pytest.raises(ValueError, match=r"num_ranks.*contains nulls"):
        stored(tmp_path, outcome)


@pytest.mark.parametrize(("key", "value"), [("tile_m", 2**70), ("tile_m", "wide"), ("order", 3)])
def test_a_value_that_its_column_cannot_hold_is_refused_by_name(
    tmp_path, make_outcome, make_point, key, value
):
    outcome = make_outcome(point=make_point(kernel={key: value}))

    with pytest.raises(ValueError, match=f"^column {key} takes (int64|string): "):
        stored(tmp_path, outcome)


def test_summary_holds_every_sound_point_and_marks_the_last_sweep(
    tmp_path, make_outcome, make_point
):
    old = make_outcome(point=make_point("a1"))
    new = make_outcome(point=make_point("a2"), status=Status.timeout, reason="too slow")
    for outcome in (old, old, new):
        stored(tmp_path, outcome)
    broken = stored(tmp_path, make_outcome(point=make_point("a3")))
    (broken / "samples.parquet").unlink()
    lost = make_outcome(point=make_point("a4"), status=Status.oom, reason="disk full")

    path = write_summary(tmp_path / "exp", [new, lost])

    table = pq.read_table(path)
    assert table.schema.equals(SUMMARY.remove_metadata(), check_metadata=False)
    rows = table.to_pylist()
    shown = ("config_id", "status", "contender", "last_sweep", "median_ns")
    assert [tuple(row[key] for key in shown) for row in rows] == [
        ("a1", "ok", "fused", False, 130),
        ("a2", "timeout", None, True, None),
        ("a4", "oom", None, True, None),
    ]
    assert {rows[1][column] for column in PERFORMANCE_COLUMNS} == {None}
    assert [folder.name for folder, _ in read_points(tmp_path / "exp")] == ["a1-b0b", "a2-b0b"]


def test_the_summary_of_no_point_is_a_table_without_rows(tmp_path):
    table = pq.read_table(write_summary(tmp_path / "exp", []))

    assert table.num_rows == 0
    assert table.schema.names == SUMMARY.names


def test_results_dir_is_made_and_left_empty_by_the_check(tmp_path):
    check_results_dir(tmp_path / "a" / "b")

    assert names_in(tmp_path / "a" / "b") == []


@pytest.mark.parametrize("kind", ["file", "below a file", "proc"])
def test_a_results_dir_that_cannot_be_written_is_refused_in_one_sentence(tmp_path, kind):
    (tmp_path / "file").write_text("")
    path = {
        "file": tmp_path / "file",
        "below a file": tmp_path / "file" / "deep",
        "proc": Path("/proc/tilepipe"),
    }[kind]

    with pytest.raises(StoreError, match=r"results_dir=$") as caught:
        check_results_dir(path)

    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_point_folder_below_a_file_is_refused_in_one_sentence(tmp_path, make_point):
    (tmp_path / "file").write_text("")

    with pytest.raises(StoreError, match=r"c0ffee-b0b.new: Not a directory: name a folder"):
        open_point_folder(tmp_path / "file", make_point())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS])
def test_a_failed_write_keeps_the_earlier_file_and_leaves_no_other(tmp_path, monkeypatch, number):
    path = tmp_path / "point.json"
    write_bytes(path, b"earlier")

    def fail(descriptor):
        raise OSError(number, "as the kernel says it")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreError, match=f"{path}: {os.strerror(number)}: ") as caught:
        write_bytes(path, b"later")

    assert caught.value.errno == number
    assert ("free some space" in str(caught.value)) == (number in (errno.ENOSPC, errno.EDQUOT))
    assert path.read_bytes() == b"earlier"
    assert names_in(tmp_path) == ["point.json"]


def test_a_device_or_a_pipe_is_written_to_and_stays_what_it_is(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_bytes(pipe, b"told")
        assert os.read(reader, 100) == b"told"
    finally:
        os.close(reader)

    assert pipe.is_fifo()
    assert names_in(tmp_path) == ["pipe"]


def test_of_a_link_the_file_is_replaced_that_it_leads_to(tmp_path):
    (tmp_path / "there").mkdir()
    file, link = tmp_path / "there" / "file", tmp_path / "link"
    file.write_bytes(b"earlier")
    link.symlink_to(file)

    write_bytes(link, b"later")

    assert link.is_symlink()
    assert file.read_bytes() == b"later"


def fill(path):
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_full_disk_is_one_sentence_and_earlier_points_stay(mounted, make_outcome, make_point):
    small_disk = mounted("192k")
    check_results_dir(small_disk)
    first = make_outcome()
    folder = stored(small_disk, first)
    second = open_point_folder(small_disk, make_point("a2"))
    fill(small_disk / "filler")

    with pytest.raises(StoreError, match="No space left on device: free some space") as caught:
        write_outcome(second, make_outcome(point=make_point("a2")), PROVENANCE)
    with pytest.raises(StoreError, match=f"^{small_disk}: No space left"):
        check_results_dir(small_disk)

    assert caught.value.errno == errno.ENOSPC
    assert read_outcome(folder) == first
    assert names_in(second) == ["logs"]
    assert names_in(small_disk) == ["exp", "filler"]
