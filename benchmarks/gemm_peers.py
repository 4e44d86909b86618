"""The grouped GEMM beside torch._grouped_mm, quack and a dense cuBLAS product, on one GPU.

    python -m benchmarks.gemm_peers FOLDER [--pairs 30] [--jobs tall,deep] [--total-s 450]

A job is a process of its own with a time limit: shapes with one B, and stages. A tuning is first
run on poisoned memory and compared with the FP32 oracle, every value; one that is wrong is named
and never timed. Should a tuning end its process or its time, the job is started again without it,
and later jobs leave it out. All that are right are then timed interleaved with the peers; ratios
are medians of pairs with a 95 % interval, in one run.
Stages: `tuning` (packed rows), `way` (layouts, stores, clips of the best one), `hooks` (flags set),
`sms` (fewer CTAs).

FOLDER gets `gemm_peers.csv`, a row a result as it comes, and `quack.json`, quack's configurations
that won, where `quack_h200.json` knows none; jobs for which no time is left are named in the table.
"""

import argparse
import csv
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.program import EXIT_LATE, job_code, need_gpus, run
from tilepipe.config.choices import Granularity, Layout, StoreMode
from tilepipe.kernels.gemm.choices import Clip, Consumers
from tilepipe.kernels.gemm.defaults import default_tuning
from tilepipe.kernels.gemm.plan import GemmProblem, GemmTuning, plan_gemm
from tilepipe.measure.stats import median_interval, paired_ratio
from tilepipe.schedule.layout import make_layout
from tilepipe.schedule.settings import PlanSettings
from tilepipe.workload.laws import zipf_shares

NUM_SMS = 132
LIMIT_NS = 1_000_000_000
LIMIT_S = 150.0  # of one process
# Less than this is not worth starting a process for.
_LEAST_S = 15.0
_PING_PONG = Consumers.ping_pong


@dataclass(frozen=True)
class Family:
    """Shapes with one B: their tunings are compiled once."""

    num_experts: int
    k: int
    n: int


@dataclass(frozen=True)
class Job:
    """What one process times."""

    family: Family
    rows: tuple[int, ...]
    law: str
    stages: tuple[str, ...]


