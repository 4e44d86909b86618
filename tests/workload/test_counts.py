"""Tokens drawn from recorded counts: exact totals, distinct experts, well-mixed, and repeatable."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workload.recordings import BARE, WEIGHTED, draw_ids
from tilepipe.config import schemas
from tilepipe.workload import draw, laws, quota
from tilepipe.workload.trace import read_counts

REPAIR = "record the file again or repair it there"


def rng_of(seed):
    return np.random.Generator(np.random.PCG64(seed))


@st.composite
def shares_and_sizes(draw_value):
    shares = draw_value(
        st.lists(
            st.integers(0, 5) | st.integers(0, 2**40), min_size=1, max_size=20
        ).filter(any)
    )  # fmt: skip
    num_topk = draw_value(st.integers(1, np.count_nonzero(shares)))
    return np.array(shares), {"num_tokens": draw_value(st.integers(0, 60)), "num_topk": num_topk}


@given(case=shares_and_sizes())
@settings(max_examples=200, deadline=None)
def test_totals_are_the_shares_to_within_one_token_unless_capped(case):
    shares, sizes = case

    due = quota.quotas(shares, **sizes)

    num_tokens, num_slots = sizes["num_tokens"], sizes["num_tokens"] * sizes["num_topk"]
    assert due.sum() == num_slots
    assert (due <= num_tokens).all()
    assert not due[shares == 0].any()
    whole, below = sum(shares.tolist()), due < num_tokens
    for expert in np.flatnonzero(below):
        # What capped experts leave is shared out among the others: never less than their own.
        assert int(due[expert]) * whole > num_slots * int(shares[expert]) - whole
    if below.all():
        exact = [num_slots * share / whole for share in shares.tolist()]
        assert np.abs(due - exact).max() < 1


def test_a_count_above_the_tokens_gives_every_token_and_the_rest_is_shared():
    # Of 40 slots 1000 / 1030 would be due to expert 0; there are only 10 tokens.
    due = quota.quotas(np.array([1000, 15, 10, 5, 0]), num_tokens=10, num_topk=3)

    assert due.tolist() == [10, 10, 7, 3, 0]


@given(case=shares_and_sizes(), seed=st.integers(0, 2**40))
@settings(max_examples=100, deadline=None)
def test_tokens_have_distinct_experts_and_meet_the_totals(case, seed):
    shares, sizes = case
    due = quota.quotas(shares, **sizes)

    ids = quota.draw_by_quota(rng_of(seed), due, **sizes)

    assert ids.shape == (sizes["num_tokens"], sizes["num_topk"])
    assert np.array_equal(np.bincount(ids.ravel(), minlength=len(due)), due)
    ascending = np.sort(ids, axis=1)
    assert (ascending[:, 1:] != ascending[:, :-1]).all()
    assert np.array_equal(ids, quota.draw_by_quota(rng_of(seed), due, **sizes))


def test_experts_meet_as_often_as_in_tokens_drawn_one_by_one():
    shares = laws.zipf_shares(rng_of(1), 32, exponent=0.5)
    sizes = {"num_tokens": 40_000, "num_topk": 4}
    one_by_one = laws.choose(rng_of(2), shares, **sizes)
    # As many tokens per expert as there, so that only the mixing can differ.
    due = np.bincount(one_by_one.ravel(), minlength=32)

    ids = quota.draw_by_quota(rng_of(3), due, **sizes)

    meets = []
    for drawn in (ids, one_by_one):
        chosen = np.zeros((40_000, 32))
        np.put_along_axis(chosen, drawn, 1, axis=1)
        meets.append((chosen.T @ chosen)[np.triu_indices(32, 1)])
    # Two draws of a count differ by sqrt(2 x count) as a rule, the worst of 496 by up to 5 times.
    assert np.abs((meets[0] - meets[1]) / np.sqrt(2 * meets[1])).max() < 5
    # Slots and places are mixed too: halves of the tokens and single slots have the same shares.
    for part in (ids[:20_000], ids[:, :2]):
        share = np.bincount(part.ravel(), minlength=32) / part.size
        assert np.abs(share - due / due.sum()).max() < 0.005


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def draw_counts(path, *, layer=None, num_ranks=2, num_tokens=10, num_experts=4, num_topk=2, seed=0):
    return draw(
        schemas.CountsRouting(path=path, layer=layer, seed=seed),
        num_ranks=num_ranks,
        num_tokens=num_tokens,
        num_experts=num_experts,
        num_topk=num_topk,
    )


def test_the_group_has_the_recorded_load_whatever_the_seed(tmp_path):
    path = write(tmp_path, "load.json", json.dumps({"counts": [40, 30, 20, 10]}))

    first, second, other = (draw_counts(path, seed=seed) for seed in (1, 1, 2))

    for routing in (first, other):
        assert [ids.shape for ids in routing.topk_idx] == [(10, 2), (10, 2)]
        assert np.bincount(np.concatenate(routing.topk_idx).ravel()).tolist() == [16, 12, 8, 4]
        for weights in routing.topk_weights:
            assert np.abs(weights.sum(axis=1) - 1).max() < 2**-22
            assert weights.dtype == np.float32
    assert np.array_equal(first.topk_idx, second.topk_idx)
    assert not np.array_equal(first.topk_idx, other.topk_idx)


def test_draws_are_the_same_on_every_machine(tmp_path):
    path = write(tmp_path, "load.json", json.dumps({"counts": [5, 4, 3, 2, 1, 0]}))

    routing = draw_counts(path, num_tokens=4, num_ranks=1, num_experts=6, num_topk=3, seed=7)

    assert routing.topk_idx[0].tolist() == PINNED


PINNED = [[2, 3, 0], [4, 0, 1], [3, 1, 0], [0, 1, 2]]


def test_counts_of_no_token_are_refused(tmp_path):
    path = write(tmp_path, "load.json", json.dumps([{"0": [], "1": []}]))

    with pytest.raises(ValueError, match="no token is counted in it") as caught:
        draw_counts(path, layer=0)
    assert str(caught.value) == (
        f"routing.path={path}: no token is counted in it, or none in routing.layer=0; `python "
        f"-m tilepipe.list routing {path}` says what it holds"
    )


def test_an_expert_or_topk_beyond_the_counts_names_the_override(tmp_path):
    path = write(tmp_path, "load.json", json.dumps({"counts": [1, 0, 0, 0, 2, 3]}))

    with pytest.raises(ValueError, match=r"workload\.num_experts") as caught:
        draw_counts(path)
    assert str(caught.value) == (
        f"workload.num_experts=4: {path} counts tokens of expert 5; type workload.num_experts=6"
    )
    with pytest.raises(ValueError, match=r"workload\.num_topk") as caught:
        draw_counts(path, num_experts=8, num_topk=4)
    assert str(caught.value) == (
        f"workload.num_topk=4: {path} counts tokens of only 3 experts; type at most "
        "workload.num_topk=3"
    )


# Files of counts.

LOAD = np.array([[3, 0, 4, 1], [0, 0, 0, 0], [5, 6, 7, 8]])


def write_npy(folder):
    np.save(folder / "load.npy", LOAD)
    return folder / "load.npy"


def write_npz(folder):
    np.savez(folder / "load.npz", expert_counts=LOAD.astype(np.uint16))
    return folder / "load.npz"


def write_json(folder):
    return write(folder, "load.json", json.dumps({"logical_count": (LOAD * 2 // 2).tolist()}))


def write_json_by_layer(folder):
    by_layer = {str(layer): row.tolist() for layer, row in enumerate(LOAD) if row.any()}
    return write(folder, "layers.json", json.dumps(by_layer))


def write_csv(folder):
    rows = [
        f"{layer},{expert},{count}\n"
        for layer, counts in enumerate(LOAD)
        for expert, count in enumerate(counts)
        if count
    ]
    return write(folder, "load.csv", "layer,expert,count\n" + "".join(rows))


def write_stat(folder):
    """SGLang's recorder, mode stat: buffered steps, most of them empty."""
    import torch

    steps = np.zeros((5, *LOAD.shape), np.int32)
    steps[1], steps[3] = LOAD - (LOAD > 0), LOAD > 0
    dump = {"rank": 0, "logical_count": torch.from_numpy(steps)}
    torch.save({**dump, "average_utilization_rate_over_window": None}, folder / "stat.pt")
    return folder / "stat.pt"


