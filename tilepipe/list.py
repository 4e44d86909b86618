"""List what can be typed and what is stored: `python -m tilepipe.list [KIND]`.

Knows nothing of composing: it reads the comments of option files, the schemas of keys, the metadata
of the tables' columns, and recordings of routing.
"""

import argparse
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilepipe.config.keys import keys
from tilepipe.config.register import CONF_DIR, Root
from tilepipe.stopping import leave
from tilepipe.streams import heard_out

__all__ = ["Option", "main", "options", "read_option"]

# Kind, as it is typed here -> group of options, as it is typed to tilepipe.run.
_GROUPS = {
    "experiments": "experiment",
    "kernels": "kernel",
    "workloads": "workload",
    "routings": "routing",
    "placements": "placement",
    "hardware": "hardware",
}
_COLUMNS = "columns"
_KEYS = "keys"
# Followed by a file, and words of _ROUTING_WORDS.
_ROUTING = "routing"
_KINDS = (*_GROUPS, _KEYS, _COLUMNS, _ROUTING)
_ROUTING_WORDS = (
    *("num_ranks", "num_experts", "layer", "first_token", "max_tokens"),
    *("num_topk", "num_layers"),
)
_MAY_BE_COUNTS = (".npy", ".npz")
# The one option without a file: config/register.py computes it.
_AUTO = "The largest of these that this machine is; cpu where there is no GPU."
# Columns of a terminal below which a text stands under what it explains, not beside it.
_LEAST_COLUMNS = 40
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
# Below a comment's prose, indented by more than its one blank.
_COMMAND = re.compile(r"#\s{2,}(\S.*)")


@dataclass(frozen=True, kw_only=True)
class Option:
    """What the comment at the head of an option file says."""

    name: str
    sentence: str
    command: str | None = None  # as the file gives it


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of the command: 0 listed, 2 for a wrong word."""
    parser = argparse.ArgumentParser(prog="python -m tilepipe.list", description=__doc__)
    kinds = ", ".join(_KINDS)
    parser.add_argument("kind", nargs="?", metavar="KIND", help=f"one of {kinds}; none: all")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help=f"after routing: FILE, then {'=N, '.join(_ROUTING_WORDS)}=N, law=counts",
    )
    parser.add_argument(
        "--config-dir", metavar="DIR", type=Path, help="folder of your own, as for tilepipe.run"
    )
    typed = parser.parse_args(arguments)
    try:
        if typed.kind == _ROUTING:
            lines = _routing_lines(typed.words)
        elif typed.words:
            raise ValueError(
                f"{typed.words[0]}: only kind {_ROUTING} takes more words; leave it out"
            )
        else:
            lines = _listing(typed.kind, typed.config_dir)
        print("\n".join(lines), flush=True)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def options(group: str, config_dir: Path | None) -> list[Option]:
    """Options of a group by name, ours first; raises ValueError for a folder that has none."""
    found = _read_group(CONF_DIR, group, own=True)
    if group == "hardware":
        found["auto"] = Option(name="auto", sentence=_AUTO)
    listed = [found[name] for name in sorted(found)]
    if config_dir is None:
        return listed
    for name, option in sorted(_read_group(config_dir, group, own=False).items()):
        if name in found:
            # Hydra looks into our folder first.
            sentence = (
                f"Never taken: TilePipe has {group}={name} itself; give the file another name."
            )
            option = Option(name=name, sentence=sentence)
        listed.append(option)
    return listed


def read_option(name: str, lines: Iterable[str]) -> Option:
    """Read the comment at the head of an option file: its first sentence, and a command."""
    prose, command = [], None
    for line in lines:
        if not line.startswith("#"):
            break
        indented = _COMMAND.match(line)
        if indented:
            command = command or indented.group(1).strip()
        elif not line.startswith("# @package"):
            prose.append(line.lstrip("# ").strip())
    sentence = _SENTENCE_END.split(" ".join(prose).strip())[0]
    return Option(name=name, sentence=sentence or "(its file has no comment)", command=command)


def _listing(kind: str | None, config_dir: Path | None) -> list[str]:
    """Lines to print; raises ValueError for what was mistyped."""
    if kind is not None and kind not in _KINDS:
        raise ValueError(f"kind={kind}: must be one of {', '.join(_KINDS)}; type none to list all")
    if config_dir is not None:
        _check_config_dir(config_dir)
    if kind == _COLUMNS:
        return _column_lines()
    if kind == _KEYS:
        return _key_lines()
    if kind is not None:
        return _option_lines(options(_GROUPS[kind], config_dir))
    lines = []
    for each, group in _GROUPS.items():
        lines += [f"{each}: {_typed(group)}", *_option_lines(options(group, config_dir)), ""]
    return [
        *lines,
        f"{_KEYS}: what key=value takes and means",
        "  python -m tilepipe.list keys",
        "",
        f"{_COLUMNS}: of the result tables",
        "  python -m tilepipe.list columns",
        "",
        f"{_ROUTING}: what a recording holds, and how its load would lie on ranks",
        "  python -m tilepipe.list routing FILE num_ranks=8",
    ]


def _typed(group: str) -> str:
    return "+experiment=NAME" if group == "experiment" else f"{group}=NAME"


def _check_config_dir(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"--config-dir={folder}: no such folder: name one that holds option files")
    if not any((folder / group).is_dir() for group in _GROUPS.values()):
        groups = ", ".join(_GROUPS.values())
        raise ValueError(
            f"--config-dir={folder}: holds none of the folders {groups}: put option files into "
            "one of them"
        )


def _read_group(folder: Path, group: str, *, own: bool) -> dict[str, Option]:
    found = {}
    for path in sorted((folder / group).rglob("*.yaml")):
        name = path.relative_to(folder / group).with_suffix("").as_posix()
        with path.open(encoding="utf-8", errors="replace") as lines:
            option = read_option(name, lines)
        if group == "experiment" and not own and option.command is None:
            command = f"python -m tilepipe.run --config-dir {shlex.quote(str(folder))} "
            command += f"+experiment={shlex.quote(name)}"
            option = Option(name=name, sentence=option.sentence, command=command)
        found[name] = option
    return found


def _option_lines(listed: Sequence[Option]) -> list[str]:
    width = max((len(option.name) for option in listed), default=0)
    lines = []
    for option in listed:
        lines.append(f"  {option.name:<{width}}  {option.sentence}")
        if option.command:
            lines.append(f"  {'':<{width}}  {option.command}")
    return lines


def _key_lines() -> list[str]:
    """Every key with what it takes, the options that have it, and its meaning."""
    # Here and not above: pyarrow takes as long to load as all the rest.
    from tilepipe.results.schema import SUMMARY

    columns = {field.name: field.metadata[b"meaning"].decode() for field in SUMMARY}
    found = keys(CONF_DIR, Root)
    width = max(len(key.name) for key in found)
    lines = []
    for key in found:
        group, _, own = key.name.rpartition(".")
        # A key that no option file explains is a column, which says the same of it.
        meaning = key.meaning or columns.get(own) or columns.get(f"{group}_{own}", "")
        if own.endswith("_source"):
            meaning = f"where {own.removesuffix('_source')} was read"
        of = f" ({group}={', '.join(key.options)})" if key.options else ""
        lines += _wrapped(f"  {key.name:<{width}}  ", f"{key.allowed}{of}: {meaning}", _columns())
    return lines


def _columns() -> int | None:
    """Columns of the terminal; None where lines go elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _column_lines() -> list[str]:
    """Every column of the four tables, with unit and meaning."""
    # Here and not above: pyarrow takes as long to load as all the rest.
    from tilepipe.results import schema as tables

    known = (tables.SAMPLES, tables.BREAKDOWN, tables.SUMMARY, tables.TIMELINE)
    columns = _columns()
    lines = []
    for schema in known:
        table = schema.metadata[b"table"].decode()
        width = max(map(len, schema.names))
        lines.append(f"{table}.parquet")
        for field in schema:
            told = {key.decode(): value.decode() for key, value in field.metadata.items()}
            unit = f"[{told['unit']}]"
            lines += _wrapped(f"  {field.name:<{width}}  {unit:<15} ", told["meaning"], columns)
        lines.append("")
    return lines[:-1]


