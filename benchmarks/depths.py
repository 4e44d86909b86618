"""GB/s a CTA against bytes in flight: both copies, by warps and loads or stages, in one process.

    python -m benchmarks.depths OUT.csv

Dispatch of `deepseek_v3_ep8_rank`, 4096 tokens, one rank, on 16 CTAs, beside the plain copies of
copy_limit.cu. Bytes in flight are what a CTA has asked for and not yet been given, at most. What
does not fit an SM, or would spill registers, is left out, and the reason printed.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.beside_limit import Bench, build_copies, write_as_measured
from benchmarks.program import need_gpus, run
from tilepipe.config.choices import Copy
from tilepipe.config.limits import piece_bytes
from tilepipe.kernels.launcher import Launcher
from tilepipe.kernels.memory import LANES, VECTOR_BYTES

NUM_CTAS, NUM_ITERS = 16, 10
WARPS = (8, 12, 16, 32)
LOADS = (2, 4, 7, 10, 14)
# Few warps with whole rows, and many with pieces of them.
RINGS = [
    *((warps, stages, 14_336) for warps in (1, 2, 4) for stages in (2, 3, 4, 6)),
    *((warps, stages, 7_168) for warps in (4, 8, 12) for stages in (2, 3, 4)),
    *((warps, stages, 2_048) for warps in WARPS for stages in (2, 3, 4, 7, 10, 14)),
]
# Configurations timed together: each round holds the plain copies too.
ROUND = 6


def settings() -> Iterator[dict[str, Any]]:
    """Knobs of every configuration."""
    for warps in WARPS:
        for loads in LOADS:
            yield {"copy": Copy.simt, "num_warps": warps, "num_loads": loads}
    for warps, stages, room in RINGS:
        yield {"copy": Copy.tma, "num_warps": warps, "num_stages": stages, "stage_bytes": room}


def bytes_in_flight(knobs: dict[str, Any], row_bytes: int) -> int:
    """Of a CTA: loads of all lanes, or the pieces whose loads may be under way."""
    if knobs["copy"] is Copy.simt:
        return int(knobs["num_warps"] * LANES * knobs["num_loads"] * VECTOR_BYTES)
    ahead = knobs["num_stages"] - (knobs["num_stages"] + 1) // 2 + 1
    return int(knobs["num_warps"] * ahead * piece_bytes(row_bytes, knobs["stage_bytes"]))


def label(knobs: dict[str, Any]) -> str:
    """Name of a configuration's contender."""
    return "-".join(str(getattr(value, "name", value)) for value in knobs.values())


def prepared(bench: Bench) -> dict[str, tuple[dict[str, Any], Launcher]]:
    """Launchers of all configurations that fit; the others are told on stderr."""
    found = {}
    for knobs in settings():
        try:
            found[label(knobs)] = (knobs, bench.launcher(NUM_CTAS, **knobs))
        except ValueError as error:
            sys.stderr.write(f"{label(knobs)}: {error}\n")
    return found


def measured(bench: Bench) -> Iterator[dict[str, Any]]:
    """One row a configuration, and those of the copies that were timed with it."""
    ready = prepared(bench)
    names = list(ready)
    for first in range(0, len(names), ROUND):
        some = names[first : first + ROUND]
        works: dict[str, Callable[[], None]] = {
            "copy": partial(bench.copy, NUM_CTAS, bulk=False),
            "copy_bulk": partial(bench.copy, NUM_CTAS, bulk=True),
        }
        works |= {name: partial(ready[name][1].launch, bench.work) for name in some}
        num_bytes = bench.num_rows * bench.row_bytes
        for row in bench.rows(works, NUM_ITERS, NUM_CTAS, num_bytes):
            yield {**described(row, ready, bench), "round": first // ROUND}


def described(
    row: dict[str, Any], ready: dict[str, tuple[dict[str, Any], Launcher]], bench: Bench
) -> dict[str, Any]:
    """A row of times with what its kernel holds of an SM."""
    knobs, launcher = ready.get(row["contender"], ({}, None))
    found = launcher.residency[bench.work] if launcher else None
    return {
        "contender": row["contender"],
        "copy": getattr(knobs.get("copy"), "name", None),
        "num_comm_warps": knobs.get("num_warps"),
        "num_loads": knobs.get("num_loads"),
        "num_stages": knobs.get("num_stages"),
        "stage_bytes": knobs.get("stage_bytes"),
        "bytes_in_flight": bytes_in_flight(knobs, bench.row_bytes) if knobs else None,
        "num_registers": found.num_registers if found else None,
        "shared_bytes": found.shared_bytes if found else None,
        "ctas_per_sm": found.ctas_per_sm if found else None,
        "gbps_per_cta": round(row["gbps"] / NUM_CTAS, 2),
        **{key: row[key] for key in ("median_us", "low_us", "high_us", "share", "share_low")},
        **{key: row[key] for key in ("of", "sm_mhz", "throttled")},
    }


def main() -> int:
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m benchmarks.depths OUT.csv\n")
        return 2
    need_gpus()
    with Bench(build_copies(), "dispatch") as bench:
        write_as_measured(Path(sys.argv[1]), measured(bench))
    return 0


if __name__ == "__main__":
    run(main)
