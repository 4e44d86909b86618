"""The device's oracle: it says what the host's oracle says, of right outputs and of wrong ones."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.experiments.groups import random_routing  # noqa: E402
from tilepipe.config.choices import Layout  # noqa: E402
from tilepipe.config.placements import BalancedPlacement  # noqa: E402
from tilepipe.experiments.cuda import oracle as device_oracle  # noqa: E402
from tilepipe.experiments.cuda.oracle import DeviceOracle, poison  # noqa: E402
from tilepipe.experiments.oracle import Oracle  # noqa: E402
from tilepipe.host.buffers import pack_home  # noqa: E402
from tilepipe.measure import gate  # noqa: E402
from tilepipe.reference import moe  # noqa: E402
from tilepipe.schedule.layout import count_rows, make_layout  # noqa: E402
from tilepipe.schedule.settings import PlanSettings  # noqa: E402
from tilepipe.workload import bf16, payload, place  # noqa: E402
from tilepipe.workload.placement import assign, contiguous  # noqa: E402
from tilepipe.workload.routing import Routing  # noqa: E402

NAMED = {"contender": "dispatch", "stage": "before"}
HIDDEN, LAUNCH = 24, 5
ROUTINGS = {
    "uniform": random_routing([20, 20], num_experts=4, num_topk=2),
    "masked": random_routing([20, 20], num_experts=4, num_topk=3, kind="masked"),
    "ragged": random_routing([3, 40, 17, 1], num_experts=8, num_topk=2, seed=1),
    "no_tokens": random_routing([0, 9], num_experts=2, num_topk=1, seed=2),
    "one_expert": random_routing([30], num_experts=6, num_topk=4, kind="one_expert"),
    "nothing": random_routing([0, 0], num_experts=2, num_topk=1),
    # Ids are physical experts, some of them replicas of one expert and one of them unused.
    "placed": place(
        BalancedPlacement(num_redundant=7),
        random_routing([20, 9, 20], num_experts=5, num_topk=3, kind="one_expert"),
    ).physical,
}


def in_blocks(routing):
    return assign(contiguous(routing.num_experts, len(routing.topk_idx)), routing)


class Received:
    """What a rank must have received, by the host's means, and what both oracles say of it."""

    def __init__(self, routing, rank, layout=Layout.padded):
        self.routing, self.rank = routing, rank
        num_ranks = len(routing.topk_idx)
        self.settings = PlanSettings(
            num_ranks=num_ranks,
            num_experts=routing.num_experts,
            num_topk=routing.topk_idx[0].shape[1],
            tile_m=8,
            layout=layout,
        )
        counts = np.stack([count_rows(ids, routing.num_experts) for ids in routing.topk_idx])
        self.layout = make_layout(rank, counts, self.settings)
        self.recv_x = np.full((self.layout.extent + 3, HIDDEN), gate.BF16_POISON, np.uint16)
        self.row_home = np.full(self.layout.extent + 3, -(2**63), np.int64)
        num_local = routing.num_experts // num_ranks
        for expert in range(num_local):
            row = int(self.layout.expert_first_row[expert])
            for source, ids in enumerate(routing.topk_idx):
                token, slot = np.nonzero(ids == rank * num_local + expert)
                rows = slice(row, row + len(token))
                self.recv_x[rows] = payload.row_bits(LAUNCH, source, token, HIDDEN)
                self.row_home[rows] = pack_home(source, token, slot).astype(np.int64)
                row += len(token)

    def verdict(self):
        """The device's, once it is known to be the host's."""
        host = Oracle(in_blocks(self.routing), rank=self.rank)
        on_host = host.check_dispatched(LAUNCH, self.recv_x, self.layout, **NAMED)

        device = DeviceOracle(self.routing, rank=self.rank, device="cpu")
        got = torch.from_numpy(self.recv_x.view(np.int16)).view(torch.bfloat16)
        verdict = device.check_dispatched(LAUNCH, got, self.layout, **NAMED)
        assert verdict == on_host
        return verdict

    def home_verdict(self):
        device = DeviceOracle(self.routing, rank=self.rank, device="cpu")
        return device.check_homes(torch.from_numpy(self.row_home), self.layout, **NAMED)


class Combined:
    """What a rank's tokens must have become, by the host's means."""

    def __init__(self, routing, rank, launch=LAUNCH):
        self.routing, self.rank = routing, rank
        ids, weights = routing.topk_idx[rank], routing.topk_weights[rank]
        num_topk = ids.shape[1]
        bits = payload.row_bits(
            launch,
            rank,
            np.repeat(np.arange(len(ids)), num_topk),
            HIDDEN,
            slot=np.tile(np.arange(num_topk), len(ids)),
        )
        rows = bf16.from_bits(bits).reshape(len(ids), num_topk, HIDDEN)
        self.out = bf16.to_bits(moe.combine(rows, ids, weights))

    def verdict(self):
        """The device's, once it is known to be the host's."""
        host = Oracle(in_blocks(self.routing), rank=self.rank)
        on_host = host.check_combined(LAUNCH, self.out, **NAMED)

        device = DeviceOracle(self.routing, rank=self.rank, device="cpu")
        got = torch.from_numpy(self.out.view(np.int16)).view(torch.bfloat16)
        verdict = device.check_combined(LAUNCH, got, **NAMED)
        assert verdict == on_host
        return verdict


