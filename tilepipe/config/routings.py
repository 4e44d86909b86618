"""Typed settings of each routing law.

Knows nothing of Hydra, numpy or how a law is drawn.
"""

from dataclasses import dataclass

from tilepipe.config.choices import Law
from tilepipe.config.refuse import NOT_TYPED, require, require_own

__all__ = [
    "LOG_LINES",
    "ROUTINGS",
    "AllLocalRouting",
    "AllRemoteRouting",
    "CountsRouting",
    "HotExpertRouting",
    "HotRankRouting",
    "LognormalRouting",
    "MaskedRouting",
    "RaggedRouting",
    "Routing",
    "TraceRouting",
    "UniformRouting",
    "ZipfRouting",
]

# What the smallest recording and the smallest file of counts look like, for those who have none.
LOG_LINES = '{"type": "meta"} and {"layer": 0, "topk_ids": [3, 17], "topk_weights": [0.6, 0.4]}'
_COUNT_LINES = "layer,expert,count and 0,17,4096"


@dataclass(kw_only=True)
class _Routing:
    """What every law has."""

    law: Law  # fixed by the option
    seed: int = 0

    def __post_init__(self) -> None:
        require_own(self, "routing", "law")
        require(self.seed >= 0, "routing.seed", self.seed, "must be 0 or more")


def _require_share(share: float) -> None:
    require(0 < share <= 1, "routing.hot_share", share, "must be above 0 and at most 1")


def _require_file(law: Law, path: str, layer: int | None) -> None:
    named = path not in ("", NOT_TYPED)
    lines = f"CSV with the lines {_COUNT_LINES}" if law is Law.counts else f"lines {LOG_LINES}"
    needed = f"routing={law.name} needs routing.path=FILE, of a format in docs/routing.md, such as"
    require(named, "routing.path", path, f"{needed} {lines}")
    counted = layer is None or layer >= 0
    require(counted, "routing.layer", layer, "must be 0 or more, or null")


@dataclass(kw_only=True)
class UniformRouting(_Routing):
    """Every expert equally likely."""

    law: Law = Law.uniform


@dataclass(kw_only=True)
class ZipfRouting(_Routing):
    """Expert popularity falls as a power of its place."""

    law: Law = Law.zipf
    exponent: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.exponent <= 10, "routing.exponent", self.exponent, "must be in 0..10")


@dataclass(kw_only=True)
class LognormalRouting(_Routing):
    """Expert popularity is exp(sigma x normal)."""

    law: Law = Law.lognormal
    sigma: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.sigma <= 10, "routing.sigma", self.sigma, "must be in 0..10")


@dataclass(kw_only=True)
class HotExpertRouting(_Routing):
    """One expert that a share of the tokens choose."""

    law: Law = Law.hot_expert
    hot_expert: int  # expert number
    hot_share: float  # of the tokens

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_share(self.hot_share)


@dataclass(kw_only=True)
class HotRankRouting(_Routing):
    """One rank whose experts every slot prefers."""

    law: Law = Law.hot_rank
    hot_rank: int
    hot_share: float  # of the slots

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_share(self.hot_share)


@dataclass(kw_only=True)
class AllLocalRouting(_Routing):
    """Every token chooses experts of its own rank."""

    law: Law = Law.all_local


@dataclass(kw_only=True)
class AllRemoteRouting(_Routing):
    """Every token chooses experts of other ranks."""

    law: Law = Law.all_remote


@dataclass(kw_only=True)
class MaskedRouting(_Routing):
    """Uniform, with a share of the slots dropped."""

    law: Law = Law.masked
    masked_share: float  # of the slots

    def __post_init__(self) -> None:
        super().__post_init__()
        share = self.masked_share
        require(0 <= share <= 1, "routing.masked_share", share, "must be in 0..1")


@dataclass(kw_only=True)
class RaggedRouting(_Routing):
    """Uniform, with token counts that rise evenly from the first rank to the last."""

    law: Law = Law.ragged
    min_share: float  # the first rank has this share of workload.num_tokens; 0: it is empty

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.min_share <= 1, "routing.min_share", self.min_share, "must be in 0..1")


@dataclass(kw_only=True)
class TraceRouting(_Routing):
    """Routing recorded from a real model."""

    law: Law = Law.trace
    path: str = NOT_TYPED
    layer: int | None = None  # null: the file holds one layer
    request: str | None = None  # null: all requests
    # A window of the tokens that layer and request leave.
    first_token: int = 0
    max_tokens: int | None = None  # null: all that follow
    num_layers: int | None = None  # of the model; null: the file says it, or its tokens tell

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_file(self.law, self.path, self.layer)
        first = self.first_token
        require(first >= 0, "routing.first_token", first, "must be 0 or more")
        for key in ("max_tokens", "num_layers"):
            count = getattr(self, key)
            counted = count is None or count >= 1
            require(counted, f"routing.{key}", count, "must be 1 or more, or null")


@dataclass(kw_only=True)
class CountsRouting(_Routing):
    """Distinct experts at random, as many tokens each as recorded counts say."""

    law: Law = Law.counts
    path: str = NOT_TYPED
    layer: int | None = None  # null: the file holds one layer

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_file(self.law, self.path, self.layer)


Routing = (
    UniformRouting
    | ZipfRouting
    | LognormalRouting
    | HotExpertRouting
    | HotRankRouting
    | AllLocalRouting
    | AllRemoteRouting
    | MaskedRouting
    | RaggedRouting
    | TraceRouting
    | CountsRouting
)

ROUTINGS: dict[Law, type[Routing]] = {
    Law.uniform: UniformRouting,
    Law.zipf: ZipfRouting,
    Law.lognormal: LognormalRouting,
    Law.hot_expert: HotExpertRouting,
    Law.hot_rank: HotRankRouting,
    Law.all_local: AllLocalRouting,
    Law.all_remote: AllRemoteRouting,
    Law.masked: MaskedRouting,
    Law.ragged: RaggedRouting,
    Law.trace: TraceRouting,
    Law.counts: CountsRouting,
}
