"""Recorded routing: what the formats yield, how it is dealt, and every sentence of refusal."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilepipe.config import schemas
from tilepipe.config.routings import LOG_LINES
from tilepipe.workload import Selection, Trace, deal, draw, read_trace

META = {"type": "meta", "model_id": "toy", "top_k": 2}


def row(ids, weights=None, layer=0, token_idx=0):
    record = {"type": "route", "req_id": "r", "token_idx": token_idx, "layer": layer}
    record["topk_ids"] = ids
    if weights is not None:
        record["topk_weights"] = weights
    return record


def write_jsonl(folder, records, tail=""):
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return str(path)


def refusal(path, layer=None):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the tests compare the whole text
        read_trace(path, Selection(layer=layer))
    return str(caught.value)


def draw_trace(path, *, num_ranks=1, num_tokens=None, num_experts=8, num_topk=2, layer=None):
    return draw(
        schemas.TraceRouting(path=path, layer=layer),
        num_ranks=num_ranks,
        num_tokens=num_tokens,
        num_experts=num_experts,
        num_topk=num_topk,
    )


def test_jsonl_rows_stay_in_file_order_though_token_idx_restarts(tmp_path):
    rows = [
        row([3, 1], [0.5, 0.25], token_idx=0),
        row([0, 2], [0.125, 0.5], token_idx=1),
        row([1, 0], [0.25, 0.25], token_idx=0),
    ]

    trace = read_trace(write_jsonl(tmp_path, [META, *rows]), Selection())

    assert trace.topk_idx.tolist() == [[3, 1], [0, 2], [1, 0]]
    assert trace.topk_idx.dtype == np.int32
    assert trace.topk_weights.tolist() == [[0.5, 0.25], [0.125, 0.5], [0.25, 0.25]]
    assert trace.topk_weights.dtype == np.float32
    assert (trace.layer, trace.layers) == (0, (0,))


def test_jsonl_layer_picks_its_rows(tmp_path):
    rows = [row([token, 9], layer=layer) for token in range(3) for layer in (12, 0)]

    trace = read_trace(write_jsonl(tmp_path, [META, *rows]), Selection(layer=12))

    assert trace.topk_idx.tolist() == [[0, 9], [1, 9], [2, 9]]
    assert trace.topk_weights is None
    assert (trace.layer, trace.layers) == (12, (0, 12))


def test_jsonl_needs_no_metadata_and_skips_empty_lines(tmp_path):
    path = write_jsonl(tmp_path, [row([1, 0])], tail="\n\n" + json.dumps(row([2, 3])))

    assert read_trace(path, Selection()).topk_idx.tolist() == [[1, 0], [2, 3]]


def test_npy_holds_one_layer_or_several(tmp_path):
    flat, layered = tmp_path / "flat.npy", tmp_path / "layered.npy"
    ids = np.arange(12, dtype=np.int64).reshape(2, 3, 2)
    np.save(flat, ids[0].astype(np.uint8))
    np.save(layered, ids)

    one, second = read_trace(str(flat), Selection()), read_trace(str(layered), Selection(layer=1))

    assert one.topk_idx.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert (one.layer, one.layers, one.topk_weights) == (None, (), None)
    assert second.topk_idx.tolist() == [[6, 7], [8, 9], [10, 11]]
    assert (second.layer, second.layers) == (1, (0, 1))


def test_npy_with_a_single_layer_needs_no_layer(tmp_path):
    path = tmp_path / "trace.npy"
    np.save(path, np.array([[[4, 1]]]))

    trace = read_trace(str(path), Selection())

    assert (trace.topk_idx.tolist(), trace.layer) == ([[4, 1]], 0)


@pytest.mark.parametrize("name", ["topk_ids", "topk_idx"])
def test_npz_holds_ids_and_perhaps_weights(tmp_path, name):
    bare, full = tmp_path / "bare.npz", tmp_path / "full.npz"
    ids, weights = np.array([[[1, 0]], [[2, 5]]]), np.array([[[0.5, 0.5]], [[0.75, 0.25]]])
    np.savez(bare, **{name: ids})
    np.savez_compressed(full, **{name: ids, "topk_weights": weights})

    assert read_trace(str(bare), Selection(layer=1)).topk_weights is None
    trace = read_trace(str(full), Selection(layer=1))
    assert trace.topk_idx.tolist() == [[2, 5]]
    assert trace.topk_weights.tolist() == [[0.75, 0.25]]


def test_a_trace_does_not_hang_on_its_file(tmp_path):
    path = tmp_path / "trace.npy"
    np.save(path, np.array([[4, 1]], np.int32))
    trace = read_trace(str(path), Selection())

    np.save(path, np.array([[2, 3]], np.int32))

    assert trace.topk_idx.tolist() == [[4, 1]]
    assert type(trace.topk_idx) is np.ndarray


def test_every_format_gives_equal_routing(tmp_path):
    rng = np.random.Generator(np.random.PCG64(1))
    ids = np.argsort(rng.random((50, 8)), axis=1)[:, :3]
    weights = rng.random((50, 3)).astype(np.float32)
    rows = [row(i, w) for i, w in zip(ids.tolist(), weights.tolist(), strict=True)]
    npz = tmp_path / "trace.npz"
    np.savez(npz, topk_ids=ids, topk_weights=weights)

    routings = [
        draw_trace(path, num_ranks=4, num_topk=3)
        for path in (write_jsonl(tmp_path, rows), str(npz))
    ]

    for routing in routings:
        assert np.array_equal(np.concatenate(routing.topk_idx), ids)
        assert np.array_equal(np.concatenate(routing.topk_weights), weights)


@given(num_rows=st.integers(0, 40), num_ranks=st.integers(1, 8), cap=st.none() | st.integers(0, 12))
def test_deal_cuts_contiguous_blocks_of_nearly_equal_size(num_rows, num_ranks, cap):
    ids = np.arange(num_rows, dtype=np.int32).reshape(-1, 1)
    trace = Trace(ids, ids.astype(np.float32), 3, (3,))

    blocks = deal(trace, num_ranks, cap)

    sizes = [len(block.topk_idx) for block in blocks]
    dealt = num_rows if cap is None else min(num_rows, cap * num_ranks)
    assert len(blocks) == num_ranks
    assert np.array_equal(np.concatenate([block.topk_idx for block in blocks]), ids[:dealt])
    assert np.array_equal(np.concatenate([block.topk_weights for block in blocks]), ids[:dealt])
    assert max(sizes) - min(sizes) <= 1
    assert cap is None or max(sizes) <= cap


def test_typed_tokens_cap_each_rank(tmp_path):
    path = write_jsonl(tmp_path, [row([token, 7]) for token in range(7)])

    capped = draw_trace(path, num_ranks=2, num_tokens=2)
    whole = draw_trace(path, num_ranks=2, num_tokens=100)

    assert [ids[:, 0].tolist() for ids in capped.topk_idx] == [[0, 1], [2, 3]]
    assert [ids[:, 0].tolist() for ids in whole.topk_idx] == [[0, 1, 2, 3], [4, 5, 6]]


def test_missing_weights_become_equal_over_the_valid_slots(tmp_path):
    path = write_jsonl(tmp_path, [row([1, 2]), row([3, -1]), row([-1, -1])])

    routing = draw_trace(path)

    assert routing.topk_weights[0].tolist() == [[0.5, 0.5], [1, 0], [0, 0]]


def test_recorded_weights_stay_as_recorded_but_for_dropped_slots(tmp_path):
    path = write_jsonl(tmp_path, [row([1, 2], [0.25, 0.125]), row([-1, 3], [0.5, 0.5])])

    routing = draw_trace(path)

    assert routing.topk_weights[0].tolist() == [[0.25, 0.125], [0, 0.5]]


def test_another_topk_names_the_override(tmp_path):
    path = write_jsonl(tmp_path, [row([0, 1, 2, 3])])

    with pytest.raises(ValueError, match=r"type workload\.num_topk=4$") as caught:
        draw_trace(path, num_topk=2)

    assert str(caught.value) == (
        f"workload.num_topk=2: {path} was recorded with topk 4; type workload.num_topk=4"
    )


def test_an_expert_beyond_the_group_names_line_and_override(tmp_path):
    path = write_jsonl(tmp_path, [META, row([0, 1], layer=5), row([9, 2]), row([12, 3])])

    with pytest.raises(ValueError, match=r"workload\.num_experts") as caught:
        draw_trace(path, num_ranks=3, num_experts=9, layer=0)

    # 13 experts would do, but 3 ranks share them evenly.
    assert str(caught.value) == (
        f"workload.num_experts=9: line 3 of {path} chooses expert 9; type workload.num_experts=15"
    )


REPAIR = "record the file again or repair it there"

BAD_LINES = {
    "is not valid JSON, or was cut short": '{"layer": 0, "topk_ids": [1, 2',
    "is not a JSON object": "[1, 2]",
    "has no layer number as layer (null)": json.dumps({"topk_ids": [1, 2]}),
    "has no list topk_ids": json.dumps({"layer": 0, "experts": [1, 2]}),
    "has 3 ids where the rows before have 2": json.dumps(row([1, 2, 3], [1, 1, 1])),
    "has topk_ids with an entry that is no whole number (1.0)": json.dumps(row([1.0, 2], [1, 1])),
    "has an id that is no expert number (-2)": json.dumps(row([-2, 2], [1, 1])),
    "has the same expert twice (2)": json.dumps(row([2, 2], [1, 1])),
    "has no weights where the rows before have some": json.dumps(row([1, 2])),
    "has topk_ids and topk_weights of unequal length, 2 and 1": json.dumps(row([1, 2], [1])),
    'has topk_weights with an entry that is no number ("a")': json.dumps(row([1, 2], ["a", 1])),
    "has topk_weights with an entry that is no number (true)": json.dumps(row([1, 2], [True, 1])),
    "has a weight that is negative, infinite in float32 or no number (NaN)": json.dumps(
        row([1, 2], [1, np.nan])
    ),
}


@pytest.mark.parametrize("found", BAD_LINES)
def test_a_bad_line_is_refused_with_its_number(tmp_path, found):
    good = row([0, 1], [0.5, 0.5])
    # A row of another layer and an empty line: line numbers are the file's, not the layer's.
    path = write_jsonl(
        tmp_path, [META, good, row([5, 5, 5], layer=7)], tail="\n" + BAD_LINES[found]
    )

    assert refusal(path, layer=0) == f"routing.path={path}: line 5 {found}; {REPAIR}"


def test_weights_in_some_rows_only_are_refused(tmp_path):
    path = write_jsonl(tmp_path, [row([0, 1]), row([0, 1], [0.5, 0.5])])

    assert refusal(path) == (
        f"routing.path={path}: line 2 has weights where the rows before have none; {REPAIR}"
    )


def test_a_broken_character_is_refused_with_its_line(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(json.dumps(row([0, 1])).encode() + b'\n{"layer": "\xff"}\n')

    assert refusal(str(path)) == (f"routing.path={path}: line 2 is not UTF-8; write it as UTF-8")


@pytest.mark.parametrize("records", [[], [META]])
def test_a_log_without_tokens_is_refused(tmp_path, records):
    path = write_jsonl(tmp_path, records)

    assert refusal(path) == (
        f"routing.path={path}: no token is recorded in it; two lines of a log are {LOG_LINES}"
    )


def test_the_two_lines_that_sentences_show_are_a_recording(tmp_path):
    path = tmp_path / "shown.jsonl"
    path.write_text(LOG_LINES.replace(" and ", "\n"))

    trace = read_trace(str(path), Selection(layer=0))

    assert trace.topk_idx.tolist() == [[3, 17]]
    assert trace.topk_weights.tolist() == [pytest.approx([0.6, 0.4])]


def test_a_missing_file_and_an_unknown_suffix_are_refused(tmp_path):
    (tmp_path / "trace.txt").write_text("0,1\n")

    assert refusal(f"{tmp_path}/no.jsonl") == (
        f"routing.path={tmp_path}/no.jsonl: no such file; type routing.path=FILE"
    )
    assert refusal(f"{tmp_path}/trace.txt") == (
        f"routing.path={tmp_path}/trace.txt: unknown suffix .txt, and its content is of no known "
        "format; give one of .json, .jsonl, .ndjson, .npy, .npz, .parquet, .pq, .csv, .pt"
    )


def test_the_layers_present_are_named(tmp_path):
    several = write_jsonl(tmp_path, [row([0, 1], layer=layer) for layer in (12, 3, 12)])
    single = tmp_path / "single.jsonl"
    single.write_text(json.dumps(row([0, 1], layer=4)))
    flat = tmp_path / "flat.npy"
    np.save(flat, np.array([[0, 1]]))
    stacked = tmp_path / "stacked.npy"
    np.save(stacked, np.array([[[0, 1]], [[2, 3]]]))

    assert refusal(several) == (
        f"routing.layer=null: {several} holds layers 3, 12; type routing.layer=3 or another of them"
    )
    assert refusal(str(single), layer=5) == (
        f"routing.layer=5: {single} holds layer 4; type routing.layer=4"
    )
    assert refusal(str(flat), layer=0) == (
        f"routing.layer=0: {flat} does not tell layers apart; type routing.layer=null"
    )
    for layer, typed in ((None, "null"), (2, "2")):
        assert refusal(str(stacked), layer=layer) == (
            f"routing.layer={typed}: {stacked} holds layers 0, 1; "
            "type routing.layer=0 or another of them"
        )


BAD_ARRAYS = {
    "the ids are float64, not integers; store expert numbers": {"topk_ids": np.ones((2, 2))},
    "the ids have shape (4,); store (num_tokens, num_topk) or (num_layers, num_tokens, num_topk)": {
        "topk_ids": np.arange(4)
    },
    "the weights are float64 (1, 2) beside ids (2, 2); store one number per id": {
        "topk_ids": np.array([[0, 1], [2, 3]]),
        "topk_weights": np.ones((1, 2)),
    },
    f"no token is recorded in it; {REPAIR}": {"topk_ids": np.zeros((0, 2), np.int32)},
    f"row 1 has the same expert twice (3); {REPAIR}": {"topk_ids": np.array([[-1, -1], [3, 3]])},
    f"row 1 has an id that is no expert number (2147483648); {REPAIR}": {
        "topk_ids": np.array([[0, 1], [2**31, 2]])
    },
    f"row 0 has a weight that is negative, infinite in float32 or no number (1e+300); {REPAIR}": {
        "topk_ids": np.array([[0, 1]]),
        "topk_weights": np.array([[1e300, 0.0]]),
    },
    "the file holds a, b, but none of topk_ids, topk_idx, indices, experts; "
    "store the ids under one of these names": {"a": np.ones(1), "b": np.ones(1)},
    "the file holds topk_ids and topk_idx, which mean the same; "
    "store it once, under one of these names": {"topk_ids": np.ones(1), "topk_idx": np.ones(1)},
    "holds counts, not tokens; type routing=counts": {"logical_count": np.ones((2, 2), int)},
    "routed_experts has shape (2, 2); store (num_tokens, num_layers, num_topk)": {
        "routed_experts": np.ones((2, 2), int)
    },
}


@pytest.mark.parametrize("sentence", BAD_ARRAYS)
def test_a_bad_array_is_refused(tmp_path, sentence):
    path = tmp_path / "trace.npz"
    np.savez(path, **BAD_ARRAYS[sentence])

    assert refusal(str(path)) == f"routing.path={path}: {sentence}"


def test_an_empty_npy_is_refused(tmp_path):
    path = tmp_path / "trace.npy"
    np.save(path, np.zeros((0, 2), np.int32))

    assert refusal(str(path)) == f"routing.path={path}: no token is recorded in it; {REPAIR}"


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_a_truncated_or_foreign_array_file_is_refused(tmp_path, suffix):
    path = tmp_path / f"trace{suffix}"
    save = np.save if suffix == ".npy" else np.savez_compressed
    save(path, np.arange(2000).reshape(-1, 2))
    whole = path.read_bytes()

    for content in (whole[: len(whole) // 2], whole[:60], b"no array", b""):
        path.write_bytes(content)
        assert refusal(str(path)) == (
            f"routing.path={path}: not an array file of numbers, or cut short; {REPAIR}"
        )


@pytest.mark.parametrize("chunk_bytes", [1, 300, 4 << 20])
def test_both_ways_through_a_log_give_the_same_rows(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr("tilepipe.workload.trace.jsonl._CHUNK_BYTES", chunk_bytes)
    rng = np.random.Generator(np.random.PCG64(1))
    rows = [row(i, w) for i, w in zip(np.argsort(rng.random((60, 9)))[:, :3].tolist(),
                                      rng.random((60, 3)).tolist(), strict=True)]  # fmt: skip
    quick, slow = tmp_path / "quick.jsonl", tmp_path / "slow.jsonl"
    quick.write_text("\n".join(json.dumps(record) for record in [META, *rows]))
    # Blank lines, and a row of another layer that Arrow refuses: NaN is no JSON.
    odd = row([1, 2, 3], [1, 1, np.nan], layer=9)
    slow.write_text("\n\n".join(json.dumps(record) for record in [META, odd, *rows]))

    one, other = (read_trace(str(path), Selection(layer=0)) for path in (quick, slow))

    assert np.array_equal(one.topk_idx, other.topk_idx)
    assert np.array_equal(one.topk_weights, other.topk_weights)


def test_two_objects_on_a_line_are_refused(tmp_path):
    path = write_jsonl(tmp_path, [row([0, 1])], tail=json.dumps(row([1, 2])) * 2)

    assert refusal(path) == (
        f"routing.path={path}: line 2 is not valid JSON, or was cut short; {REPAIR}"
    )


def test_a_log_without_a_layer_or_ids_is_named(tmp_path):
    path = write_jsonl(tmp_path, [META, {"layer": 0, "tokens": [1, 2]}])

    assert refusal(path) == (
        f"routing.path={path}: line 2 holds layer, tokens, but none of topk_ids, topk_idx, "
        f"indices, experts; store the ids under one of these names, as in {LOG_LINES}"
    )


def test_reading_stops_where_the_ranks_have_all_they_take(tmp_path, monkeypatch):
    # Three lines at a time; the last is broken: only who reads that far can tell.
    monkeypatch.setattr("tilepipe.workload.trace.jsonl._CHUNK_BYTES", 200)
    path = write_jsonl(tmp_path, [row([token, 7]) for token in range(6)], tail="{")

    routing = draw_trace(path, num_ranks=2, num_tokens=3, layer=0)

    assert [ids[:, 0].tolist() for ids in routing.topk_idx] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match="line 7 is not valid JSON"):
        draw_trace(path, num_ranks=2, num_tokens=4, layer=0)


def test_a_window_is_dealt(tmp_path):
    path = write_jsonl(tmp_path, [row([token, 7]) for token in range(7)])
    law = schemas.TraceRouting(path=path, first_token=2, max_tokens=4)

    routing = draw(law, num_ranks=2, num_tokens=None, num_experts=8, num_topk=2)

    assert [ids[:, 0].tolist() for ids in routing.topk_idx] == [[2, 3], [4, 5]]


def test_no_token_per_rank_is_an_empty_routing(tmp_path):
    path = write_jsonl(tmp_path, [row([0, 1])])

    routing = draw_trace(path, num_ranks=2, num_tokens=0)

    assert [ids.shape for ids in routing.topk_idx] == [(0, 2), (0, 2)]
