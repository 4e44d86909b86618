"""The four tables of a results folder, column by column, and what each number means.

Knows nothing of how a value is reached, of files or of which point it belongs to.

Every field carries `meaning`, `unit` and `window` (what lies inside the timed window) as metadata,
and `allowed` where only some words are legal. A column never changes its meaning: it gets another
name, and SCHEMA_VERSION goes up; but for a figure that is made anew from what older files hold
wherever they are read (accounting.as_today). Files of older versions stay readable: ADDED_IN says
which columns they cannot have.
"""

from collections.abc import Mapping
from enum import Enum

import pyarrow as pa

from tilepipe.config import choices
from tilepipe.records import SpanKind, SpanRole, Status
from tilepipe.results.meanings import COMPONENTS, CONTENDERS, TERMS
from tilepipe.results.spans import SPAN_KINDS, STAMPED_LOSS, STAMPED_TERM, STAMPED_WINDOW

__all__ = [
    "BREAKDOWN",
    "COMPONENTS",
    "CONTENDERS",
    "CONTENDER_FIGURES",
    "PERFORMANCE_COLUMNS",
    "PLACEMENT_KEYS",
    "POINT_FIGURES",
    "ROUTING_KEYS",
    "SAMPLES",
    "SCHEMA_VERSION",
    "SUMMARY",
    "TERMS",
    "TIMELINE",
]

SCHEMA_VERSION = 7

NOT_TIMED = "not timed"


def _meanings(words: Mapping[str, str]) -> str:
    return "; ".join(f"{word}: {meaning}" for word, meaning in words.items())


_COMPONENT_WINDOW = _meanings(COMPONENTS)
_SLOWEST = f"the slowest rank of each iteration; {_COMPONENT_WINDOW}"


def _names(enum: type[Enum]) -> tuple[str, ...]:
    return tuple(member.name for member in enum)


def _field(
    name: str,
    dtype: pa.DataType,
    meaning: str,
    *,
    unit: str = "none",
    window: str = NOT_TIMED,
    nullable: bool = True,
    allowed: tuple[str, ...] = (),
) -> pa.Field:
    metadata = {"meaning": meaning, "unit": unit, "window": window}
    if allowed:
        metadata["allowed"] = ",".join(allowed)
    return pa.field(name, dtype, nullable=nullable, metadata=metadata)


def _word(name: str, meaning: str, *allowed: str, nullable: bool = True) -> pa.Field:
    return _field(name, pa.string(), meaning, nullable=nullable, allowed=allowed)


def _count(name: str, meaning: str, *, unit: str = "1", nullable: bool = True) -> pa.Field:
    return _field(name, pa.int64(), meaning, unit=unit, nullable=nullable)


def _time(name: str, meaning: str, *, window: str = _SLOWEST, nullable: bool = True) -> pa.Field:
    return _field(name, pa.int64(), meaning, unit="ns", window=window, nullable=nullable)


def _figure(name: str, meaning: str, *, unit: str = "1", window: str = NOT_TIMED) -> pa.Field:
    return _field(name, pa.float64(), meaning, unit=unit, window=window)


def _table(name: str, fields: list[pa.Field]) -> pa.Schema:
    return pa.schema(fields, metadata={"table": name, "schema_version": str(SCHEMA_VERSION)})