TALL = Family(32, 7168, 4096)
DEEP = Family(32, 2048, 7168)
MIXTRAL = Family(8, 4096, 14_336)
_FURTHER = ("way", "hooks", "sms")
# In order: what matters most first.
JOBS = {
    "tall": Job(TALL, (4096, 32_768), "uniform", ("tuning",)),
    "deep": Job(DEEP, (4096, 32_768), "uniform", ("tuning",)),
    "mixtral": Job(MIXTRAL, (8192,), "uniform", ("tuning",)),
    "tall_zipf": Job(TALL, (4096, 32_768), "zipf", ("tuning",)),
    "deep_zipf": Job(DEEP, (4096, 32_768), "zipf", ("tuning",)),
    "skinny": Job(TALL, (1024,), "uniform", ("tuning",)),
    "deep_further": Job(DEEP, (32_768, 4096), "uniform", _FURTHER),
    "tall_further": Job(TALL, (32_768, 4096), "uniform", _FURTHER),
}
TUNINGS = {
    "coop_128x256": GemmTuning(),
    "coop_128x256_whole": GemmTuning(cuts_tail=False),
    "coop_128x256_128_bytes": GemmTuning(wide_b=False),
    "coop_128x256_c2": GemmTuning(cluster_m=2),
    "coop_256x128_c2": GemmTuning(tile_m=256, tile_n=128, cluster_m=2),
    "pp_128x128": GemmTuning(tile_n=128, consumers=_PING_PONG),
    "pp_128x128_c2": GemmTuning(tile_n=128, cluster_m=2, consumers=_PING_PONG),
    "pp_128x192": GemmTuning(tile_n=192, consumers=_PING_PONG),
    "pp_64x256": GemmTuning(tile_m=64, consumers=_PING_PONG),
    "pp_64x256_c2": GemmTuning(tile_m=64, cluster_m=2, consumers=_PING_PONG),
}
FIELDS = (
    *("shape", "stage", "contender", "status", "median_us", "low_us", "high_us", "tflops"),
    *("ratio_to", "ratio", "ratio_low", "ratio_high", "num_pairs", "sm_mhz", "power_w", "detail"),
    # The faster of torch and quack, and the ratio of time to its.
    *("peer", "peer_ratio", "peer_low", "peer_high"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--tunings", default=",".join(TUNINGS))
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of each process")
    parser.add_argument("--total-s", type=float, default=450.0, help="of all of them")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--skip", default="", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        return _measure(chosen)
    for option, known in (("jobs", JOBS), ("tunings", TUNINGS)):
        unknown = set(getattr(chosen, option).split(",")) - set(known)
        if unknown:
            parser.error(f"--{option}={','.join(sorted(unknown))}: choose of {', '.join(known)}")
    need_gpus()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    _write_header(_results(chosen))
    end = time.monotonic() + chosen.total_s
    skipped: list[str] = []
    try:
        for name in chosen.jobs.split(","):
            _run_job(name, chosen, skipped, end)
    finally:
        sys.stdout.writelines(_table(_results(chosen)))
    return 0


def _results(chosen: argparse.Namespace) -> Path:
    return Path(chosen.folder, "gemm_peers.csv")


def _write_header(out: Path) -> None:
    with out.open("w", newline="", encoding="utf-8") as file:
        csv.DictWriter(file, FIELDS, lineterminator="\n").writeheader()


def _run_job(name: str, chosen: argparse.Namespace, skipped: list[str], end: float) -> None:
    """One process; without whatever ended it, again."""
    out = _results(chosen)
    while True:
        left = min(chosen.limit_s, end - time.monotonic())
        if left < _LEAST_S:
            _append(out, {"shape": name, "status": "skipped", "detail": "no time was left"})
            return
        progress = Path(chosen.folder, f"{name}.now")
        progress.write_text("start", encoding="utf-8")
        words = [sys.executable, "-m", "benchmarks.gemm_peers", str(chosen.folder)]
        words += ["--child", name, "--tunings", chosen.tunings]
        words += ["--pairs", str(chosen.pairs), "--skip", ",".join(skipped)]
        errors = Path(chosen.folder, f"{name}.stderr")
        try:
            code = job_code(words, errors=errors, limit_s=left)
            last = progress.read_text(encoding="utf-8")
        finally:
            progress.unlink()
        why = f"its process ended with {code}"
        if code == EXIT_LATE:
            why = f"its process did not end within {left:.0f} s"
        if code == 0:
            errors.unlink()
            return
        why = " ".join([why, *errors.read_text(encoding="utf-8").splitlines()[-1:]])
        errors.rename(errors.with_name(f"{name}.{last}.stderr"))
        _append(out, {"shape": name, "contender": last, "status": "failed", "detail": why})
        sys.stdout.write(f"{name}: {last}: {why}\n")
        if last in skipped or last == "start" or last.startswith("timing"):
            return
        skipped.append(last)


def _append(out: Path, row: Mapping[str, Any]) -> None:
    with out.open("a", newline="", encoding="utf-8") as file:
        csv.DictWriter(file, FIELDS, lineterminator="\n").writerow(row)


def _read(out: Path) -> list[dict[str, str]]:
    with out.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _table(out: Path) -> Iterator[str]:
    for row in _read(out):
        ratio = f"{row['ratio']} [{row['ratio_low']}, {row['ratio_high']}]"
        if not row["ratio"]:
            ratio = row["detail"]
        if row["peer"]:
            ratio += (
                f", to {row['peer']} {row['peer_ratio']} [{row['peer_low']}, {row['peer_high']}]"
            )
        yield (
            f"{row['shape']:>24} {row['stage']:<7} {row['contender']:<22} {row['status']:<9} "
            f"{row['median_us']:>9} us {row['tflops']:>6} TFLOP/s  {ratio}\n"
        )


# What follows runs in a child, which alone loads CUDA.


def _measure(chosen: argparse.Namespace) -> int:
    import torch

    from benchmarks.gemm_contenders import Shape

    job, skipped = JOBS[chosen.child], set(chosen.skip.split(","))
    family = job.family
    names = [name for name in chosen.tunings.split(",") if name not in skipped]
    torch.manual_seed(0)
    b = torch.empty(
        family.num_experts, family.n, family.k, dtype=torch.bfloat16, device="cuda"
    ).normal_(0.0, family.k**-0.5)
    for num_rows in job.rows:
        counts = _counts(num_rows, family.num_experts, job.law)
        shape = Shape(f"{num_rows}x{family.k}x{family.n}-{job.law}", counts, b)
        run = _Run(chosen, family, shape, skipped)
        for stage in job.stages:
            match stage:
                case "tuning":
                    run.tunings(names)
                case "way":
                    run.ways()
                case "hooks":
                    run.hooks()
                case "sms":
                    run.fewer_sms()
        del run, shape
        torch.cuda.empty_cache()
    return 0


def _counts(num_rows: int, num_experts: int, law: str) -> list[int]:
    """Rows of each expert: equal, or by zipf's law with exponent 1, drawn once."""
    if law == "uniform":
        return [num_rows // num_experts] * num_experts
    rng = np.random.default_rng(0)
    shares = zipf_shares(rng, num_experts, exponent=1.0).astype(np.float64)
    return rng.multinomial(num_rows, shares / shares.sum()).tolist()


class _Run:
    """The stages of one shape; every contender is checked before it is timed."""

    def __init__(
        self, chosen: argparse.Namespace, family: Family, shape: Any, skipped: set[str]
    ) -> None:
        self._chosen, self._family, self._shape = chosen, family, shape
        self._skipped = skipped
        # The fastest tuning of this shape by an earlier job, or what is taken without being told.
        times = [
            (float(row["median_us"]), row["contender"])
            for row in _read(_results(chosen))
            if row["shape"] == shape.name and row["contender"] in TUNINGS and row["median_us"]
        ]
        named = min(times)[1] if times else ""
        by_default = default_tuning(shape.counts, k=family.k)
        self._best = TUNINGS.get(named, by_default)

    def tunings(self, names: list[str]) -> None:
        """Every tuning beside the peers."""
        contenders = self._peers()
        for name in names:
            contenders |= self._own("tuning", name, TUNINGS[name], Layout.packed)
        self._time("tuning", contenders, ratio_to="torch")

    def ways(self) -> None:
        """Layouts, stores and clips of the best tuning."""
        best, contenders = self._best, {}
        for layout in Layout:
            for store, clip in (
                *((StoreMode.tma, clip) for clip in Clip),
                (StoreMode.direct, None),
            ):
                if layout is Layout.packed and clip is Clip.whole:
                    continue
                way = "direct" if clip is None else clip.value
                tuning = replace(best, store=store, clip=clip)
                contenders |= self._own("way", f"{layout.value}_{way}", tuning, layout)
        self._time("way", contenders, ratio_to="packed_ragged")

    def hooks(self) -> None:
        """Flags that are set, rows that are told, and neither."""
        best, contenders = self._best, {}
        align = best.tile_m
        for name, hooks in (
            ("gemm_all", {}),
            ("gemm_flags", {"wait": Granularity.tile}),
            ("gemm_flags_expert", {"wait": Granularity.expert}),
            ("gemm_publishing", {"publish": True}),
        ):
            contenders |= self._own("hooks", name, best, Layout.packed, align=align, **hooks)
        self._time("hooks", contenders, ratio_to="gemm_all")

    def fewer_sms(self) -> None:
        """Fewer CTAs than SMs."""
        best, contenders = self._best, {}
        for ctas in (NUM_SMS, 124, 116, 108):
            contenders |= self._own("sms", f"{ctas}_ctas", best, Layout.packed, ctas=ctas)
        self._time("sms", contenders, ratio_to=f"{NUM_SMS}_ctas")

    def _peers(self) -> dict[str, Callable[[], None]]:
        peers: dict[str, Callable[[], None]] = {}
        for name, make in self._shape.peers(Path(self._chosen.folder, "quack.json")).items():
            if name in self._skipped:
                continue
            self._now(name)
            launch, why = make()
            if launch is None:
                self._row("tuning", name, status="skipped", detail=why)
            else:
                peers[name] = launch
        return peers

    def _own(
        self,
        stage: str,
        name: str,
        tuning: GemmTuning,
        layout: Layout,
        *,
        align: int = 128,
        ctas: int = NUM_SMS,
        **hooks: Any,
    ) -> dict[str, Callable[[], None]]:
        """A contender of ours by name, if it is right."""
        if name in self._skipped:
            return {}
        self._now(name)
        family = self._family
        try:
            plan = plan_gemm(
                GemmProblem(
                    n=family.n,
                    k=family.k,
                    num_experts=family.num_experts,
                    layout=layout,
                    group_align=align,
                    **hooks,
                ),
                tuning,
                num_gemm_ctas=ctas,
                num_sms=NUM_SMS,
            )
        except ValueError as error:
            self._row(stage, name, status="refused", detail=str(error))
            return {}
        settings = PlanSettings(
            num_ranks=1,
            num_experts=family.num_experts,
            num_topk=1,
            tile_m=align,
            layout=layout,
            num_n_tiles=plan.num_n_tiles,
        )
        received = make_layout(0, np.array([self._shape.counts], np.int32), settings)
        launch, wrong = self._shape.own(plan, received, limit_ns=LIMIT_NS)
        if wrong:
            self._row(stage, name, status="incorrect", detail=wrong)
            return {}
        return {name: launch}

    def _time(
        self, stage: str, contenders: dict[str, Callable[[], None]], *, ratio_to: str
    ) -> None:
        """Interleaved samples of all; writes a row each."""
        self._now(f"timing_{stage}")
        if not contenders:
            return
        samples, clocks = self._shape.timed(contenders, self._chosen.pairs)
        peers = [name for name in ("torch", "quack") if name in samples]
        peer = min(peers, key=lambda name: np.median(samples[name]), default=None)
        for name, values in samples.items():
            found = median_interval(values)
            row: dict[str, Any] = {
                "median_us": round(found.value / 1e3, 1),
                "low_us": round(found.low / 1e3, 1),
                "high_us": round(found.high / 1e3, 1),
                "tflops": round(self._shape.flops / found.value / 1e3, 1),
                "num_pairs": len(values),
                **clocks,
            }
            if ratio_to in samples:
                ratio = paired_ratio(values, samples[ratio_to])
                row |= {"ratio_to": ratio_to, "ratio": round(ratio.value, 4)}
                row |= {"ratio_low": round(ratio.low, 4), "ratio_high": round(ratio.high, 4)}
            if peer is not None:
                ratio = paired_ratio(values, samples[peer])
                row |= {"peer": peer, "peer_ratio": round(ratio.value, 4)}
                row |= {"peer_low": round(ratio.low, 4), "peer_high": round(ratio.high, 4)}
            self._row(stage, name, status="ok", **row)

    def _row(self, stage: str, contender: str, **fields: Any) -> None:
        row = {"shape": self._shape.name, "stage": stage, "contender": contender, **fields}
        _append(_results(self._chosen), row)
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()

    def _now(self, name: str) -> None:
        """Leave word of what is under way, for the parent."""
        now = Path(self._chosen.folder, f"{self._chosen.child}.now")
        now.write_text(name, encoding="utf-8")


if __name__ == "__main__":
    run(main)