def _wrapped(head: str, text: str, columns: int | None) -> list[str]:
    """A text beside its head, or below it where too little room is left; None: on one line."""
    if columns is None or len(head) + len(text) <= columns:
        return [head + text]
    beside = columns - len(head) >= _LEAST_COLUMNS
    indent = " " * (len(head) if beside else 6)
    lines = textwrap.wrap(
        text, max(columns - len(indent), 1), break_long_words=False, break_on_hyphens=False
    )
    if beside:
        return [head + lines[0], *(indent + line for line in lines[1:])]
    return [head.rstrip(), *(indent + line for line in lines)]


def _routing_lines(words: Sequence[str]) -> list[str]:
    """What a recording holds; raises ValueError for what was mistyped or is no recording."""
    # Here and not above: NumPy takes as long to load as all the rest.
    from tilepipe.workload.trace import Selection, sheet, survey

    if not words:
        raise ValueError("kind=routing: needs a file; type python -m tilepipe.list routing FILE")
    numbers, as_counts = _numbers(words[1:])
    selection = Selection(
        layer=numbers.get("layer"),
        first_token=numbers.get("first_token", 0),
        max_tokens=numbers.get("max_tokens"),
        num_topk=numbers.get("num_topk"),
        num_layers=numbers.get("num_layers"),
    )
    try:
        found = survey(
            words[0],
            num_ranks=numbers.get("num_ranks"),
            num_experts=numbers.get("num_experts"),
            selection=selection,
            as_counts=as_counts,
        )
    except ValueError as error:
        told = str(error)
        alike = Path(words[0]).suffix in _MAY_BE_COUNTS and ("twice" in told or "shape" in told)
        if as_counts or not alike:
            raise
        # Rows of counts look like rows of experts.
        raise ValueError(f"{error}, or, if it holds counts of experts, type law=counts") from error
    return [words[0], *sheet(found)]


def _numbers(words: Sequence[str]) -> tuple[dict[str, int], bool]:
    numbers, as_counts = {}, False
    for word in words:
        key, _, value = word.partition("=")
        least = 0 if key in ("layer", "first_token") else 1
        if word == "law=counts":
            as_counts = True
        elif key not in _ROUTING_WORDS:
            known = ", ".join(_ROUTING_WORDS)
            raise ValueError(f"{word}: unknown word; type {known} with =N, or law=counts")
        elif not value.isdecimal() or int(value) < least:
            raise ValueError(f"{word}: must be a whole number of {least} or more")
        else:
            numbers[key] = int(value)
    return numbers, as_counts


if __name__ == "__main__":
    leave(heard_out(main))
