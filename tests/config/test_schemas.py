"""What a user may type is refused in one sentence: key, value, allowed."""

import copy
import re
from dataclasses import fields
from enum import Enum
from typing import get_args

import pytest

from tilepipe.config import device_checks
from tilepipe.config.checks import check_config
from tilepipe.config.choices import L2, Copy, Operation, Push, Regime, Roles, Walk
from tilepipe.config.schemas import DispatchGemmKernel, config_from_dict

REFUSED = [
    ("kernel.tile_m=24", "kernel.tile_m=24: must be a multiple of 16 in 16..1024"),
    ("kernel.tile_n=0", "kernel.tile_n=0: must be a multiple of 16 in 16..1024"),
    (
        "kernel=dispatch kernel.num_comm_ctas=0",
        "kernel.num_comm_ctas=0: must be 1 or more, auto, or null",
    ),
    ("kernel.num_comm_ctas=-1", "kernel.num_comm_ctas=-1: must be 0 or more, auto, or null"),
    ("kernel.num_comm_ctas=many", "kernel.num_comm_ctas=many: must be 0 or more, auto, or null"),
    (
        "hardware=h200_x1 kernel=dispatch_gemm kernel.roles=beside kernel.num_comm_ctas=12",
        "kernel.num_comm_ctas=12: with kernel.roles=beside every CTA multiplies and none "
        "communicates alone; type kernel.num_comm_ctas=0, or leave kernel.roles out",
    ),
    (
        "hardware=h200_x1 kernel=dispatch_gemm kernel.roles=switch kernel.num_comm_ctas=0",
        "kernel.num_comm_ctas=0: with kernel.roles=switch some CTAs communicate; use 1 or more, or "
        "leave kernel.roles out",
    ),
    (
        "hardware=h200_x1 kernel=gemm_combine kernel.num_comm_ctas=0 kernel.push=ctas",
        "kernel.push=ctas: with kernel.roles=beside no CTA would bring rows home; type "
        "kernel.push=epilogue, which takes kernel.granularity=tile, or kernel.roles=switch "
        "kernel.num_comm_ctas=8",
    ),
    (
        "hardware=h200_x1 kernel=moe_layer kernel.roles=beside kernel.granularity=token",
        "kernel.push=ctas: with kernel.roles=beside no CTA would bring rows home",
    ),
    (
        "hardware=h200_x1 kernel=gemm_combine kernel.roles=beside kernel.home_granularity=rank",
        "kernel.home_granularity=rank: with kernel.roles=beside tokens are reduced as they",
    ),
    (
        "hardware=h200_x1 kernel=moe_layer kernel.num_comm_ctas=0 kernel.home_granularity=rank",
        "kernel.home_granularity=rank: with kernel.roles=beside tokens are reduced as they "
        "complete; leave the key out, or type kernel.roles=switch kernel.num_comm_ctas=8",
    ),
    ("kernel.num_comm_warps=33", "kernel.num_comm_warps=33: must be in 1..32, or null"),
    ("kernel.num_loads=0", "kernel.num_loads=0: must be in 1..16, or null"),
    ("kernel.num_loads=17", "kernel.num_loads=17: must be in 1..16, or null"),
    ("kernel.num_stages=0", "kernel.num_stages=0: must be in 1..14, or null"),
    (
        "kernel.stage_bytes=500",
        "kernel.stage_bytes=500: must be a multiple of 16 in 512..65536, or null",
    ),
    ("kernel.num_stages=15", "kernel.num_stages=15: must be in 1..14, or null"),
    ("kernel=combine kernel.flag_batch=0", "kernel.flag_batch=0: must be in 1..32, or null"),
    ("kernel.capacity_factor=0", "kernel.capacity_factor=0.0: must be above 0, or null"),
    ("workload.num_tokens=-1", "workload.num_tokens=-1: must be 0 or more"),
    ("workload.num_topk=0", "workload.num_topk=0: must be 1 or more"),
    ("routing.seed=-1", "routing.seed=-1: must be 0 or more"),
    ("measure.num_iters=0", "measure.num_iters=0: must be 1 or more"),
    ("measure.interval=0", "measure.interval=0.0: must be above 0 and below 1, or null"),
    ("measure.interval=1", "measure.interval=1.0: must be above 0 and below 1, or null"),
    ("launch.pace_gbps=0", "launch.pace_gbps=0.0: must be in 0.1..10000, or null"),
    ("launch.pace_gbps=inf", "launch.pace_gbps=inf: must be a finite number"),
    ("launch.pace_latency_ns=-1", "launch.pace_latency_ns=-1: must be in 0..1000000"),
    ("launch.pace_latency_ns=1000001", "launch.pace_latency_ns=1000001: must be in 0..1000000"),
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
    ("routing=counts", "routing=counts needs routing.path=FILE"),
    (
        "routing=trace routing.path=F routing.first_token=-1",
        "routing.first_token=-1: must be 0 or more",
    ),
    (
        "routing=trace routing.path=F routing.max_tokens=0",
        "routing.max_tokens=0: must be 1 or more, or null",
    ),
    (
        "routing=trace routing.path=F routing.num_layers=0",
        "routing.num_layers=0: must be 1 or more, or null",
    ),
    (
        "routing=counts routing.path=F routing.layer=-1",
        "routing.layer=-1: must be 0 or more, or null",
    ),
    ("operation=combine", "operation=combine: differs from kernel.operation=dispatch_gemm"),
    ("kernel.operation=combine", "differs from kernel.operation=combine; type kernel=OPERATION"),
    (
        "routing.law=zipf",
        "routing.exponent: missing; routing has law, seed, exponent; choose with routing=NAME",
    ),
    ("+kernel.cpoy=tma", "kernel.cpoy: unknown key; kernel has operation, layout"),
    ("+nmae=x", "nmae: unknown key; the root has name, operation"),
    # Settings that fit one by one, but not together.
    ("workload.hidden=2884", "workload.hidden=2884: rows of 5768 bytes are no multiple of 16"),
    ("workload.intermediate=6", "workload.intermediate=6: rows of 24 bytes are no multiple of 16"),
    (
        "kernel=gemm_combine workload.intermediate=12",
        "workload.intermediate=12: rows of 24 bytes are no multiple of 16; use a multiple of 8",
    ),
    (
        "kernel=moe_layer workload.intermediate=12",
        "workload.intermediate=12: rows of 24 bytes are no multiple of 16; use a multiple of 8",
    ),
    (
        "hardware=h200_x1 kernel=moe_layer kernel.planner=device",
        "kernel.planner=device: the tiles of the GEMM are planned by NumPy; leave the key out",
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
    ("kernel.num_comm_warps=8", "kernel.num_comm_warps=8: the host executor has no warps; leave"),
    ("kernel.num_loads=4", "kernel.num_loads=4: the host executor has no loads in flight; leave"),
    ("kernel.num_stages=3", "kernel.num_stages=3: the host executor has no stages; leave the key"),
    (
        "kernel=combine kernel.flag_batch=2",
        "kernel.flag_batch=2: the host executor has no release fences to share; leave the key out, "
        "or choose hardware with a GPU",
    ),
    ("measure.l2=warm", "measure.l2=warm: the host executor has no L2 cache to flush; leave"),
    (
        "measure.regime=chained",
        "measure.regime=chained: the host executor has isolated launches only; leave the key out",
    ),
    (
        "launch.pace_gbps=50",
        "launch.pace_gbps=50.0: the host executor has no links to throttle; leave the key out, or "
        "choose hardware with a GPU",
    ),
    (
        "hardware=h200_x1 kernel=dispatch kernel.num_comm_ctas=auto",
        "kernel.num_comm_ctas=auto: dispatch alone has no best count to find; type counts to sweep",
    ),
    (
        "hardware=h200_x1 kernel=gemm_combine kernel.order=token",
        "kernel.order=token: rows go home as the GEMM stores them; leave the key out",
    ),
    ("kernel.roles=switch", "kernel.roles=switch: the host executor has no CTAs; leave the key"),
    (
        "hardware=h200_x1 kernel.roles=null",
        "kernel.roles=null: null is for the host executor; leave the key out",
    ),
    (
        "hardware=h200_x1 kernel.num_comm_warps=13",
        "kernel.num_comm_warps=13: CTAs of a fused launch have 12 warps; use at most 12",
    ),
    (
        "hardware=h200_x1 kernel.planner=device",
        "kernel.planner=device: the tiles of the GEMM are planned by NumPy; leave the key out",
    ),
    (
        "hardware=h100_x8 kernel.num_comm_ctas=auto kernel.roles=switch",
        "kernel.num_comm_ctas=auto: it is chosen by hardware.simt_cta_gbps, "
        "hardware.beside_gemm_share, hardware.beside_gemm_gbps, hardware.reached_tflops, "
        "hardware.reached_link_gbps, which hardware=h100_x8 does not tell; "
        "type them and their sources, or counts to sweep",
    ),
    (
        "hardware=h200_x1 kernel.copy=tma hardware.tma_cta_gbps=null kernel.num_comm_ctas=auto "
        "kernel.roles=switch",
        "kernel.num_comm_ctas=auto: it is chosen by hardware.tma_cta_gbps, which hardware=h200_x1",
    ),
    (
        "hardware=h200_x1 hardware.beside_gemm_share=1.5",
        "hardware.beside_gemm_share=1.5: must be above 0 and at most 1, or null",
    ),
    (
        "hardware=h100_x1 hardware.reached_tflops=600",
        "hardware.reached_tflops_source=null: say where reached_tflops comes from",
    ),
    (
        "kernel=gemm_combine kernel.push=epilogue",
        "kernel.push=epilogue: the host executor has no CTAs that push; leave the key out",
    ),
    (
        "kernel=gemm_combine kernel.walk=chunk",
        "kernel.walk=chunk: the host executor has no second order of tiles; leave the key out",
    ),
    (
        "kernel=gemm_combine kernel.num_chunks=0",
        "kernel.num_chunks=0: workload.hidden=64 in tiles of 256 columns has 1; choose 1, or null",
    ),
    (
        "hardware=h200_x1 kernel=gemm_combine workload=deepseek_v3_ep8_rank kernel.num_chunks=29",
        "kernel.num_chunks=29: workload.hidden=7168 in tiles of 256 columns has 28; choose 1..28, "
        "or null",
    ),
    (
        "hardware=h200_x1 kernel=gemm_combine kernel.push=epilogue kernel.granularity=expert",
        "kernel.push=epilogue: chunks of rows go home one by one, and kernel.granularity=expert "
        "waits for whole rows; type kernel.granularity=tile, or another kernel.push",
    ),
    (
        "hardware=h200_x1 kernel=gemm_combine kernel.push=ctas kernel.walk=chunk "
        "kernel.granularity=token",
        "kernel.walk=chunk: chunks of rows go home one by one, and kernel.granularity=token waits",
    ),
    (
        "hardware=h200_x1 kernel=combine kernel.num_comm_warps=21",
        "kernel.num_comm_warps=21: combine with workload.num_topk=2 has registers and shared "
        "memory for 20 warps; use at most 20",
    ),
    (
        "hardware=h200_x1 kernel=combine workload.num_experts=64 workload.num_topk=32",
        "kernel.num_comm_warps=16: combine with workload.num_topk=32 has registers and shared "
        "memory for 12 warps; use at most 12",
    ),
    (
        "hardware=h200_x1 kernel=dispatch workload.num_experts=64 workload.num_topk=33",
        "workload.num_topk=33: kernels hold at most 32 slots of a token; lower it, or type "
        "hardware=cpu",
    ),
    (
        "hardware=h200_x8 launch.pace_latency_ns=7",
        "launch.pace_latency_ns=7: only ranks that share a GPU are throttled; type "
        "launch.fabric=loopback too",
    ),
    (
        "measure.max_iters=99",
        "measure.max_iters=99: needs measure.interval; type both, or both as null",
    ),
    (
        "hardware=h200_x1 measure.max_iters=null",
        "measure.interval=0.01: needs measure.max_iters; type both, or both as null",
    ),
    (
        "hardware=h200_x1 measure.num_iters=201",
        "measure.max_iters=200: must be at least measure.num_iters=201; raise it, or type null",
    ),
    (
        "hardware=h200_x1 measure.regime=chained",
        "measure.regime=chained: measure.l2=cold would flush inside the period; type "
        "measure.l2=warm too",
    ),
    *(
        (
            f"hardware=h200_x1 kernel={kernel} measure.regime=chained measure.l2=warm",
            "measure.regime=chained: launches back to back do not show where a plan ends, which a "
            "breakdown takes off; type measure.regime=isolated, or kernel=dispatch, combine or "
            "grouped_gemm",
        )
        for kernel in ("dispatch_gemm", "gemm_combine", "moe_layer")
    ),
    (
        "hardware=h200_x1 kernel=combine measure.timeline=true",
        "measure.timeline=True: on a GPU only dispatch_gemm and gemm_combine record one; leave the "
        "key out, or type hardware=cpu",
    ),
    (
        "hardware=h200_x4 kernel=dispatch_gemm measure.timeline=true",
        "measure.timeline=True: GPUs have a clock each; type launch.fabric=loopback, or leave the "
        "key out",
    ),
    (
        "hardware=h200_x1 measure.l2=null",
        "measure.l2=null: null is for the host executor; type cold or warm",
    ),
    (
        "hardware=h200_x1 kernel.flag_batch=null",
        "kernel.flag_batch=null: null is for the host executor; leave the key out, or type "
        "hardware=cpu",
    ),
    (
        "hardware=h200_x1 kernel.num_loads=null",
        "kernel.num_loads=null: null is for the host executor; leave the key out",
    ),
    (
        "hardware=h200_x1 kernel.copy=tma kernel.num_stages=null",
        "kernel.num_stages=null: null is for the host executor; leave the key out",
    ),
    (
        "hardware=h200_x1 kernel.num_stages=3",
        "kernel.num_stages=3: only kernel.copy=tma takes it; leave the key out, or type that copy",
    ),
    (
        "hardware=h200_x1 kernel=combine kernel.copy=tma kernel.num_loads=4",
        "kernel.num_loads=4: only kernel.copy=simt takes it; leave the key out, or type that copy",
    ),
    (
        "hardware=h200_x1 launch.num_ranks=16 workload.num_experts=16",
        "launch.num_ranks=16: launch.fabric=loopback takes 1..8: its ranks share one GPU",
    ),
    (
        "hardware=h200_x8 launch.num_ranks=64 workload.num_experts=64",
        "launch.num_ranks=64: launch.fabric=nvshmem takes 1..32: a lane of a warp watches each",
    ),
    (
        "hardware=h200_x1 kernel=dispatch launch.num_ranks=2 kernel.num_comm_ctas=265",
        "kernel.num_comm_ctas=265: 132 SMs shared by 2 ranks hold 264 CTAs of 16 warps a rank; use "
        "at most 264, or fewer kernel.num_comm_warps",
    ),
    (
        "hardware=h200_x1 kernel=dispatch_gemm kernel.num_comm_ctas=132",
        "kernel.num_comm_ctas=132: 132 SMs hold a CTA each, one the GEMM's; use at most 131",
    ),
    (
        "hardware=h200_x1 kernel=gemm_combine launch.num_ranks=8 kernel.num_comm_ctas=16",
        "kernel.num_comm_ctas=16: 132 SMs shared by 8 ranks hold a CTA each, one the GEMM's; use "
        "at most 15",
    ),
    (
        "hardware=h200_x1 kernel=dispatch kernel.copy=tma kernel.flag_batch=17",
        "kernel.flag_batch=17: warps with kernel.num_stages=4 remember 15 rows; use at most 15",
    ),
    (
        "hardware=h200_x1 kernel=combine kernel.copy=tma kernel.num_stages=5 workload=deepseek_v3",
        "kernel.num_stages=5: 8 warps x that many stages of 7168 bytes need 286720 bytes of "
        "shared memory, and an SM has 232448; lower it, kernel.stage_bytes or "
        "kernel.num_comm_warps",
    ),
    (
        "kernel.planner=device",
        "kernel.planner=device: the host executor plans with NumPy; leave the key out, or choose "
        "hardware with a GPU",
    ),
    (
        "hardware=h200_x1 kernel=dispatch kernel.planner=device workload.num_experts=2048",
        "workload.num_experts=2048: the plan kernel counts at most 1024 experts; lower it, or type "
        "kernel.planner=numpy",
    ),
    (
        "kernel=grouped_gemm kernel.store=tma",
        "kernel.store=tma: the host executor has no ways of storing; leave the key out, or choose "
        "hardware with a GPU",
    ),
    (
        "kernel=grouped_gemm kernel.num_gemm_ctas=4",
        "kernel.num_gemm_ctas=4: the host executor has no CTAs; leave the key out, or choose ",
    ),
    (
        "hardware=h200_x1 kernel=grouped_gemm kernel.num_gemm_ctas=133",
        "kernel.num_gemm_ctas=133: one runs on each SM, and there are 132; use at most 132",
    ),
    (
        "hardware=h200_x1 kernel=grouped_gemm kernel.num_gemm_ctas=0",
        "kernel.num_gemm_ctas=0: must be 1 or more, or null",
    ),
    ("launch.fabric=nvshmem", "launch.fabric=nvshmem: hardware=cpu has no GPU; use host"),
    ("placement=file", "placement.path: not typed; placement=file needs placement.path=FILE"),
    ("placement=file placement.path=", "placement.path=: placement=file needs placement.path=FILE"),
    (
        "placement=file placement.path=f placement.layer=-1",
        "placement.layer=-1: must be 0 or more, or null",
    ),
    (
        "placement=balanced placement.num_redundant=-4",
        "placement.num_redundant=-4: must be 0 or more",
    ),
    (
        "placement=balanced placement.num_redundant=3",
        "placement.num_redundant=3: with workload.num_experts=8 it is no multiple of "
        "launch.num_ranks=4; use 0, 4 and so on",
    ),
    (
        "placement=balanced workload.num_experts=9 placement.num_redundant=4",
        "placement.num_redundant=4: with workload.num_experts=9 it is no multiple of "
        "launch.num_ranks=4; use 3, 7 and so on",
    ),
    (
        "placement=balanced placement.num_redundant=36",
        "placement.num_redundant=36: must be at most workload.num_experts x launch.num_ranks = 32",
    ),
    (
        "placement=round_robin workload.num_experts=9",
        "workload.num_experts=9: must be a multiple of launch.num_ranks=4",
    ),
    (
        "placement=file placement.path=f routing=hot_rank workload.num_experts=9",
        "workload.num_experts=9: must be a multiple of launch.num_ranks=4",
    ),
    (
        "placement=balanced routing=all_local",
        "placement=balanced: routing=all_local knows where experts live by placement=contiguous",
    ),
    (
        "placement=round_robin routing=all_remote",
        "placement=round_robin: routing=all_remote knows where experts live by placement=contigu",
    ),
    ("hardware=h200_x2 launch.fabric=host", "launch.fabric=host: hardware=h200_x2 has GPUs"),
]


def test_an_order_that_the_plan_kernel_has_not_is_refused_there(container, monkeypatch):
    monkeypatch.setattr(device_checks, "PLANNED_ORDERS", ("edf",))
    plain = container("hardware=h200_x1", "kernel=dispatch", "kernel.order=token")

    check_config(config_from_dict(plain))
    plain["kernel"]["planner"] = "device"
    with pytest.raises(
        ValueError, match=r"^kernel\.order=token: the plan kernel has no such order"
    ):
        check_config(config_from_dict(plain))


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
    assert config.kernel == DispatchGemmKernel(
        copy=Copy.tma,
        num_comm_ctas=0,
        num_comm_warps=8,
        num_stages=4,
        stage_bytes=7_168,
        flag_batch=8,
        roles=Roles.beside,
    )
    assert config.routing.hot_share == 0.5
    assert config.hardware.link_gbps == 450.0


@pytest.mark.parametrize(
    "words",
    [
        "placement=file placement.path=f workload.num_experts=9",  # its map may leave gaps
        "placement=file placement.path=f placement.layer=0 placement.replica=local",
        "placement=balanced workload.num_experts=9 placement.num_redundant=3",
        "placement=balanced launch.num_ranks=1",
        "placement=balanced placement.num_redundant=32 routing=hot_rank",
        "placement=round_robin routing=one_rank",
    ],
)
def test_placements_that_fit_are_accepted(words, container):
    check_config(config_from_dict(container("hardware=cpu", *words.split())))


ACCEPTED = [
    "launch.pace_gbps=50 launch.pace_latency_ns=1000000 launch.num_ranks=8",
    *(
        f"kernel={kernel} measure.regime=chained measure.l2=warm"
        for kernel in ("dispatch", "combine", "grouped_gemm")
    ),
    "measure.max_iters=null measure.interval=null measure.num_iters=500",
    "measure.num_iters=200",  # as many as measure.max_iters
    "kernel=dispatch kernel.num_comm_warps=32 kernel.num_loads=16 kernel.flag_batch=32",
    "kernel.copy=tma kernel.num_loads=null",
    "kernel.copy=tma kernel.num_comm_warps=1 kernel.num_stages=14 kernel.flag_batch=5",
    "kernel=dispatch kernel.copy=tma kernel.num_comm_warps=16 kernel.num_stages=14 "
    "kernel.stage_bytes=512 kernel.flag_batch=4",
    "kernel=dispatch kernel.planner=device workload.num_experts=1024",
    "kernel=dispatch_gemm kernel.roles=switch kernel.num_comm_warps=12",
    "launch.wrap=inline launch.num_ranks=8",  # ranks that share a GPU share a process
    "kernel=gemm_combine kernel.push=epilogue kernel.walk=chunk kernel.num_chunks=1",
    "kernel=gemm_combine kernel.push=ctas kernel.walk=expert kernel.granularity=expert",
    "kernel=grouped_gemm",
    "kernel=gemm_combine measure.timeline=true launch.num_ranks=8",
    "hardware=h200_x1 kernel=grouped_gemm kernel.num_gemm_ctas=132 kernel.store=direct",
]


@pytest.mark.parametrize("words", ACCEPTED)
def test_what_a_gpu_makes_possible_is_accepted(words, container):
    kernel = [] if "kernel=" in words else ["kernel=combine"]

    check_config(config_from_dict(container("hardware=h200_x1", *kernel, *words.split())))


@pytest.mark.parametrize("measure", ["default", "short", "quick"])
def test_how_launches_are_timed_follows_the_device(measure, container):
    on_gpu = config_from_dict(container("hardware=h200_x1", f"measure={measure}")).measure
    on_host = config_from_dict(container("hardware=cpu", f"measure={measure}")).measure

    assert (on_gpu.l2, on_gpu.regime) == (L2.cold, Regime.isolated)
    assert (on_host.l2, on_host.regime) == (None, Regime.isolated)
    assert on_gpu.num_iters == on_host.num_iters
    bounds = (200, 0.01) if measure == "default" else (None, None)
    assert (on_gpu.max_iters, on_gpu.interval) == bounds
    assert (on_host.max_iters, on_host.interval) == (None, None)


def test_a_dataclass_refuses_another_operation_than_its_own():
    with pytest.raises(ValueError, match="this option is dispatch_gemm; to change it type kernel="):
        DispatchGemmKernel(operation=Operation.combine)


def test_an_unknown_choice_lists_the_known_ones(container):
    plain = container()
    plain["kernel"]["order"] = "edff"

    with pytest.raises(ValueError, match=r"kernel\.order=edff: choose one of edf, edf_list, "):
        config_from_dict(plain)


def test_a_choice_is_read_back_as_the_choice_and_not_as_its_name(container):
    words = "hardware=h200_x1 kernel=gemm_combine kernel.push=epilogue kernel.walk=chunk"

    config = config_from_dict(container(*words.split()))

    for group in (config.kernel, config.launch, config.measure, config.workload, config.routing):
        for field in fields(group):
            held = getattr(group, field.name)
            declared = () if isinstance(held, list) else get_args(field.type) or (field.type,)
            kinds = [kind for kind in declared if is_choice(kind)]
            assert held is None or not kinds or isinstance(held, kinds[0]), field.name
    assert (config.kernel.push, config.kernel.walk) == (Push.epilogue, Walk.chunk)


def is_choice(kind):
    return isinstance(kind, type) and issubclass(kind, Enum)
