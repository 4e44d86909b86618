"""How launches on a GPU are recorded: stamped ones take turns with others, and no stamp is lost."""

from collections import Counter
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from tests.kernels.test_spans import SETTINGS, TOPK, multiplying  # noqa: E402
from tests.kernels.tracks import words_of_laps  # noqa: E402
from tilepipe.experiments.cuda.recording import record  # noqa: E402
from tilepipe.fabric.table import Slot, Word  # noqa: E402
from tilepipe.kernels.overlap.launch import BoundLaunch  # noqa: E402
from tilepipe.kernels.overlap.stamped import LostStampsError  # noqa: E402
from tilepipe.kernels.track import NUM_TRACKS  # noqa: E402
from tilepipe.records import SpanKind  # noqa: E402
from tilepipe.schedule.plan import make_plan  # noqa: E402

LAUNCH = 77


class Trial:
    """A launch of one rank; `made`: stamps that a warp says it has made, launch by launch, the last
    one for all that follow; None: as many as it has."""

    def __init__(self, *, made=(None,)):
        self.plan = make_plan(TOPK, SETTINGS, epoch=1)[0]
        self.made, self.rooms, self.ran = [*made], [], []
        self.prepared, self.opened = None, Counter()
        words = torch.zeros(max(Word) + 1, dtype=torch.int32)
        group = SimpleNamespace(
            plans=[self.plan],
            settings=SETTINGS,
            ranks=range(1),
            heap=SimpleNamespace(barrier=lambda: None),
            tensor=lambda rank, slot: {Slot.words: words}[slot],
            refresh_plan=lambda: None,
            check=lambda: None,
        )
        self.session = SimpleNamespace(group=group, ranks=[0], timer=self)

    def prepare(self, contender, launch):
        assert launch == LAUNCH
        self.prepared = contender

    def opening(self, contender):
        assert contender == self.prepared
        return lambda: self.opened.update([contender])

    def stamped(self, contender, num_stamps):
        self.rooms.append((contender, num_stamps))
        tracks = None
        if num_stamps:
            tracks = torch.zeros(2, NUM_TRACKS, 1 + num_stamps, 4, dtype=torch.int32)
        fused = SimpleNamespace(
            gemm=SimpleNamespace(is_ping_pong=False),
            opens=False,
            cluster_m=1,
            num_launch_ranks=1,
            num_stamps=num_stamps,
        )
        return BoundLaunch(plan=fused, run=lambda: self.run(contender, tracks), tracks=tracks)

    def run(self, contender, tracks):
        assert contender == self.prepared
        if tracks is None:
            return
        assert not tracks[:, :, 0].any(), "stamps of the launch before were not forgotten"
        room = tracks.shape[2] - 1
        said = self.made.pop(0) if len(self.made) > 1 else self.made[0]
        made = {(1, 4): said} if said else None
        laps = multiplying(self.plan, wait_ns=50 if contender == "fused" else 0)
        words = words_of_laps(laps, num_ctas=2, room=room, step=1, made=made)
        tracks.copy_(torch.from_numpy(words))

    def measure(self, parts):
        """As the device's timer: nanoseconds of each part."""
        names = [name for name, _ in parts]
        for _, launch in parts:
            launch()
        stamped = parts[-1][1].tracks is not None
        self.ran.append((self.prepared, stamped))
        # Times of stamped launches go up, so that their median is one in the middle.
        stage_ns = 2_000 + 10 * len(self.ran) if stamped else 2_000
        return {"start_ns": 1_000_000, names[0]: 500, names[1]: stage_ns}


def test_stamped_launches_take_turns_with_others_and_come_last():
    trial = Trial()

    found = record(trial, LAUNCH)

    turns = trial.ran[2:]  # behind those that show how much room is needed
    beside, fused = ("gemm_contended", True), {True: ("fused", True), False: ("fused", False)}
    # At last a stamped one: its outputs are checked.
    assert turns == [
        launch for n in range(15) for launch in (beside, fused[n % 2 == 1], fused[n % 2 == 0])
    ]
    assert trial.opened == {"fused": 31, "gemm_contended": 16}
    counts = found.counts[0]
    assert counts["unstamped_ns"] == 2_000
    assert counts["stamped_ns"] == counts["recorded_ns"]


def test_spans_are_those_of_the_median_launch_on_the_hosts_clock():
    found = record(Trial(), LAUNCH)

    spans = found.spans[0]
    assert min(span.start_ns for span in spans) == 1_000_500
    tiles = [span for span in spans if span.kind is SpanKind.tile]
    assert len(tiles) == 6
    # Each of six waits shows for 50 ns, beside rows that were there; and one SM multiplies.
    assert found.counts[0]["stamped_late_ns"] == 6 * 50
    assert found.counts[0]["stamped_late_loss_ns"] == 6 * 50


def test_a_launch_whose_warps_need_more_room_is_bound_again():
    trial = Trial(made=[1_900])

    record(trial, LAUNCH)

    rooms = [("gemm_contended", 1 << 11), ("gemm_contended", 1 << 12)]
    assert trial.rooms == [*rooms, ("fused", 1 << 11), ("fused", 1 << 12), ("fused", 0)]


def test_a_launch_that_leaves_more_than_the_one_before_is_not_shown_in_part():
    with pytest.raises(LostStampsError, match=r"\d+ stamps found no room, of 2048 a warp"):
        record(Trial(made=[None, 2_500]), LAUNCH)


def test_a_warp_that_leaves_too_many_stamps_ends_in_a_sentence():
    with pytest.raises(
        RuntimeError,
        match=r"measure\.timeline=true: a warp leaves more than 16384 stamps; lower "
        r"workload\.num_tokens, or raise kernel\.num_comm_ctas",
    ):
        record(Trial(made=[20_000]), LAUNCH)
