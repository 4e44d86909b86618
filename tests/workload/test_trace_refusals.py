"""What a careless or hostile hand may do to a recording, in every format: rows or one sentence."""

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.workload import recordings
from tests.workload.recordings import BARE, WEIGHTED, draw_ids
from tilepipe.config import schemas
from tilepipe.config.routings import LOG_LINES
from tilepipe.workload.trace import Selection, read_counts, read_trace, survey

ALL = {**WEIGHTED, **BARE}
REPAIR = "record the file again or repair it there"
# Where token 9 of layer 1 stands in the file of each writer; elsewhere it is row 9.
PLACES = {
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
# Writers whose numbers are unsigned bytes: 254 stands for what others write as -2.
NARROW = ("vllm_completions", "routed_npz", "npy_by_column")


def ids_of(num_tokens=11):
    rng = np.random.Generator(np.random.PCG64(1))
    return draw_ids(rng, num_layers=3, num_tokens=num_tokens, num_topk=3, num_experts=9)


def read(path, layer=None, **chosen):
    return read_trace(str(path), Selection(layer=layer, num_topk=3, **chosen))


def refusal(call, *arguments, **keys):
    with pytest.raises(ValueError, match=r"^routing\.") as caught:
        call(*arguments, **keys)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", [name for name in ALL if name not in NARROW])
def test_an_id_below_minus_one_is_named_in_every_format(tmp_path, name):
    ids = ids_of()
    ids[1, 9, 2] = -2

    told = refusal(read, ALL[name](tmp_path, ids), 1)

    place = PLACES.get(name, "row 9")
    assert told.endswith(f": {place} has an id that is no expert number (-2); {REPAIR}")


@pytest.mark.parametrize("name", ALL)
def test_a_recording_without_tokens_is_refused_in_every_format(tmp_path, name):
    path = ALL[name](tmp_path, ids_of(num_tokens=0))

    assert refusal(read, path, 1).startswith(
        # An array has its layers even so; an answer that was asked for none has none.
        (f"routing.path={path}: ", f"routing.layer=1: {path} ")
    )


def unequal(folder, name):
    """A recording whose second part has one expert a token less than the first."""
    whole = ids_of(num_tokens=2)[1:2]
    less = whole[..., :2]
    path = folder / f"{name}.jsonl"
    if name == "jsonl":
        path.write_text(recordings.log_lines(whole) + recordings.log_lines(less))
        return path, "line 5 has 2 ids where the rows before have 3"
    if name == "parquet":
        path = folder / "two.parquet"
        tables = [recordings.parquet_table(part, None) for part in (whole, less)]
        pq.write_table(pa.concat_tables(tables), path)
        return path, "row 2 has 2 ids where the rows before have 3"
    if name == "query":
        steps = [{"0": part[0].tolist()} for part in (whole, less)]
        path.write_text("\n".join(map(json.dumps, steps)))
        return path, "line 2, layer 0, row 0 has 2 ids where the rows before have 3"
    if name == "answers":
        answers = [
            {"choices": [{"routed_experts": p.swapaxes(0, 1).tolist()}]} for p in (whole, less)
        ]
        path.write_text("\n".join(map(json.dumps, answers)))
        return path, "line 2 has 1 layers of topk 2 where those before have 1 layers of topk 3"
    import torch

    path = folder / "two.pt"
    dumps = [recordings.recorder_dump(part) for part in (whole, less)]
    torch.save({"records": [record for dump in dumps for record in dump["records"]]}, path)
    return path, "record 2, token 0 has 2 ids where the rows before have 3"


# An array has one topk by its form.
@pytest.mark.parametrize("name", ["jsonl", "parquet", "query", "answers", "recorder"])
def test_mixed_topk_is_refused_in_every_format(tmp_path, name):
    path, found = unequal(tmp_path, name)

    assert refusal(read, path, 0) == f"routing.path={path}: {found}; {REPAIR}"


PACKED = {
    "gzip-compressed; unpack it with gzip -d": gzip.compress,
    "bzip2-compressed; unpack it with bzip2 -d": bz2.compress,
    "xz-compressed; unpack it with xz -d": lzma.compress,
    "zstd-compressed; unpack it with zstd -d": lambda text: pa.compress(
        text, codec="zstd", asbytes=True
    ),
    "UTF-16; convert it with iconv -f UTF-16 -t UTF-8": lambda text: text.decode().encode("utf-16"),
}


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet", ".npz", ".pt", ".csv", ""])
@pytest.mark.parametrize("what", PACKED)
def test_a_packed_file_is_told_how_to_unpack_whatever_its_name(tmp_path, what, suffix):
    path = tmp_path / f"packed{suffix}"
    path.write_bytes(PACKED[what](recordings.log_lines(ids_of()).encode()))
    sentence = f"routing.path={path}: is {what}, and type the path of what comes out"

    for call in (read, survey):
        assert refusal(call, str(path)) == sentence
    assert refusal(read_counts, str(path), None) == sentence


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_byte_order_mark_and_ends_of_lines_do_not_matter(tmp_path, mark, end):
    ids, query = ids_of(), tmp_path / "query.json"
    recordings.write_query(tmp_path, ids)
    texts = {
        "log.jsonl": recordings.log_lines(ids),
        "unnamed": recordings.log_lines(ids),
        "answers.jsonl": json.dumps(recordings.generated(ids)) + "\n",
        "steps.json": query.read_text(),
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.write_bytes((mark + text).replace("\n", end).encode())
        assert np.array_equal(read(path, 1).topk_idx, ids[1]), name
    counts = tmp_path / "counts.csv"
    counts.write_bytes(f"{mark}expert, count{end}1, 5{end}".encode())
    assert read_counts(str(counts), None).tolist() == [0, 5]


def test_steps_may_stand_one_a_line_or_alone(tmp_path):
    ids = ids_of()
    steps = json.loads(Path(recordings.write_query(tmp_path, ids)).read_text())
    lines, alone = tmp_path / "lines.jsonl", tmp_path / "alone.json"
    lines.write_text("\n".join(map(json.dumps, steps)))
    alone.write_text(json.dumps(steps[0]))

    assert np.array_equal(read(lines, 2).topk_idx, ids[2])
    assert np.array_equal(read(alone, 2).topk_idx, ids[2, :6])


def test_what_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    pipe = "is a device or a pipe; write it to a file, which is read twice"

    assert refusal(read, tmp_path / "pipe") == f"routing.path={tmp_path / 'pipe'}: {pipe}"
    assert refusal(read, "/dev/zero") == f"routing.path=/dev/zero: {pipe}"
    assert refusal(read, "/proc/self/mem") == (
        "routing.path=/proc/self/mem: cannot be read (Input/output error); type the path of a file "
        "that can"
    )
    for path in ("", "a\0b", f"{tmp_path}/no/such"):
        assert refusal(read_trace, path, Selection()) == (
            f"routing.path={path}: no such file; type routing.path=FILE"
        )
    assert refusal(read, "a" * 5000) == (
        f"routing.path={'a' * 5000}: cannot be read (File name too long); type the path of a file "
        "that can"
    )


GOOD = '{"layer": 1, "topk_ids": [1, 2, 3], "topk_weights": [0.5, 0.25, 0.25]}\n'
LINES = {
    "has topk_ids with an entry that is no whole number ([1])": ("[1, 2, 3]", "[[1], [2], [3]]"),
    "has topk_ids with an entry that is no whole number (true)": ("[1, 2, 3]", "[true, 2, 3]"),
    'has topk_ids with an entry that is no whole number ("1")': ("[1, 2, 3]", '["1", 2, 3]'),
    "has an id that is no expert number (1000000000000000000000)": ("[1,", f"[{10**21},"),
    f"has an id that is no expert number ({'9' * 30}...)": ("[1,", f"[{'9' * 40},"),
    "has topk_ids with an entry that is no whole number (1000.0)": ("[1,", "[1e3,"),
    "has topk_weights with an entry that is no number (true)": ("0.5", "true"),
    "has a weight that is negative, infinite in float32 or no number (Infinity)": ("0.5", "1e999"),
    "has no list topk_weights": ("[0.5, 0.25, 0.25]", "0.5"),
    'has no layer number as layer ("1")': ('"layer": 1', '"layer": "1"'),
    "has no layer number as layer (-1)": ('"layer": 1', '"layer": -1'),
    "has no layer number as layer (2147483648)": ('"layer": 1', '"layer": 2147483648'),
    "is not valid JSON, or was cut short": ("[1,", f"[{'9' * 5000},"),
}


def test_a_weight_beyond_float64_is_refused_whichever_way_it_is_read(tmp_path):
    path = tmp_path / "log.jsonl"
    # Blank lines: the fast parser leaves such a log to the other.
    for gap in ("", "\n"):
        path.write_text(gap + GOOD.replace("0.5", f"1{'0' * 400}") + gap)
        assert "has a weight that is negative, infinite in float32 or no" in refusal(read, path, 1)


@pytest.mark.parametrize("found", LINES)
def test_an_odd_line_of_a_log_is_named_with_its_value(tmp_path, found):
    path = tmp_path / "log.jsonl"
    path.write_text(GOOD + GOOD.replace(*LINES[found]) + GOOD)

    assert refusal(read, path, 1) == f"routing.path={path}: line 2 {found}; {REPAIR}"


COLUMNS = {
    f"row 1 has no layer number as layer (-1); {REPAIR}": pa.array([1, -1]),
    f"row 0 has no layer number as layer (9223372036854775813); {REPAIR}": pa.array(
        [2**63 + 5, 1], pa.uint64()
    ),
}


@pytest.mark.parametrize("sentence", COLUMNS)
def test_a_layer_column_holds_numbers_of_layers(tmp_path, sentence):
    path = tmp_path / "trace.parquet"
    pq.write_table(pa.table({"topk_ids": [[1, 2, 3]] * 2, "layer": COLUMNS[sentence]}), path)

    assert refusal(read, path, 1) == f"routing.path={path}: {sentence}"


def test_columns_of_parquet_that_cannot_be_told_or_matched_are_refused(tmp_path):
    twice, listed = tmp_path / "twice.parquet", tmp_path / "listed.parquet"
    ids = pa.array([[1, 2, 3]])
    pq.write_table(pa.table([ids, ids], names=["experts", "experts"]), twice)
    pq.write_table(pa.table({"topk_ids": ids, "req_id": [[1]]}), listed)

    assert refusal(read, twice) == f"routing.path={twice}: holds two columns experts; store it once"
    assert refusal(read, listed, request="1") == (
        f"routing.path={listed}: column req_id is list<element: int64>, no string or integer; "
        "store names or numbers of requests"
    )


def test_numbers_and_lists_beyond_reason_in_json_are_refused(tmp_path):
    path = tmp_path / "query.json"
    texts = {
        "element 0 has a number of thousands of digits": f'[{{"3": [[{"9" * 5000}, 2]]}}]',
        "element 0 has lists in lists without end": "[" * 100_000,
    }
    for found, text in texts.items():
        path.write_text(text)
        assert refusal(read, path, 3) == f"routing.path={path}: {found}; {REPAIR}"


def test_a_npy_that_promises_more_than_it_holds_is_refused(tmp_path):
    content = recordings.as_npy(ids_of().swapaxes(0, 1))
    import base64

    raw = base64.b64decode(content)
    vast = raw.replace(b"(11, 3, 3), ", b"(9999999999, 3, 3), ", 1)
    vast = vast[:8] + (len(vast) - 10 - 99).to_bytes(2, "little") + vast[10:]
    path = tmp_path / "vast.json"
    answer = {"choices": [{"routed_experts": base64.b64encode(vast).decode()}]}
    path.write_text(json.dumps(answer))

    assert refusal(read, path, 1) == (
        f"routing.path={path}: line 1 has a .npy that was cut short; {REPAIR}"
    )


def test_a_dump_whose_map_or_counts_do_not_fit_is_refused(tmp_path):
    import torch

    def told(call, **dump):
        path = tmp_path / "dump.pt"
        torch.save(dump, path)
        return refusal(*call, str(path), *([None] if call[0] is read_counts else [0])).replace(
            f"routing.path={path}: ", ""
        )

    counts = [{"global_physical_count": torch.ones(1, n, dtype=torch.int32)} for n in (2, 3)]
    ids = [{"topk_ids_of_layer": torch.tensor([[[1, 2, 8]]], dtype=torch.int32)}]
    small, negative = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[-1, 0]])

    assert told([read_counts], records=counts) == (
        f"record 1 has counts (1, 3) where those before have (1, 2); {REPAIR}"
    )
    assert told([read_counts], records=counts[:1], last_physical_to_logical_map=negative) == (
        f"last_physical_to_logical_map holds numbers that are no expert's; {REPAIR}"
    )
    assert told([read], records=ids, last_physical_to_logical_map=small) == (
        f"record 0, token 0 has id 8, its map only 4; {REPAIR}"
    )


