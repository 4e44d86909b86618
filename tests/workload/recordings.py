"""One recording, written as each engine or tool writes it."""

import base64
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def draw_ids(rng, *, num_layers, num_tokens, num_topk, num_experts):
    """Distinct experts (num_layers, num_tokens, num_topk), most likely first."""
    return np.argsort(rng.random((num_layers, num_tokens, num_experts)), axis=2)[..., :num_topk]


def log_lines(ids, weights=None, *, layers=None, requests=None):
    """Lines of vLLM-MoE-Logger: tokens in order, every layer of a token."""
    lines = [json.dumps({"type": "meta", "model_id": "toy", "top_k": ids.shape[2]})]
    for token in range(ids.shape[1]):
        for layer in range(len(ids)):
            record = {"type": "route", "req_id": requests[token] if requests else "r1"}
            record |= {"token_idx": token, "layer": layers[layer] if layers else layer}
            record["topk_ids"] = ids[layer, token].tolist()
            if weights is not None:
                record["topk_weights"] = weights[layer, token].tolist()
            lines.append(json.dumps(record))
    return "\n".join(lines) + "\n"


def write_jsonl(folder, ids, weights=None):
    path = folder / "trace.jsonl"
    path.write_text(log_lines(ids, weights))
    return str(path)


def write_jsonl_in_layers(folder, ids, weights=None):
    """All tokens of a layer, then the next; names as other tools have them; NaN-free but odd."""
    path = folder / "layers.jsonl"
    with path.open("w") as file:
        for layer, rows in enumerate(ids.tolist()):
            for token, row in enumerate(rows):
                record = {"layer_idx": layer, "experts": row}
                if weights is not None:
                    record["scores"] = weights[layer, token].tolist()
                # A blank line: the fast parser cannot tell lines apart then.
                file.write(json.dumps(record) + "\n\n")
    return str(path)


def parquet_table(ids, weights, *, names=("topk_ids", "topk_weights"), fixed=False, dtype=None):
    """Rows layer by layer, with a layer column."""
    num_topk = ids.shape[2]

    def lists(values, kind):
        column = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel(), kind), num_topk)
        return column if fixed else column.cast(pa.list_(kind))

    columns = {names[0]: lists(ids, dtype or pa.int32())}
    if weights is not None:
        columns[names[1]] = lists(weights, pa.float32())
    columns["layer"] = np.repeat(np.arange(len(ids)), ids.shape[1])
    columns["token_idx"] = np.tile(np.arange(ids.shape[1]), len(ids))
    return pa.table(columns)


def write_parquet(folder, ids, weights=None):
    path = folder / "trace.parquet"
    table = parquet_table(ids, weights)
    pq.write_table(table, path, row_group_size=max(1, ids.shape[1]))
    return str(path)


def write_parquet_fixed(folder, ids, weights=None):
    """Lists of fixed length, narrow ids, tokens of all layers mixed, one group of rows."""
    path = folder / "fixed.parquet"
    table = parquet_table(ids, weights, names=("indices", "scores"), fixed=True, dtype=pa.int16())
    mixed = np.arange(ids.shape[0] * ids.shape[1]).reshape(ids.shape[:2]).T.ravel()
    pq.write_table(table.take(pa.array(mixed)), path)
    return str(path)


def write_query(folder, ids):
    """A prompt of half the tokens, then one step per token; layer 99 has no experts."""
    path = folder / "query.json"
    half = (ids.shape[1] + 1) // 2
    bounds = [(0, half), *((token, token + 1) for token in range(half, ids.shape[1]))]
    steps = [
        {"99": None, **{str(layer): rows[start:stop].tolist() for layer, rows in enumerate(ids)}}
        for start, stop in bounds
    ]
    path.write_text(json.dumps(steps))
    return str(path)


def as_int32(tokens_first):
    return base64.b64encode(np.ascontiguousarray(tokens_first, "<i4").tobytes()).decode()


def as_npy(tokens_first):
    content = io.BytesIO()
    np.save(content, np.ascontiguousarray(tokens_first, np.uint8))
    return base64.b64encode(content.getvalue()).decode()


def generated(ids, name="a1"):
    """SGLang's answer of /generate."""
    meta = {"id": name, "prompt_tokens": 1, "completion_tokens": ids.shape[1]}
    return {"text": "x", "meta_info": {**meta, "routed_experts": as_int32(ids.swapaxes(0, 1))}}


