"""Tell a stored table of this or an older version from a strange one, and read it as today's.

Knows nothing of files or of what a column means; `ADDED_IN` says what came when.
"""

import re

import pyarrow as pa

from tilepipe.results.schema import SCHEMA_VERSION

__all__ = ["ADDED_IN", "filled", "of_version", "schema_faults", "version_fault", "version_of"]

# Column -> version that brought it, in every table that has it; the others are of version 1.
# Nothing tells what an older file would have held there, so such a column must be nullable.
ADDED_IN = {
    **dict.fromkeys(("num_comm_warps", "num_loads", "num_stages", "flag_batch"), 2),
    **dict.fromkeys(("l2", "regime", "pace_gbps", "pace_latency_ns"), 2),
    **dict.fromkeys(("sm_clock_mhz", "sm_clock_min_mhz", "sm_clock_max_mhz"), 2),
    **dict.fromkeys(("power_w", "temperature_c", "clock_reasons", "throttled"), 2),
    **dict.fromkeys(("placement", "placement_path", "placement_layer", "placement_replica"), 3),
    **dict.fromkeys(("routing_request", "routing_first_token", "routing_max_tokens"), 3),
    "routing_num_layers": 3,
    **dict.fromkeys(("num_redundant", "physical_max_over_mean"), 3),
    **dict.fromkeys(("planner", "stage_bytes", "store", "num_gemm_ctas", "roles", "left_out"), 3),
    **dict.fromkeys(("push", "walk", "num_chunks"), 4),
    **dict.fromkeys(("stamped_ns", "stamping_cost"), 4),
    **dict.fromkeys(("gbps_per_cta", "link_share", "memory_gbps", "memory_share"), 2),
    "dedup_wire_bytes": 4,
    "stamped_loss_ns": 5,
}


def version_of(found: pa.Schema) -> int | None:
    """Version that a stored schema says it is of; None where it names no number."""
    text = (found.metadata or {}).get(b"schema_version", b"").decode(errors="replace")
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None


def version_fault(version: object) -> str | None:
    """Why files of this version cannot be read, in a sentence; None where they can."""
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        told = "nothing" if version is None else repr(version)
        return f"schema_version is {told}, want {SCHEMA_VERSION} or an older one, from 1"
    if version > SCHEMA_VERSION:
        return (
            f"schema_version is {version}, want {SCHEMA_VERSION} or older: "
            "a newer TilePipe wrote it, read it with that one"
        )
    return None


def of_version(schema: pa.Schema, version: int) -> pa.Schema:
    """One of our tables as that version had it, but for the texts, which are today's."""
    fields = [field for field in schema if ADDED_IN.get(field.name, 1) <= version]
    return pa.schema(fields, {**schema.metadata, b"schema_version": str(version).encode()})


def filled(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """A table of an older version with today's columns, null in those it could not have."""
    columns = [
        table.column(field.name)
        if field.name in table.schema.names
        else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def schema_faults(found: pa.Schema, schema: pa.Schema) -> list[str]:
    """How a stored schema differs from ours in the version it names, one sentence each.

    Another table, or a version that cannot be read, is one fault.
    """
    table = (found.metadata or {}).get(b"table", b"nothing")
    if table != schema.metadata[b"table"]:
        named = table.decode(errors="replace")
        return [f"table is {named}, want {schema.metadata[b'table'].decode()}"]
    version = version_of(found)
    fault = version_fault(version)
    if version is None or fault is not None:
        return [str(fault)]
    want = of_version(schema, version)
    faults = []
    if sorted(found.names) != sorted(want.names) or len(set(found.names)) != len(found.names):
        missing = sorted(set(want.names) - set(found.names))
        unknown = sorted(set(found.names) - set(want.names))
        faults.append(f"columns missing {missing}, unknown {unknown}")
    elif found.names != want.names:
        faults.append("columns are in another order")
    for field in want:
        if found.names.count(field.name) == 1:
            stored = found.field(field.name)
            # What an older version said of a column is not kept here.
            faults += _type_faults(stored, field) or (
                _text_faults(stored, field) if version == SCHEMA_VERSION else []
            )
    return faults


def _type_faults(found: pa.Field, want: pa.Field) -> list[str]:
    if found.type == want.type and found.nullable == want.nullable:
        return []
    spelled = [f"{f.type}{'' if f.nullable else ' not null'}" for f in (found, want)]
    return [f"column {want.name} is {spelled[0]}, want {spelled[1]}"]


def _text_faults(found: pa.Field, want: pa.Field) -> list[str]:
    metadata = found.metadata or {}
    return [
        f"column {want.name}: {key.decode()} is not what this version writes"
        for key, value in want.metadata.items()
        # Only our keys: a Parquet reader adds its own.
        if metadata.get(key) != value
    ]
