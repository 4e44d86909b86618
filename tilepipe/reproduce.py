"""Run all experiments that this machine can run: `python -m tilepipe.reproduce [KERNEL …]`.

Knows nothing of how an experiment runs: each is a `python -m tilepipe.run +experiment=NAME` of its
own, printed before it starts, and what it left is read from its summary.

Words without `=` choose experiments by kernel option (dispatch, combine, grouped_gemm, …); words
with `=` are handed to every run. A failed experiment keeps none of the others from running. The
last lines say what ran, what was left out and which hardware that needs.
"""

import argparse
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilepipe.config import detect
from tilepipe.config.choices import Operation
from tilepipe.config.register import CONF_DIR, by_device
from tilepipe.stopping import ASKING, leave
from tilepipe.streams import heard_out

__all__ = ["experiments", "main"]

# A kernel option, or one for hardware with GPUs and another for the host executor.
_KERNEL = re.compile(
    r"^\s*- override /kernel: (?:\$\{tilepipe\.by_device:\$\{hardware\},(\w+),)?(\w+)", re.MULTILINE
)
_STOPPED = (130, 143)
_GOOD = ("ok", "unsupported", "skipped")
# Part of the name of a hardware option -> what it adds to what runs without it.
_ONE_GPU = (
    "one H100 or H200 (hardware=h100_x1, h200_x1): our kernels, executor cuda over loopback; type "
    "the same there"
)
_LINKED = (
    "2, 4 or 8 H200 or 8 H100 of one host (hardware=h200_x2, h200_x4, h200_x8, h100_x8): rows over "
    "NVLink, fabric nvshmem; type the same there"
)


@dataclass(frozen=True, kw_only=True)
class _Ended:
    """What one experiment has left."""

    name: str
    code: int
    num_points: int = 0
    num_ok: int = 0
    left_out: tuple[str, ...] = ()  # reasons of points for want of hardware or code
    failed: tuple[str, ...] = ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 all ran or lacked hardware, 1 some point failed, 2 a wrong word, 130 stopped."""
    parser = argparse.ArgumentParser(prog="python -m tilepipe.reproduce", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="KERNEL or key=value")
    words: list[str] = parser.parse_args(arguments).words
    overrides = [word for word in words if "=" in word]
    kernels = [word for word in words if "=" not in word]
    try:
        names = experiments(kernels, hardware=_typed(overrides, "hardware", "auto"))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    folder = Path(_typed(overrides, "results_dir", "outputs"))
    ended = []
    for name in names:
        ended.append(_run(name, overrides, folder))
        if ended[-1].code in _STOPPED:
            break
    print("\n".join(_closing(ended, num_asked=len(names))), flush=True)
    if ended[-1].code in _STOPPED:
        return ended[-1].code
    return int(any(one.code for one in ended))


def _typed(overrides: Sequence[str], key: str, otherwise: str) -> str:
    """The last value typed for a key."""
    values = [word.partition("=")[2] for word in overrides if word.partition("=")[0] == key]
    return values[-1] if values else otherwise


def experiments(kernels: Sequence[str], *, hardware: str = "auto") -> list[str]:
    """Experiments with one of these kernel options, of all where none is named, in their order.

    One whose kernel depends on the hardware counts as that of this hardware option.

    Raises ValueError for a word that no experiment has.
    """
    by_kernel: dict[str, list[str]] = {operation.name: [] for operation in Operation}
    for path in sorted((CONF_DIR / "experiment").glob("*.yaml")):
        found = _KERNEL.search(path.read_text(encoding="utf-8"))
        if found:
            by_kernel[by_device(hardware, found[1] or found[2], found[2])].append(path.stem)
    for word in kernels:
        if word not in by_kernel:
            raise ValueError(
                f"{word}: no kernel option: choose of {', '.join(by_kernel)}; type none for all"
            )
    return [name for kernel in kernels or by_kernel for name in by_kernel[kernel]]


def _run(name: str, overrides: Sequence[str], results_dir: Path) -> _Ended:
    command = ["-m", "tilepipe.run", f"+experiment={name}", *overrides]
    print(f"\n== python {shlex.join(command)}", flush=True)
    path = results_dir / name / "summary.parquet"
    before = _written_ns(path)
    code = _wait_for([sys.executable, *command])
    # A run that wrote none has left nothing to read: an older summary is not its own.
    return _Ended(name=name, code=code) if _written_ns(path) == before else _read(name, code, path)


def _written_ns(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.is_file() else None


def _wait_for(command: Sequence[str]) -> int:
    """The exit code. A signal to end is for the child to act upon.

    A terminal sends Ctrl-C to the child too, which counts two within a second as one.
    """
    child = subprocess.Popen(command)
    heard = [number for number in ASKING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {
        number: signal.signal(number, lambda asked, _: child.send_signal(asked)) for number in heard
    }
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code


def _read(name: str, code: int, path: Path) -> _Ended:
    # Here and not above: pyarrow takes as long to load as all the rest.
    import pyarrow.parquet as pq

    columns = ["config_id", "build_id", "repetition", "status", "reason", "last_sweep"]
    rows = [row for row in pq.read_table(path, columns=columns).to_pylist() if row["last_sweep"]]
    points = {(r["config_id"], r["build_id"], r["repetition"]): r for r in rows}.values()
    left_out = {r["reason"] for r in points if r["status"] in _GOOD and r["status"] != "ok"}
    failed = {r["reason"] for r in points if r["status"] not in _GOOD}
    return _Ended(
        name=name,
        code=code,
        num_points=len(points),
        num_ok=sum(r["status"] == "ok" for r in points),
        left_out=tuple(sorted(left_out)),
        failed=tuple(sorted(failed)),
    )


def _closing(ended: Sequence[_Ended], *, num_asked: int) -> list[str]:
    """What ran, what did not and why, and what other hardware would add."""
    lines = ["", f"reproduced on {detect.hardware_option()}, points ok of points:"]
    for one in ended:
        lines.append(f"  {one.name:<28} {one.num_ok} of {one.num_points}")
        if one.code and not one.failed:
            lines.append(f"    ended with code {one.code}; see above")
        lines += [f"    failed: {reason}" for reason in one.failed]
        lines += [f"    left out: {reason}" for reason in one.left_out]
    if len(ended) < num_asked:
        lines.append(
            f"stopped: {num_asked - len(ended)} experiments did not run; type the same again"
        )
    needs = _needs(detect.hardware_option())
    if needs:
        lines.append("left out here, and the hardware that it needs:")
        lines += [f"  {sentence}" for sentence in needs]
    return lines


def _needs(option: str) -> list[str]:
    """What the machine that this option describes lacks."""
    if option == "cpu":
        return [_ONE_GPU, _LINKED]
    return [_LINKED] if option.endswith("_x1") else []


if __name__ == "__main__":
    leave(heard_out(main))