def write_generated(folder, ids):
    """Answers of SGLang's /generate, one a line, a request per half of the tokens."""
    path = folder / "generate.jsonl"
    half = (ids.shape[1] + 1) // 2
    parts = [("a1", ids[:, :half]), ("a2", ids[:, half:])]
    answers = [generated(part, name) for name, part in parts if part.shape[1]]
    path.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    return str(path)


def write_sglang_chat(folder, ids):
    """One answer of SGLang's OpenAI endpoint, indented."""
    path = folder / "chat.json"
    usage = {"prompt_tokens": ids.shape[1], "completion_tokens": 1}
    choice = {"index": 0, "sgl_ext": {"routed_experts": as_int32(ids.swapaxes(0, 1))}}
    path.write_text(json.dumps({"id": "c", "choices": [choice], "usage": usage}, indent=2))
    return str(path)


def write_vllm_completions(folder, ids):
    """vLLM's /v1/completions: base64 of a .npy, in an array of answers."""
    path = folder / "completions.json"
    choice = {"index": 0, "routed_experts": as_npy(ids.swapaxes(0, 1))}
    path.write_text(json.dumps([{"id": "cmpl-1", "choices": [choice]}]))
    return str(path)


def write_vllm_lists(folder, ids):
    """vLLM 0.21: nested lists, those of the prompt apart."""
    path = folder / "lists.json"
    tokens = ids.swapaxes(0, 1).tolist()
    answer = {"id": "cmpl-1", "prompt_routed_experts": tokens[:1]}
    answer["choices"] = [{"index": 0, "routed_experts": tokens[1:]}] if tokens[1:] else []
    path.write_text(json.dumps(answer))
    return str(path)


def write_npy(folder, ids):
    path = folder / "trace.npy"
    np.save(path, ids.astype(np.int64))
    return str(path)


def write_npy_by_column(folder, ids):
    path = folder / "column.npy"
    np.save(path, np.asfortranarray(ids.astype(np.uint16)))
    return str(path)


def write_npz(folder, ids, weights=None):
    path = folder / "trace.npz"
    extra = {} if weights is None else {"topk_weights": weights}
    np.savez_compressed(path, topk_idx=ids, **extra)
    return str(path)


def write_routed_npz(folder, ids):
    """The array an engine hands out, saved under its name."""
    path = folder / "routed.npz"
    np.savez(path, routed_experts=ids.swapaxes(0, 1).astype(np.uint8))
    return str(path)


def recorder_dump(ids, *, logical=None):
    """What SGLang's recorder saves per token: two passes, rows padded to 8 slots with -1."""
    import torch

    half = (ids.shape[1] + 1) // 2
    records = []
    for number, part in enumerate((ids[:, :half], ids[:, half:])):
        buffer = torch.full((len(ids), 64, 8), -1, dtype=torch.int32)
        buffer[:, : part.shape[1], : ids.shape[2]] = torch.from_numpy(part.astype(np.int32))
        counts = np.stack([np.bincount(rows[rows >= 0], minlength=256) for rows in part])
        records.append(
            {
                "forward_pass_id": number,
                "rank": 0,
                "gatherer_key": "primary",
                "input_ids": list(range(part.shape[1])),
                "positions": list(range(part.shape[1])),
                "extend_seq_lens": None,
                "forward_mode": 1,
                "topk_ids_of_layer": buffer[:, : part.shape[1], :].clone().cpu(),
                "misc_objects": [],
                "global_physical_count": torch.from_numpy(counts.astype(np.int32)),
            }
        )
    same = np.tile(np.arange(256), (len(ids), 1))
    mapped = torch.from_numpy(same if logical is None else logical)
    return {"records": records, "last_physical_to_logical_map": mapped}


def write_recorder(folder, ids):
    import torch

    path = folder / "per_token.pt"
    torch.save(recorder_dump(ids), path)
    return str(path)


# Name -> writer of (folder, ids) alone.
BARE = {
    "query": write_query,
    "sglang_generate": write_generated,
    "sglang_chat": write_sglang_chat,
    "vllm_completions": write_vllm_completions,
    "vllm_lists": write_vllm_lists,
    "npy": write_npy,
    "npy_by_column": write_npy_by_column,
    "routed_npz": write_routed_npz,
    "recorder": write_recorder,
}
# Name -> writer of (folder, ids, weights), weights of the same shape or None.
WEIGHTED = {
    "jsonl": write_jsonl,
    "jsonl_in_layers": write_jsonl_in_layers,
    "parquet": write_parquet,
    "parquet_fixed": write_parquet_fixed,
    "npz": write_npz,
}
