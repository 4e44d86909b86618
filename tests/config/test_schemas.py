"""What a user may type is refused in one sentence: key, value, allowed."""

import copy
import re

import pytest

from tilepipe.config.checks import check_config
from tilepipe.config.choices import Copy, Operation
from tilepipe.config.schemas import DispatchGemmKernel, config_from_dict

REFUSED = [
    ("kernel.tile_m=24", "kernel.tile_m=24: must be a multiple of 16 in 16..1024"),
    ("kernel.tile_n=0", "kernel.tile_n=0: must be a multiple of 16 in 16..1024"),
    ("kernel.num_comm_ctas=0", "kernel.num_comm_ctas=0: must be 1 or more, auto, or null"),
    ("kernel.num_comm_ctas=many", "kernel.num_comm_ctas=many: must be 1 or more, auto, or null"),
    ("kernel.capacity_factor=0", "kernel.capacity_factor=0.0: must be above 0, or null"),
    ("workload.num_tokens=-1", "workload.num_tokens=-1: must be 0 or more"),
    ("workload.num_topk=0", "workload.num_topk=0: must be 1 or more"),
    ("routing.seed=-1", "routing.seed=-1: must be 0 or more"),
    ("measure.num_iters=0", "measure.num_iters=0: must be 1 or more"),
    ("launch.num_ranks=0", "launch.num_ranks=0: must be 1 or more"),
    ("launch.time_limit_s=0", "launch.time_limit_s=0.0: must be above 0"),
    ("routing=zipf routing.exponent=-1", "routing.exponent=-1.0: must be in 0..10"),
    ("routing=masked routing.masked_share=1.5", "routing.masked_share=1.5: must be in 0..1"),
    ("routing=ragged routing.min_share=nan", "routing.min_share=nan: must be a finite number"),
    (
        "routing=hot_rank routing.hot_share=0",
        "routing.hot_share=0.0: must be above 0 and at most 1",
    ),
    ("routing=trace", "routing=trace needs routing.path=FILE"),
    ("operation=combine", "operation=combine: differs from kernel.operation=dispatch_gemm"),
    ("kernel.operation=combine", "differs from kernel.operation=combine; type kernel=OPERATION"),
    ("routing.law=zipf", "routing.exponent: missing; ZipfRouting has law, seed, exponent"),
    ("+kernel.cpoy=tma", "kernel.cpoy: unknown key; DispatchGemmKernel has operation, layout"),
    ("+nmae=x", "nmae: unknown key; Config has name, operation"),
    # Settings that fit one by one, but not together.
    ("workload.hidden=2884", "workload.hidden=2884: rows of 5768 bytes are no multiple of 16"),
    ("workload.intermediate=6", "workload.intermediate=6: rows of 24 bytes are no multiple of 16"),
    (
        "kernel=gemm_combine workload.intermediate=12",
        "workload.intermediate=12: rows of 24 bytes are no multiple of 16; use a multiple of 8",
    ),
    ("launch.num_ranks=3", "workload.num_experts=8: must be a multiple of launch.num_ranks=3"),
    ("workload.num_topk=9", "workload.num_topk=9: must be at most workload.num_experts=8"),
    ("routing=all_local workload.num_topk=3", "routing=all_local finds 2 experts on a rank"),
    ("routing=all_remote workload.num_topk=7", "routing=all_remote finds 6 experts on other ranks"),
    ("routing=all_remote launch.num_ranks=1", "routing=all_remote needs 2 or more ranks"),
    ("routing=hot_expert routing.hot_expert=8", "routing.hot_expert=8: must be in 0..7"),
    ("routing=hot_rank routing.hot_rank=4", "routing.hot_rank=4: must be in 0..3"),
    ("workload.num_tokens=null", "workload.num_tokens=null: only routing=trace brings"),
    ("kernel.copy=tma", "kernel.copy=tma: the host executor has no copies; leave the key out"),
    ("kernel.num_comm_ctas=auto", "kernel.num_comm_ctas=auto: the host executor has no CTAs"),
    ("launch.fabric=nvshmem", "launch.fabric=nvshmem: hardware=cpu has no GPU; use host"),
    ("hardware=h200_x2 launch.fabric=host", "launch.fabric=host: hardware=h200_x2 has GPUs"),
]


@pytest.mark.parametrize(("words", "sentence"), REFUSED, ids=[words for words, _ in REFUSED])
def test_a_bad_value_is_refused_in_one_sentence(words, sentence, container):
    plain = container("hardware=cpu", *words.split())

    with pytest.raises(ValueError, match=re.escape(sentence)) as refused:
        check_config(config_from_dict(plain))

    assert "\n" not in str(refused.value)


def test_sizes_at_the_limits_are_accepted(container):
    words = "workload.num_tokens=0 workload.hidden=8 workload.intermediate=4 workload.num_topk=8"

    config = config_from_dict(container(*words.split(), "kernel.tile_m=16", "kernel.tile_n=1024"))

    check_config(config)
    assert (config.workload.num_tokens, config.workload.num_topk) == (0, 8)


def test_rebuilding_keeps_every_value_and_changes_nothing_it_was_given(container):
    plain = container("hardware=h200_x8", "kernel.copy=tma", "routing=hot_expert")
    before = copy.deepcopy(plain)

    config = config_from_dict(plain)

    assert plain == before
    assert config.kernel == DispatchGemmKernel(copy=Copy.tma, num_comm_ctas=12)
    assert config.routing.hot_share == 0.5
    assert config.hardware.link_gbps == 450.0


def test_a_dataclass_refuses_another_operation_than_its_own():
    with pytest.raises(ValueError, match="this option is dispatch_gemm; to change it type kernel="):
        DispatchGemmKernel(operation=Operation.combine)


def test_an_unknown_choice_lists_the_known_ones(container):
    plain = container()
    plain["kernel"]["order"] = "edff"

    with pytest.raises(ValueError, match=r"kernel\.order=edff: choose one of edf, edf_list, "):
        config_from_dict(plain)
