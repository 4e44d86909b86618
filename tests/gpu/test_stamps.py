"""Stamped launches on a device: right outputs, and spans that obey their laws."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from dataclasses import replace  # noqa: E402

from tests.gpu.overlaps import Chosen, FusedCase, HomeCase  # noqa: E402
from tests.gpu.test_overlap import name_of, routings_of  # noqa: E402
from tests.kernels.stamped_laws import most_backwards_ns, rank_faults  # noqa: E402
from tilepipe.config.choices import (  # noqa: E402
    Copy,
    Granularity,
    HomeGranularity,
    Layout,
    Push,
    Roles,
    Walk,
)
from tilepipe.kernels.gemm.choices import Consumers  # noqa: E402
from tilepipe.kernels.gemm.plan import GemmTuning  # noqa: E402
from tilepipe.kernels.overlap.stamped import (  # noqa: E402
    LostStampsError,
    clear_tracks,
    known_of,
    most_stamps,
    spans_of_launch,
    words_of,
)
from tilepipe.records import SpanKind  # noqa: E402
from tilepipe.results.recording import point_folder, read_recording  # noqa: E402
from tilepipe.results.sms import late_loss  # noqa: E402

ROOM = 2048
# Clocks of two SMs are told apart by the timer, whose steps are 32 ns on an H200.
CLOCKS_APART_NS = 100
TOGETHER = {"opens": True, "gates": True, "roles": Roles.switch}
DISPATCHING = [
    {},
    {"copy": Copy.simt},
    TOGETHER,
    {**TOGETHER, "copy": Copy.simt, "num_ranks": 4},
    {"granularity": Granularity.token, "roles": Roles.switch},
    {**TOGETHER, "roles": Roles.beside, "num_ranks": 2},
    {"granularity": Granularity.expert, "layout": Layout.packed},
    {"tuning": GemmTuning(cluster_m=2), "num_ranks": 2},
    {"tuning": GemmTuning(consumers=Consumers.ping_pong, tile_n=128), "layout": Layout.packed},
]
RETURNING = [
    {"roles": Roles.switch},
    {"copy": Copy.simt, "num_chunks": 4},
    {"granularity": Granularity.token, "num_ranks": 2},
    {"granularity": Granularity.expert, "roles": Roles.switch, "copy": Copy.simt},
    {"home_granularity": HomeGranularity.rank, "num_ranks": 4, "num_chunks": 2},
    {"tuning": GemmTuning(cluster_m=2), "num_chunks": 2, "num_ranks": 2, "roles": Roles.switch},
    {"push": Push.epilogue, "num_chunks": 4, "roles": Roles.switch},
    {"push": Push.epilogue, "num_chunks": 4, "walk": Walk.chunk, "roles": Roles.beside},
    {"push": Push.epilogue, "num_chunks": 2, "walk": Walk.chunk, "num_ranks": 4},
]


def launched(case, chosen):
    """Run twice with stamps; returns what is wrong, the spans by rank and what they are of."""
    routings = routings_of(chosen)
    made = case(chosen, routings)
    for number, routing in enumerate(routings[1:], start=1):  # the last one has most tokens
        made.prepare(routing, number)
        clear_tracks(made.launch)
        faults = made.run()
    known = {rank: known_of(made.group, made.launch, rank) for rank in made.group.ranks}
    spans = spans_of_launch(words_of(made.launch), made.launch, known, base_ns=0)
    for rank, found in spans.items():
        faults += [f"rank {rank}: {fault}" for fault in rank_faults(found, known[rank])]
    return faults, spans, made


@pytest.mark.parametrize("case", DISPATCHING, ids=name_of)
def test_a_stamped_dispatch_gemm_is_right_and_tells_of_every_row_and_tile_once(case):
    chosen = Chosen(num_stamps=ROOM, **case)

    faults, spans, _ = launched(FusedCase, chosen)

    assert faults == []
    assert most_backwards_ns(spans, homewards=False) < CLOCKS_APART_NS


@pytest.mark.parametrize("case", RETURNING, ids=name_of)
def test_a_stamped_gemm_combine_is_right_and_tells_of_every_piece_and_tile_once(case):
    chosen = Chosen(num_stamps=ROOM, **{"n": 1024, **case})

    faults, spans, _ = launched(HomeCase, chosen)

    assert faults == []
    assert most_backwards_ns(spans, homewards=True) < CLOCKS_APART_NS
    assert any(span.kind is SpanKind.reduce for found in spans.values() for span in found)


def test_rows_on_a_slow_link_show_as_waits_of_the_sms_that_multiply():
    plain = Chosen(num_stamps=ROOM, num_ranks=2)
    slow = replace(plain, pace_gbps=0.5, pace_latency_ns=20_000)

    _, spans, _ = launched(FusedCase, plain)
    _, slow_spans, _ = launched(FusedCase, slow)

    assert late_loss(slow_spans, spans).all_ns > 20_000


def test_stamps_that_find_no_room_are_counted_and_the_launch_is_right():
    chosen = Chosen(num_stamps=4)
    (routing,) = routings_of(chosen, count=1)
    fused = FusedCase(chosen, [routing])
    fused.prepare(routing, 1)

    assert fused.run() == []

    assert most_stamps(fused.launch) > 4
    known = {rank: known_of(fused.group, fused.launch, rank) for rank in fused.group.ranks}
    with pytest.raises(LostStampsError, match=r"\d+ stamps found no room, of 4 a warp"):
        spans_of_launch(words_of(fused.launch), fused.launch, known, base_ns=0)


def test_spans_are_as_long_as_the_kernel_is_by_events():
    """Of ten launches the one for which it holds best: other processes may use the GPU between an
    event and the kernel."""
    chosen = Chosen(num_stamps=ROOM, hidden=4096, n=4096, num_experts=16, num_topk=4)
    (routing,) = routings_of(chosen, count=1)
    fused = FusedCase(chosen, [routing])
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    apart = []

    for number in range(10):
        fused.prepare(routing, number + 1)
        clear_tracks(fused.launch)
        # Enqueued behind a spin: else the host's own time lies between the two events.
        torch.cuda._sleep(20_000_000)
        fused.group.open(exchange=True)
        events[0].record()
        fused.launch()
        events[1].record()
        fused.group.synchronize()
        known = {rank: known_of(fused.group, fused.launch, rank) for rank in fused.group.ranks}
        spans = spans_of_launch(words_of(fused.launch), fused.launch, known, base_ns=0)[0]
        kernel_ns = events[0].elapsed_time(events[1]) * 1e6
        apart.append(kernel_ns - max(span.end_ns for span in spans))

    # What lies outside: the launch itself, and the end of the grid.
    assert min(map(abs, apart)) < max(0.01 * kernel_ns, 8_000)


@pytest.mark.parametrize(("kernel", "term"), [("dispatch_gemm", "late"), ("gemm_combine", "tail")])
def test_a_recorded_point_is_valid_and_its_spans_add_up_to_the_kernel(tmp_path, kernel, term):
    words = (
        *(f"kernel={kernel}", f"name={kernel}"),
        *("workload=deepseek_v3_ep8_rank", "workload.num_tokens=512"),
        *("hardware=h200_x1", "measure=quick", "measure.timeline=true", f"results_dir={tmp_path}"),
    )

    for command in (
        ("tilepipe.run", *words),
        ("tilepipe.validate", str(tmp_path)),
        ("tilepipe.timeline", str(tmp_path / kernel)),
    ):
        ended = subprocess.run(
            (sys.executable, "-m", *command), capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr

    recording = read_recording(point_folder(tmp_path / kernel))
    document = json.loads((point_folder(tmp_path / kernel) / "point.json").read_text())
    counts = document["ranks"][0]["counts"]
    # By how much is no matter here: tests share the GPU.
    assert recording.end_ns - recording.start_ns < counts["recorded_ns"]
    (told,) = [t for t in recording.terms if t.term == term]
    assert None not in (told.stamped_ns, told.stamped_loss_ns)
    assert document["figures"]["fused/stamping_cost"] > 0
    assert "by stamps" in ended.stdout
    assert f"{term}:" in ended.stdout
