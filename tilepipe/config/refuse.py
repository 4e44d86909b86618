"""Refuse what a user typed, in one sentence.

Knows nothing of any particular setting.
"""

from dataclasses import fields
from enum import Enum
from typing import Any

__all__ = ["require", "require_own"]


def require(holds: bool, key: str, value: object, allowed: str) -> None:
    """Raise a ValueError that says key, value and what is allowed instead."""
    if not holds:
        word = "null" if value is None else value.name if isinstance(value, Enum) else value
        raise ValueError(f"{key}={word}: {allowed}")


def require_own(settings: Any, group: str, key: str) -> None:
    """Refuse another value of `key` than the option's own, which is its dataclass default."""
    own = next(field.default for field in fields(settings) if field.name == key)
    typed = getattr(settings, key)
    allowed = f"this option is {own.name}; to change it type {group}={typed.name}"
    require(typed is own, f"{group}.{key}", typed, allowed)
