"""Which kinds of figures and tables there are, and what each needs of a folder and of a machine.

Knows nothing of how they are drawn or written.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from tilepipe.config.choices import Copy
from tilepipe.report.ablations import ABLATION_NOTE, ablation_grids
from tilepipe.report.bandwidth import bandwidth_figures, copies_of, has_links
from tilepipe.report.groups import ok_rows
from tilepipe.report.imbalance import imbalance_figures
from tilepipe.report.overlap import overlap_figures
from tilepipe.report.peers import baseline_figures, peer_figures
from tilepipe.report.points import Found
from tilepipe.report.shapes import Figure, Grid
from tilepipe.report.terms import breakdown_figures
from tilepipe.report.timelines import timeline_figures

__all__ = ["EXECUTORS", "KINDS", "Kind", "missing_of"]

Make = Callable[[Found], Sequence[Figure | Grid]]

EXECUTORS = ("cuda", "host")
RUN = "python -m tilepipe.run"
_GPU = "an NVIDIA GPU (H100, H200)"
_GPUS = "two or more NVIDIA GPUs of one host"


def _nothing(points: pa.Table) -> list[tuple[str, str]]:
    return []


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of figure or table; `needs` is empty where nobody misses it."""

    slug: str
    title: str
    make: Make
    needs: str
    executors: tuple[str, ...] = EXECUTORS
    note: str = ""
    # Points of one executor -> what figures of this kind lack, and what that needs.
    lacks: Callable[[pa.Table], Sequence[tuple[str, str]]] = _nothing


def _fused_kinds() -> list[Kind]:
    kinds = []
    for operation, name in (
        ("dispatch_gemm", "dispatch → GEMM"),
        ("gemm_combine", "GEMM → combine"),
        ("moe_layer", "whole layer"),
    ):
        needs = f"a point that ended ok: {RUN} +experiment={operation}"
        kinds += [
            Kind(
                slug=f"{operation.replace('_', '-')}-fused",
                title=f"{name}: fused against unfused",
                make=partial(_of_points, overlap_figures, operation),
                needs=needs,
            ),
            Kind(
                slug=f"{operation.replace('_', '-')}-terms",
                title=f"{name}: breakdown",
                make=partial(_of_terms, operation),
                needs=needs,
            ),
        ]
    return kinds


def _of_points(make: Callable[[pa.Table, str], Any], word: str, found: Found) -> Any:
    return make(found.points, word)


def _of_terms(operation: str, found: Found) -> Any:
    return breakdown_figures(found.terms, operation)


def _bandwidth_lacks(operation: str, points: pa.Table) -> list[tuple[str, str]]:
    """A copy beside the other, and links: what a figure of one GPU cannot show."""
    lacking = []
    copies = copies_of(points, operation)
    for copy in (copy.name for copy in Copy):
        if copies and copy not in copies:
            command = f"{RUN} +experiment={operation} kernel.copy={copy}"
            lacking.append((f"{operation}: bandwidth of copy {copy}", f"{_GPU}: {command}"))
    if not has_links(points, operation):
        command = f"{RUN} +experiment={operation}"
        what = f"{operation}: bandwidth of wire_bytes against the link"
        lacking.append((what, f"{_GPUS}: {command}"))
    return lacking


def _bandwidth_kinds() -> list[Kind]:
    return [
        Kind(
            slug=f"{operation}-bandwidth",
            title=f"{operation}: bandwidth against communication CTAs",
            make=partial(_of_points, bandwidth_figures, operation),
            needs=f"two or more values of kernel.num_comm_ctas: {RUN} +experiment={operation}",
            executors=("cuda",),
            lacks=partial(_bandwidth_lacks, operation),
        )
        for operation in ("dispatch", "combine")
    ]


def _baseline_kinds() -> list[Kind]:
    return [
        Kind(
            slug=f"{operation.replace('_', '-')}-torch",
            title=f"{name}: beside torch",
            make=partial(_of_points, baseline_figures, operation),
            needs="",  # it is there where it was asked for
        )
        for operation, name in (
            ("dispatch", "dispatch"),
            ("combine", "combine"),
            ("dispatch_gemm", "dispatch → GEMM"),
            ("gemm_combine", "GEMM → combine"),
            ("moe_layer", "whole layer"),
        )
    ]


def _ablation_kinds() -> list[Kind]:
    # Setting -> what it is called, the experiment that sweeps it, executors that have it.
    asked = {
        "order": ("order of sends", "dispatch_gemm_order", EXECUTORS),
        "granularity": ("granularity of flags", "dispatch_gemm_granularity", EXECUTORS),
        "home_granularity": ("when home may reduce", "", EXECUTORS),
        "flag_batch": ("rows a release fence", "dispatch_granularity", ("cuda",)),
        "num_loads": ("depth of copy simt", "dispatch_simt_depth", ("cuda",)),
        "num_stages": ("depth of copy tma", "dispatch_tma_depth", ("cuda",)),
        "layout": ("layout of received rows", "", EXECUTORS),
    }
    return [
        Kind(
            slug=f"by-{setting}",
            title=f"by kernel.{setting}: {called}",
            make=partial(_of_points, ablation_grids, setting),
            needs=f"two or more values of kernel.{setting}: {RUN} +experiment={experiment}"
            if experiment
            else "",
            executors=executors,
            note=ABLATION_NOTE,
        )
        for setting, (called, experiment, executors) in asked.items()
    ]


KINDS = (
    *_bandwidth_kinds(),
    *_fused_kinds(),
    Kind(
        slug="peers",
        title="grouped GEMM against its peers",
        make=lambda found: peer_figures(found.points),
        needs=f"two or more contenders: {RUN} +experiment=grouped_gemm",
    ),
    *_baseline_kinds(),
    Kind(
        slug="imbalance",
        title="time and imbalance by routing law",
        make=lambda found: imbalance_figures(found.points),
        needs=f"two or more laws: {RUN} +experiment=dispatch_gemm routing=uniform,zipf,hot_rank",
    ),
    *_ablation_kinds(),
    Kind(
        slug="timeline",
        title="timeline of a launch",
        make=timeline_figures,
        needs=f"a recorded launch: {RUN} +experiment=dispatch_gemm measure.timeline=true",
    ),
)
_NO_POINTS = {
    "cuda": f"executor cuda: no point ended ok; every figure of it needs {_GPU}: {RUN} "
    "+experiment=dispatch",
    "host": f"executor host: no point ended ok; needs no GPU: {RUN} +experiment=dispatch_gemm "
    "hardware=cpu",
}


def missing_of(found: Found, executor: str, shown: Collection[str]) -> list[str]:
    """What a report of these points, all of one executor, cannot show and what that needs.

    `shown` are the titles of kinds that it does show. Where no point ended ok, only kinds that no
    other executor has are named one by one.
    """
    has_points = bool(ok_rows(found.points))
    sentences = [] if has_points else [_NO_POINTS[executor]]
    hardware = f"{_GPU} and " if executor == "cuda" else ""
    for kind in KINDS:
        if executor not in kind.executors or not (has_points or kind.executors == (executor,)):
            continue
        if kind.needs and kind.title not in shown:
            sentences.append(f"executor {executor}, {kind.title}: needs {hardware}{kind.needs}")
        sentences += [
            f"executor {executor}, {what}: needs {needs}"
            for what, needs in kind.lacks(found.points)
        ]
    return sentences