def write_per_pass(folder):
    """SGLang's recorder, mode per_pass: physical slots, of which two hold expert 0."""
    import torch

    physical = np.concatenate([LOAD[:, :1] * 0 + 1, LOAD], axis=1).astype(np.int32)
    physical[:, 1] -= physical[:, 0]
    physical[1] = 0
    records = [
        {"forward_pass_id": n, "global_physical_count": torch.from_numpy(part)}
        for n, part in enumerate((physical // 2, physical - physical // 2))
    ]
    logical = torch.tensor([[0, 0, 1, 2, 3]] * 3)
    dump = {"records": records, "last_physical_to_logical_map": logical}
    torch.save(dump, folder / "per_pass.pt")
    return folder / "per_pass.pt"


WRITERS = [write_npy, write_npz, write_json, write_json_by_layer, write_csv, write_stat]
WRITERS += [write_per_pass]


@pytest.mark.parametrize("writer", WRITERS)
def test_counts_read_the_same_from_every_file(tmp_path, writer):
    path = str(writer(tmp_path))

    assert read_counts(path, 0).tolist() == LOAD[0].tolist()
    assert read_counts(path, 2).tolist() == LOAD[2].tolist()
    for layer, typed in ((None, "null"), (1, "1")):
        with pytest.raises(ValueError, match=r"routing\.layer") as caught:
            read_counts(path, layer)
        assert str(caught.value) == (
            f"routing.layer={typed}: {path} holds layers 0, 2; type routing.layer=0 or another of "
            "them"
        )


@pytest.mark.parametrize("name", ["jsonl", "parquet", "npz", "query", "recorder", "routed_npz"])
def test_a_trace_is_counted(tmp_path, name):
    ids = draw_ids(rng_of(1), num_layers=2, num_tokens=9, num_topk=3, num_experts=7)
    path = {**BARE, **WEIGHTED}[name](tmp_path, ids)

    assert read_counts(path, 1).tolist() == np.bincount(ids[1].ravel()).tolist()
    with pytest.raises(ValueError, match="holds layers 0, 1"):
        read_counts(path, None)
    with pytest.raises(ValueError, match=r"routing\.layer=5"):
        read_counts(path, 5)


def test_a_file_of_one_layer_needs_none(tmp_path):
    path = write(tmp_path, "load.csv", "expert,count\n2,5\n0,1\n")

    assert read_counts(path, None).tolist() == [1, 0, 5]
    with pytest.raises(ValueError, match="does not tell layers apart"):
        read_counts(path, 0)


UNCLOSED = "expert, count " + "2,3 " * 1000
BAD = {
    "bad.csv": {
        "has the columns expert, tokens; name them expert, count and, for several layers, layer": (
            "expert,tokens\n1,2\n"
        ),
        f"has the columns {UNCLOSED[:60]}...; name them expert, count and, for several layers, "
        "layer": 'expert,"count\n' + "2,3\n" * 1000,
        f"line 3 holds something else than whole numbers; {REPAIR}": "expert,count\n1,2\n2,x\n",
        f"line 3 has expert 1 again; {REPAIR}": "expert,count\n1,2\n1,3\n",
        f"no count is recorded in it; {REPAIR}": "expert,count\n",
    },
    "bad.json": {
        "holds counts of unequal length; store one per expert": '{"counts": [[1, 2], [3]]}',
        "holds counts of float64 (2,); store integers (num_experts,) or (num_layers, "
        "num_experts)": '{"counts": [1, 2.5]}',
        f"expert 1 has a count out of 0..{2**53} (-2); {REPAIR}": '{"counts": [1, -2]}',
        f"holds no count above 0; {REPAIR}": '{"counts": [0, 0]}',
    },
}


@pytest.mark.parametrize(
    ("name", "sentence"), [(name, sentence) for name in BAD for sentence in BAD[name]]
)
def test_bad_counts_are_refused(tmp_path, name, sentence):
    path = write(tmp_path, name, BAD[name][sentence])

    with pytest.raises(ValueError, match=r"routing\.path") as caught:
        read_counts(path, None)
    assert str(caught.value) == f"routing.path={path}: {sentence}"


def test_counts_are_no_trace(tmp_path):
    path = write_json(tmp_path)

    with pytest.raises(ValueError, match="routing=counts") as caught:
        draw(
            schemas.TraceRouting(path=path),
            num_ranks=1,
            num_tokens=None,
            num_experts=4,
            num_topk=2,
        )
    assert str(caught.value) == (
        f"routing.path={path}: holds counts, not tokens; type routing=counts"
    )
