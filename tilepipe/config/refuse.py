"""Refuse what a user typed, in one sentence.

Knows nothing of any particular setting.
"""

from dataclasses import fields
from enum import Enum
from typing import Any

__all__ = ["NOT_TYPED", "require", "require_own"]

NOT_TYPED = "???"  # omegaconf's word for a value that must be typed


def require(holds: bool, key: str, value: object, allowed: str) -> None:
    """Raise a ValueError that says key, value and what is allowed instead."""
    if not holds:
        if value == NOT_TYPED:
            raise ValueError(f"{key}: not typed; {allowed}")
        word = "null" if value is None else value.name if isinstance(value, Enum) else value
        raise ValueError(f"{key}={word}: {allowed}")


def require_own(settings: Any, group: str, key: str) -> None:
    """Refuse another value of `key` than the option's own, which is its dataclass default."""
    own = next(field.default for field in fields(settings) if field.name == key)
    typed = getattr(settings, key)
    allowed = f"this option is {own.name}; to change it type {group}={typed.name}"
    require(typed is own, f"{group}.{key}", typed, allowed)
