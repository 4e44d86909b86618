"""How many CTAs of a fused launch communicate: the count for which a model of its time is least.

Knows nothing of configuration files, kernels and GPUs; rates come from the hardware file.

Of a rank, on its S SMs, with c communication CTAs; times in ns, rates in 1e9 byte/s:

    gemm(g) = tiles x tile / g                 the last tiles are cut, so there are no whole waves
    comm(c) = max(moved / (c x cta x beside) + moved / shared, linked / link)
    roll(c) = what the first tiles wait for, or the last ones leave, moved by c CTAs alone

    dispatch -> GEMM, fixed    max(gemm(S - c) + roll(c), margin x comm(c))
    dispatch -> GEMM, switch   roll(S) + max(gemm(S) + c x comm(c) / S + apart(c), margin x comm(c))
    GEMM -> combine, fixed     max(gemm(S - c), margin x comm(c)) + roll(c) + reduce(c)
    GEMM -> combine, switch    max(gemm(S - c), margin x comm(c)) + roll(c) + reduce(S)

Where tiles are sent as they are made (push=epilogue) those CTAs have tokens to reduce and nothing
else, as they complete: all parts of a token but the last while others are multiplied.

    GEMM -> combine, sent      max(gemm(S - c), linked / link) + what is then left to reduce

Beside a GEMM each CTA is slower than alone, and the slower the more of them there are: memory that
a GEMM leaves to them all is one more stretch of every row's way (`shared`; pushes of 4 to 12 CTAs
take as long as this says within 5 %).

Where many ranks share a GPU, L2 keeps nothing for the next round of tiles, and a round that ends
within a column of a raster group has that column's B tile read twice. That makes a GEMM a tenth
longer while c CTAs communicate unless the others take whole columns; and behind them unless enough
of the c can stay back for a round (kernels/overlap/joining.py; of 8 ranks on one H200, with 16 SMs
and columns of 8 tiles each, the GEMM takes 11 % longer on 15 SMs than on 16).

    apart(c) = (comm(c) unless S - c is whole columns + gemm(S) - comm(c) unless c >= column - 1)
               / 10, where S is whole columns and L2 is short, else 0

With switch a CTA that has sent all takes tiles of dispatch -> GEMM, so c costs the GEMM only as
long as communication lasts; where the link is the limit more CTAs only wait longer. `margin` keeps
rows ahead of the tiles that need them. Of equal counts the smallest is taken, and times are
compared as fractions: floats would tell apart what is equal, or lose a short part beside a long
one. So more bytes never take fewer CTAs, a longer GEMM or faster CTAs never more, and a slower link
never more but in GEMM -> combine with fixed roles, where SMs that the link keeps from multiplying
reduce, and where `apart` counts (tests/schedule/test_comm_ctas.py). What a GEMM loses to rows that
travel through the same memory is left out: it hardly depends on c.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from tilepipe.config.choices import Operation, Push, Roles
from tilepipe.schedule.settings import PlanSettings

__all__ = ["Rates", "Work", "beside_gbps", "best_num_comm_ctas", "modelled_ns", "work_of"]

# Rows shall be there a fifth before the GEMM could need the last of them.
_MARGIN = Fraction(5, 4)
# What a GEMM loses in rounds that end within a column, where L2 is short.
_APART = Fraction(1, 10)

_Real = float | Fraction


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What the hardware gives one rank."""

    num_sms: int
    cta_gbps: _Real  # of a communication CTA, the chip otherwise idle
    beside_gemm: _Real  # share of it that is left beside a GEMM to one CTA
    shared_gbps: _Real  # that ever more CTAs would reach there
    memory_gbps: _Real  # of rows that are read once and written once
    tflops: _Real  # of the GEMM on all SMs of the rank
    link_gbps: _Real | None  # each way; None: nothing limits what crosses
    column: int | None = None  # tiles that share a B tile, where L2 is short; None: it is not


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a launch asks of the busiest rank."""

    moved_bytes: int  # rows that its communication CTAs move
    linked_bytes: int  # of those that cross its link, the fuller way
    rolling_bytes: int  # rows of the first tiles of all CTAs; on the way home those of the last
    reduced_bytes: int  # rows that come home and are added up; 0 on the way out
    num_tiles: int  # output tiles
    tile_flops: int
    early_bytes: int | None = None  # of `reduced_bytes`, beside a GEMM that sends; None: none sends


def work_of(
    counts: NDArray[np.int32],  # (num_ranks, num_experts): rows of a source rank for an expert
    settings: PlanSettings,
    *,
    operation: Operation,
    num_sms: int,  # of a rank
    row_bytes: int,  # of a row that travels
    tile_n: int,
    num_k: int,
    push: Push | None = None,  # of GEMM -> combine
) -> Work:
    """What the plans of a launch come to, for the rank with the most of each.

    One rank alone stands for one of a group: all its rows cross its link, if it has one.
    """
    homeward = operation is Operation.gemm_combine
    by_rank = counts.reshape(settings.num_ranks, settings.num_ranks, -1)
    between = by_rank.sum(axis=2, dtype=np.int64)  # (source, owner)
    stays = np.eye(settings.num_ranks, dtype=bool) if settings.num_ranks > 1 else False
    away = np.where(stays, 0, between)
    rows_here = counts.sum(axis=0, dtype=np.int64).reshape(settings.num_ranks, -1)
    m_tiles = int((-(-rows_here // settings.tile_m)).sum(axis=1).max())
    num_groups, begun = divmod(num_sms, settings.raster_m * settings.num_n_tiles)
    first_tiles = num_groups * settings.raster_m + min(begun, settings.raster_m)
    first_rows = first_tiles * settings.tile_m
    sent, received = int(between.sum(axis=1).max()), int(between.sum(axis=0).max())
    last_rows = -(-num_sms * settings.tile_m // settings.num_n_tiles)
    reduced = sent * row_bytes if homeward else 0
    sends = homeward and push is Push.epilogue
    return Work(
        moved_bytes=(received if homeward else sent) * row_bytes,
        linked_bytes=int(max(away.sum(axis=0).max(), away.sum(axis=1).max())) * row_bytes,
        rolling_bytes=min(received, last_rows if homeward else first_rows) * row_bytes,
        reduced_bytes=reduced,
        early_bytes=reduced - reduced // settings.num_parts if sends else None,
        num_tiles=m_tiles * settings.num_n_tiles,
        tile_flops=2 * settings.tile_m * tile_n * num_k,
    )


def best_num_comm_ctas(
    works: Mapping[Operation, Work],  # of fused launches that follow each other with one count
    roles: Roles,
    *,
    rates: Rates,
    cluster_m: int = 1,  # CTAs of a cluster, all of one role
) -> int:
    """The count of least modelled time, of all launches together, of equals the smallest; whole
    clusters.

    At least one cluster communicates and one multiplies. Raises ValueError where the rank has SMs
    for less than two clusters.
    """
    counts = range(cluster_m, rates.num_sms // cluster_m * cluster_m, cluster_m)
    if not counts:
        raise ValueError(
            f"kernel.num_comm_ctas=auto: a rank has {rates.num_sms} SMs, and a fused launch needs "
            f"two clusters of {cluster_m}; lower launch.num_ranks"
        )
    return min(
        counts,
        key=lambda count: sum(
            modelled_ns(operation, roles, count, work=work, rates=rates)
            for operation, work in works.items()
        ),
    )


def beside_gbps(rates: Rates, num_ctas: int) -> _Real:
    """Rows that communication CTAs move beside a GEMM, 1e9 byte/s."""
    own_gbps = num_ctas * rates.cta_gbps * rates.beside_gemm
    return own_gbps * rates.shared_gbps / (own_gbps + rates.shared_gbps)


def _exact(rates: Rates) -> Rates:
    """The same rates as fractions, with which times come out without rounding."""
    return Rates(
        num_sms=rates.num_sms,
        cta_gbps=Fraction(rates.cta_gbps),
        beside_gemm=Fraction(rates.beside_gemm),
        shared_gbps=Fraction(rates.shared_gbps),
        memory_gbps=Fraction(rates.memory_gbps),
        tflops=Fraction(rates.tflops),
        link_gbps=None if rates.link_gbps is None else Fraction(rates.link_gbps),
        column=rates.column,
    )


def modelled_ns(
    operation: Operation, roles: Roles, num_comm_ctas: int, *, work: Work, rates: Rates
) -> _Real:
    """Time of a fused launch by the formulas above; without its plan, in ns, not rounded."""
    rates = _exact(rates)
    num_sms = rates.num_sms
    comm_ns = _comm_ns(work, rates, num_comm_ctas)
    late_ns = _MARGIN * comm_ns
    roll = work.rolling_bytes
    everyone = num_sms if roles is Roles.switch else num_comm_ctas
    if work.early_bytes is not None:
        beside_ns = max(
            _gemm_ns(work, rates, num_sms - num_comm_ctas), _link_ns(rates, work.linked_bytes)
        )
        early = min(work.early_bytes, beside_ns * beside_gbps(rates, num_comm_ctas))
        return beside_ns + (work.reduced_bytes - early) / _copied_gbps(rates, everyone)
    if operation is Operation.gemm_combine:
        beside_ns = max(_gemm_ns(work, rates, num_sms - num_comm_ctas), late_ns)
        tail_ns = _alone_ns(work, rates, roll, num_comm_ctas)
        reduce_ns = work.reduced_bytes / _copied_gbps(rates, everyone)
        return beside_ns + tail_ns + reduce_ns
    start_ns = _alone_ns(work, rates, roll, everyone)
    if roles is Roles.switch:
        gemm_ns = _gemm_ns(work, rates, num_sms)
        own_ns = gemm_ns + num_comm_ctas * comm_ns / num_sms
        own_ns += _apart_ns(rates, num_comm_ctas, gemm_ns=gemm_ns, comm_ns=comm_ns)
        return start_ns + max(own_ns, late_ns)
    return max(_gemm_ns(work, rates, num_sms - num_comm_ctas) + start_ns, late_ns)


def _apart_ns(rates: Rates, num_comm_ctas: int, *, gemm_ns: _Real, comm_ns: _Real) -> _Real:
    """What rounds that end within a column cost; with Roles.switch."""
    column = rates.column
    if column is None or rates.num_sms % column:
        return 0
    beside_ns = min(comm_ns, gemm_ns)
    apart_ns = beside_ns if num_comm_ctas % column else 0
    if num_comm_ctas < column - 1:
        apart_ns += gemm_ns - beside_ns
    return _APART * apart_ns


def _gemm_ns(work: Work, rates: Rates, num_ctas: int) -> _Real:
    tile_ns = work.tile_flops * rates.num_sms / (1000 * rates.tflops)
    return work.num_tiles * tile_ns / num_ctas


def _copied_gbps(rates: Rates, num_ctas: int) -> _Real:
    return min(num_ctas * rates.cta_gbps, rates.memory_gbps)


def _link_ns(rates: Rates, linked_bytes: _Real) -> _Real:
    return 0 if rates.link_gbps is None else linked_bytes / rates.link_gbps


def _comm_ns(work: Work, rates: Rates, num_ctas: int) -> _Real:
    """All rows, moved beside a GEMM."""
    copied_ns = work.moved_bytes / beside_gbps(rates, num_ctas)
    return max(copied_ns, _link_ns(rates, work.linked_bytes))


def _alone_ns(work: Work, rates: Rates, num_bytes: int, num_ctas: int) -> _Real:
    """Some rows, moved while no GEMM runs; as many of them cross the link as of all."""
    linked = Fraction(num_bytes * work.linked_bytes, max(work.moved_bytes, 1))
    return max(num_bytes / _copied_gbps(rates, num_ctas), _link_ns(rates, linked))
