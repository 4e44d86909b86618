"""Every key that can be typed: what it takes, which options have it, what it means.

Knows nothing of Hydra and of composing: it reads the schemas, and the comments beside the keys in
the option files.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from tilepipe.config import schemas
from tilepipe.config.placements import PLACEMENTS
from tilepipe.config.routings import ROUTINGS

__all__ = ["GROUPS", "Key", "in_words", "keys"]

# Group -> its schemas by option; one under the empty name where all options have the same.
GROUPS: Mapping[str, Mapping[str, type]] = {
    "hardware": {"": schemas.Hardware},
    "workload": {"": schemas.Workload},
    "kernel": {operation.name: schema for operation, schema in schemas.KERNELS.items()},
    "routing": {law.name: schema for law, schema in ROUTINGS.items()},
    "placement": {rule.name: schema for rule, schema in PLACEMENTS.items()},
    "measure": {"": schemas.Measure},
    "launch": {"": schemas.Launch},
}
_IN_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
# Keys by which an option says which one it is.
_FIXED = ("operation", "law", "rule")
# `key: value  # what it means`
_LINE = re.compile(r"(\w+): \S.*?\s#\s+(\S.*)")


@dataclass(frozen=True, kw_only=True)
class Key:
    """One `group.key`, or a key of the root."""

    name: str
    allowed: str
    options: tuple[str, ...]  # of its group that have it; empty: all
    meaning: str  # empty where no option file says one


def keys(conf_dir: Path, root: type) -> list[Key]:
    """All keys, those of the root first; `root` is their schema."""
    told = _comments(conf_dir / "config.yaml")
    hints = get_type_hints(root)
    found = [
        Key(name=name, allowed=in_words(hints[name]), options=(), meaning=told.get(name, ""))
        for name in hints
        if name not in GROUPS
    ]
    for group, schemas_of in GROUPS.items():
        found.extend(_of_group(group, schemas_of, conf_dir / group))
    return found


def _of_group(group: str, by_option: Mapping[str, type], folder: Path) -> Iterator[Key]:
    told: dict[str, str] = {}
    for path in sorted(folder.glob("*.yaml")):
        told = {**_comments(path), **told}
    having: dict[str, list[str]] = {}
    hints: dict[str, Any] = {}
    for option, schema in by_option.items():
        for field in fields(schema):
            having.setdefault(field.name, []).append(option)
            hints.setdefault(field.name, get_type_hints(schema)[field.name])
    for name, options in having.items():
        fixed = f"fixed by the option: type {group}=NAME" if name in _FIXED else ""
        yield Key(
            name=f"{group}.{name}",
            allowed=in_words(hints[name]),
            options=() if len(options) == len(by_option) else tuple(options),
            meaning=fixed or told.get(name, ""),
        )


def in_words(hint: Any) -> str:
    """What a field takes, in words."""
    if get_origin(hint) in (Union, UnionType):
        kinds = [part for part in get_args(hint) if part is not type(None)]
        # Where a count may also be text, the text is auto: what else is typed is refused later.
        parts = ["auto" if part is str and int in kinds else in_words(part) for part in kinds]
        return " or ".join([*parts, "null"] if type(None) in get_args(hint) else parts)
    if get_origin(hint) is list:
        (part,) = get_args(hint)
        return f"a list in brackets, each {in_words(part)}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(hint.__members__)}"
    return _IN_WORDS.get(hint, "another value")


def _comments(path: Path) -> dict[str, str]:
    """Key -> the comment beside it."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return {found[1]: found[2] for line in lines if (found := _LINE.fullmatch(line))}
