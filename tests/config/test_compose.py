"""Every experiment composes on every hardware, with the sweep meant for it."""

import math

import pytest
from omegaconf import OmegaConf

from tilepipe.config import detect
from tilepipe.config.checks import check_config
from tilepipe.config.choices import Copy, Fabric, Granularity, Operation, Order, Push, Roles, Walk
from tilepipe.config.limits import piece_bytes
from tilepipe.config.register import CONF_DIR, cta_axis
from tilepipe.config.schemas import FusedKernel, config_from_dict

EXPERIMENTS = sorted(path.stem for path in (CONF_DIR / "experiment").glob("*.yaml"))
HARDWARE = sorted(path.stem for path in (CONF_DIR / "hardware").glob("*.yaml"))
WORKLOADS = sorted(path.stem for path in (CONF_DIR / "workload").glob("*.yaml"))
LAWS = sorted(path.stem for path in (CONF_DIR / "routing").glob("*.yaml"))
CTAS = ["8", "12", "16", "24", "36", "48"]
TOKENS = ["2048", "4096", "8192", "16384"]
# What a sweep of one copy alone runs where there are no copies.
ONE_POINT = (
    *("dispatch_paced", "dispatch_simt_depth", "dispatch_tma_depth"),
    *("dispatch_gemm_paced", "gemm_combine_paced"),
)
# Whose ranks share one GPU whatever the hardware.
OWN_RANKS = (
    *("dispatch_paced", "dispatch_gemm_order_paced"),
    *("dispatch_gemm_paced", "gemm_combine_paced"),
)
# Where one rank alone would show nothing, eight share the one GPU.
SHARED_GPU = ("imbalance",)
TRACED = ("routing=trace", "routing.path=F", "workload=qwen15_moe", "launch.num_ranks=4")


@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_on_every_hardware(experiment, hardware, container):
    config = config_from_dict(container(f"+experiment={experiment}", f"hardware={hardware}"))

    check_config(config)
    assert (config.name, config.hardware.name) == (experiment, hardware)
    if experiment in SHARED_GPU and hardware.endswith("_x1"):
        assert config.launch.num_ranks == 8
    elif experiment not in OWN_RANKS or hardware == "cpu":
        assert config.launch.num_ranks == config.hardware.num_ranks


@pytest.mark.parametrize("hardware", ["cpu", "h200_x8"])
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_last_point_of_every_sweep_composes(experiment, hardware, container, axes):
    words = (f"+experiment={experiment}", f"hardware={hardware}")
    sweep = axes(*words)

    config = config_from_dict(
        container(*words, *[f"{key}={values[-1]}" for key, values in sweep.items()])
    )

    check_config(config)
    if hardware == "cpu":
        num_points = math.prod(len(values) for values in sweep.values())
        assert num_points == 1 if experiment in ONE_POINT else 2 <= num_points <= 8
        assert (config.workload.hidden, config.launch.num_ranks) == (512, 4)
        assert config.measure.num_iters == 10


def test_gpu_sweeps_are_those_of_the_reference(axes):
    found = {
        name: axes(f"+experiment={name}", "hardware=h200_x8")
        for name in ("dispatch", "combine", "dispatch_gemm", "gemm_combine", "moe_layer")
    }

    for name in ("dispatch", "combine"):
        assert found[name]["kernel.copy"] == ["simt", "tma"]
        assert found[name]["workload.num_tokens"] == TOKENS
        assert found[name]["kernel.num_comm_ctas"] == CTAS
    assert found["dispatch_gemm"]["workload.num_tokens"] == TOKENS
    assert found["dispatch_gemm"]["kernel.num_comm_ctas"] == ["0", "8", "12", "16", "24", "36"]
    assert found["gemm_combine"]["workload.num_tokens"] == TOKENS
    assert found["moe_layer"]["workload.num_tokens"] == TOKENS


@pytest.mark.parametrize(
    ("words", "counts"),
    [
        ("kernel.roles=beside", ["0"]),
        ("kernel.roles=switch", ["8", "12", "16", "24", "36"]),
        ("kernel.roles=fixed,switch", ["8", "12", "16", "24", "36"]),
        ("kernel.roles=beside,switch", ["0", "8", "12", "16", "24", "36"]),
    ],
)
def test_a_sweep_of_counts_holds_those_that_typed_roles_go_with(axes, words, counts):
    typed = [words] if "," not in words else []
    found = axes("+experiment=dispatch_gemm", "hardware=h200_x1", *typed)
    said = cta_axis({"hardware": "h200_x1"}, [words], "0,8,12,16,24,36", "null")

    assert said.split(",") == counts
    if typed:
        assert found["kernel.num_comm_ctas"] == counts


