"""Words of a command line that would compose to nothing a point can be, refused one by one.

Knows nothing of options' contents, and of Hydra only what its words look like.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, cast

from tilepipe.config.keys import GROUPS
from tilepipe.config.refuse import NOT_TYPED

__all__ = ["refused_word"]

_KNOWN = {
    f"{group}.{field.name}"
    for group, by_option in GROUPS.items()
    for schema in by_option.values()
    for field in fields(cast(Any, schema))
}


def refused_word(words: Sequence[str]) -> str:
    """What is wrong with the first bad one of the overrides, in a sentence; empty where none is."""
    return next((told for word in words if (told := _refusal(word))), "")


def _refusal(word: str) -> str:
    sign = word[: len(word) - len(word.lstrip("+~"))]
    key, equals, value = word[len(sign) :].partition("=")
    key = key.strip()
    if key.partition(".")[0].startswith("hydra"):
        return ""
    if sign == "~":
        return f"{word}: a key or group cannot be removed; leave the word out"
    if key in GROUPS and equals and _no_option(value.strip()):
        return f"{word}: takes the name of one option; type {key}=NAME, or {key}.KEY=VALUE"
    parent = ".".join(key.split(".")[:2])
    if parent != key and parent in _KNOWN:
        return f"{word}: unknown key; {parent} has no keys of its own; type {parent}=VALUE"
    if equals and NOT_TYPED in [part.strip() for part in value.strip("[] ").split(",")]:
        return f"{word}: ??? stands for a value that is not typed; type one, or leave the word out"
    return ""


def _no_option(value: str) -> bool:
    return value.lower() in ("null", "true", "false") or value.startswith("[")
