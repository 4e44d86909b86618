"""The same recording in every format reads back equal; each format's own refusals."""

import base64
import json
import pickle
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.workload import recordings
from tests.workload.recordings import BARE, WEIGHTED, draw_ids
from tilepipe.workload.trace import Selection, place_of_row, read_trace

ALL = {**WEIGHTED, **BARE}
REPAIR = "record the file again or repair it there"
SHAPE = {"num_layers": 3, "num_tokens": 11, "num_topk": 3, "num_experts": 9}


def ids_of(seed=1, **changes):
    rng = np.random.Generator(np.random.PCG64(seed))
    return draw_ids(rng, **{**SHAPE, **changes})


def weights_like(ids):
    return np.random.Generator(np.random.PCG64(2)).random(ids.shape, dtype=np.float32)


def read(path, layer, num_topk=3, **chosen):
    return read_trace(path, Selection(layer=layer, num_topk=num_topk, **chosen))


def refusal(path, layer=None, **chosen):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the tests compare the whole text
        read(str(path), layer, **chosen)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@given(
    seed=st.integers(0, 2**32),
    num_layers=st.integers(1, 3),
    num_tokens=st.integers(1, 9),
    num_topk=st.integers(2, 4),
    spare=st.integers(0, 5),
)
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_format_reads_back_what_was_written(
    tmp_path, seed, num_layers, num_tokens, num_topk, spare
):
    shape = {"num_layers": num_layers, "num_tokens": num_tokens, "num_topk": num_topk}
    ids = ids_of(seed, **shape, num_experts=num_topk + spare)
    weights = weights_like(ids)
    paths = {
        **{name: write(tmp_path, ids, weights) for name, write in WEIGHTED.items()},
        **{name: write(tmp_path, ids) for name, write in BARE.items()},
    }

    for name, path in paths.items():
        for layer in range(num_layers):
            trace = read(path, layer, num_topk)
            assert np.array_equal(trace.topk_idx, ids[layer]), name
            assert trace.topk_idx.dtype == np.int32
            assert trace.layer == layer
            if name in WEIGHTED:
                assert np.array_equal(trace.topk_weights, weights[layer]), name
                assert trace.topk_weights.dtype == np.float32
            else:
                assert trace.topk_weights is None


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("first", "most"), [(0, 1), (2, 4), (7, None), (4, 100)])
def test_a_window_is_cut_from_the_layer_in_every_format(tmp_path, name, first, most):
    ids = ids_of()
    path = ALL[name](tmp_path, ids)

    trace = read(path, 1, first_token=first, max_tokens=most)

    stop = None if most is None else first + most
    assert np.array_equal(trace.topk_idx, ids[1, first:stop])


@pytest.mark.parametrize("name", ALL)
def test_a_window_behind_the_end_says_how_many_tokens_there_are(tmp_path, name):
    path = ALL[name](tmp_path, ids_of())

    assert refusal(path, 1, first_token=11) == (
        f"routing.first_token=11: {path} holds 11 tokens of this choice; type at most 10"
    )


@pytest.mark.parametrize("name", ALL)
def test_every_format_names_its_layers(tmp_path, name):
    path = ALL[name](tmp_path, ids_of())

    for layer, typed in ((None, "null"), (7, "7")):
        assert refusal(path, layer) == (
            f"routing.layer={typed}: {path} holds layers 0-2; type routing.layer=0 or another of "
            "them"
        )


@pytest.mark.parametrize("name", ALL)
def test_every_format_names_the_place_of_a_repeated_expert(tmp_path, name):
    ids = ids_of()
    ids[1, 9] = 5

    told = refusal(ALL[name](tmp_path, ids), 1)

    places = {
        "jsonl": "line 30",
        "jsonl_in_layers": "line 41",
        "parquet": "row 20",
        "parquet_fixed": "row 28",
        "query": "element 4, layer 1, row 0",
        "sglang_generate": "line 2, token 3",
        "sglang_chat": "line 1, token 9",
        "vllm_completions": "element 0, token 9",
        "vllm_lists": "line 1, token 8",
        "recorder": "record 1, token 3",
    }
    assert told.endswith(f": {places.get(name, 'row 9')} has the same expert twice (5); {REPAIR}")