def test_gpu_workloads_are_the_whole_layer_or_one_rank_of_it(container):
    group = container("+experiment=dispatch_gemm", "hardware=h200_x8")
    single = container("+experiment=dispatch_gemm", "hardware=h200_x1")

    assert (group["workload"]["num_experts"], group["launch"]["fabric"]) == (256, "nvshmem")
    assert (single["workload"]["num_experts"], single["launch"]["fabric"]) == (32, "loopback")
    assert 2 * group["workload"]["intermediate"] == 4096
    assert group["kernel"]["copy"] == single["kernel"]["copy"] == "simt"
    assert group["kernel"]["num_comm_ctas"] == 0


def test_ablations_hold_every_order_and_every_granularity(axes):
    for hardware in ("cpu", "h200_x8"):
        orders = axes("+experiment=dispatch_gemm_order", f"hardware={hardware}")
        grains = axes("+experiment=dispatch_gemm_granularity", f"hardware={hardware}")

        assert orders["kernel.order"] == [order.name for order in Order]
        assert grains["kernel.granularity"] == [grain.name for grain in Granularity]


def test_imbalance_sweeps_routing_and_placement_and_takes_a_recording(axes, container):
    on_host = axes("+experiment=imbalance", "hardware=cpu")
    on_gpu = axes("+experiment=imbalance", "hardware=h200_x1")
    traced = axes("+experiment=imbalance", "hardware=cpu", *TRACED)

    assert on_host == {
        "routing": ["uniform", "lognormal", "one_rank"],
        "placement": ["contiguous", "balanced"],
        "workload.num_tokens": ["256"],
    }
    assert on_gpu == {
        "routing": ["uniform", "lognormal", "one_rank"],
        "placement": ["contiguous", "round_robin", "balanced"],
        "workload.num_tokens": ["1024"],
    }
    # What is typed takes the place of the sweep of that key.
    assert (traced["placement"], traced["workload.num_tokens"]) == (on_host["placement"], ["null"])
    words = ("+experiment=imbalance", "hardware=cpu", *TRACED, "placement=balanced")
    recorded = container(*words)
    assert (recorded["routing"]["law"], recorded["workload"]["num_experts"]) == ("trace", 60)
    assert recorded["placement"] == {"rule": "balanced", "num_redundant": 4, "replica": "spread"}
    assert container(*words, "hardware=h200_x1")["operation"] == "dispatch"
    assert recorded["operation"] == "dispatch_gemm"


def test_dispatch_granularity_sweeps_batches_of_flags_where_there_are_any(axes):
    on_host = axes("+experiment=dispatch_granularity", "hardware=cpu")
    on_gpu = axes("+experiment=dispatch_granularity", "hardware=h200_x1")

    assert on_gpu == {
        "workload.num_tokens": ["4096"],
        "kernel.num_comm_ctas": ["16"],
        "kernel.granularity": ["tile", "token", "expert"],
        "kernel.flag_batch": ["1", "4", "16"],
    }
    assert on_host == {
        "workload.num_tokens": ["64", "256"],
        "kernel.num_comm_ctas": ["null"],
        "kernel.granularity": ["tile", "token", "expert"],
        "kernel.flag_batch": ["null"],
    }


DEFAULT_WAYS = {
    "hardware=h200_x1 kernel=gemm_combine": (Push.epilogue, Walk.chunk, 0),
    "hardware=h200_x1 kernel=gemm_combine kernel.roles=fixed": (Push.epilogue, Walk.chunk, 8),
    "hardware=h200_x1 kernel=gemm_combine kernel.home_granularity=rank": (
        *(Push.epilogue, Walk.chunk),
        8,
    ),
    "hardware=h200_x1 kernel=gemm_combine kernel.granularity=token": (Push.ctas, Walk.expert, 8),
    "hardware=h200_x1 kernel=gemm_combine kernel.granularity=expert": (Push.ctas, Walk.expert, 8),
    "hardware=h200_x8 kernel=moe_layer": (Push.epilogue, Walk.chunk, 0),
    "hardware=h200_x8 kernel=moe_layer kernel.granularity=token": (Push.ctas, Walk.expert, 12),
    "hardware=cpu kernel=gemm_combine": (None, None, None),
    "hardware=cpu kernel=moe_layer kernel.granularity=expert": (None, None, None),
}


