"""What stamps cost fused launches, and whether they agree with the breakdown's own terms.

    python -m benchmarks.stamps_agree FOLDER [NAME ...] [--limit-s 60] [--lock FILE]

Workload deepseek_v3_ep8_rank unless a job says otherwise, 4096 tokens, one GPU. A process a job,
all at once: they compile, and read what launches have left, beside each other. A lock lets one of
them launch at a time, once all have compiled. FOLDER gets a JSON file a job,
`timeline-NAME.parquet` with the spans, and `agreement.csv`. A job compares what fused and stamped
launches leave with the FP32 oracle.
"""

import argparse
import csv
import fcntl
import json
import subprocess
import sys
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.program import need_gpus, run
from tilepipe.results.files import write_bytes

_DISPATCH = "kernel=dispatch_gemm kernel.num_comm_ctas=12"
_COMBINE = "kernel=gemm_combine kernel.num_comm_ctas=24 kernel.push=ctas kernel.walk=expert"
JOBS = {
    "dispatch_beside": "kernel=dispatch_gemm kernel.copy=tma",
    "dispatch_beside_paced": "kernel=dispatch_gemm kernel.copy=tma launch.pace_gbps=200",
    "dispatch_switch": f"{_DISPATCH} kernel.roles=switch",
    "dispatch_fixed": f"{_DISPATCH} kernel.roles=fixed",
    "dispatch_fixed_6": "kernel=dispatch_gemm kernel.num_comm_ctas=6 kernel.roles=fixed",
    "dispatch_tma": f"{_DISPATCH} kernel.roles=switch kernel.copy=tma",
    "dispatch_random": f"{_DISPATCH} kernel.roles=fixed kernel.order=random",
    "dispatch_paced": f"{_DISPATCH} kernel.roles=switch launch.pace_gbps=200",
    "dispatch_8_ranks": "kernel=dispatch_gemm kernel.num_comm_ctas=2 workload=deepseek_v3 "
    "workload.num_tokens=512 launch.num_ranks=8",
    "combine_switch": f"{_COMBINE} kernel.roles=switch",
    "combine_fixed": f"{_COMBINE} kernel.roles=fixed",
    "combine_tma": f"{_COMBINE} kernel.roles=switch kernel.copy=tma",
    "combine_token": f"{_COMBINE} kernel.roles=switch kernel.granularity=token",
    "combine_beside": "kernel=gemm_combine",
    "combine_sent": "kernel=gemm_combine kernel.roles=switch",
    "combine_8_ranks": "kernel=gemm_combine kernel.num_comm_ctas=4 kernel.push=ctas "
    "kernel.walk=expert workload=deepseek_v3 workload.num_tokens=512 launch.num_ranks=8",
}
_NAMES = "jobs"  # the file in FOLDER that names those of a run
_TIMED = ("fused", "gemm_contended")
_NUM_ITERS = 15
_NUM_PAIRS = 7  # of launches with stamps and without
_READY_S = 30.0  # that a job waits for the others
_COLUMNS = (
    *("job", "fused_us", "contended_us", "stamping_cost", "term", "breakdown_us", "low_us"),
    *("high_us", "stamped_us", "waits_us", "tiles_us", "behind_us", "alone_us", "allowed_us"),
    *("agrees", "kernel_us", "spans_us", "sms", "faults"),
)


