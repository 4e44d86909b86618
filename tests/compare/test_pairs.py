"""Which point meets which, on stand-ins that hold what pairing reads."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilepipe.compare import pairs
from tilepipe.compare.pairs import Side, pair, settings_of


def stored(number, kernel, *, executor="host", name="exp", repetition=0):
    """A point that no other has the id of."""
    config = {
        "name": name,
        "operation": "dispatch",
        "kernel": kernel,
        "routing": {"law": "uniform"},
        "launch": {"num_ranks": 2, "time_limit_s": 10.0 + number},
        "measure": {"num_iters": 3, "timeline": bool(number % 2)},
    }
    mine = SimpleNamespace(name=name, config_id=f"id{number}", repetition=repetition)
    return SimpleNamespace(
        document={"config": config},
        outcome=SimpleNamespace(point=mine),
        executor=executor,
        name=name,
    )


def sides(a, b):
    return [Side(label=label, points=tuple(points)) for label, points in (("A", a), ("B", b))]


def differing(mine, other):
    keys = sorted({*mine, *other})
    return {key: (mine.get(key), other.get(key)) for key in keys if mine.get(key) != other.get(key)}


KERNELS = st.dictionaries(
    st.sampled_from(["order", "tile_m", "copy", "notes"]),
    st.one_of(st.none(), st.integers(0, 2), st.sampled_from(["a", "b"]), st.just([1])),
)


@given(a=st.lists(KERNELS, max_size=5), b=st.lists(KERNELS, max_size=5))
def test_a_lone_point_is_told_what_sets_it_apart_from_the_first_of_the_nearest(a, b):
    left = [stored(number, kernel, executor="host") for number, kernel in enumerate(a)]
    right = [stored(50 + number, kernel, executor="cuda") for number, kernel in enumerate(b)]

    found = pair(*sides(left, right), unlike=False)

    assert found.pairs == []
    assert [lone.point for lone in found.lone] == [*left, *right]
    for lone in found.lone:
        others = right if lone.label == "A" else left
        told = [differing(settings_of(lone.point), settings_of(other)) for other in others]
        assert lone.differing == (min(told, key=len) if told else {})


@given(a=st.lists(st.integers(0, 4), max_size=8), b=st.lists(st.integers(0, 4), max_size=8))
def test_points_of_one_setting_meet_only_where_each_side_has_one_of_them(a, b):
    left = [stored(number, {"tile_m": size}) for number, size in enumerate(a)]
    right = [stored(50 + number, {"tile_m": size}) for number, size in enumerate(b)]

    found = pair(*sides(left, right), unlike=False)

    met = sorted(mine.document["config"]["kernel"]["tile_m"] for mine, _ in found.pairs)
    assert met == [size for size in range(5) if a.count(size) == b.count(size) == 1]
    assert all(settings_of(mine) == settings_of(other) for mine, other in found.pairs)
    assert len(found.pairs) * 2 + len(found.lone) == len(left) + len(right)


def test_settings_are_read_as_often_as_there_are_points_not_pairs_of_them(monkeypatch):
    read = []

    def counted(point):
        read.append(point)
        return settings_of(point)

    monkeypatch.setattr(pairs, "settings_of", counted)
    points = [[stored(50 * n + i, {"tile_m": 50 * n + i}) for i in range(50)] for n in range(2)]

    found = pair(*sides(*points), unlike=False)

    assert len(found.lone) == 100
    assert len(read) <= 5 * 100


@pytest.mark.parametrize("key", ["name", "launch.time_limit_s", "measure.timeline"])
def test_what_is_not_measured_is_no_setting(key):
    assert key not in settings_of(stored(1, {}))
