"""Stamps of dispatch and combine on the CPU: nothing races, no bit changes, rows are told of."""

from collections import Counter

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import cutlass.cute as cute  # noqa: E402
from cutlass import Int32, Int64  # noqa: E402
from cutlass.cute.runtime import make_fake_stream, make_ptr  # noqa: E402

from tests.ptx.group import memory_of  # noqa: E402
from tests.ptx.parse import parse  # noqa: E402
from tests.ptx.stamping import stamped_entry  # noqa: E402
from tests.ptx.test_communication import COVER, check, run_of  # noqa: E402
from tilepipe.config.choices import Copy  # noqa: E402
from tilepipe.kernels.compile import compile_code  # noqa: E402
from tilepipe.kernels.launcher import constants_of  # noqa: E402
from tilepipe.kernels.reduction import units_of  # noqa: E402
from tilepipe.kernels.track import NO_ITEM, NUM_TRACKS, Event, read_tracks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

NAMES = ("dispatch", "combine")
BY_COPY = {copy: next(n for n, case in enumerate(COVER) if case["copy"] is copy) for copy in Copy}


def stamped_run(number, room):
    """A run whose dispatch and combine leave stamps, and the memory that they leave them in."""
    run, routings = run_of(COVER[number], seed=number, races=True)
    group = run.group
    num_ctas = len(group.ranks) * group.knobs.num_ctas
    shape = (len(NAMES), num_ctas, NUM_TRACKS, 1 + room, 4)
    words = np.zeros(np.prod(shape) + 4, np.int32)
    words = words[-words.ctypes.data // 4 % 4 :][: np.prod(shape)].reshape(shape)  # 16-byte aligned
    group.machine.memory = memory_of(group, tracks=(words.ctypes.data, words.nbytes))
    group.more_shared_bytes = 4 * NUM_TRACKS
    table = make_ptr(Int64, 0, cute.AddressSpace.gmem, assumed_align=16)
    stand_ins = (Int32(0), Int32(1), Int32(1), Int64(1), Int64(1), Int64(1), make_fake_stream())
    for place, name in enumerate(NAMES):
        entry = stamped_entry(
            constants_of(name, group.settings, group.shape, group.knobs),
            combines=name == "combine",
            tracks=words[place].ctypes.data,
            room=room,
        )
        group._programs[name] = parse(compile_code(entry, (table, *stand_ins)).ptx)
    return run, routings, words


@pytest.mark.parametrize("copy", list(Copy), ids=lambda copy: copy.name)
def test_stamps_change_no_bit_race_with_nobody_and_tell_of_every_row(copy):
    run, routings, words = stamped_run(BY_COPY[copy], room=256)

    check(run, routings)  # the last launch of each is what stamps are of

    group = run.group
    sent, reduced = Counter(), Counter()
    for place, counted in ((0, sent), (1, reduced)):
        tracks, lost = read_tracks(words[place])
        assert lost == 0
        assert len(tracks) == words.shape[1] * group.knobs.num_warps
        for track in tracks:
            assert track.sm == 131 - track.cta
            rank = track.cta % len(group.ranks)
            assert track.laps[-1].event is Event.end
            assert all(lap.start_ns <= lap.end_ns for lap in track.laps)
            for lap in track.laps:
                if lap.event is Event.send and lap.item != NO_ITEM:
                    counted[rank, "row", lap.item] += lap.num_rows
                if lap.event is Event.reduce and lap.item != NO_ITEM:
                    counted[rank, "token", lap.item] += 1
    pieces = units_of(constants_of("combine", group.settings, group.shape, group.knobs))
    for rank in group.ranks:
        plan, num_tokens = group.plans[rank], len(routings[-1].topk_idx[rank])
        assert rows_of(sent, rank) == dict.fromkeys(range(plan.num_sent), 1)
        assert rows_of(reduced, rank) == dict.fromkeys(range(plan.layout.num_rows), 1)
        assert rows_of(reduced, rank, "token") == dict.fromkeys(range(num_tokens), pieces)


def rows_of(counted, rank, kind="row"):
    return {item: n for (of, what, item), n in counted.items() if (of, what) == (rank, kind)}


def test_stamps_without_room_are_counted_and_overwrite_nothing():
    run, routings, words = stamped_run(BY_COPY[Copy.simt], room=2)

    check(run, routings)  # every step past a buffer's end would be a fault

    made = words[:, :, : run.group.knobs.num_warps, 0, 0]
    assert made.max() > 2
    assert read_tracks(words[0])[1] == np.maximum(made[0] - 2, 0).sum()