_IDENTITY = [
    _field("schema_version", pa.int32(), "version of these columns", nullable=False),
    _word("name", "experiment, and folder below the results folder", nullable=False),
    _word("config_id", "hash of what defines the measurement", nullable=False),
    _word("build_id", "hash of sources, versions and hardware behind it", nullable=False),
    _count("repetition", "round of the whole sweep, from 0", nullable=False),
    _word("operation", "what is measured", *_names(choices.Operation), nullable=False),
    _word(
        "executor", "who made the row; never mixed in a comparison", "host", "cuda", nullable=False
    ),
]
_POINT_KEYS = [
    _count("num_ranks", "ranks of the expert-parallel group", nullable=False),
    _count("hidden", "elements of a token row"),
    _count("intermediate", "half the first GEMM's N, and the second GEMM's K"),
    _count("num_experts", "experts of the whole group"),
    _count("num_topk", "experts per token"),
    _word("dtype", "element type of token rows", *_names(choices.Dtype)),
    _word("law", "how tokens choose experts", *_names(choices.Law)),
    _word("placement", "which rank holds which expert", *_names(choices.PlacementRule)),
    _word("order", "in which order rows are sent", *_names(choices.Order)),
    _word("granularity", "what one semaphore stands for", *_names(choices.Granularity)),
    _word("home_granularity", "when home may reduce", *_names(choices.HomeGranularity)),
    _word("layout", "where an expert's rows start", *_names(choices.Layout)),
    _word("copy", "how a CTA moves a row; null on the host", *_names(choices.Copy)),
    _count(
        "num_comm_ctas",
        "CTAs that begin as communication CTAs; null on the host, and where auto found none",
    ),
    _count("num_comm_warps", "warps of a communication CTA; null on the host"),
    _count("num_loads", "16-byte loads a lane has in flight; null but with copy simt"),
    _count("num_stages", "pieces of a row that a warp's ring holds; null but with copy tma"),
    _count(
        "stage_bytes", "room of a stage, into which wider rows are split; as above", unit="byte"
    ),
    _count("flag_batch", "rows of a warp whose flags share one release fence; null on the host"),
    _word("roles", "what CTAs of a fused launch do; null on the host", *_names(choices.Roles)),
    _word("push", "who brings home what is multiplied; null on the host", *_names(choices.Push)),
    _word("walk", "order of the second GEMM's tiles; null on the host", *_names(choices.Walk)),
    _count("num_chunks", "pieces along N that were asked for; null: by the size of a row"),
    _word("planner", "who makes the Plan", *_names(choices.Planner)),
    _count("tile_m", "rows of an M tile"),
    _count("tile_n", "columns of an N tile"),
    _word(
        "store",
        "how an output tile gets to memory; null on the host, and for the default",
        *_names(choices.StoreMode),
    ),
    _count("num_gemm_ctas", "CTAs that multiply; null on the host, and for one each SM"),
    _word("l2", "what the L2 cache held before a launch; null on the host", *_names(choices.L2)),
    _word("regime", "how launches followed; null on the host", *_names(choices.Regime)),
    _field(
        "pace_gbps",
        pa.float64(),
        "rate to which a rank's sending, and its receiving, is throttled; null: not at all",
        unit="1e9 byte/s",
    ),
    _time(
        "pace_latency_ns",
        "delay of a flag behind its rows, a setting; null on the host",
        window=NOT_TIMED,
    ),
]
_CLOCKS = [
    _count("sm_clock_mhz", "SM clock in the timed loop: median of samples, lowest GPU", unit="MHz"),
    _count("sm_clock_min_mhz", "lowest SM clock that was seen", unit="MHz"),
    _count("sm_clock_max_mhz", "highest SM clock that was seen", unit="MHz"),
    _figure("power_w", "highest power of a GPU that was seen", unit="W"),
    _count("temperature_c", "highest temperature of a GPU that was seen", unit="deg C"),
    _word("clock_reasons", "what set the SM clock, as NVML says, joined by +; empty: nothing"),
    _field("throttled", pa.bool_(), "one of clock_reasons lowers the clock: power, heat or sync"),
]
ROUTING_KEYS = {
    "seed": (pa.int64(), "seed of the draw"),
    "exponent": (pa.float64(), "zipf: popularity falls as 1 / place ** exponent"),
    "sigma": (pa.float64(), "lognormal: popularity is exp(sigma x normal)"),
    "hot_expert": (pa.int64(), "hot_expert: number of that expert"),
    "hot_rank": (pa.int64(), "hot_rank: number of that rank"),
    "hot_share": (pa.float64(), "hot_expert, hot_rank: share of the tokens that prefer it"),
    "masked_share": (pa.float64(), "masked: share of the slots that is dropped"),
    "min_share": (pa.float64(), "ragged: share of workload.num_tokens on the first rank"),
    "path": (pa.string(), "trace, counts: the file"),
    "layer": (pa.int64(), "trace, counts: layer of the recorded model"),
    "request": (pa.string(), "trace: the only request whose tokens are taken; null: all"),
    "first_token": (pa.int64(), "trace: first token taken, of those of layer and request"),
    "max_tokens": (pa.int64(), "trace: most tokens taken; null: all that follow"),
    "num_layers": (pa.int64(), "trace: layers of the model, where they had to be typed"),
}
PLACEMENT_KEYS = {
    "path": (pa.string(), "file: the map that was read"),
    "layer": (pa.int64(), "file: row of the map"),
    "replica": (pa.string(), "file, balanced: which of an expert's replicas a row took"),
}
_BYTES = {
    "logical_bytes": "token rows counted per (token, expert)",
    "dedup_bytes": "token rows counted per (token, receiving rank)",
    "wire_bytes": "token rows that cross a link, with loopback those that would; no self traffic",
    "dedup_wire_bytes": "what wire_bytes would be with one copy of a token for each rank",
}
POINT_FIGURES = {
    "expert_max_over_mean": ("rows of the fullest expert over the mean", "1"),
    "rank_max_over_mean": ("rows of the fullest receiving rank over the mean", "1"),
    "physical_max_over_mean": (
        "rows of the fullest physical expert over the mean of all, unused ones included",
        "1",
    ),
    **{name: (f"{basis}, all ranks together", "byte") for name, basis in _BYTES.items()},
    "flops": ("multiplications and additions of the valid rows, all ranks together", "flop"),
}
# Back to back no launch shows where its plan ended.
_WORK = "stage_ns (regime chained: median_ns)"
CONTENDER_FIGURES = {
    "logical_gbps": (f"logical_bytes per rank over {_WORK}", "1e9 byte/s"),
    "dedup_gbps": (f"dedup_bytes per rank over {_WORK}", "1e9 byte/s"),
    "wire_gbps": (f"wire_bytes per rank over {_WORK}", "1e9 byte/s"),
    "gbps_per_cta": ("logical_gbps over num_comm_ctas", "1e9 byte/s"),
    "link_share": ("wire_gbps over hardware.link_gbps; only where rows cross a link", "1"),
    "memory_gbps": (
        f"bytes that rows read and write in the memory of one GPU over {_WORK}, with loopback "
        "those of all ranks: logical_bytes twice to move them, once more and a row a token to "
        "reduce them; null on the host",
        "1e9 byte/s",
    ),
    "memory_share": ("memory_gbps over hardware.hbm_gbps; only where ranks share one GPU", "1"),
    "tflops": (f"flops per rank over {_WORK}", "1e12 flop/s"),
    "efficiency": (
        "a bound over fused, both without plan, so the larger the less is left to gain; above 1 "
        "the bound's parts were slower alone. dispatch_gemm: max(gemm_split, dispatch), with "
        "roles=switch dispatch + gemm_all x (1 - dispatch / gemm_split). gemm_combine: "
        "max(gemm_split, push) + reduce, without push where push=epilogue, with the last chunk's "
        "share of reduce alone where walk=chunk. gemm_all for gemm_split where no SMs are given "
        "away. A layer has none",
        "1",
    ),
    "hidden_share": (
        "1 - (fused - gemm_all) / (dispatch or push); below 0 where fused takes longer than one "
        "after the other. Of roles=beside both are timed on all SMs, else on num_comm_ctas of "
        "them: it compares launches of the same roles",
        "1",
    ),
    "stamping_cost": ("fused launches that leave stamps over those that do not", "1"),
    "speedup": ("sequential over fused, median over iterations of the ratio", "1"),
    "speedup_low": ("lower end of the interval of speedup, its kind as interval_kind says", "1"),
    "speedup_high": ("upper end of the interval of speedup, its kind as interval_kind says", "1"),
}
_INTERVAL_KIND = (
    "how low and high were found: 95 % by order statistics or bootstrap, or, below six iterations, "
    "the range of what was seen"
)
# Null unless the point is ok.
PERFORMANCE_COLUMNS = (
    "median_ns",
    "low_ns",
    "high_ns",
    "p10_ns",
    "p90_ns",
    "min_ns",
    "spread",
    "plan_ns",
    "stage_ns",
    "interval_kind",
    *CONTENDER_FIGURES,
)

