"""Points made up with chosen times, stored as a run would store them."""

from dataclasses import replace

from tests.results.spans import sms, two_ranks
from tilepipe.records import Outcome, Point, RankRecord, Sample, Status, Verdict
from tilepipe.results.accounting import account
from tilepipe.results.store import claim_folder, write_outcome

H200 = {
    "name": "h200_x1",
    "gpu": "H200",
    "num_gpus": 1,
    "link_gbps": 450.0,
    "hbm_gbps": 4800.0,
}
CPU = {"name": "cpu", "gpu": None, "num_gpus": 0, "link_gbps": None, "hbm_gbps": None}
COPY_KEYS = {
    "simt": {"num_comm_warps": 16, "num_loads": 14, "num_stages": None, "flag_batch": 4},
    "tma": {"num_comm_warps": 4, "num_loads": None, "num_stages": 3, "flag_batch": 4},
}


class Store:
    """Stores points in a folder; `add` returns the point's folder."""

    def __init__(self, root):
        self.root = root
        self._count = 0

    def add(
        self,
        times_ns=None,  # contender -> stage times, or (plan times, stage times) of a whole launch
        *,
        name="dispatch",
        operation="dispatch",
        executor="cuda",
        status=Status.ok,
        reason="",
        num_ranks=1,
        hardware=None,
        fabric=None,
        kernel=None,
        workload=None,
        routing=None,
        measure=None,
        launch=None,
        counts=None,
        day="2026-11-29",
        commit="0123456789abcdef",
        dirty=False,
        gpu="NVIDIA H200",
        spans=None,  # of a recorded launch, by rank
    ):
        self._count += 1
        on_gpu = executor == "cuda"
        copy = (kernel or {}).get("copy", "simt" if on_gpu else None)
        config = {
            "hardware": {**(H200 if on_gpu else CPU), **(hardware or {})},
            "kernel": {
                "copy": copy,
                "num_comm_ctas": 16 if on_gpu else None,
                "order": "edf",
                "granularity": "tile",
                "layout": "padded",
                **COPY_KEYS.get(copy, {}),
                **(kernel or {}),
            },
            "workload": {"num_tokens": 64, "num_experts": 8, "hidden": 512, **(workload or {})},
            "routing": {"law": "uniform", "seed": 0, **(routing or {})},
            "measure": {
                "l2": "cold" if on_gpu else None,
                "regime": "isolated" if on_gpu else None,
                **(measure or {}),
            },
            "launch": {
                "num_ranks": num_ranks,
                "fabric": fabric or ("loopback" if on_gpu else "host"),
                "pace_gbps": None,
                **(launch or {}),
            },
        }
        point = Point(
            name=name,
            operation=operation,
            executor=executor,
            config=config,
            choices={},
            overrides=(f"+experiment={name}",),
            config_id=f"c{self._count:03}",
            build_id="b1",
            build={"gpus": [gpu] if on_gpu else [], "cpu": "Some CPU"},
        )
        records = tuple(
            replace(_record(rank, times_ns or {}, counts or {}), spans=(spans or {}).get(rank, ()))
            for rank in range(num_ranks)
        )
        terms, figures = account(point, records) if status is Status.ok else ((), {})
        outcome = Outcome(
            point=point,
            status=status,
            reason=reason,
            records=records,
            terms=terms,
            figures=figures,
            started_utc=f"{day}T10:00:00.000+00:00",
            ended_utc=f"{day}T10:00:{self._count:02}.000+00:00",
        )
        provenance = {"git": {"commit": commit, "dirty": dirty, "diff_hash": None}}
        with claim_folder(self.root, point) as folder:
            write_outcome(folder, outcome, provenance)
        return self.root / name / point.folder


def _record(rank, times_ns, counts):
    samples = []
    for contender, times in times_ns.items():
        if isinstance(times, tuple):
            plans, stages = times
            wholes = [plan + stage for plan, stage in zip(plans, stages, strict=True)]
            parts = {"e2e": wholes, "plan": plans}
        else:
            parts = {"stage": times}
        samples += [
            Sample(
                contender=contender, component=part, iteration=i, start_ns=i, duration_ns=duration
            )
            for part, series in parts.items()
            for i, duration in enumerate(series)
        ]
    verdict = Verdict(
        contender=next(iter(times_ns), "none"),
        stage="after",
        passed=True,
        num_values=8,
        num_wrong=0,
        max_error=0.0,
        detail="",
    )
    return RankRecord(
        rank=rank,
        samples=tuple(samples),
        verdicts=(verdict,),
        counts={
            "num_tokens": 64,
            "all_rows": 512,
            "max_expert_rows": 80,
            "num_physical": 8,
            "max_physical_rows": 80,
            "max_rank_rows": 512,
            "logical_bytes": 480_000,
            "dedup_bytes": 60_000,
            "wire_bytes": 0,
            "flops": 6_000_000,
            **counts,
        },
    )


