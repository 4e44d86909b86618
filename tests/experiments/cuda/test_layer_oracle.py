"""The device's oracle of a whole layer: as strict as the host's, of right tokens and wrong ones."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.experiments.groups import random_routing  # noqa: E402
from tilepipe.experiments.cuda.layer_oracle import LayerOracle  # noqa: E402
from tilepipe.experiments.oracle import Oracle  # noqa: E402
from tilepipe.reference import moe  # noqa: E402
from tilepipe.workload import bf16, payload  # noqa: E402
from tilepipe.workload.placement import assign, contiguous  # noqa: E402

NAMED = {"contender": "fused", "stage": "before"}
LAUNCH, HIDDEN, INTERMEDIATE = 5, 256, 136
ROUTINGS = {
    "uniform": random_routing([20, 20], num_experts=4, num_topk=2),
    "masked": random_routing([20, 7], num_experts=4, num_topk=3, kind="masked"),
    "one_expert": random_routing([30], num_experts=6, num_topk=4, kind="one_expert"),
    "nothing": random_routing([0, 9], num_experts=2, num_topk=1),
}


def rounded(rows):
    return bf16.from_bits(bf16.to_bits(rows))


def layer_of(routing, rank, *, num_roundings=1, flaw=None):
    """Tokens of a rank, every value rounded to bf16 where an executor rounds it."""
    ids, weights = routing.topk_idx[rank], routing.topk_weights[rank]
    x = bf16.from_bits(payload.row_bits(LAUNCH, rank, np.arange(len(ids)), HIDDEN))
    home = np.zeros((*ids.shape, HIDDEN), np.float32)
    keep = rounded if num_roundings == 4 else lambda rows: rows
    for expert in range(routing.num_experts):
        token, slot = np.nonzero(ids == expert)
        first = payload.expert_weights(expert, 2 * INTERMEDIATE, HIDDEN)
        second = payload.expert_weights(expert, HIDDEN, INTERMEDIATE)
        gate, up = (keep(part) for part in np.split(x[token] @ first.T, 2, axis=1))
        if flaw == "swapped":
            gate, up = up, gate
        one = np.ones_like(up)
        h = rounded(keep(moe.swiglu(gate, one)) * up)
        if flaw == "no_silu":
            h = rounded(gate * up)
        if flaw == "neighbour" and len(h):
            h[0] = h[-1]
        home[token, slot] = rounded(h @ second.T)
    return bf16.to_bits(moe.combine(home, ids, weights))


def verdicts(routing, rank, out, **told):
    """The host's and the device's."""
    host = Oracle(
        assign(contiguous(routing.num_experts, len(routing.topk_idx)), routing), rank=rank
    )
    device = LayerOracle(
        routing,
        rank=rank,
        experts=range(routing.num_experts),
        intermediate=INTERMEDIATE,
        device="cpu",
    )
    got = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
    return (
        host.check_layer(LAUNCH, out, intermediate=INTERMEDIATE, **told, **NAMED),
        device.check(LAUNCH, got, **told, **NAMED),
    )


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("num_roundings", [1, 4])
def test_tokens_that_are_rounded_where_they_may_be_pass_both(name, num_roundings):
    routing = ROUTINGS[name]
    for rank in range(len(routing.topk_idx)):
        out = layer_of(routing, rank, num_roundings=num_roundings)

        for verdict in verdicts(routing, rank, out, num_roundings=num_roundings):
            assert verdict.passed, verdict.detail
            assert verdict.num_values == out.size


@pytest.mark.parametrize("flaw", ["swapped", "no_silu", "neighbour"])
def test_what_is_no_layer_is_refused_by_both(flaw):
    routing = ROUTINGS["uniform"]
    out = layer_of(routing, 0, flaw=flaw)

    for verdict in verdicts(routing, 0, out):
        assert not verdict.passed
        assert f"{verdict.num_wrong} of {out.size} values differ, the first at [" in verdict.detail


def test_one_slot_of_one_token_with_another_weight_is_refused_by_both():
    routing = ROUTINGS["uniform"]
    weights = routing.topk_weights[1].copy()
    weights[3] = weights[3, ::-1]
    other = type(routing)(
        topk_idx=routing.topk_idx,
        topk_weights=(routing.topk_weights[0], weights),
        num_experts=routing.num_experts,
    )

    for verdict in verdicts(routing, 1, layer_of(other, 1)):
        assert not verdict.passed
        assert verdict.num_wrong <= HIDDEN
        assert "[3, " in verdict.detail


def test_values_that_were_never_written_are_refused_by_both():
    out = layer_of(ROUTINGS["uniform"], 0)
    out[7, 9] = 0x7FC1

    for verdict in verdicts(ROUTINGS["uniform"], 0, out):
        assert (verdict.passed, verdict.num_wrong) == (False, 1)
        assert verdict.max_error == np.inf