SAMPLES = _table(
    "samples",
    [
        *_IDENTITY,
        _word("contender", _meanings(CONTENDERS), *CONTENDERS, nullable=False),
        _word("component", _COMPONENT_WINDOW, *COMPONENTS, nullable=False),
        _count("rank", "rank that measured", nullable=False),
        _count("iteration", "number of the timed iteration, from 0", nullable=False),
        _time(
            "start_ns",
            "start on the host's monotonic clock, common to the ranks of one host",
            window=_COMPONENT_WINDOW,
            nullable=False,
        ),
        _time("duration_ns", "length of the window", window=_COMPONENT_WINDOW, nullable=False),
        _count("num_tokens", "tokens of this rank"),
        *_POINT_KEYS,
    ],
)
BREAKDOWN = _table(
    "breakdown",
    [
        *_IDENTITY,
        _word("term", f"null counts as 0; {_meanings(TERMS)}", *TERMS, nullable=False),
        _time("value_ns", "difference of medians; null where nothing was measured"),
        _time("low_ns", "lower end of the interval"),
        _time("high_ns", "upper end of the interval"),
        _word("interval_kind", _INTERVAL_KIND, "bootstrap95", "range"),
        _time("stamped_ns", STAMPED_TERM, window=STAMPED_WINDOW),
        _time("stamped_loss_ns", STAMPED_LOSS, window=STAMPED_WINDOW),
    ],
)
SUMMARY = _table(
    "summary",
    [
        *_IDENTITY,
        _word("status", "how the point ended", *_names(Status), nullable=False),
        _word("reason", "why, in a sentence; empty when ok", nullable=False),
        _field("last_sweep", pa.bool_(), "the sweep that wrote this file held it", nullable=False),
        _word("started_utc", "start of the point, ISO 8601"),
        _word("ended_utc", "end of the point, ISO 8601"),
        _word("hardware", "chosen hardware entry"),
        _word("fabric", "who the peers are", *_names(choices.Fabric)),
        *_POINT_KEYS,
        _count("num_tokens", "workload.num_tokens, per rank; null where a trace fixes it"),
        _count("num_tokens_total", "tokens of all ranks together"),
        _field("capacity_factor", pa.float64(), "receive rows over the mean; null: worst case"),
        *(_field(f"routing_{key}", kind, text) for key, (kind, text) in ROUTING_KEYS.items()),
        *(_field(f"placement_{key}", kind, text) for key, (kind, text) in PLACEMENT_KEYS.items()),
        _count("num_redundant", "physical experts beyond one an expert; null where nothing ran"),
        _count("num_warmups", "untimed iterations before the timed ones"),
        *_CLOCKS,
        _word("left_out", "baselines asked for and not run, and why; null: none"),
        _word("contender", f"null when not ok; {_meanings(CONTENDERS)}", *CONTENDERS),
        _word("component", "what the times below are of", *COMPONENTS),
        _count("num_iters", "timed iterations behind the times below"),
        _time("median_ns", "median over iterations"),
        _time("low_ns", "lower end of the median's interval"),
        _time("high_ns", "upper end of the median's interval"),
        _word("interval_kind", _INTERVAL_KIND, "order95", "range"),
        _time("p10_ns", "10th percentile over iterations, a value that was measured"),
        _time("p90_ns", "90th percentile over iterations, a value that was measured"),
        _time("min_ns", "fastest iteration"),
        _figure("spread", "(p90 - p10) / median", window=_SLOWEST),
        _time("plan_ns", "median of component plan; null where it was not timed apart"),
        _time("stage_ns", "median of component stage; null where it was not timed apart"),
        *(_figure(name, text, unit=unit) for name, (text, unit) in POINT_FIGURES.items()),
        *(
            _figure(name, text, unit=unit, window=_SLOWEST)
            for name, (text, unit) in CONTENDER_FIGURES.items()
        ),
    ],
)
# Of the clock that the ranks of a host share.
_RECORDED = (
    "one launch from behind the barrier to this rank's last result, of contender fused or of what "
    "an operation without one has first; recorded after all timed ones, so no sample is stamped"
)
TIMELINE = _table(
    "timeline",
    [
        *_IDENTITY,
        _count("rank", "rank that did it", nullable=False),
        _word(
            "lane",
            "who did it, one thing at a time: a thread on the host; on a GPU the number of an SM, "
            "then .WARP where warps of an SM work apart",
            nullable=False,
        ),
        _word("role", "what the lane was there for", *_names(SpanRole), nullable=False),
        _word("kind", _meanings(SPAN_KINDS), *_names(SpanKind), nullable=False),
        _time("start_ns", "start, on the ranks' common clock", window=_RECORDED, nullable=False),
        _time("end_ns", "end, on the same clock", window=_RECORDED, nullable=False),
        _count("expert", "its number in the whole group"),
        _count("m_tile", "M tile, of the rank that owns the expert"),
        _count("n_tile", "N tile"),
        _count("chunk", "N chunk"),
        _count("peer", "rank that receives"),
        _count("ticket", "place in the sending order of the rank"),
        _count("num_rows", "rows that were sent, read or multiplied; tokens that were summed"),
        _count(
            "deadline",
            "where the GEMM of the rank that owns the expert first asks for it: place in hand-out "
            "order; of a row on its way home: first token of its run",
        ),
        _time(
            "lateness_ns",
            "of a wait: ready minus first asked for; null where the first look found it ready",
            window=_RECORDED,
        ),
    ],
)
