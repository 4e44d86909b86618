"""What libraries multiply for comparison, and which configuration of one is taken."""

import pytest

torch = pytest.importorskip("torch")

from tilepipe.baselines.products import Operands, product_of, quickest  # noqa: E402

ROWS = (5, 0, 8)


def operands():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(sum(ROWS), 32, generator=generator).to(torch.bfloat16)
    b = torch.randn(len(ROWS), 16, 32, generator=generator).to(torch.bfloat16)
    return Operands(a, b, torch.tensor(ROWS).cumsum(0).to(torch.int32))


def close(got, want):
    # Half a unit in the last place of bf16, and sums of 32 terms in another order.
    return torch.allclose(got.float(), want, rtol=2**-8, atol=1e-4)


def test_torch_multiplies_the_rows_of_each_expert_by_its_own_weight():
    made = operands()

    got = product_of("torch_grouped_mm", made)()

    parts = made.a.float().split(ROWS)
    want = torch.cat([part @ b.T for part, b in zip(parts, made.b.float(), strict=True)])
    assert close(got, want)


def test_the_dense_product_takes_all_rows_and_the_first_weight():
    made = operands()

    got = product_of("cublas_dense", made)()

    assert got is made.out
    assert close(got, made.a.float() @ made.b[0].float().T)


def test_the_configuration_with_the_least_time_is_taken_and_the_first_of_equals():
    times = {"slow": 9, "fast": 3, "as_fast": 3}
    products = {name: lambda name=name: name for name in times}

    assert quickest(products, lambda product: times[product()]) == "fast"


def test_a_configuration_that_a_library_refuses_is_left_out():
    def refuse():
        raise ValueError("tile_n=7 is no tile")

    products = {"refused": refuse, "slow": lambda: 9}

    assert quickest(products, lambda product: product()) == "slow"
    with pytest.raises(RuntimeError, match="the last one refused: tile_n=7 is no tile"):
        quickest({"refused": refuse}, lambda product: product())
