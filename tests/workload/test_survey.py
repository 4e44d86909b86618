"""Figures of a recording against a count in plain Python."""

import json
from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from tests.workload.recordings import BARE, WEIGHTED, draw_ids, write_jsonl, write_recorder
from tilepipe.workload.trace import Selection, sheet, survey


def counted(rows, num_ranks, num_experts):
    """Rows per expert, mean ranks of a token, and how often pairs meet, on one rank and on two."""
    size = num_experts // num_ranks
    experts, num_ranks_met, meets = Counter(), 0, Counter()
    for row in rows:
        chosen = [expert for expert in row if expert >= 0]
        experts.update(chosen)
        num_ranks_met += len({expert // size for expert in chosen})
        for one, other in combinations(chosen, 2):
            meets[one // size == other // size] += 1
    pairs = Counter(
        one // size == other // size for one, other in combinations(range(num_experts), 2)
    )
    return (
        [experts[expert] for expert in range(num_experts)],
        num_ranks_met / len(rows),
        *(meets[same] / pairs[same] for same in (True, False)),
    )


@pytest.mark.parametrize("name", ["jsonl", "parquet", "routed_npz", "query", "sglang_generate"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_figures_are_those_of_a_plain_count(tmp_path, name, num_ranks):
    rng = np.random.Generator(np.random.PCG64(1))
    ids = draw_ids(rng, num_layers=3, num_tokens=50, num_topk=3, num_experts=12)
    path = {**WEIGHTED, **BARE}[name](tmp_path, ids)

    found = survey(path, num_ranks=num_ranks, selection=Selection(num_topk=3))

    assert found.num_experts == 12
    assert [layer.layer for layer in found.layers] == [0, 1, 2]
    for layer, rows in zip(found.layers, ids.tolist(), strict=True):
        per_expert, ranks, within, across = counted(rows, num_ranks, 12)
        assert layer.rows_per_expert.tolist() == per_expert
        assert layer.ranks_per_token == pytest.approx(ranks)
        assert layer.meets_within == pytest.approx(within)
        assert layer.meets_across == pytest.approx(across)
        assert (layer.num_tokens, layer.num_topk, layer.has_weights) == (50, 3, False)
        assert (
            layer.rows_per_rank.tolist()
            == np.sum(np.reshape(per_expert, (num_ranks, -1)), axis=1).tolist()
        )


def test_dropped_slots_count_for_nothing(tmp_path):
    rows = [[0, 5, -1], [-1, -1, -1], [3, 4, 5]]
    path = tmp_path / "dropped.npy"
    np.save(path, rows)

    (layer,) = survey(str(path), num_ranks=2).layers

    per_expert, ranks, within, across = counted(rows, 2, 6)
    assert layer.rows_per_expert.tolist() == per_expert
    assert (layer.ranks_per_token, layer.meets_within, layer.meets_across) == (
        pytest.approx(ranks),
        pytest.approx(within),
        pytest.approx(across),
    )


def test_a_typed_number_of_experts_spares_the_first_reading(tmp_path):
    ids = np.array([[[0, 1], [1, 2]]])
    path = write_jsonl(tmp_path, ids)

    assert survey(path, num_ranks=5).num_experts == 5
    assert survey(path).layers[0].num_ranks == 1  # 3 experts: neither 8, 4 nor 2 divide them
    assert survey(path, num_experts=16).layers[0].num_ranks == 8
    with pytest.raises(ValueError, match="type more") as caught:
        survey(path, num_experts=2, num_ranks=1)
    assert str(caught.value) == (
        f"num_experts=2: {path} chooses expert 2; type more, or leave the word out"
    )
    with pytest.raises(ValueError, match=r"^num_ranks=3: must divide num_experts=4$"):
        survey(path, num_experts=4, num_ranks=3)


def test_counts_tell_the_load_alone(tmp_path):
    path = tmp_path / "load.json"
    path.write_text(json.dumps({"counts": [[6, 2], [0, 0], [1, 3]]}))

    found = survey(str(path), num_ranks=2)

    assert [layer.layer for layer in found.layers] == [0, 2]
    assert found.layers[0].rows_per_expert.tolist() == [6, 2]
    assert found.layers[0].ranks_per_token is None
    text = "\n".join(sheet(found))
    assert "0       -     -        -     2             1.50           1.50" in text


def test_a_bare_array_is_counts_only_where_it_is_called_so(tmp_path):
    path = tmp_path / "bare.npy"
    np.save(path, np.array([[6, 2], [1, 3]]))

    assert survey(str(path)).layers[0].num_tokens == 2
    assert survey(str(path), as_counts=True).layers[1].rows_per_expert.tolist() == [1, 3]
    with pytest.raises(ValueError, match="holds tokens, not counts; leave law=counts out"):
        survey(write_jsonl(tmp_path, np.array([[[0, 1]]])), as_counts=True)


def test_the_sheet_says_what_a_recording_holds(tmp_path):
    ids = np.array([[[0, 1], [0, 2], [0, 3], [2, 3]]])
    path = write_jsonl(tmp_path, ids, np.ones(ids.shape, np.float32))

    lines = sheet(survey(path, num_ranks=2))

    assert lines[:4] == [
        "  format    log, one JSON object a line",
        "  layers    0",
        "  requests  1",
        "  experts   4, on 2 ranks of 2",
    ]
    assert [" ".join(line.split()) for line in lines[5:7]] == [
        "layer tokens topk weights seen expert max/mean rank max/mean hottest experts ranks/token "
        "within across",
        "0 4 2 yes 4 1.50 1.00 0 (37.5%), 2 (25.0%), 3 (25.0%) 1.50 250.00 125.00",
    ]


def test_a_layer_or_nothing_is_named(tmp_path):
    ids = draw_ids(
        np.random.Generator(np.random.PCG64(1)),
        num_layers=2,
        num_tokens=4,
        num_topk=2,
        num_experts=4,
    )
    path = write_recorder(tmp_path, ids)

    assert [layer.layer for layer in survey(path, selection=Selection(layer=1)).layers] == [1]
    with pytest.raises(ValueError, match=r"^routing\.layer=5: .* holds layers 0, 1; "):
        survey(path, selection=Selection(layer=5))
    np.save(tmp_path / "empty.npy", np.zeros((0, 2), int))
    with pytest.raises(ValueError, match="no token is recorded in it"):
        survey(str(tmp_path / "empty.npy"))


@pytest.mark.parametrize("name", ["jsonl", "parquet", "npz", "routed_npz", "recorder"])
def test_a_window_is_cut_from_every_layer(tmp_path, name):
    rng = np.random.Generator(np.random.PCG64(1))
    ids = draw_ids(rng, num_layers=3, num_tokens=50, num_topk=3, num_experts=12)
    path = {**WEIGHTED, **BARE}[name](tmp_path, ids)

    def found(**window):
        return survey(path, num_ranks=2, selection=Selection(**window)).layers

    for layer, rows in zip(found(first_token=20, max_tokens=9), ids[:, 20:29], strict=True):
        assert layer.num_tokens == 9
        assert layer.rows_per_expert.tolist() == np.bincount(rows.ravel(), minlength=12).tolist()
    assert [layer.num_tokens for layer in found(first_token=45, max_tokens=9)] == [5, 5, 5]
    with pytest.raises(ValueError, match="tokens") as caught:
        found(first_token=50)
    assert str(caught.value) == f"first_token=50: {path} holds 50 tokens a layer; type at most 49"


def test_equal_tokens_at_the_start_are_told_with_the_way_around_them(tmp_path):
    rng = np.random.Generator(np.random.PCG64(1))
    ids = draw_ids(rng, num_layers=3, num_tokens=50, num_topk=3, num_experts=12)
    ids[:2, :20] = ids[:2, :1]
    ids[2, :16] = ids[2, :1]
    ids[:, 20] = (ids[:, 0] + 1) % 12
    path = write_jsonl(tmp_path, ids)

    found = survey(path, num_ranks=2)
    later = survey(path, num_ranks=2, selection=Selection(first_token=20))
    same = survey(path, num_ranks=2, selection=Selection(max_tokens=18, layer=1))

    assert [layer.num_alike for layer in found.layers] == [20, 20, 16]
    assert sheet(found)[-2:] == [
        "",
        "  The first 20 tokens of layers 0, 1 are equal, as an engine's warm-up: first_token=20 "
        "leaves them out.",
    ]
    assert "equal" not in "".join(sheet(later))
    assert sheet(same)[-1].endswith(
        "18 tokens of layer 1 are equal, as an engine's warm-up: all there are."
    )
