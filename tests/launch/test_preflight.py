"""What is said of a point before any rank starts."""

import copy
from dataclasses import replace

import pytest

from tests.launch.points import compose_point
from tilepipe.launch.preflight import refusal

NUM_SMS = 132


@pytest.mark.parametrize("operation", ["dispatch_gemm", "gemm_combine"])
def test_counts_of_a_sweep_that_cannot_be_resident_are_refused_and_no_others(operation):
    point = compose_point(
        "hardware=h200_x1", f"kernel={operation}", "workload=deepseek_v3_ep8_rank"
    )
    for num_ranks in (1, 2, 4, 8):
        most = NUM_SMS // num_ranks - 1
        for count in range(2, 65):
            config = copy.deepcopy(point.config)
            config["launch"]["num_ranks"] = num_ranks
            config["kernel"] |= {"num_comm_ctas": count, "roles": "switch"}

            said = refusal(replace(point, config=config))

            shared = f" shared by {num_ranks} ranks" if num_ranks > 1 else ""
            assert said == (
                f"kernel.num_comm_ctas={count}: {NUM_SMS} SMs{shared} hold a CTA each, one the "
                f"GEMM's; use at most {most}"
                if count > most
                else ""
            )


def test_a_number_that_is_to_be_found_is_refused_where_nothing_was_measured():
    known, unknown, alone = (
        compose_point("kernel.num_comm_ctas=auto", *words)
        for words in (
            ("hardware=h200_x8", "kernel.roles=switch"),
            ("hardware=h100_x1", "kernel.copy=tma", "kernel.roles=switch"),
            ("hardware=h200_x1", "kernel=combine"),
        )
    )

    assert refusal(known) == ""
    # None are there to be counted, so no rates are wanted.
    assert refusal(compose_point("kernel.num_comm_ctas=auto", "hardware=h100_x1")) == ""
    assert refusal(unknown) == (
        "kernel.num_comm_ctas=auto: it is chosen by hardware.tma_cta_gbps, "
        "hardware.beside_gemm_share, hardware.beside_gemm_gbps, hardware.reached_tflops, "
        "which hardware=h100_x1 does not tell; type them and their sources, or counts to sweep"
    )
    assert refusal(alone) == (
        "kernel.num_comm_ctas=auto: combine alone has no best count to find; type counts to sweep"
    )
