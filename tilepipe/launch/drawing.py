"""Whether a routing can be drawn in the memory that this machine has free.

Knows nothing of how routing is drawn, only what it leaves in memory; looks at no GPU.
"""

from pathlib import Path
from typing import Any

from tilepipe.config.choices import Fabric, Law

__all__ = ["available_bytes", "drawing_fault"]

# A token's slot is an id (int32) and a weight (float32); every process keeps those of all ranks.
_SLOT_BYTES = 8
# Further bytes a slot of the rank that is being drawn: 32 by most laws, 40 by hot_rank.
_DRAWN_SLOT_BYTES = 40
# Popularity of an expert, and where its share starts and ends: 8 bytes each. By lognormal and zipf,
# which begin with lists of numbers, it is more.
_EXPERT_BYTES = 24
_MOST_EXPERT_BYTES = 145


def drawing_fault(container: dict[str, Any], available: int | None) -> str:
    """Why a configuration's routing does not fit into `available` bytes, in a sentence.

    Empty where it may fit, where a recording says how many tokens there are, and where it is
    unknown what is available.
    """
    workload, routing = container["workload"], container["routing"]
    ranks, experts = container["launch"]["num_ranks"], workload["num_experts"]
    if available is None or routing["law"] == Law.trace.name or workload["num_tokens"] is None:
        return ""
    # On the host each rank is a process that draws the routing of all and keeps it, all at once.
    processes = ranks if container["launch"]["fabric"] == Fabric.host.name else 1
    # Once all is drawn, rows are counted by expert and rank.
    if (needed := processes * experts * max(_EXPERT_BYTES, 8 * ranks)) > available:
        while_drawn = processes * (_MOST_EXPERT_BYTES + 8 * ranks)
        return _sentence("workload.num_experts", experts, needed, available, while_drawn)
    # Token counts rise evenly from the share of the first rank to all on the last.
    share = (1 + routing["min_share"]) / 2 if routing["law"] == Law.ragged.name else 1
    slots = workload["num_topk"] * ranks * share
    needed = int(processes * workload["num_tokens"] * slots * _SLOT_BYTES)
    if needed <= available:
        return ""
    while_drawn = processes * (slots * _SLOT_BYTES + workload["num_topk"] * _DRAWN_SLOT_BYTES)
    return _sentence("workload.num_tokens", workload["num_tokens"], needed, available, while_drawn)


def available_bytes() -> int | None:
    """Memory that processes could take now, swap included; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    told = {name: words.split() for name, _, words in (line.partition(":") for line in lines)}
    if "MemAvailable" not in told:
        return None
    return sum(int(told[name][0]) * 1024 for name in ("MemAvailable", "SwapFree") if name in told)


def _sentence(key: str, value: int, needed: int, available: int, each: float) -> str:
    """`each` is what one more token or expert takes at the worst, in bytes."""
    most = int(available // each)
    step = int(10 ** max(len(str(most)) - 2, 0))
    return (
        f"{key}={value}: their routing takes {needed / 2**30:.1f} GiB to draw, and this machine "
        f"has {available / 2**30:.1f} GiB free; type {most // step * step} or fewer"
    )
