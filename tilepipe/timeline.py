"""Show a recorded launch: `python -m tilepipe.timeline POINT [rank=N] [window_us=A,B] [out=DIR]`.

Knows nothing of how a launch is recorded; see docs/timeline.md for how to read it.

POINT is a point's folder, or an experiment's that holds one point. Writes timeline.json, for
https://ui.perfetto.dev or chrome://tracing, and timeline.svg into it, or into DIR. Of a launch on
a GPU every SM is a lane, with lanes=warps in timeline.json every warp of it; beside them stands
what SMs of each role did, and whether stamps agree with the breakdown.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tilepipe.results.files import StoreError, cause_of, write_bytes
from tilepipe.results.recording import Recording, point_folder, read_recording
from tilepipe.results.sms import agreement, role_times, sm_spans
from tilepipe.results.traceevents import trace_json
from tilepipe.stopping import leave
from tilepipe.streams import heard_out

__all__ = ["main"]

# Viewers in a browser take it; ten times as much they do not.
_MAX_JSON_BYTES = 50_000_000
_KEYS = ("rank", "window_us", "out", "lanes")
_LANES = ("sms", "warps")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of the command: 0 written, 1 nothing to show or too much, 2 wrong words."""
    parser = argparse.ArgumentParser(prog="python -m tilepipe.timeline", description=__doc__)
    parser.add_argument("point", metavar="POINT", type=Path, help="folder of the point")
    parser.add_argument(
        "words",
        metavar="KEY=VALUE",
        nargs="*",
        help="rank=N: one rank only; window_us=A,B: from A to B only; out=DIR: write there; "
        "lanes=warps: every warp of an SM in timeline.json",
    )
    typed = parser.parse_args(arguments)
    try:
        keys = _keys(typed.words)
        window_us = _window_us(keys.get("window_us"))
        by_warp = _is_by_warp(keys.get("lanes", _LANES[0]))
        folder = point_folder(typed.point)
    except (StoreError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    try:
        recording = read_recording(folder)
        _show(recording, Path(keys.get("out", folder)), keys.get("rank"), window_us, by_warp)
        for line in _told(recording):
            print(line)
    except (StoreError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _keys(words: Sequence[str]) -> dict[str, str]:
    keys: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in _KEYS or not equals or not value:
            allowed = "type rank=N, window_us=A,B, lanes=warps or out=DIR"
            raise ValueError(f"{word}: unknown word: {allowed}")
        if key in keys:
            raise ValueError(f"{word}: {key}={keys[key]} is typed too: leave one out")
        keys[key] = value
    return keys


def _is_by_warp(text: str) -> bool:
    if text not in _LANES:
        raise ValueError(f"lanes={text}: type sms or warps")
    return text == "warps"


def _window_us(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    allowed = "must be two numbers A,B with 0 <= A < B, microseconds since the first rank began"
    try:
        if "_" in text:  # which Python would read over
            raise ValueError
        start_us, end_us = map(float, text.split(","))
    except ValueError:
        raise ValueError(f"window_us={text}: {allowed}") from None
    if not 0 <= start_us < end_us < math.inf:
        raise ValueError(f"window_us={text}: {allowed}")
    return start_us, end_us


def _show(
    recording: Recording,
    out: Path,
    rank: str | None,
    window_us: tuple[float, float] | None,
    by_warp: bool,
) -> None:
    """Write both files and say where they are."""
    # Here and not above: only who draws needs matplotlib.
    from tilepipe.timeline_figure import timeline_figure, to_svg

    ranks = None if rank is None else [_rank(rank, len(recording.spans))]
    total_us = (recording.end_ns - recording.start_ns) / 1e3
    if window_us is not None and window_us[0] >= total_us:
        raise ValueError(
            f"window_us={window_us[0]:g},{window_us[1]:g}: the launch took {total_us:.0f} us; "
            "begin before that"
        )
    whole = replace(recording, spans={r: sm_spans(s) for r, s in recording.spans.items()})
    trace = trace_json(recording if by_warp else whole, ranks=ranks, window_us=window_us)
    if len(trace) > _MAX_JSON_BYTES:
        raise ValueError(
            f"timeline.json would hold {len(trace) / 1e6:.0f} MB, and viewers take "
            f"{_MAX_JSON_BYTES / 1e6:.0f}: type rank=0, or window_us=0,{total_us / 10:.0f}"
        )
    title = f"{recording.point.name} {recording.point.folder}"
    try:
        figure = timeline_figure(whole, ranks=ranks, window_us=window_us)
        picture = to_svg(figure, title=title)
    except ModuleNotFoundError as error:
        picture = None
        print(f"no picture: {error}: pip install 'tilepipe[plot]'", file=sys.stderr)
    _keep(out, {"timeline.json": trace, **({"timeline.svg": picture} if picture else {})})
    print(f"{out / 'timeline.json'}: open it in https://ui.perfetto.dev or chrome://tracing")
    if picture is not None:
        print(out / "timeline.svg")


def _keep(out: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder, which is made for them."""
    was_there = out.is_dir()
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_bytes(out / name, content)
    except OSError as error:
        if not was_there:
            with suppress(OSError):  # holds a file that was written
                out.rmdir()
        cause = cause_of(error)
        raise ValueError(f"{out}: {cause}: name another folder with out=") from error


def _told(recording: Recording) -> list[str]:
    """What SMs did, by what they were there for; and of a breakdown what stamps say of its term."""
    lines = []
    for rank, spans in recording.spans.items():
        if recording.point.executor == "host":
            continue
        for role, told in role_times(spans).items():
            length_ns = told.times.length_ns
            most_first = sorted(told.by_kind.items(), key=lambda kind: (-kind[1], kind[0].name))
            parts = ", ".join(
                f"{kind.name} {100 * ns / length_ns:.1f} %" for kind, ns in most_first
            )
            lines.append(f"rank {rank}, {told.num_sms} SMs, {role}: {parts}")
    fused_ns = sum(
        (1 if term.term == "e2e" else -1) * term.interval.value
        for term in recording.terms
        if term.term in ("e2e", "plan") and term.interval is not None
    )
    for term in recording.terms:
        # Where the launch that the term is taken from left no stamps, of the fused one alone.
        stamped_ns = term.stamped_ns if term.stamped_loss_ns is None else term.stamped_loss_ns
        if stamped_ns is not None and term.interval is not None:
            lines.append(str(agreement(term.term, stamped_ns, term.interval, fused_ns=fused_ns)))
    return lines


def _rank(text: str, num_ranks: int) -> int:
    if not text.isdecimal() or int(text) >= num_ranks:
        raise ValueError(f"rank={text}: must be in 0..{num_ranks - 1}")
    return int(text)


if __name__ == "__main__":
    leave(heard_out(main))