COUNTS = {
    f"line 2 has an id that is no expert number (-1); {REPAIR}": ("csv", "expert,count\n-1,2\n"),
    f"line 2 has a count out of 0..{2**53} (-2); {REPAIR}": ("csv", "expert,count\n1,-2\n"),
    f"line 2 has no layer number as layer (-3); {REPAIR}": ("csv", "layer,expert,count\n-3,1,2\n"),
    f"line 2 holds something else than whole numbers; {REPAIR}": ("csv", "expert,count\n1,\0\n"),
    "is not UTF-8; write it as UTF-8": ("csv", b"expert,count,note\n1,2,\xe9\n"),
    f"layer 0, expert 1 has a count out of 0..{2**53} (-4); {REPAIR}": (
        "json",
        '{"counts": [[1, -4]]}',
    ),
    "line 2 holds counts again; store one object": ("json", '{"counts": [1]}\n{"counts": [1]}'),
    "the file holds logical_count and counts, which mean the same; store it once, under one of "
    "these names": ("json", '{"counts": [1], "logical_count": [1]}'),
}


@pytest.mark.parametrize("sentence", COUNTS)
def test_odd_counts_are_named_with_their_place(tmp_path, sentence):
    suffix, text = COUNTS[sentence]
    path = tmp_path / f"counts.{suffix}"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())

    assert refusal(read_counts, str(path), None) == f"routing.path={path}: {sentence}"


def test_an_array_of_anything_else_is_shown_two_lines_of_a_log(tmp_path):
    path = tmp_path / "array.json"
    path.write_text("[1, 2]")

    assert refusal(read, path) == (
        f"routing.path={path}: is an array of neither answers nor steps; write a log as one object "
        f"a line, as in {LOG_LINES}"
    )


def test_who_types_no_path_is_shown_what_a_file_looks_like():
    for law, lines in (
        (schemas.TraceRouting, f"lines {LOG_LINES}"),
        (schemas.CountsRouting, "CSV with the lines layer,expert,count and 0,17,4096"),
    ):
        name = law.law.name
        assert refusal(law) == (
            f"routing.path: not typed; routing={name} needs routing.path=FILE, of a format in "
            f"docs/routing.md, such as {lines}"
        )
