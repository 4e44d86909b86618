"""Cases of plans made on the device.

Knows nothing of who runs the kernels.
"""

import numpy as np

from tilepipe.config.choices import Granularity, HomeGranularity, Layout, Order
from tilepipe.schedule.settings import PlanSettings
from tilepipe.workload.routing import Routing

__all__ = ["AXES", "PLAIN", "allowed", "draw", "settings_of"]

AXES = {
    "num_ranks": [1, 2, 3, 8],
    "order": list(Order),
    "granularity": list(Granularity),
    "home_granularity": list(HomeGranularity),
    "layout": list(Layout),
    "tile_m": [16, 48, 128],
    "experts_per_rank": [1, 3, 32],
    "num_topk": [1, 2, 8],
    "num_n_tiles": [1, 16],
    "tokens": [0, 1, 33, 700],
    "kind": ["uniform", "one_expert", "masked", "ragged"],
}

PLAIN = {
    "num_ranks": 2,
    "experts_per_rank": 4,
    "num_topk": 2,
    "tile_m": 16,
    "num_n_tiles": 1,
    "layout": Layout.packed,
    "granularity": Granularity.tile,
    "home_granularity": HomeGranularity.token,
    "order": Order.edf,
    "tokens": 64,
    "kind": "uniform",
}


def allowed(case):
    num_experts = case["num_ranks"] * case["experts_per_rank"]
    return case["num_topk"] <= num_experts


def draw(case, seed):
    """A routing of a case."""
    rng = np.random.default_rng(seed)
    num_experts = case["num_ranks"] * case["experts_per_rank"]
    topk_idx = []
    for rank in range(case["num_ranks"]):
        count = case["tokens"]
        if case["kind"] == "ragged":
            count = count * (rank + seed % 3) // (case["num_ranks"] + 1)
        ids = np.argsort(rng.random((count, num_experts)), axis=1)[:, : case["num_topk"]]
        ids = ids.astype(np.int32)
        if case["kind"] == "one_expert":
            ids[ids == 0] = ids[:, :1].repeat(case["num_topk"], axis=1)[ids == 0]
            ids[:, :1] = 0
        if case["kind"] == "masked":
            ids[rng.random(ids.shape) < 0.4] = -1
        topk_idx.append(ids)
    return Routing(
        topk_idx=tuple(topk_idx),
        topk_weights=tuple(rng.random(ids.shape).astype(np.float32) for ids in topk_idx),
        num_experts=num_experts,
    )


def settings_of(case):
    num_ranks = case["num_ranks"]
    return PlanSettings(
        num_ranks=num_ranks,
        num_experts=num_ranks * case["experts_per_rank"],
        num_topk=case["num_topk"],
        tile_m=case["tile_m"],
        num_n_tiles=case["num_n_tiles"],
        num_chunks=min(4, case["num_n_tiles"]),
        layout=case["layout"],
        granularity=case["granularity"],
        home_granularity=case["home_granularity"],
        order=case["order"],
        seed=7,
    )