def steady(middle_ns, num_iters=7, step_ns=10):
    """An odd number of times around a median; below six iterations the interval is a range."""
    return [middle_ns + step_ns * (i - num_iters // 2) for i in range(num_iters)]


def launch_of(plan_ns, stage_ns):
    """A whole launch: plan times and stage times."""
    return steady(plan_ns, step_ns=0), steady(stage_ns)


def fused_times(*, rest="late", fused_ns=1_000):
    """Contenders of a fused operation with chosen medians."""
    middle = {"late": "gemm_flags", "tail": "gemm_publish"}[rest]
    communication = {"late": "dispatch", "tail": "push"}[rest]
    times = {
        "fused": launch_of(100, fused_ns),
        "sequential": launch_of(100, 1_500),
        "gemm_all": steady(600),
        middle: steady(650),
        "gemm_contended": steady(800),
        communication: launch_of(100, 700),
    }
    return times | ({"reduce": steady(200)} if rest == "tail" else {})


def layer_times(*, fused_ns=1_000):
    """Contenders of a whole layer with chosen medians."""
    return {
        "fused": launch_of(100, fused_ns),
        "sequential": launch_of(100, 1_500),
        "dispatch_gemm": steady(600),
        "swiglu": steady(50),
        "gemm_combine": steady(400),
        "torch_layer": launch_of(200, 2_000),
    }


def store_everything(store):
    """Points of both executors with which every kind of figure is drawn, and two that failed."""
    for operation in ("dispatch", "combine"):
        _store_bandwidth(store, operation)
        _store_links(store, operation)
    for executor in ("cuda", "host"):
        _store_fused(store, executor)
        for num_tokens in (256, 4096):
            store.add(
                layer_times(fused_ns=num_tokens),
                name="moe_layer",
                operation="moe_layer",
                executor=executor,
                workload={"num_tokens": num_tokens},
            )
            store.add(
                {"gemm_all": steady(900), "blas_per_expert": steady(1_100)},
                name="grouped_gemm",
                operation="grouped_gemm",
                executor=executor,
                workload={"num_tokens": num_tokens},
            )
    for num_warps, num_loads in ((12, 7), (12, 14), (16, 7)):
        store.add(
            {"dispatch": launch_of(10, 40_000 // num_loads)},
            name="dispatch_simt_depth",
            kernel={"num_comm_warps": num_warps, "num_loads": num_loads},
        )
    for num_stages in (1, 3):
        store.add(
            {"dispatch": launch_of(10, 1_000 // num_stages)},
            name="dispatch_tma_depth",
            kernel={"copy": "tma", "num_stages": num_stages},
        )
    for granularity in ("tile", "token"):
        for flag_batch in (1, 4):
            store.add(
                {"dispatch": launch_of(10, 800 + 300 // flag_batch)},
                name="dispatch_granularity",
                kernel={"granularity": granularity, "flag_batch": flag_batch},
            )
    for order in ("edf", "token"):
        store.add(
            fused_times(),
            name="recorded",
            operation="dispatch_gemm",
            executor="host",
            num_ranks=2,
            kernel={"order": order},
            spans=two_ranks(),
        )
    store.add(
        fused_times(),
        name="recorded",
        operation="dispatch_gemm",
        kernel={"order": "token"},
        spans=sms(4),
    )
    reasons = ("rank 1: 3 of 8 values are wrong: token 5, column 7", "no GPU | here *now*")
    for order, reason in zip(("edf", "token"), reasons, strict=True):
        store.add(status=Status.incorrect, reason=reason, name="broken", kernel={"order": order})


def _store_bandwidth(store, operation):
    for copy in ("simt", "tma"):
        for num_tokens in (2048, 4096, 16384):
            for num_ctas in (8, 16, 48):
                time_ns = num_tokens * 4_000 // num_ctas + (5_000 if copy == "tma" else 0)
                main = {operation: launch_of(1_000, time_ns)}
                push = (
                    {"push": launch_of(1_000, time_ns * 2 // 3)} if operation == "combine" else {}
                )
                store.add(
                    main | push,
                    name=operation,
                    operation=operation,
                    kernel={"copy": copy, "num_comm_ctas": num_ctas},
                    workload={"num_tokens": num_tokens},
                    counts={"logical_bytes": num_tokens * 100_000, "all_rows": num_tokens},
                )


def _store_links(store, operation):
    """Two GPUs, rows that cross a link."""
    for copy in ("simt", "tma"):
        for num_ctas in (8, 16):
            store.add(
                {operation: launch_of(1_000, 64_000 // num_ctas)},
                name=operation,
                operation=operation,
                num_ranks=2,
                fabric="nvshmem",
                hardware={"name": "h200_x2", "num_gpus": 2},
                kernel={"copy": copy, "num_comm_ctas": num_ctas},
                counts={"wire_bytes": 1_500_000, "logical_bytes": 2_000_000},
            )


def _store_fused(store, executor):
    laws = (
        {"law": "uniform"},
        {"law": "zipf", "exponent": 1.0},
        {"law": "zipf", "exponent": 1.5},
        {"law": "hot_rank", "hot_rank": 0, "hot_share": 0.5},
    )
    for operation, rest in (("dispatch_gemm", "late"), ("gemm_combine", "tail")):
        for num_tokens in (2048, 16384):
            for order in ("edf", "random"):
                store.add(
                    fused_times(rest=rest, fused_ns=num_tokens),
                    name=operation,
                    operation=operation,
                    executor=executor,
                    kernel={"order": order},
                    workload={"num_tokens": num_tokens},
                )
        for routing in laws:
            for granularity in ("tile", "expert")[: 2 if executor == "host" else 1]:
                store.add(
                    fused_times(rest=rest),
                    name=f"{operation}_law",
                    operation=operation,
                    executor=executor,
                    kernel={"granularity": granularity},
                    routing=routing,
                    counts={"max_rank_rows": 700},
                )
