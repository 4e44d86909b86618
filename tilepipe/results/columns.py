"""What the columns of a stored table say of themselves, against the schema they should have.

Knows nothing of any one table.
"""

import pyarrow as pa

__all__ = ["allowed_words", "schema_faults"]


def allowed_words(field: pa.Field) -> tuple[str, ...]:
    """The only words that a column may hold; empty where any will do."""
    words = (field.metadata or {}).get(b"allowed", b"").decode()
    return tuple(words.split(",")) if words else ()


def schema_faults(found: pa.Schema, want: pa.Schema) -> list[str]:
    """How a stored schema differs from ours, one sentence each; another version is one fault."""
    metadata = found.metadata or {}
    for key, value in want.metadata.items():
        if metadata.get(key) != value:
            text = metadata.get(key, b"nothing").decode(errors="replace")
            return [f"{key.decode()} is {text}, want {value.decode()}"]
    faults = []
    if sorted(found.names) != sorted(want.names) or len(set(found.names)) != len(found.names):
        missing = sorted(set(want.names) - set(found.names))
        unknown = sorted(set(found.names) - set(want.names))
        faults.append(f"columns missing {missing}, unknown {unknown}")
    elif found.names != want.names:
        faults.append("columns are in another order")
    for field in want:
        if found.names.count(field.name) == 1:
            faults += _field_faults(found.field(field.name), field)
    return faults


def _field_faults(found: pa.Field, want: pa.Field) -> list[str]:
    if found.type != want.type or found.nullable != want.nullable:
        spelled = [f"{f.type}{'' if f.nullable else ' not null'}" for f in (found, want)]
        return [f"column {want.name} is {spelled[0]}, want {spelled[1]}"]
    metadata = found.metadata or {}
    return [
        f"column {want.name}: {key.decode()} is not what this version writes"
        for key, value in want.metadata.items()
        # Only our keys: a Parquet reader adds its own.
        if metadata.get(key) != value
    ]