def ranks():
    return [
        pytest.param(routing, rank, id=f"{name}-{rank}")
        for name, routing in ROUTINGS.items()
        for rank in range(len(routing.topk_idx))
    ]


@pytest.fixture(params=[2**25, 100], ids=["whole", "batches"])
def _batch_values(request, monkeypatch):
    """Outputs compared at once, and in batches of four rows."""
    monkeypatch.setattr(device_oracle, "_BATCH_VALUES", request.param)


@pytest.mark.usefixtures("_batch_values")
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize(("routing", "rank"), ranks())
def test_right_outputs_pass_and_every_value_is_counted(routing, rank, layout):
    received, combined = Received(routing, rank, layout), Combined(routing, rank)

    dispatched, homes, summed = received.verdict(), received.home_verdict(), combined.verdict()

    assert (dispatched.passed, homes.passed, summed.passed) == (True, True, True)
    assert dispatched.num_values == received.layout.num_rows * HIDDEN
    assert homes.num_values == received.layout.num_rows
    assert summed.num_values == len(routing.topk_idx[rank]) * HIDDEN
    assert (dispatched.contender, dispatched.stage) == ("dispatch", "before")


def flipped_bit(received, row):
    received.recv_x[row, 5] ^= 0x8000


def swapped_rows(received, row):
    received.recv_x[[row, row + 1]] = received.recv_x[[row + 1, row]]


def poison_left(received, row):
    received.recv_x[row] = gate.BF16_POISON


def stale_row(received, row):
    token = np.arange(1)
    received.recv_x[row] = payload.row_bits(LAUNCH - 1, 0, token, HIDDEN)


@pytest.mark.usefixtures("_batch_values")
@pytest.mark.parametrize(
    ("corrupt", "first_column"),
    [(flipped_bit, 5), (swapped_rows, 0), (poison_left, 0), (stale_row, 0)],
)
@pytest.mark.parametrize("expert", [0, 1])
def test_a_corrupt_row_is_found_where_it_is(corrupt, first_column, expert):
    received = Received(ROUTINGS["uniform"], 1)
    corrupt(received, int(received.layout.expert_first_row[expert]) + 6)

    verdict = received.verdict()

    assert not verdict.passed
    assert f"the first at [6, {first_column}]: got 0x" in verdict.detail
    assert ("never written" in verdict.detail) == (corrupt is poison_left)


def test_a_launch_before_passes_for_no_other():
    received = Received(ROUTINGS["uniform"], 0)
    device = DeviceOracle(received.routing, rank=0, device="cpu")
    got = torch.from_numpy(received.recv_x.view(np.int16)).view(torch.bfloat16)

    verdict = device.check_dispatched(LAUNCH + 1, got, received.layout, **NAMED)

    assert not verdict.passed
    # One value in 256 is the same by chance.
    assert verdict.num_wrong > 0.97 * verdict.num_values


def test_rows_in_gaps_are_nobodys_business():
    received = Received(ROUTINGS["uniform"], 0, Layout.padded)
    held = np.zeros(len(received.recv_x), bool)
    held[received.layout.held_rows()[1]] = True
    assert not held.all()
    received.recv_x[~held] = 0x1234

    assert received.verdict().passed


def test_rows_too_many_or_outside_the_buffer_are_a_wrong_result():
    received = Received(ROUTINGS["uniform"], 0)
    received.layout.expert_rows[1] += 1
    shorter = Received(ROUTINGS["uniform"], 0)
    shorter.recv_x = shorter.recv_x[:5]

    verdicts = [received.verdict(), shorter.verdict()]

    num_rows = int(shorter.layout.expert_rows[0])
    assert not any(verdict.passed for verdict in verdicts)
    assert verdicts[1].detail == f"got shape (5, {HIDDEN}), want ({num_rows}, {HIDDEN})"


@pytest.mark.parametrize("change", [1, 1 << 16, 1 << 48])
def test_a_wrong_way_home_is_found_whatever_part_of_it_is_wrong(change):
    received = Received(ROUTINGS["ragged"], 2)
    row = int(received.layout.expert_first_row[1]) + 3
    received.row_home[row] ^= change

    verdict = received.home_verdict()

    assert (verdict.passed, verdict.num_wrong, verdict.max_error) == (False, 1, change)
    assert "the first at [3]: got " in verdict.detail


def test_a_way_home_that_was_never_written_says_so():
    received = Received(ROUTINGS["uniform"], 0)
    words = torch.from_numpy(received.row_home)
    poison(words)

    verdict = received.home_verdict()

    assert verdict.num_wrong == verdict.num_values
    assert "never written" in verdict.detail


