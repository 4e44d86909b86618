"""Which ranks a process holds, on which GPU, and how two processes measure one point together."""

import threading

import pytest

torch = pytest.importorskip("torch")

from tests.experiments.cuda.test_session import FakeTrial, stages  # noqa: E402
from tests.fabric.nvshmem_stand_in import on_ranks  # noqa: E402
from tests.launch.points import compose_point  # noqa: E402
from tilepipe.config.schemas import config_from_dict  # noqa: E402
from tilepipe.experiments.cuda.heap import open_heap, shares_gpus, watchdog_s  # noqa: E402
from tilepipe.experiments.cuda.trial import measure  # noqa: E402
from tilepipe.fabric import nvshmem  # noqa: E402

NVSHMEM = "launch.fabric=nvshmem"


def config_of(*words):
    tiny = ("workload=tiny", "kernel=dispatch", "measure=quick")
    return config_from_dict(compose_point(*tiny, *words).config)


@pytest.mark.parametrize(
    ("words", "shared"),
    [
        (("hardware=h200_x2",), False),
        (("hardware=h200_x2", "launch.num_ranks=4"), True),
        (("hardware=h200_x1", NVSHMEM), False),
        (("hardware=generic_x1", NVSHMEM, "launch.num_ranks=2"), True),
        (("hardware=h200_x1", "launch.num_ranks=8"), False),
    ],
)
def test_processes_that_take_turns_on_a_gpu_wait_a_thousand_times_as_long(words, shared):
    config = config_of(*words, "launch.watchdog_ms=250")

    assert shares_gpus(config) == shared
    assert watchdog_s(config) == (250.0 if shared else 0.25)


@pytest.mark.parametrize(
    ("words", "devices"),
    [
        (("hardware=h200_x4",), [0, 1, 2, 3]),
        (("hardware=h200_x2", "launch.num_ranks=4"), [0, 1, 0, 1]),
        (("hardware=h200_x1", NVSHMEM, "launch.num_ranks=2"), [0, 0]),
    ],
)
def test_every_rank_takes_a_gpu_in_turn(words, devices, monkeypatch):
    config = config_of(*words)
    own, chosen = threading.local(), {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(own, "device", device))
    monkeypatch.setattr(
        nvshmem,
        "meet_by_environment",
        lambda num_ranks, limit_s: (own.meeting, num_ranks, limit_s)[0],
    )

    def opened(specs, *, meeting, device):
        assert own.device == device, "NVSHMEM starts on the current device"
        chosen[meeting.rank] = device

    monkeypatch.setattr(nvshmem, "NvshmemHeap", opened)

    def body(meeting):
        own.meeting = meeting
        open_heap(config, {})

    assert on_ranks(config.launch.num_ranks, body) == [None] * len(devices)
    assert [chosen[rank] for rank in range(len(devices))] == [
        torch.device("cuda", index) for index in devices
    ]


def measured(trials):
    """Records of trials that run at once, each in a process of its own with one rank."""

    def body(meeting):
        trial = trials[meeting.rank]
        trial.session.ranks = range(meeting.rank, meeting.rank + 1)
        trial.session.group.heap = meeting

        return measure(trial)

    return on_ranks(len(trials), body)


def test_processes_stop_after_the_same_iteration_though_one_was_sure_before():
    iterations = {"num_iters": 8, "max_iters": 40, "interval": 0.01}
    calm, restless = FakeTrial(**iterations), FakeTrial(**iterations)
    restless.jitter_ns = 30

    first, second = measured([calm, restless])

    taken = [{sample.iteration for sample in records[0].samples} for records in (first, second)]
    assert taken[0] == taken[1]
    alone = measured([FakeTrial(**iterations)])[0]
    assert max(taken[0]) > max(sample.iteration for sample in alone[0].samples)


def test_processes_hand_back_a_record_of_their_own_rank():
    first, second = measured([FakeTrial(), FakeTrial()])

    assert [[record.rank for record in records] for records in (first, second)] == [[0], [1]]
    assert first[0].samples != ()


def test_with_a_failed_gate_in_one_process_none_takes_a_sample():
    fine, wrong = FakeTrial(), FakeTrial(wrong=[(1, "before")])

    first, second = measured([fine, wrong])

    assert (first[0].samples, second[0].samples) == ((), ())
    assert stages(first[0]) == [("before", True)]
    assert stages(second[0]) == [("before", False)]