def config_of(words: str) -> Any:
    """The configuration that these words compose."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from tilepipe.config.checks import check_config
    from tilepipe.config.register import CONF_DIR, register
    from tilepipe.config.schemas import config_from_dict

    register()
    asked = ["hardware=h200_x1", "workload=deepseek_v3_ep8_rank", "workload.num_tokens=4096"]
    own = {word.split("=")[0] for word in words.split()}
    asked = [word for word in asked if word.split("=")[0] not in own]
    typed = [*asked, *words.split(), "measure=short", "measure.timeline=true"]
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        composed = compose("config", overrides=typed, return_hydra_config=True)
    OmegaConf.set_struct(composed, False)
    composed.pop("hydra")
    config = config_from_dict(OmegaConf.to_container(composed, resolve=True, enum_to_str=True))
    check_config(config)
    return config


def run_job(name: str, folder: Path, lock_file: Path) -> None:
    """Time fused and contended launches, record stamped ones, write what they say."""
    from tilepipe.experiments.cuda.recording import FIRST_ROOM, take
    from tilepipe.experiments.cuda.session import opened_session
    from tilepipe.kernels.kept import codes_kept, default_folder

    config = config_of(JOBS[name])
    kind = import_module(f"tilepipe.experiments.cuda.{config.operation.name}").TRIAL
    with codes_kept(default_folder()), opened_session(config, kind.memory(config)) as session:
        trial = kind(session)
        for contender in _TIMED:
            trial.stamped(contender, FIRST_ROOM)  # compiled before the GPU is asked for
        _await_others(name, folder)
        with lock_file.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            series = _series(trial)
            taken = take(trial, 1000, num_pairs=_NUM_PAIRS)
            faults = [
                verdict.detail
                for rank in session.ranks
                for verdict in trial.check("fused", rank, 1000, "after")
                if not verdict.passed
            ]
        row, spans = _read(name, config, series, taken)
    row["faults"] = "; ".join(faults)
    _write_spans(folder / f"timeline-{name}.parquet", spans)
    write_bytes(folder / f"{name}.json", json.dumps(row).encode())  # whole or not at all


def _await_others(name: str, folder: Path) -> None:
    """Return once every job has compiled what it launches, which disturbs those that are timed, or
    this one has waited for as long as it may."""
    _ready_file(folder, name).touch()
    names = (folder / _NAMES).read_text().split() if (folder / _NAMES).exists() else []
    ends = time.monotonic() + _READY_S
    while time.monotonic() < ends and not all(_ready_file(folder, n).exists() for n in names):
        time.sleep(0.1)


def _ready_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.ready"


def _read(name: str, config: Any, series: Any, taken: Any) -> tuple[dict[str, Any], Any]:
    """What launches say, and the spans of one of them, by rank."""
    import numpy as np

    from tilepipe.experiments.cuda.recording import told
    from tilepipe.results.sms import agreement

    fused, contended = series
    recorded = told(taken)
    first = min(recorded.spans)
    counts = recorded.counts[first]
    term = "tail" if config.operation.name == "gemm_combine" else "late"
    measured = _difference(fused, contended)
    stamped_ns = counts[f"stamped_{term}_loss_ns"]
    found = agreement(term, stamped_ns, measured, fused_ns=int(np.median(fused)))
    every = [span for spans in recorded.spans.values() for span in spans]
    spans_ns = max(s.end_ns for s in every) - min(s.start_ns for s in every)
    row = {
        "job": name,
        "fused_us": np.median(fused) / 1e3,
        "contended_us": np.median(contended) / 1e3,
        "stamping_cost": counts["stamped_ns"] / counts["unstamped_ns"],
        "term": term,
        "breakdown_us": measured.value / 1e3,
        "low_us": measured.low / 1e3,
        "high_us": measured.high / 1e3,
        "stamped_us": stamped_ns / 1e3,
        "waits_us": recorded.loss.waits_ns / 1e3,
        "tiles_us": recorded.loss.tiles_ns / 1e3,
        "behind_us": recorded.loss.behind_ns / 1e3,
        "alone_us": counts[f"stamped_{term}_ns"] / 1e3,
        "allowed_us": found.allowed / 1e3,
        "agrees": found.holds,
        "kernel_us": counts["recorded_ns"] / 1e3,
        "spans_us": spans_ns / 1e3,
        "sms": _roles(recorded.spans[first]),
    }
    return row, recorded.spans


def _series(trial: Any) -> tuple[Any, Any]:
    """Times of the kernels of fused and gemm_contended, in turn."""
    import numpy as np

    from tilepipe.measure.contenders import run_interleaved

    def timed(contender: str, number: int) -> Any:
        trial.session.group.refresh_plan()
        trial.prepare(contender, 2 + number)
        return trial.time(contender)

    samples = run_interleaved(
        {contender: partial(timed, contender) for contender in _TIMED},
        num_warmups=2,
        num_iters=_NUM_ITERS,
        barrier=lambda: None,
    )
    taken: dict[tuple[str, str], list[int]] = {}
    for sample in samples:
        taken.setdefault((sample.contender, sample.component), []).append(sample.duration_ns)
    fused = np.array(taken["fused", "e2e"]) - np.array(taken["fused", "plan"])
    return fused, np.array(taken["gemm_contended", "stage"])


def _difference(fused: Any, contended: Any) -> Any:
    """The breakdown's last term, with its interval."""
    import numpy as np

    from tilepipe.measure.stats import bootstrap_medians, resample_idx
    from tilepipe.records import Interval

    idx = resample_idx(_NUM_ITERS, num_resamples=1000, seed=1)
    drawn = bootstrap_medians(fused, idx) - bootstrap_medians(contended, idx)
    value = int(np.median(fused) - np.median(contended))
    low, high = (int(np.percentile(drawn, p)) for p in (2.5, 97.5))
    return Interval(value=value, low=min(low, value), high=max(high, value))


