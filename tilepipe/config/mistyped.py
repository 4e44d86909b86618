"""What Hydra says of a mistyped word, as one sentence: key, value, what is allowed, what to type.

Knows nothing of points or how they run; of Hydra, the wording of its messages and which words it
reads. What it does not recognise becomes the message's first lines in one.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from tilepipe.config.keys import GROUPS, in_words

__all__ = ["mistyped", "unknown_key"]

# Lines of a message that are for those who know Hydra.
_ASIDE = re.compile(
    r"\s*(full_key: |object_type=|reference_type=|See https?:|Set the environment variable|"
    r"To append to your config use|Config search path:|provider=|\^\s*$)"
)


_SCHEMAS = [schema for by_option in GROUPS.values() for schema in by_option.values()]


def mistyped(message: str, words: Sequence[str], *, root: type) -> str:
    """The sentence for what Hydra printed about the words of a command line.

    `root` is the schema of the keys that belong to no group.
    """
    told = "\n".join(line for line in message.splitlines() if not _ASIDE.match(line)).strip()
    found = (
        _reference(message, words, root)
        or _wrong_value(message, words, root)
        or _unknown_key(message, words, root)
        or _unknown_option(told, words)
        or _already_there(told, words)
        or _unreadable(told, words)
        or _sweep(message, words)
        or _folder(told)
    )
    return found or _in_one_line(told)


def unknown_key(container: Mapping[str, Any], words: Sequence[str], *, root: type) -> str:
    """The sentence for a key that was added and that no schema has; empty where there is none.

    `container` is a composed configuration: two plus signs add to it whatever is typed.
    """
    operation, law = container["operation"], container["routing"].get("law")
    rule = container["placement"].get("rule")
    options = {"kernel": str(operation), "routing": str(law), "placement": str(rule)}
    for group in ("", *GROUPS):
        by_option = GROUPS.get(group, {"": root})
        schema = by_option.get("") or by_option.get(options.get(group, ""))
        held = container[group] if group else container
        strays = [] if schema is None else sorted(set(held) - {f.name for f in fields(schema)})
        if strays:
            return _unknown(f"{group}.{strays[0]}" if group else strays[0], schema, words)
    return ""


def _reference(message: str, words: Sequence[str], root: type) -> str | None:
    """A value in ${} that leads to no value."""
    raised = re.search(r"^omegaconf\.errors\.(\w+): (.*)", message, re.MULTILINE)
    full_key = re.search(r"full_key: (\S+)", message)
    if raised is None or full_key is None or "nterpolation" not in raised[1]:
        return None
    # Another key's value may be worked out of the one that was typed.
    referring = [word for word in words if "${" in word]
    own = [word for word in referring if word.lstrip("+").startswith(f"{full_key[1]}=")]
    typed = next(iter([*own, *referring]), full_key[1])
    key = typed.lstrip("+").partition("=")[0]
    missing = _quoted(r"Interpolation key '([^']*)' not found", raised[2])
    resolver = _quoted(r"Unsupported interpolation type (\S+)", raised[2])
    if missing is not None:
        found = f"there is no key {missing}"
    elif resolver is not None:
        found = f"there is no function {resolver}"
    elif "Recursive" in raised[2]:
        found = "the value in braces leads back to this key"
    elif "Missing mandatory value" in raised[2]:
        found = "the value in braces is of a key that has none"
    else:
        found = "the value in braces is none that this key takes"
    schema = _schema_of(message, key, root)
    hint = get_type_hints(schema).get(key.rpartition(".")[2]) if schema else None
    return f"{typed}: {found}; type {in_words(hint) if hint is not None else 'a value'}"


def _wrong_value(message: str, words: Sequence[str], root: type) -> str | None:
    """A value that its key's type does not take."""
    typed = re.search(r"Error merging override [^=]*=(.*)|alue '([^']*)'", message)
    full_key = re.search(r"full_key: (\S+)", message)
    if typed is None or full_key is None:
        return None
    file = _quoted(r"In '([^']*)': \w+ raised", message)
    key = full_key[1].partition("[")[0]
    schema = _schema_of(message, key, root)
    hint = get_type_hints(schema).get(key.rpartition(".")[2]) if schema else None
    if hint is None:
        return None
    value = typed[1] if typed[1] is not None else typed[2]
    ends = "[]" if get_origin(hint) is list else ("", "")
    near = _nearest(value.strip("[]"), _members(hint), f"{key}={ends[0]}", ends[1])
    place = f"{file}.yaml: " if file else ""
    return f"{place}{key}={value}: must be {in_words(hint)}{near}"


