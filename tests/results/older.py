"""Folders as versions 1 and 2 left them, made from those that this version writes."""

import json

import pyarrow as pa
import pyarrow.parquet as pq

_KEYS = (
    "num_ranks hidden intermediate num_experts num_topk dtype law order granularity "
    "home_granularity layout copy num_comm_ctas "
)
_LATER_KEYS = "l2 regime pace_gbps pace_latency_ns "
_IDS = "schema_version name config_id build_id repetition operation executor "
_SAMPLE = "contender component rank iteration start_ns duration_ns num_tokens "
_ENDED = "status reason last_sweep started_utc ended_utc hardware fabric "
_ROUTING = (
    "num_tokens num_tokens_total capacity_factor routing_seed routing_exponent routing_sigma "
    "routing_hot_expert routing_hot_rank routing_hot_share routing_masked_share routing_min_share "
    "routing_path routing_layer num_warmups "
)
_TIMES = (
    "contender component num_iters median_ns low_ns high_ns interval_kind p10_ns p90_ns min_ns "
    "spread plan_ns stage_ns expert_max_over_mean rank_max_over_mean logical_bytes dedup_bytes "
    "wire_bytes flops logical_gbps dedup_gbps wire_gbps "
)
_OVERLAP = "tflops efficiency hidden_share speedup speedup_low speedup_high"
_BREAKDOWN = _IDS + "term value_ns low_ns high_ns interval_kind"
_GPU_KEYS = "num_comm_warps num_loads num_stages flag_batch tile_m tile_n " + _LATER_KEYS
_CLOCKS = (
    "sm_clock_mhz sm_clock_min_mhz sm_clock_max_mhz power_w temperature_c clock_reasons throttled "
)
# Version -> table -> its columns in their order, as that version wrote them.
COLUMNS = {
    1: {
        "samples": _IDS + _SAMPLE + _KEYS + "tile_m tile_n",
        "breakdown": _BREAKDOWN,
        "summary": _IDS + _ENDED + _KEYS + "tile_m tile_n " + _ROUTING + _TIMES + _OVERLAP,
    },
    2: {
        "samples": _IDS + _SAMPLE + _KEYS + _GPU_KEYS,
        "breakdown": _BREAKDOWN,
        "summary": _IDS
        + _ENDED
        + _KEYS
        + _GPU_KEYS
        + _ROUTING
        + _CLOCKS
        + _TIMES
        + "gbps_per_cta link_share memory_gbps memory_share "
        + _OVERLAP,
    },
}


def make_older(root, version):
    """Rewrite every file below root, in place, as that version wrote it."""
    for path in sorted(root.rglob("*.parquet")):
        table = pq.ParquetFile(path).read()
        columns = COLUMNS[version].get(path.stem)
        # A timeline has had its columns from the start.
        kept = table if columns is None else table.select(columns.split())
        place = kept.schema.get_field_index("schema_version")
        column = pa.array([version] * kept.num_rows, pa.int32())
        kept = kept.set_column(place, kept.schema.field(place), column)
        # An older version described its columns in other words.
        fields = [field.with_metadata({"meaning": "as it was then"}) for field in kept.schema]
        metadata = {b"table": path.stem.encode(), b"schema_version": str(version).encode()}
        columns = [column.combine_chunks() for column in kept.columns]
        pq.write_table(pa.table(columns, schema=pa.schema(fields, metadata)), path)
    for path in sorted(root.rglob("point.json")):
        document = json.loads(path.read_text())
        document["schema_version"] = version
        del document["left_out"]
        for entry in document["ranks"]:
            if version == 1:
                del entry["clocks"]
        path.write_text(json.dumps(document))