def _roles(spans: Any) -> str:
    """Mean microseconds of an SM of each role, by what it did."""
    from tilepipe.results.sms import role_times

    return "; ".join(
        f"{role.num_sms} {which}: "
        + " ".join(f"{k.name} {ns / role.num_sms / 1e3:.1f}" for k, ns in role.by_kind.items())
        for which, role in role_times(spans).items()
    )


def _write_spans(path: Path, spans: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = (
        *("lane", "start_ns", "end_ns", "expert", "m_tile", "n_tile", "chunk"),
        *("peer", "ticket", "num_rows", "deadline", "lateness_ns"),
    )
    rows = [(rank, span) for rank, found in spans.items() for span in found]
    columns = {name: [getattr(span, name) for _, span in rows] for name in names}
    columns |= {"rank": [rank for rank, _ in rows]}
    columns |= {key: [getattr(s, key).name for _, s in rows] for key in ("role", "kind")}
    pq.write_table(pa.table(columns), path)


def _run_all(names: list[str], folder: Path, limit_s: float, lock: Path) -> list[str]:
    """Those that have failed."""
    running = {}
    (folder / _NAMES).write_text("\n".join(names))
    for name in names:
        _ready_file(folder, name).unlink(missing_ok=True)
        (folder / f"{name}.json").unlink(missing_ok=True)  # of an earlier run
    for name in names:
        words = (sys.executable, "-m", __spec__.name, str(folder), "--job", name)
        words += ("--lock", str(lock))
        log = (folder / f"{name}.log").open("w")
        running[name] = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
    ends = time.monotonic() + limit_s
    failed = []
    try:
        for name, process in running.items():
            try:
                code = process.wait(max(0.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = 1
            failed += [name] * bool(code)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return failed


def _job(name: str) -> str:
    if name not in JOBS:
        raise argparse.ArgumentTypeError(f"{name!r} is no job; choose from {', '.join(JOBS)}")
    return name


def main() -> int | str:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", type=_job, metavar="NAME", help=", ".join(JOBS))
    parser.add_argument("--limit-s", type=float, default=180.0)
    parser.add_argument("--lock", type=Path, help="the file that launches take turns by")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    typed = parser.parse_args()
    need_gpus()
    typed.folder.mkdir(parents=True, exist_ok=True)
    lock = typed.lock or typed.folder / "lock"
    if typed.job:
        try:
            run_job(typed.job, typed.folder, lock)
        finally:
            _ready_file(typed.folder, typed.job).touch()  # nobody waits for one that failed
        return 0
    try:
        failed = _run_all(typed.names or list(JOBS), typed.folder, typed.limit_s, lock)
    finally:
        _write_agreement(typed.folder)
    return f"failed, see its log: {', '.join(failed)}" if failed else 0


def _write_agreement(folder: Path) -> None:
    """Of every job that has ended."""
    rows = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    with (folder / "agreement.csv").open("w", newline="") as sink:
        writer = csv.DictWriter(sink, _COLUMNS)
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})


if __name__ == "__main__":
    run(main)