def _unknown_key(message: str, words: Sequence[str], root: type) -> str | None:
    """A key that no option has, or a group that needs a plus sign."""
    key = _quoted(r"Could not override '([^']*)'", message)
    if key is None:
        return None
    typed = _typed(key, words)
    if f"+{key}=" in message and "No match in the defaults list" in message:
        if "Did you mean to override" in message:
            return None
        return f"{typed}: nothing to replace; type +{typed}"
    inner = re.search(rf"full_key: ({re.escape(key)}\.\S+)", message)
    schema = _schema_of(message, key, root)
    if schema is None:
        return None
    if inner is not None and key in GROUPS:  # typed in braces
        # What chose the option may be typed under the same key.
        typed = _typed(key, [word for word in words if "{" in word])
        return f"{typed}: {_unknown(inner[1], schema, ())}"
    return _unknown(key, schema, words)


def _unknown(key: str, schema: Any, words: Sequence[str]) -> str:
    typed = _typed(key, words)
    prefix = key[: -len(key.rpartition(".")[2])]
    known = [field.name for field in fields(schema)]
    near = _nearest(key.rpartition(".")[2], known, prefix) or "; type one of them"
    return f"{typed}: unknown key; {prefix[:-1] or 'the root'} has {', '.join(known)}{near}"


def _unknown_option(told: str, words: Sequence[str]) -> str | None:
    """An option that its group lacks."""
    name = _quoted(r"Could not find '([^']*)'", told)
    if name is None or "/" not in name:
        return None
    group, _, option = name.rpartition("/")
    _, found, listed = told.partition(f"Available options in '{group}':")
    options = listed.split() if found else []
    plus = "+" if group == "experiment" else ""
    near = _nearest(option, options, f"{plus}{group}=") or "; type one of them"
    return f"{plus}{group}={option}: no such option; there are {', '.join(options)}{near}"


def _already_there(told: str, words: Sequence[str]) -> str | None:
    """A plus sign before a key that every configuration has."""
    key = _quoted(r"An item is already at '([^']*)'", told)
    if key is None:
        return None
    typed = _typed(key, [word for word in words if word.startswith("+")])
    return f"+{typed}: the key is there already; type {typed}"


def _unreadable(told: str, words: Sequence[str]) -> str | None:
    """A word that is no `key=value`."""
    word = _quoted(r"Error parsing override '(.*)'", told)
    if word is None:
        word = _quoted(r"LexerNoViableAltException: (.*)", told)
    if word is None and re.search(r"\binput '", told):
        word = next((typed for typed in words if not _is_read(typed)), None)
    if word is None:
        return None
    return (
        f"{word}: not understood; type key=value, or key=a,b for a sweep; quote twice, as in "
        "\"key='value'\", a value with blanks, commas, brackets, quotes or letters beyond a-z"
    )


def _is_read(word: str) -> bool:
    if word.startswith("-"):
        return True
    try:
        OverridesParser.create().parse_override(word)
    except HydraException:
        return False
    return True


def _sweep(message: str, words: Sequence[str]) -> str | None:
    """A sweep of a kind that cannot be, or where one point is to be shown."""
    if "BasicSweeper does not support sweep type" in message:
        interval = next((word for word in words if "interval(" in word), "interval()")
        return f"{interval}: an interval holds no list of values; type key=a,b or key=range(a,b)"
    word = _quoted(r"Ambiguous value for argument '(.*)'", message)
    if word is not None:
        return f"{word}: with --cfg, --info or --run there is one point; type one value"
    return None


def _folder(told: str) -> str | None:
    folder = _quoted(r"Additional config directory '([^']*)' not found", told)
    if folder is not None:
        return f"--config-dir {folder}: no such folder; name one that holds experiment/NAME.yaml"
    name = _quoted(r"Cannot find primary config '([^']*)'", told)
    if name is not None:
        return f"--config-name {name}: no such file; leave it out, and type +experiment=NAME"
    return None


def _in_one_line(told: str) -> str:
    """The end of a traceback, or the first lines of anything else."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    raised = [number for number, line in enumerate(lines) if re.match(r"[\w.]+Error\b", line)]
    if any(line.startswith("Traceback") for line in lines) and raised:
        first = [] if lines[0].startswith("Traceback") else lines[:1]
        lines = [*first, *lines[raised[-1] :]]
    return "; ".join(line.rstrip(".;:") for line in lines[:4]) or "not understood"


def _schema_of(message: str, key: str, root: type) -> Any:
    """The dataclass that Hydra compared with: by its name, for a list by the key's group."""
    names = re.findall(r"object_type=(\w+)", message)
    known = {schema.__name__: schema for schema in (root, *_SCHEMAS)}
    if names and names[-1] in known:
        return known[names[-1]]
    return GROUPS.get(key.partition(".")[0], {}).get("")


def _members(hint: Any) -> list[str]:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return list(hint.__members__)
    return [name for part in get_args(hint) for name in _members(part)]


def _nearest(word: str, known: Sequence[str], prefix: str, suffix: str = "") -> str:
    near = get_close_matches(word, known, n=1)
    return f"; did you mean {prefix}{near[0]}{suffix}?" if near else ""


def _typed(key: str, words: Sequence[str]) -> str:
    """The word as it was typed, but for what stands before the key."""
    found = (word.lstrip("+~") for word in words)
    return next((word for word in found if word.partition("=")[0] == key), key)


def _quoted(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found[1] if found else None
