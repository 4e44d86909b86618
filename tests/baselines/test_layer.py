"""Torch's layer in one process against the reference, for random routings."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tests.experiments.groups import random_routing  # noqa: E402
from tilepipe.baselines.layer import TorchLayer  # noqa: E402
from tilepipe.reference import moe  # noqa: E402
from tilepipe.workload import bf16, payload  # noqa: E402

HIDDEN = 8


@st.composite
def routings(draw):
    num_experts = draw(st.integers(1, 9))
    return random_routing(
        [draw(st.integers(0, 40))],
        num_experts=num_experts,
        num_topk=draw(st.integers(1, num_experts)),
        kind=draw(st.sampled_from(["uniform", "masked"])),
        seed=draw(st.integers(0, 99)),
    )


def layer_of(routing, **options):
    ids = routing.topk_idx[0]
    return TorchLayer(
        num_tokens=len(ids),
        num_topk=ids.shape[1],
        num_experts=routing.num_experts,
        num_received=int((ids >= 0).sum()),
        hidden=HIDDEN,
        device=torch.device("cpu"),
        **options,
    )


def tensor_of(bits):
    return torch.from_numpy(bits).view(torch.bfloat16)


@settings(deadline=None, max_examples=60)
@given(routing=routings())
def test_rows_are_those_of_the_reference_and_find_their_way_home(routing):
    torch.set_num_threads(1)
    (ids,), (weights,) = routing.topk_idx, routing.topk_weights
    x = payload.row_bits(1, 0, np.arange(len(ids)), HIDDEN)
    layer = layer_of(routing)

    route = layer.make_route(torch.from_numpy(ids.astype(np.int64)))
    layer.poison(0x7FC1, route)
    received = layer.dispatch(route, tensor_of(x))
    out = layer.combine(route, received, torch.from_numpy(weights))

    per_expert = moe.dispatch([x], [ids], num_experts=routing.num_experts)
    assert np.array_equal(received.view(torch.uint16).numpy(), np.concatenate(per_expert))
    assert route.expert_ends.tolist() == np.cumsum([len(rows) for rows in per_expert]).tolist()
    # No slot has a row of its own here, so each token is its row times the sum of its weights.
    total = weights.sum(axis=1, keepdims=True) * bf16.from_bits(x)
    found = bf16.from_bits(out.view(torch.uint16).numpy())
    assert np.allclose(found, total, rtol=2**-7, atol=1e-6)


def test_each_experts_rows_meet_its_own_weight():
    routing = random_routing([40], num_experts=4, num_topk=2, kind="masked")
    ids = routing.topk_idx[0]
    stacked = np.stack([payload.expert_weights(expert, 16, HIDDEN) for expert in range(4)])
    layer = layer_of(routing, weights=torch.from_numpy(stacked).bfloat16())
    route = layer.make_route(torch.from_numpy(ids.astype(np.int64)))
    x = payload.row_bits(1, 0, np.arange(len(ids)), HIDDEN)

    product = layer.multiply(route, layer.dispatch(route, tensor_of(x)))

    rows = moe.dispatch([bf16.from_bits(x)], [ids], num_experts=4)
    want = np.concatenate(moe.grouped_gemm(rows, list(stacked)))
    assert product.dtype == torch.bfloat16
    assert np.allclose(product.float().numpy(), want, rtol=2**-7, atol=2**-7)
