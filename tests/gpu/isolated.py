"""Run tests in processes of their own, several at a time, so that a hung kernel costs one of them.

    python -m tests.gpu.isolated FOLDER TEST... [--jobs 8] [--limit-s 60] [--total-s 240]

A kernel that hangs or faults takes its CUDA context along, and with it every later test of its
process. Here a process runs a few tests and ends with the first that fails; the rest go into
another one. FOLDER gets `outcomes.jsonl`, a line a test as its process ends, with the seconds that
all tests of that process took, and `failures.txt`. The exit code is 1 where a test has failed, or
found no time. Knows nothing of what is tested.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections import Counter, deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

_PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
_OUTCOME = re.compile(r"^(\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b", re.MULTILINE)
_FINE = ("PASSED", "SKIPPED", "XFAIL")
# What a failed test has to say is at the end.
_MAX_TEXT = 12_000


@dataclass(frozen=True)
class Ended:
    """What became of the tests of one process."""

    outcomes: dict[str, str]
    rest: tuple[str, ...]  # not begun
    text: str
    process_s: float = 0.0


def collected(tests: list[str]) -> list[str]:
    """Ids of all tests that the arguments name."""
    found = subprocess.run(
        [*_PYTEST, "--collect-only", "-q", *tests], capture_output=True, text=True, check=False
    )
    return [line for line in found.stdout.splitlines() if "::" in line]


def chunks_of(ids: list[str], size: int) -> deque[tuple[str, ...]]:
    """Tests that follow each other in one function, a few at a time."""
    chunks: deque[tuple[str, ...]] = deque()
    for name in ids:
        last = chunks[-1] if chunks else ()
        if last and len(last) < size and last[0].split("[")[0] == name.split("[")[0]:
            chunks[-1] = (*last, name)
        else:
            chunks.append((name,))
    return chunks


def ended(ids: tuple[str, ...], text: str, why: str) -> Ended:
    """Read a process's output; the first test without an outcome is the one that ended it."""
    told = dict(_OUTCOME.findall(text))
    outcomes = {name: told[name] for name in ids if name in told}
    rest = [name for name in ids if name not in outcomes]
    stopped = any(outcome not in _FINE for outcome in outcomes.values())
    if rest and not stopped:
        outcomes[rest.pop(0)] = why
    return Ended(outcomes=outcomes, rest=tuple(rest), text=text)


def run_chunk(ids: tuple[str, ...], limit_s: float) -> Ended:
    """One process for these tests; it ends with the first failure."""
    words = [*_PYTEST, "-v", "-x", "--tb=short", "-rN", *ids]
    begin = time.monotonic()
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            text, _ = process.communicate(timeout=limit_s)
            why = f"ended its process with {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
            why = f"did not end within {limit_s:g} s"
    return replace(ended(ids, text, why), process_s=time.monotonic() - begin)


def run_all(chunks: deque[tuple[str, ...]], chosen: argparse.Namespace) -> dict[str, str]:
    """Outcomes of all tests, kept as they come."""
    begin = time.monotonic()
    outcomes: dict[str, str] = {}
    running: set[Future[Ended]] = set()
    with ThreadPoolExecutor(chosen.jobs) as pool:
        while chunks or running:
            while chunks and len(running) < chosen.jobs:
                ids = chunks.popleft()
                left = chosen.total_s - (time.monotonic() - begin)
                if left < 5:
                    outcomes |= dict.fromkeys(ids, "found no time")
                    continue
                running.add(pool.submit(run_chunk, ids, min(chosen.limit_s, left)))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                result = future.result()
                _keep(chosen.folder, result)
                outcomes |= result.outcomes
                if result.rest:
                    chunks.append(result.rest)
    return outcomes


def _keep(folder: Path, result: Ended) -> None:
    with (folder / "outcomes.jsonl").open("a", encoding="utf-8") as file:
        for name, outcome in result.outcomes.items():
            told = {"test": name, "outcome": outcome, "process_s": round(result.process_s, 1)}
            file.write(json.dumps(told) + "\n")
    wrong = {name: told for name, told in result.outcomes.items() if told not in _FINE}
    if wrong:
        with (folder / "failures.txt").open("a", encoding="utf-8") as file:
            file.writelines(f"==== {name}: {told}\n" for name, told in wrong.items())
            file.write(result.text[-_MAX_TEXT:] + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time")
    parser.add_argument("--limit-s", type=float, default=60.0, help="of one process")
    parser.add_argument("--total-s", type=float, default=240.0, help="of all of them")
    parser.add_argument("--chunk", type=int, default=6, help="tests of a process at most")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    ids = collected(chosen.tests)
    if not ids:
        sys.stderr.write(
            f"{' '.join(chosen.tests)}: no test is collected: a GPU and torch with CUDA are needed "
            "(python -m tilepipe.doctor says more)\n"
        )
        return 2
    outcomes = run_all(chunks_of(ids, chosen.chunk), chosen)
    for name in ids:
        if outcomes[name] not in _FINE:
            sys.stdout.write(f"{name}: {outcomes[name]}\n")
    counts = Counter(outcomes.values())
    sys.stdout.write(", ".join(f"{count} {what}" for what, count in sorted(counts.items())) + "\n")
    return int(any(outcome not in _FINE for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
