"""How far points of a sweep lie above the line through their neighbours."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.neighbours import main, over_line, sweeps_of
from tests.report.made_up import Store
from tilepipe.report.points import SETTINGS


def test_a_point_is_held_against_the_line_through_both_neighbours():
    times = {2: 400.0, 4: 220.0, 6: 100.0, 16: 200.0}

    assert over_line(times) == {4: 220.0 / 250.0, 6: 100.0 / (220.0 * 10 / 12 + 200.0 * 2 / 12)}


@given(
    counts=st.lists(st.integers(1, 64), min_size=3, unique=True),
    slope=st.floats(0, 10),
    at_zero=st.floats(1, 100),
)
def test_a_straight_line_lies_on_itself_and_its_ends_on_nothing(counts, slope, at_zero):
    found = over_line({count: at_zero + slope * count for count in counts})

    assert sorted(found) == sorted(counts)[1:-1]
    assert all(ratio == pytest.approx(1) for ratio in found.values())


def test_points_that_differ_in_more_than_their_ctas_are_other_sweeps():
    row = dict.fromkeys((*SETTINGS, "contender"))
    rows = [
        {**row, "operation": "dispatch", "contender": "dispatch", "status": status}
        | {"copy": copy, "num_comm_ctas": count, "work_ns": 10 * count}
        for copy in ("simt", "tma")
        for count, status in ((2, "ok"), (4, "ok"), (6, "timeout"))
    ]

    found = sweeps_of([*rows, {**rows[0], "contender": "torch_dispatch", "work_ns": 1}])

    assert [sweep.title for sweep in found] == [
        "operation=dispatch copy=simt",
        "operation=dispatch copy=tma",
    ]
    assert [sweep.times for sweep in found] == [{2: 20, 4: 40}] * 2


def test_a_cliff_is_shown_and_ends_in_one(tmp_path, capsys):
    store = Store(tmp_path)
    for count, stage_ns in ((2, 100), (4, 130), (6, 80)):
        launch = ([10] * 3, [stage_ns] * 3)
        store.add({"dispatch": launch}, kernel={"num_comm_ctas": count})

    code = main([str(tmp_path)])
    flat = main([str(tmp_path), "--most", "1.5"])

    out = capsys.readouterr().out
    assert (code, flat) == (1, 0)
    assert re.search(r"4 +\S+ ms +1\.4444", out)
    assert "1 of the points lie above 1.04 x the line" in out


def test_what_holds_no_sweep_is_refused_in_a_sentence(tmp_path, capsys):
    codes = [main([str(tmp_path / "missing")]), main([str(tmp_path)])]

    assert codes == [2, 2]
    missing, empty = capsys.readouterr().err.splitlines()
    assert missing.endswith("missing: no such folder; name one that results_dir= was")
    assert "holds no two points that differ in kernel.num_comm_ctas alone" in empty
