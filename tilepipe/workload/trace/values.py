"""JSON values of a file one after the other: of one array, or written one after another.

Knows nothing of what a value means.

A file of gigabytes is read through a window that holds one value: the elements of an array at the
top are values, and so is each object of a file of several.
"""

import json
import re
from collections.abc import Iterator
from typing import IO, Any

from tilepipe.workload.trace.refusals import refusal

__all__ = ["values"]

_CHUNK_CHARS = 1 << 20
# A decoder that ran out of text stops within these many characters of its end, but in a string.
_TAIL_CHARS = 12
_SOLID = re.compile(r"[^ \t\r\n]")


def values(path: str) -> Iterator[tuple[str, Any]]:
    """Place in words and value, in file order; a ValueError where the text is no JSON."""
    with open(path, encoding="utf-8-sig", errors="strict") as file:
        try:
            yield from _Window(path, file).values()
        except UnicodeDecodeError:
            raise refusal(path, "is not UTF-8", "write it as UTF-8") from None


class _Window:
    """The text from the value at hand to what has been read."""

    def __init__(self, path: str, file: IO[str]) -> None:
        self._path = path
        self._file = file
        self._text = ""
        self._at = 0  # of the next character in the text
        self._line = 1
        self._decode = json.JSONDecoder().raw_decode

    def values(self) -> Iterator[tuple[str, Any]]:
        is_array = self._next() == "["
        if is_array:
            self._pass(self._at + 1)
        number = 0
        while (mark := self._next()) and not (is_array and mark == "]"):
            if is_array and number:
                if mark != ",":
                    raise self._refusal(f"element {number}")
                self._pass(self._at + 1)
                self._next()
            place = f"element {number}" if is_array else f"line {self._line}"
            yield place, self._value(place)
            number += 1
        if is_array:
            if not mark:
                raise self._refusal(f"element {number}")
            self._pass(self._at + 1)
            if self._next():
                raise self._refusal("what follows the array")

    def _next(self) -> str:
        """The next character that is no blank, "" at the end; it is not passed."""
        while True:
            solid = _SOLID.search(self._text, self._at)
            self._pass(solid.start() if solid else len(self._text))
            if solid:
                return solid.group()
            if not self._read():
                return ""

    def _value(self, place: str) -> Any:
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except RecursionError:
                raise refusal(self._path, f"{place} has lists in lists without end") from None
            except json.JSONDecodeError as error:
                in_string = error.msg.startswith("Unterminated string")
                short = in_string or error.pos >= len(self._text) - _TAIL_CHARS
                if not short or not self._read():
                    raise self._refusal(place) from None
                continue
            except ValueError:  # the decoder's only other one
                told = f"{place} has a number of thousands of digits"
                raise refusal(self._path, told) from None
            self._pass(end)
            return value

    def _read(self) -> bool:
        # As much again as is there: a long value is decoded few times over.
        left = self._text[self._at :]
        more = self._file.read(max(_CHUNK_CHARS, len(left)))
        self._text, self._at = left + more, 0
        return bool(more)

    def _pass(self, at: int) -> None:
        self._line += self._text.count("\n", self._at, at)
        self._at = at

    def _refusal(self, place: str) -> ValueError:
        return refusal(self._path, f"{place} is not valid JSON, or was cut short")
