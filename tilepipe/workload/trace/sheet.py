"""A survey in words and columns, for a screen.

Knows nothing of files or of how figures are reached.
"""

import numpy as np

from tilepipe.workload.trace.refusals import listed
from tilepipe.workload.trace.survey import LayerSurvey, Survey

__all__ = ["sheet"]

_HEAD = (
    "layer",
    "tokens",
    "topk",
    "weights",
    "seen",
    "expert max/mean",
    "rank max/mean",
    "hottest experts",
    "ranks/token",
    "within",
    "across",
)
_NOTES = (
    "seen: experts with a token. max/mean: rows of the fullest expert, and of the fullest rank.",
    "ranks/token: ranks that own a token's experts, mean. within, across: tokens of a thousand in",
    "which a pair of experts meets, mean over pairs on one rank and over pairs on two. Experts lie",
    "on ranks in order; where within is not far above across, another placement has room to help.",
)
_NUM_HOTTEST = 3
# Fewer equal tokens at the start are a prompt's, more are what an engine tried itself out with.
_MOST_ALIKE = 16


def sheet(found: Survey) -> list[str]:
    """Lines: what the recording is, then a row per layer."""
    layers = [layer.layer for layer in found.layers if layer.layer is not None]
    num_ranks = found.layers[0].num_ranks
    num_local = found.num_experts // num_ranks
    table = [_HEAD, *(_row(layer) for layer in found.layers)]
    widths = [max(len(row[column]) for row in table) for column in range(len(_HEAD))]
    return [
        f"  format    {found.format}",
        f"  layers    {listed(layers) if layers else 'not told apart'}",
        f"  requests  {'not told apart' if found.num_requests is None else found.num_requests}",
        f"  experts   {found.num_experts}, on {num_ranks} ranks of {num_local}",
        "",
        *(
            "  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
            for row in table
        ),
        "",
        *(f"  {note}" for note in _NOTES),
        *_alike(found),
    ]


def _alike(found: Survey) -> list[str]:
    """What to leave out, if a recording begins with one token again and again."""
    begins: dict[int, list[LayerSurvey]] = {}
    for layer in found.layers:
        if layer.num_alike is not None and layer.num_alike > _MOST_ALIKE:
            begins.setdefault(layer.num_alike, []).append(layer)
    notes = []
    for count, layers in sorted(begins.items()):
        numbers = [layer.layer for layer in layers if layer.layer is not None]
        which = f" of layer{'s' if len(numbers) > 1 else ''} {listed(numbers)}" if numbers else ""
        whole = all(layer.num_tokens == count for layer in layers)
        way = "all there are" if whole else f"first_token={count} leaves them out"
        told = f"The first {count} tokens{which} are equal, as an engine's warm-up: {way}."
        notes += ["", f"  {told}"]
    return notes


def _row(layer: LayerSurvey) -> tuple[str, ...]:
    rows, per_rank = layer.rows_per_expert, layer.rows_per_rank
    whole = int(rows.sum())
    hottest = np.argsort(-rows, kind="stable")[:_NUM_HOTTEST].tolist()
    return (
        _word(layer.layer),
        _word(layer.num_tokens),
        _word(layer.num_topk),
        "-" if layer.has_weights is None else "yes" if layer.has_weights else "no",
        str(np.count_nonzero(rows)),
        f"{int(rows.max()) * len(rows) / whole:.2f}" if whole else "-",
        f"{int(per_rank.max()) * len(per_rank) / whole:.2f}" if whole else "-",
        ", ".join(f"{expert} ({rows[expert] / whole:.1%})" for expert in hottest if rows[expert]),
        "-" if layer.ranks_per_token is None else f"{layer.ranks_per_token:.2f}",
        _per_thousand(layer.meets_within, layer.num_tokens),
        _per_thousand(layer.meets_across, layer.num_tokens),
    )


def _word(number: int | None) -> str:
    return "-" if number is None else str(number)


def _per_thousand(meets: float | None, num_tokens: int | None) -> str:
    return "-" if meets is None or not num_tokens else f"{1000 * meets / num_tokens:.2f}"