@pytest.mark.parametrize("words", DEFAULT_WAYS)
def test_rows_go_home_by_default_in_the_fastest_way_that_a_granularity_has(container, words):
    kernel = config_from_dict(container(*words.split())).kernel

    assert (kernel.push, kernel.walk, kernel.num_comm_ctas) == DEFAULT_WAYS[words]
    assert kernel.num_chunks is None  # rows of so few columns have one tile


@pytest.mark.parametrize(
    ("words", "roles", "num_comm_ctas"),
    [
        ("", Roles.beside, 0),
        ("kernel.num_comm_ctas=16", Roles.switch, 16),
        ("kernel.num_comm_ctas=auto", Roles.beside, "auto"),
        ("kernel.num_comm_ctas=auto kernel.roles=switch", Roles.switch, "auto"),
        ("kernel.num_comm_ctas=auto kernel=gemm_combine", Roles.beside, "auto"),
        # No warp beside the tiles can do that.
        ("kernel.num_comm_ctas=auto kernel=gemm_combine kernel.push=ctas", Roles.switch, "auto"),
        (
            "kernel.num_comm_ctas=auto kernel=moe_layer kernel.home_granularity=rank",
            Roles.switch,
            "auto",
        ),
        ("kernel.num_comm_ctas=16 kernel.roles=fixed", Roles.fixed, 16),
        ("kernel.roles=switch", Roles.switch, 12),
        ("kernel.roles=fixed", Roles.fixed, 12),
        ("kernel.roles=beside", Roles.beside, 0),
        ("hardware=cpu", None, None),
    ],
)
def test_roles_and_communication_ctas_follow_each_other(container, words, roles, num_comm_ctas):
    kernel = config_from_dict(container("hardware=h200_x1", *words.split())).kernel

    assert (kernel.roles, kernel.num_comm_ctas) == (roles, num_comm_ctas)


@pytest.mark.parametrize(
    ("words", "num_chunks"),
    [
        ("workload.hidden=7168", 2),
        ("workload.hidden=7168 kernel.num_chunks=4", 4),
        ("workload.hidden=7168 kernel.push=ctas", None),
        ("workload.hidden=256", None),  # one tile
        ("workload.hidden=768", None),  # three: no two equal chunks
    ],
)
def test_rows_sent_across_links_have_two_chunks_where_two_are_equal(container, words, num_chunks):
    composed = container("hardware=h200_x2", "kernel=gemm_combine", *words.split())

    assert config_from_dict(composed).kernel.num_chunks == num_chunks


@pytest.mark.parametrize("experiment", ["decode", "combine_decode"])
def test_decoding_is_swept_by_copy_and_cache_where_there_are_any(experiment, axes):
    on_host = axes(f"+experiment={experiment}", "hardware=cpu")
    on_gpu = axes(f"+experiment={experiment}", "hardware=h200_x1")

    assert on_gpu == {
        "kernel.copy": ["simt", "tma"],
        "workload.num_tokens": ["1", "2", "4", "8", "16", "32", "64", "128"],
        "kernel.num_comm_ctas": ["16"],
        "measure.l2": ["warm", "cold"],
    }
    assert on_host == {
        "kernel.copy": ["null"],
        "workload.num_tokens": ["1", "8", "64"],
        "kernel.num_comm_ctas": ["null"],
        "measure.l2": ["null"],
    }


def test_paced_links_are_swept_by_rate_and_by_latency_on_one_gpu(container, axes):
    words = ("+experiment=dispatch_paced", "hardware=h200_x8")

    sweep = axes(*words)
    launches = [container(*words, f"launch={pair}")["launch"] for pair in sweep["launch"]]
    on_host = container("+experiment=dispatch_paced", "hardware=cpu")["launch"]

    assert [(found["pace_gbps"], found["pace_latency_ns"]) for found in launches] == [
        *((rate, 1000) for rate in (22, 44, 88)),
        *((44, latency) for latency in (0, 4000, 16_000)),
    ]
    assert {(found["num_ranks"], found["fabric"]) for found in launches} == {(8, "loopback")}
    assert sweep["kernel.num_comm_ctas"] == ["1", "2", "4", "8", "16"]
    assert (on_host["pace_gbps"], on_host["fabric"]) == (None, "host")


