"""Payload made by torch: bit for bit the rows that NumPy makes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tilepipe.experiments.cuda import payload as device_payload  # noqa: E402
from tilepipe.experiments.cuda.payload import fill_rows, row_bits  # noqa: E402
from tilepipe.workload import payload  # noqa: E402


def bits_of(tensor):
    return tensor.view(torch.int16).numpy().view(np.uint16)


@given(
    launch=st.one_of(st.integers(0, 5), st.integers(2**31 - 3, 2**32 + 3), st.integers(0, 2**40)),
    num_rows=st.integers(0, 9),
    num_columns=st.sampled_from([0, 1, 2, 3, 5, 31, 64, 77]),
    first=st.one_of(st.integers(0, 9), st.integers(2**31 - 9, 2**31), st.integers(0, 2**32)),
    by_row=st.booleans(),
    dtype=st.sampled_from(["int32", "int64"]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=200, deadline=None)
def test_rows_are_those_of_numpy(launch, num_rows, num_columns, first, by_row, dtype, seed):
    rng = np.random.default_rng(seed)
    token = first + rng.integers(0, 100, num_rows)
    if dtype == "int32":
        token %= 2**31
    rank, slot = rng.integers(0, 8, num_rows), rng.integers(0, 2**16, num_rows)
    if not by_row:
        rank, slot = int(rng.integers(0, 8)), int(rng.integers(0, 16))
    want = payload.row_bits(launch, rank, token, num_columns, slot=slot)

    got = row_bits(
        launch,
        rank if isinstance(rank, int) else torch.from_numpy(rank),
        torch.from_numpy(token.astype(dtype)),
        num_columns,
        slot=slot if isinstance(slot, int) else torch.from_numpy(slot),
    )

    assert got.dtype == torch.int16
    assert got.shape == want.shape
    np.testing.assert_array_equal(bits_of(got), want)


def test_every_value_is_exact_and_all_256_occur():
    token = np.arange(200)

    got = row_bits(3, 1, torch.from_numpy(token), 200).view(torch.bfloat16).double() * 64

    assert sorted(set(got.flatten().tolist())) == list(range(-128, 128))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int16])
@pytest.mark.parametrize("num_columns", [1, 7, 40])
def test_rows_larger_than_a_block_come_out_alike(monkeypatch, dtype, num_columns):
    monkeypatch.setattr(device_payload, "_BLOCK_VALUES", 33)
    rank, token = np.arange(25) % 3, np.arange(25)
    out = torch.zeros(25, num_columns, dtype=dtype)

    fill_rows(out, 9, torch.from_numpy(rank), torch.from_numpy(token), slot=2)

    want = payload.row_bits(9, rank, token, num_columns, slot=2)
    np.testing.assert_array_equal(bits_of(out), want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_at_given_places_leave_the_others_as_they_are(monkeypatch, dtype):
    monkeypatch.setattr(device_payload, "_BLOCK_VALUES", 50)
    places = np.random.default_rng(0).permutation(40)[:30]
    rank, token, slot = np.arange(30) % 4, np.arange(30) + 7, np.arange(30) % 2
    want = np.full((40, 12), 0x7FC1, np.uint16)
    want[places] = payload.row_bits(2, rank, token, 12, slot=slot)
    out = torch.full((40, 12), 0x7FC1, dtype=torch.int16)

    fill_rows(
        out.view(torch.bfloat16),
        2,
        torch.from_numpy(rank),
        torch.from_numpy(token),
        slot=torch.from_numpy(slot),
        row_idx=torch.from_numpy(places).to(dtype),
    )

    np.testing.assert_array_equal(bits_of(out), want)


@pytest.mark.filterwarnings("error")
def test_the_first_rows_are_filled_where_no_places_are_given():
    out = torch.zeros(5, 8, dtype=torch.bfloat16)

    fill_rows(out, 1, 0, torch.arange(3))

    np.testing.assert_array_equal(bits_of(out)[:3], payload.row_bits(1, 0, np.arange(3), 8))
    assert not out[3:].any()


def test_names_given_stay_as_they_are():
    rank, token, slot = torch.arange(4, dtype=torch.int32), torch.arange(4), torch.arange(4)

    row_bits(1, rank, token, 8, slot=slot)

    assert rank.tolist() == token.tolist() == slot.tolist() == [0, 1, 2, 3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_makes_the_same_rows():
    rng = np.random.default_rng(5)
    names = [rng.integers(0, high, 3000) for high in (8, 2**31, 16)]
    rank, token, slot = (torch.from_numpy(name).cuda() for name in names)
    places = rng.permutation(3000)
    out = torch.zeros(3000, 7168, dtype=torch.bfloat16, device="cuda")

    fill_rows(out, 2**31 + 5, rank, token, slot=slot, row_idx=torch.from_numpy(places).cuda())
    bits = row_bits(2**31 + 5, rank, token, 7168, slot=slot)

    want = payload.row_bits(2**31 + 5, names[0], names[1], 7168, slot=names[2])
    np.testing.assert_array_equal(bits_of(bits.cpu()), want)
    np.testing.assert_array_equal(bits_of(out.cpu())[places], want)