@pytest.mark.usefixtures("_batch_values")
@pytest.mark.parametrize("place", [(0, 0), (7, 3), (19, 23)])
@pytest.mark.parametrize("routing", ["uniform", "masked"])
def test_a_flipped_bit_of_a_sum_is_found(routing, place):
    combined = Combined(ROUTINGS[routing], 1)
    combined.out[place] ^= 1

    verdict = combined.verdict()

    assert (verdict.passed, verdict.num_wrong, verdict.max_error) == (False, 1, 1.0)
    assert f"1 of 480 values differ, the first at {list(place)}: " in verdict.detail


def test_the_sums_of_another_launch_are_refused():
    combined = Combined(ROUTINGS["uniform"], 0, launch=LAUNCH - 1)

    assert combined.verdict().num_wrong > 0.9 * combined.out.size


def test_sums_left_as_poison_are_refused():
    combined = Combined(ROUTINGS["uniform"], 0)
    combined.out[11:] = gate.BF16_POISON

    verdict = combined.verdict()

    assert verdict.num_wrong == 9 * HIDDEN
    assert "the first at [11, 0]: got 0x7fc1 (poison" in verdict.detail


def test_sums_of_too_few_tokens_are_a_wrong_result():
    combined = Combined(ROUTINGS["uniform"], 0)
    device = DeviceOracle(combined.routing, rank=0, device="cpu")

    verdict = device.check_combined(LAUNCH, torch.zeros(7, HIDDEN, dtype=torch.bfloat16), **NAMED)

    assert not verdict.passed
    assert verdict.detail == f"got shape (7, {HIDDEN}), want (20, {HIDDEN})"


def test_sums_round_after_every_product_and_every_addition():
    # Where both rows of a token hold one value its products cancel: to nothing if the first was
    # rounded like the second, to a remainder if a fused multiply-add kept all of one.
    ids = random_routing([400], num_experts=4, num_topk=2).topk_idx
    third = np.float32(1 / 3)
    weights = np.tile(np.array([third, -third]), (400, 1))
    combined = Combined(Routing(topk_idx=ids, topk_weights=(weights,), num_experts=4), 0)
    values = [
        bf16.from_bits(payload.row_bits(LAUNCH, 0, np.arange(400), HIDDEN, slot=slot))
        for slot in range(2)
    ]
    alike = (values[0] == values[1]) & (values[0] != 0)
    assert alike.sum() > 10

    assert not combined.out[alike].any()
    assert combined.verdict().passed
    fused = (third * values[0]).astype(np.float64) - third.astype(np.float64) * values[1]
    combined.out = bf16.to_bits(fused.astype(np.float32))
    assert combined.verdict().num_wrong >= alike.sum() / 2


@pytest.mark.parametrize(
    ("dtype", "as_numpy"),
    [
        (torch.int16, np.uint16),
        (torch.int32, np.int32),
        (torch.int64, np.int64),
        (torch.float32, np.float32),
    ],
)
def test_poison_is_that_of_the_gate(dtype, as_numpy):
    tensor, array = torch.zeros(3, 2, dtype=dtype), np.zeros((3, 2), as_numpy)

    poison(tensor)
    gate.poison(array)

    np.testing.assert_array_equal(tensor.numpy().view(as_numpy), array)


def test_poison_of_bf16_keeps_its_bits():
    tensor = torch.zeros(4, 6, dtype=torch.bfloat16)

    poison(tensor[1:3])

    assert tensor.view(torch.int16)[:, 0].tolist() == [0, 0x7FC1, 0x7FC1, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ["uniform", "masked", "ragged"])
def test_a_gpu_comes_to_the_same_verdicts(name):
    received, combined = Received(ROUTINGS[name], 0), Combined(ROUTINGS[name], 0)
    device = DeviceOracle(ROUTINGS[name], rank=0, device="cuda")
    place = int(received.layout.expert_first_row[1])
    recv_x, out = (
        torch.from_numpy(bits.view(np.int16)).cuda().view(torch.bfloat16)
        for bits in (received.recv_x, combined.out)
    )
    row_home = torch.from_numpy(received.row_home).cuda()

    def verdicts():
        return [
            device.check_dispatched(LAUNCH, recv_x, received.layout, **NAMED),
            device.check_homes(row_home, received.layout, **NAMED),
            device.check_combined(LAUNCH, out, **NAMED),
        ]

    right = verdicts()
    for tensor in (recv_x[place], row_home[place:], out[1]):
        poison(tensor)
    wrong = verdicts()

    assert [verdict.detail for verdict in right] == ["", "", ""]
    assert [verdict.passed for verdict in wrong] == [False, False, False]
    received.recv_x[place] = combined.out[1] = gate.BF16_POISON
    received.row_home[place:] = -(2**63)
    assert wrong == [received.verdict(), received.home_verdict(), combined.verdict()]