@pytest.mark.parametrize("name", ALL)
def test_the_place_of_a_row_is_found_again(tmp_path, name):
    path = ALL[name](tmp_path, ids_of())

    chosen = Selection(layer=1, num_topk=3, first_token=5)
    found = place_of_row(path, chosen, 4)

    ids = ids_of()
    ids[1, 9] = 5
    assert f": {found} has the same expert twice" in refusal(ALL[name](tmp_path, ids), 1)


@pytest.mark.parametrize("name", ALL)
def test_a_truncated_file_is_one_sentence(tmp_path, name):
    path = tmp_path / "cut" / "x"
    path.parent.mkdir()
    whole = ALL[name](path.parent, ids_of(num_tokens=40))
    content = (path.parent / whole).read_bytes()

    for size in (0, 1, 40, len(content) // 2, len(content) - 4):
        # A log cut between two lines is a shorter log.
        while content[size - 1 : size] in (b"\n", b"}"):
            size -= 1
        (path.parent / whole).write_bytes(content[:size])
        told = refusal(whole, 1)
        assert told.startswith((f"routing.path={whole}: ", f"routing.layer=1: {whole} "))


# A damaged Parquet file is the library's to survive.
@pytest.mark.parametrize("name", [name for name in ALL if not name.startswith("parquet")])
def test_a_damaged_file_gives_rows_or_one_sentence(tmp_path, name):
    path = ALL[name](tmp_path, ids_of())
    with open(path, "rb") as file:
        whole = file.read()
    rng = np.random.Generator(np.random.PCG64(3))

    told = []
    for _ in range(60):
        content = bytearray(whole)
        for place in (rng.random(3) * len(content)).astype(int):
            content[place] = int(rng.random() * 256)
        with open(path, "wb") as file:
            file.write(content)
        try:
            read(path, 1)
        except ValueError as error:
            told.append(str(error))

    assert all(text.startswith("routing.") and "\n" not in text for text in told)


@pytest.mark.parametrize("suffix", ["", ".bin"])
@pytest.mark.parametrize("name", ALL)
def test_a_file_without_a_telling_name_is_known_by_its_content(tmp_path, name, suffix):
    ids = ids_of()
    path = tmp_path / f"unnamed{suffix}"
    path.write_bytes((tmp_path / ALL[name](tmp_path, ids)).read_bytes())

    assert np.array_equal(read(str(path), 2).topk_idx, ids[2])


def test_a_folder_is_refused_with_a_file_in_it(tmp_path):
    (tmp_path / "layer_02.parquet").touch()
    (tmp_path / "layer_03.parquet").touch()

    assert refusal(tmp_path) == (
        f"routing.path={tmp_path}: is a folder; type the path of one file in it, such as "
        "layer_02.parquet"
    )


# Requests.


def test_a_request_picks_its_tokens(tmp_path):
    ids = ids_of(num_layers=1)
    log, numbered = tmp_path / "log.jsonl", tmp_path / "numbered.jsonl"
    log.write_text(recordings.log_lines(ids, requests=["r1", "r2"] * 5 + ["r1"]))
    numbered.write_text(recordings.log_lines(ids, requests=[1, 22] * 5 + [1]))
    table = recordings.parquet_table(ids, None)
    table = table.append_column("request_id", pa.array([5, 6] * 5 + [5]))
    pq.write_table(table, tmp_path / "trace.parquet")
    answers = recordings.write_generated(tmp_path, ids)

    even, odd = ids[0, 0::2], ids[0, 1::2]
    assert np.array_equal(read(str(log), None, request="r2").topk_idx, odd)
    assert np.array_equal(read(str(numbered), None, request="22").topk_idx, odd)
    parquet = str(tmp_path / "trace.parquet")
    assert np.array_equal(read(parquet, None, request="5").topk_idx, even)
    assert np.array_equal(read(parquet, 0, request="5", first_token=1).topk_idx, even[1:])
    assert np.array_equal(read(answers, 0, request="a2").topk_idx, ids[0, 6:])


def test_requests_are_named_where_one_is_missing(tmp_path):
    ids = ids_of(num_layers=1)
    path = tmp_path / "log.jsonl"
    path.write_text(recordings.log_lines(ids, requests=[f"r{n}" for n in range(11)]))
    array = recordings.write_npy(tmp_path, ids)

    assert refusal(path, request="q") == (
        f"routing.request=q: {path} holds r0, r1, r10, r2, r3 and 6 more; type one of them, or "
        "null for all"
    )
    for bare in (array, recordings.write_parquet(tmp_path, ids)):
        assert refusal(bare, 0, request="q") == (
            f"routing.request=q: {bare} does not tell requests apart; type routing.request=null"
        )


# Parquet.


def write_rows(tmp_path, **columns):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def test_flame_writes_a_layer_a_file_with_narrow_numbers(tmp_path):
    ids = ids_of()[0]
    scores = weights_like(ids).astype(np.float16)
    path = write_rows(
        tmp_path,
        scores=pa.array(list(scores), pa.list_(pa.float16())),
        indices=pa.array(list(ids), pa.list_(pa.int16())),
    )

    trace = read(str(path), None)

    assert np.array_equal(trace.topk_idx, ids)
    assert np.array_equal(trace.topk_weights, scores.astype(np.float32))
    assert (trace.layer, trace.layers) == (None, ())
    assert refusal(path, 2) == (
        f"routing.layer=2: {path} does not tell layers apart; type routing.layer=null"
    )


PARQUET = {
    "the file holds token_id, but none of topk_ids, topk_idx, indices, experts; store the ids "
    "under one of these names": {"token_id": [1, 2]},
    "the file holds topk_ids and experts, which mean the same; store it once, under one of these "
    "names": {"topk_ids": [[1]], "experts": [[1]]},
    "column topk_ids is list<element: double>, not lists of integers; store expert numbers": {
        "topk_ids": [[1.0, 2.0]]
    },
    "column topk_ids is int64, not lists of integers; store expert numbers": {"topk_ids": [1]},
    "column weights is list<element: string>, not lists of numbers; store one number per id": {
        "topk_ids": [[1]],
        "weights": [["a"]],
    },
    "column layer is double, no integer; store layer numbers": {
        "topk_ids": [[1]],
        "layer": [0.5],
    },
    f"row 2 has 3 ids where the rows before have 2; {REPAIR}": {
        "topk_ids": [[1, 2], [2, 1], [1, 2, 3], [3, 4]]
    },
    f"row 1 has no list topk_ids; {REPAIR}": {"topk_ids": [[1, 2], None, [2, 3]]},
    f"row 0 has no list topk_ids; {REPAIR}": {"topk_ids": pa.array([[]], pa.list_(pa.int8()))},
    f"row 2 has topk_ids with an entry that is no whole number (null); {REPAIR}": {
        "topk_ids": [[1, 2], [3, 4], [2, None]]
    },
    f"row 1 has topk_ids and topk_weights of unequal length, 2 and 1; {REPAIR}": {
        "topk_ids": [[1, 2], [3, 4]],
        "topk_weights": [[0.5, 0.5], [0.5]],
    },
    f"row 1 has topk_weights with an entry that is no number (null); {REPAIR}": {
        "topk_ids": [[1, 2], [3, 4]],
        "topk_weights": [[0.5, 0.5], [0.5, None]],
    },
    f"row 1 has a weight that is negative, infinite in float32 or no number (-1.0); {REPAIR}": {
        "topk_ids": [[1, 2], [3, 4]],
        "topk_weights": [[0.5, 0.5], [0.5, -1.0]],
    },
    f"row 1 has an id that is no expert number (1099511627776); {REPAIR}": {
        "topk_ids": [[1, 2], [3, 2**40]]
    },
    f"row 1 has no layer number as layer (null); {REPAIR}": {
        "topk_ids": [[1], [2]],
        "layer": [0, None],
    },
    f"no token is recorded in it; {REPAIR}": {"topk_ids": pa.array([], pa.list_(pa.int8()))},
}


@pytest.mark.parametrize("sentence", PARQUET)
def test_bad_parquet_is_refused(tmp_path, sentence):
    path = write_rows(tmp_path, **PARQUET[sentence])

    assert refusal(path) == f"routing.path={path}: {sentence}"


def test_weights_may_be_missing_in_a_whole_parquet_column(tmp_path):
    empty = pa.array([None, None], pa.list_(pa.float32()))
    path = write_rows(tmp_path, topk_ids=[[1, 2], [3, 4]], topk_weights=empty)

    assert read(str(path), None).topk_weights is None


# Answers.


def write_answer(tmp_path, **answer):
    path = tmp_path / "answer.json"
    path.write_text(json.dumps(answer))
    return path


def test_the_layers_of_an_answer_may_be_typed_where_a_prefix_was_left_out(tmp_path):
    ids = ids_of()
    meta = {"id": "a", "prompt_tokens": 20, "completion_tokens": 3}
    meta["routed_experts"] = recordings.as_int32(ids.swapaxes(0, 1))
    path = write_answer(tmp_path, meta_info=meta)

    assert np.array_equal(read(str(path), 2, num_layers=3).topk_idx, ids[2])
    assert refusal(path, 2) == (
        f"routing.path={path}: line 1 has 99 ids, which is no whole number of 22 tokens of topk 3; "
        "type the model's topk, and routing.num_layers=N where a prefix was left out"
    )
    assert refusal(path, 2, num_layers=5) == (
        f"routing.path={path}: line 1 has 99 ids, which is no whole number of 5 layers of topk 3; "
        "type the model's topk, and routing.num_layers=N where a prefix was left out"
    )


def test_zeros_throughout_are_a_layer_without_experts(tmp_path):
    ids = ids_of()
    ids[0] = 0
    path = recordings.write_generated(tmp_path, ids)

    assert read(path, 1).layers == (1, 2)
    assert refusal(path, 0) == (
        f"routing.layer=0: {path} holds layers 1, 2; type routing.layer=1 or another of them"
    )


def test_each_choice_of_an_answer_is_a_request(tmp_path):
    ids = ids_of()
    path = write_answer(
        tmp_path,
        id="cmpl",
        choices=[
            {"routed_experts": recordings.as_npy(ids[:, :4].swapaxes(0, 1))},
            {"routed_experts": recordings.as_npy(ids[:, 4:].swapaxes(0, 1))},
        ],
    )

    assert np.array_equal(read(str(path), 0, request="cmpl/1").topk_idx, ids[0, 4:])
    assert np.array_equal(read(str(path), 0).topk_idx, ids[0])


ANSWERS = {
    "line 1 has routed_experts that are no base64": {"meta_info": {"routed_experts": "&&&&"}},
    "line 1 has 3 bytes of routed_experts, no int32": {"meta_info": {"routed_experts": "AAAA"}},
    "line 1 has no counts of tokens to tell its layers by": {
        "meta_info": {"routed_experts": "AAAAAA=="}
    },
    "line 1 has a .npy that was cut short": {
        "choices": [{"routed_experts": base64.b64encode(b"\x93NUMPY\x01\x00").decode()}]
    },
    "line 1 has lists of unequal length": {"choices": [{"routed_experts": [[[1, 2], [3]]]}]},
    "line 1 has routed_experts of float64 (1, 1, 2), not integers (tokens, layers, topk)": {
        "choices": [{"routed_experts": [[[1.5, 2]]]}]
    },
    "line 1 has no routed_experts": {"choices": [{"text": "x"}]},
}


@pytest.mark.parametrize("found", ANSWERS)
def test_a_bad_answer_is_refused(tmp_path, found):
    path = write_answer(tmp_path, **ANSWERS[found])

    assert refusal(path, 0).startswith(f"routing.path={path}: {found}; ")


def test_answers_of_two_models_are_refused(tmp_path):
    path = tmp_path / "two.jsonl"
    answers = [recordings.generated(ids_of()), recordings.generated(ids_of(num_layers=2))]
    path.write_text("\n".join(map(json.dumps, answers)))

    assert refusal(path, 0) == (
        f"routing.path={path}: line 2 has 2 layers of topk 3 where those before have 3 layers "
        f"of topk 3; {REPAIR}"
    )


# JSON of queries.

QUERIES = {
    "element 0, layer 3, row 1 has 1 ids where the rows before have 2": [{"3": [[1, 2], [3]]}],
    "element 1, layer 3, row 0 has no list experts": [{"3": [[1, 2]]}, {"3": [4]}],
    "element 0, layer 3 has no list of tokens": [{"3": 4}],
    "element 0, layer 3, row 0 has experts with an entry that is no whole number (1.5)": [
        {"3": [[1.5, 2]]}
    ],
    "element 1 is no object of layer numbers": [{"3": [[1, 2]]}, {"x": [[1, 2]]}],
    "no token is recorded in it": [],
    "is an array of neither answers nor steps": [{"topk_ids": [1, 2]}],
}


@pytest.mark.parametrize("found", QUERIES)
def test_a_bad_query_is_refused(tmp_path, found):
    path = tmp_path / "query.json"
    path.write_text(json.dumps(QUERIES[found]))

    assert refusal(path, 3 if found.startswith("element") else None).startswith(
        f"routing.path={path}: {found}; "
    )


# Arrays.


def test_an_array_deeper_than_any_model_is_refused(tmp_path):
    path = tmp_path / "tokens_first.npy"
    np.save(path, np.zeros((600, 4, 2), np.int32))

    assert refusal(path, 0) == (
        f"routing.path={path}: the ids have shape (600, 4, 2), more layers than any model; store "
        "(num_tokens, num_layers, num_topk) in a .npz under the name routed_experts"
    )


# SGLang's recorder.


def test_physical_slots_are_translated_to_experts(tmp_path):
    import torch

    ids = ids_of()
    # Slot 255 - e holds expert e, as after a rebalancing.
    logical = np.tile(np.arange(256)[::-1].copy(), (3, 1))
    torch.save(recordings.recorder_dump(255 - ids, logical=logical), tmp_path / "moved.pt")

    assert np.array_equal(read(str(tmp_path / "moved.pt"), 1).topk_idx, ids[1])


def test_tensors_of_any_stride_are_read(tmp_path):
    import torch

    ids = ids_of(num_topk=8)
    dump = recordings.recorder_dump(ids)
    whole = torch.from_numpy(ids.astype(np.int32)).transpose(1, 2).contiguous()
    dump["records"] = [{"topk_ids_of_layer": whole.transpose(1, 2)[:, 2:]}]
    torch.save(dump, tmp_path / "view.pt")

    assert np.array_equal(read(str(tmp_path / "view.pt"), 1).topk_idx, ids[1, 2:])


class Surprise:
    def __reduce__(self):
        return (print, ("run",))


def test_a_dump_that_asks_for_code_is_refused_unseen(tmp_path, capsys):
    path = tmp_path / "surprise.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps({"records": [Surprise()]}))

    assert refusal(path, 0) == (
        f"routing.path={path}: asks to load builtins.print, which is no plain data; load it where "
        "it was recorded and store its arrays with numpy.savez"
    )
    assert capsys.readouterr().out == ""


DUMPS = {
    "holds rank, neither records nor logical_count; "
    "dump it with SGLang's expert distribution recorder": {"rank": 0},
    "holds no dictionary, neither records nor logical_count; "
    "dump it with SGLang's expert distribution recorder": [1, 2],
    f"no token is recorded in it; {REPAIR}": {"records": []},
    "holds counts, not tokens; type routing=counts": {"records": [{"global_physical_count": 1}]},
    f"record 0 has no tensor topk_ids_of_layer; {REPAIR}": {
        "records": [{"topk_ids_of_layer": [[[1]]]}]
    },
}


@pytest.mark.parametrize("sentence", DUMPS)
def test_a_bad_dump_is_refused(tmp_path, sentence):
    import torch

    path = tmp_path / "dump.pt"
    torch.save(DUMPS[sentence], path)

    assert refusal(path, 0) == f"routing.path={path}: {sentence}"


def test_an_old_file_of_torch_is_refused_with_the_way_out(tmp_path):
    import torch

    path = tmp_path / "old.pt"
    torch.save({"records": []}, path, _use_new_zipfile_serialization=False)

    assert refusal(path, 0) == (
        f"routing.path={path}: no file of torch.save in its zip form, or cut short; record it "
        "again, or load it where it was recorded and store its arrays with numpy.savez"
    )
