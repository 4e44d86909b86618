"""How fast recordings are read, and how little of a large one is ever in memory."""

import json
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.workload.recordings import draw_ids
from tilepipe.workload.trace import Selection, read_trace

LAYERS, TOKENS = 6, 200_000

MEASURE = """
import sys
from tilepipe.workload.trace import Selection, read_trace, survey
path, layer, first, most = sys.argv[1], *map(int, sys.argv[2:])

def peak_kb():
    # Not ru_maxrss: a process inherits that of the one which started it.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

before = peak_kb()
trace = read_trace(path, Selection(layer=layer, first_token=first, max_tokens=most))
assert trace.topk_idx.shape == (most, 8), trace.topk_idx.shape
print(int(trace.topk_idx.sum()), before // 1024, peak_kb() // 1024)
"""


@pytest.fixture(scope="module")
def recorded():
    """Ids (layers, tokens, 8) and weights of them, 77 MB together."""
    rng = np.random.Generator(np.random.PCG64(1))
    some = draw_ids(rng, num_layers=1, num_tokens=4096, num_topk=8, num_experts=64)
    ids = np.resize(some.astype(np.int32), (LAYERS, TOKENS, 8))
    return ids, np.resize(rng.random((999, 8), dtype=np.float32), ids.shape)


def write_parquet(folder, ids, weights):
    path = folder / "large.parquet"
    columns = {
        name: pa.FixedSizeListArray.from_arrays(values.ravel(), 8).cast(pa.list_(kind))
        for name, values, kind in (
            ("topk_ids", ids, pa.int32()),
            ("topk_weights", weights, pa.float32()),
        )
    }
    columns["layer"] = np.repeat(np.arange(LAYERS), TOKENS)
    pq.write_table(pa.table(columns), path, row_group_size=1 << 30)  # one group of rows
    return path


def write_npz(folder, ids, weights):
    path = folder / "large.npz"
    np.savez(path, topk_idx=ids, topk_weights=weights)
    return path


def write_routed(folder, ids, _):
    path = folder / "routed.npz"
    np.savez(path, routed_experts=ids.swapaxes(0, 1))
    return path


def write_jsonl(folder, ids, weights):
    """A sixth of the tokens: 60 MB."""
    path = folder / "large.jsonl"
    lines = [
        json.dumps({"layer": 0, "topk_ids": some, "topk_weights": gates}) + "\n"
        for some, gates in zip(ids[0, :2000].tolist(), weights[0, :2000].tolist(), strict=True)
    ]
    text = "".join(lines)
    with path.open("w") as file:
        for layer in range(LAYERS):
            for _ in range(TOKENS // 12_000):
                file.write(text.replace('"layer": 0', f'"layer": {layer}'))
    return path


@pytest.mark.parametrize("write", [write_parquet, write_npz, write_routed, write_jsonl])
def test_a_window_of_a_large_file_costs_a_few_megabytes(tmp_path, recorded, write):
    ids, weights = recorded
    path = write(tmp_path, ids, weights)
    first = 30_000 if write is not write_jsonl else 20_000

    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), "3", str(first), "10000"],
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    total, before_mb, after_mb = map(int, done.stdout.split())
    start = first if write is not write_jsonl else 0  # whose tokens come round every 2000
    of_layer = ids[3, start : start + 10_000] if start else np.resize(ids[0, :2000], (10_000, 8))
    assert total == of_layer.sum()
    # The file holds 77 MB (routed 38, JSONL 35); loading pyarrow alone takes 45.
    assert after_mb - before_mb < 120
    assert after_mb < 300


def lines_per_second(path, num_lines):
    start_s = time.process_time()
    read_trace(path, Selection())
    return num_lines / (time.process_time() - start_s)


def test_a_log_is_read_by_two_hundred_thousand_lines_a_second(tmp_path):
    record = {"type": "route", "req_id": "r1", "token_idx": 1, "layer": 0}
    record["topk_ids"] = [43, 5, 7, 58]
    record["topk_weights"] = [0.0966397076845169, 0.0517275109, 0.039045970886945724, 0.036]
    path = tmp_path / "log.jsonl"
    path.write_text((json.dumps(record) + "\n") * 100_000)

    # The best of three: other tests run beside this one.
    assert max(lines_per_second(str(path), 100_000) for _ in range(3)) > 200_000


def test_parquet_is_read_by_millions_of_rows_a_second(tmp_path, recorded):
    ids, weights = recorded
    path = tmp_path / "rows.parquet"
    columns = {
        "topk_ids": pa.FixedSizeListArray.from_arrays(ids[:3].ravel(), 8).cast(
            pa.list_(pa.int32())
        ),
        "topk_weights": pa.FixedSizeListArray.from_arrays(weights[:3].ravel(), 8).cast(
            pa.list_(pa.float32())
        ),
    }
    pq.write_table(pa.table(columns), path)

    # 5 M and more on an idle core; the bound leaves room for a loaded one.
    assert max(lines_per_second(str(path), 3 * TOKENS) for _ in range(3)) > 2e6
