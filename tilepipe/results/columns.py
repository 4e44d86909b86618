"""What a column of a stored table says of itself. Knows nothing of any one table."""

import pyarrow as pa

__all__ = ["allowed_words"]


def allowed_words(field: pa.Field) -> tuple[str, ...]:
    """The only words that a column may hold; empty where any will do."""
    words = (field.metadata or {}).get(b"allowed", b"").decode()
    return tuple(words.split(",")) if words else ()