def test_orders_are_swept_in_a_group_in_small(container, axes):
    words = ("+experiment=dispatch_gemm_order_paced", "hardware=h200_x8")
    sweep, group = axes(*words), container(*words)
    whole = container("+experiment=dispatch_gemm", "hardware=h200_x8")
    launch, num_ranks = group["launch"], group["launch"]["num_ranks"]

    assert sweep["kernel.order"] == [order.name for order in Order]
    assert sweep["workload.intermediate"] == ["2048", "768"]
    assert (num_ranks, launch["fabric"]) == (8, "loopback")
    # A rank has an eighth of the SMs, tokens, experts and link that it has in the whole group.
    assert int(sweep["workload.num_tokens"][0]) * 8 == whole["workload"]["num_tokens"] == 4096
    assert group["workload"]["num_experts"] * 8 == whole["workload"]["num_experts"]
    assert launch["pace_gbps"] == pytest.approx(360 * (132 // num_ranks) / 132, rel=1e-3)


@pytest.mark.parametrize("operation", ["dispatch_gemm", "gemm_combine"])
def test_a_paced_rank_stands_for_one_of_a_group_and_runs_beside_torch(operation, container, axes):
    words = (f"+experiment={operation}_paced", "hardware=h200_x8")
    on_gpu, on_host = container(*words), container(*words, "hardware=cpu")

    assert on_gpu["operation"] == operation
    assert (on_gpu["launch"]["num_ranks"], on_gpu["launch"]["pace_gbps"]) == (1, 360)
    assert (on_host["launch"]["num_ranks"], on_host["launch"]["pace_gbps"]) == (4, None)
    assert on_gpu["measure"]["baselines"] == on_host["measure"]["baselines"] == ["torch"]
    assert axes(*words)["kernel.copy"] == ["simt", "tma"]


# Shared memory for rings, beside which an SM holds tables and barriers.
RING_BYTES = 226 * 1024


def test_every_ring_that_is_swept_fits(container, axes):
    words = ("+experiment=dispatch_tma_depth", "hardware=h200_x1")
    kernels = [
        container(*words, "kernel.copy=tma", f"kernel={pair}")["kernel"]
        for pair in axes(*words)["kernel"]
    ]

    row_bytes = 2 * container(*words)["workload"]["hidden"]
    rings = [
        kernel["num_comm_warps"]
        * kernel["num_stages"]
        * piece_bytes(row_bytes, kernel["stage_bytes"])
        for kernel in kernels
    ]
    assert max(rings) <= RING_BYTES
    # Whole rows, halves and sevenths, from one warp to sixteen.
    assert {kernel["stage_bytes"] for kernel in kernels} == {14_336, 7_168, 2_048}
    assert {kernel["num_comm_warps"] for kernel in kernels} == {1, 2, 4, 8, 12, 16}


def test_loads_in_flight_are_swept_as_far_as_registers_go(container, axes):
    words = ("+experiment=dispatch_simt_depth", "hardware=h200_x1")

    sweep = axes(*words)
    kernels = [container(*words, f"kernel={pair}")["kernel"] for pair in sweep["kernel"]]

    found = [(kernel["num_comm_warps"], kernel["num_loads"]) for kernel in kernels]
    fitting = [
        (num_warps, num_loads)
        for num_warps in (8, 12, 16, 32)
        for num_loads in (2, 4, 7, 10, 14)
        if num_warps < 32 or num_loads <= 7
    ]
    assert found == fitting
    assert {kernel["num_stages"] for kernel in kernels} == {None}


KNOBS = ("num_comm_warps", "num_loads", "num_stages", "stage_bytes", "flag_batch")


@pytest.mark.parametrize(
    "operation", ["dispatch", "combine", "dispatch_gemm", "gemm_combine", "moe_layer"]
)
@pytest.mark.parametrize(
    ("words", "knobs"),
    [
        (("hardware=cpu",), (None, None, None, None, None)),
        (("hardware=h200_x1",), (16, 14, None, None, 4)),
        (("hardware=h200_x1", "kernel.copy=simt"), (16, 14, None, None, 4)),
        (("hardware=h200_x1", "kernel.copy=tma"), (8, None, 4, 7_168, 8)),
        (("hardware=h200_x1", "kernel.copy=tma", "kernel.num_stages=3"), (8, None, 3, 7_168, 8)),
    ],
)
def test_how_rows_are_copied_follows_the_copy(words, knobs, operation, container):
    config = config_from_dict(container(f"kernel={operation}", *words))

    check_config(config)
    # CTAs of a fused launch have the warps of a GEMM.
    most = 12 if isinstance(config.kernel, FusedKernel) else 32
    warps, *others = knobs
    wanted = (warps and min(warps, most), *others)
    assert tuple(getattr(config.kernel, key) for key in KNOBS) == wanted


@pytest.mark.parametrize(
    ("operation", "batch"),
    [("dispatch", 8), ("combine", 8), ("dispatch_gemm", 4), ("gemm_combine", 4), ("moe_layer", 4)],
)
def test_plain_copies_alone_on_links_share_a_fence_by_eight_rows(operation, batch, container):
    words = (f"kernel={operation}", "hardware=h200_x2")

    assert container(*words, "kernel.copy=simt")["kernel"]["flag_batch"] == batch
    assert container(*words, "kernel.copy=tma")["kernel"]["flag_batch"] == 8
    assert container(*words, "kernel.copy=simt", "kernel.flag_batch=2")["kernel"]["flag_batch"] == 2


@pytest.mark.parametrize("experiment", ["dispatch", "combine", "grouped_gemm", "dispatch_gemm"])
def test_a_trace_leaves_one_point_of_a_host_sweep(experiment, container, axes):
    words = (f"+experiment={experiment}", "hardware=cpu", *TRACED)

    sweep = axes(*words)

    assert {len(values) for values in sweep.values()} == {1}
    assert sweep["workload.num_tokens"] == ["null"]
    typed = [f"{key}={values[0]}" for key, values in sweep.items()]
    assert container(*words, *typed)["workload"]["num_tokens"] is None


def test_a_trace_drops_only_the_token_axis_of_a_gpu_sweep(axes):
    words = ("+experiment=dispatch", "hardware=h200_x8", *TRACED)

    sweep = axes(*words)

    assert sweep["workload.num_tokens"] == ["null"]
    assert sweep["kernel.num_comm_ctas"] == CTAS


def test_a_typed_token_count_caps_a_trace(container):
    assert container(*TRACED)["workload"]["num_tokens"] is None
    assert container(*TRACED, "workload.num_tokens=7")["workload"]["num_tokens"] == 7


def test_typed_words_win_over_what_an_experiment_chose(container):
    words = ("+experiment=dispatch_gemm", "hardware=cpu", "workload=mixtral_8x7b")

    found = container(*words, "measure=default", "workload.hidden=2048", "kernel.layout=packed")

    assert (found["workload"]["hidden"], found["workload"]["num_experts"]) == (2048, 8)
    assert found["measure"]["num_iters"] == 30
    assert found["kernel"]["layout"] == "packed"


@pytest.mark.parametrize("law", LAWS)
def test_every_law_composes_with_a_workload_as_it_stands(law, container):
    path = ["routing.path=F"] if law in ("trace", "counts") else []

    config = config_from_dict(container("workload=deepseek_v3", f"routing={law}", *path))

    check_config(config)
    # An option may be a law with settings of its own.
    assert config.routing.law.name == {"one_rank": "hot_rank"}.get(law, law)
    assert config.workload.num_tokens == (None if law == "trace" else 4096)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_divides_over_four_ranks(workload, container):
    config = config_from_dict(container(f"workload={workload}", "launch.num_ranks=4"))

    check_config(config)
    assert config.workload.num_tokens is not None


def test_hardware_auto_follows_the_gpus_that_are_here(container, monkeypatch):
    on_cpu = config_from_dict(container("+experiment=combine"))
    monkeypatch.setattr(detect, "gpu_names", lambda: ("NVIDIA H200",) * 4)
    on_gpus = config_from_dict(container("+experiment=combine"))

    assert (on_cpu.hardware.name, on_cpu.launch.fabric) == ("cpu", Fabric.host)
    assert (on_gpus.hardware.name, on_gpus.launch.fabric) == ("h200_x4", Fabric.nvshmem)
    assert (on_cpu.kernel.copy, on_gpus.kernel.copy) == (None, Copy.simt)
    assert (on_cpu.workload.hidden, on_gpus.workload.hidden) == (512, 7168)


@pytest.mark.parametrize("operation", [operation.name for operation in Operation])
def test_a_kernel_option_is_named_after_its_operation(operation, container):
    config = config_from_dict(container(f"kernel={operation}"))

    assert config.operation.name == config.kernel.operation.name == operation
    # No experiment has this name: what is typed by hand lies apart from what they measure.
    assert config.name == f"typed_{operation}"
    assert not (CONF_DIR / "experiment" / f"{config.name}.yaml").exists()
    # The option file and the dataclass say the same, but for what a device decides.
    assert config.kernel == type(config.kernel)()


@pytest.mark.parametrize("hardware", HARDWARE)
def test_every_peak_names_its_source(hardware):
    found = OmegaConf.load(CONF_DIR / "hardware" / f"{hardware}.yaml")

    for key in ("num_sms", "link_gbps", "hbm_gbps", "bf16_tflops"):
        assert (found[key] is None) == (found[f"{key}_source"] is None)
    assert found.name == hardware
