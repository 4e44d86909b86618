"""Waits that never end, ranks with other settings: who waited for what is told in one sentence."""

import json
import re
import time

import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

import numpy as np  # noqa: E402

from tests.gpu.groups import SPOILED_TOKENS, CheckedGroup, rank_0_sends_nothing  # noqa: E402
from tests.launch.points import compose_point  # noqa: E402
from tilepipe.config.choices import Copy, Granularity, HomeGranularity  # noqa: E402
from tilepipe.fabric.table import Slot, Word  # noqa: E402
from tilepipe.fabric.watch import WatchdogTimeout  # noqa: E402
from tilepipe.kernels.launcher import Knobs  # noqa: E402
from tilepipe.launch.driver import run_points  # noqa: E402
from tilepipe.measure.gate import BF16_POISON  # noqa: E402
from tilepipe.schedule.settings import PlanSettings  # noqa: E402
from tilepipe.workload.routing import Routing  # noqa: E402

LIMIT_S = 0.2
# Experts 0 and 1 are those of ranks 0 and 1. Three tokens of rank 0 and two of rank 1 for expert 1.
ALL_TO_RANK_1 = ([[1], [1], [1]], [[1], [1]])
ONE_TO_RANK_1 = ([[1]], [[1], [1]])
# The only token, of rank 0, visits both experts; its slots come home from both ranks.
TO_BOTH_RANKS = ([[0, 1]], [])


def checked_group(ids, *, num_ranks=2, copy=Copy.simt, **chosen):
    """A group that has run dispatch and combine once, launches 1 and 2, and is ready for more."""
    num_topk = len(ids[0][0])
    topk_idx = tuple(np.array(of_rank, np.int32).reshape(-1, num_topk) for of_rank in ids)
    routing = Routing(
        topk_idx=topk_idx,
        topk_weights=tuple(np.ones(of_rank.shape, np.float32) for of_rank in topk_idx),
        num_experts=num_ranks,
    )
    settings = PlanSettings(
        num_ranks=num_ranks, num_experts=num_ranks, num_topk=num_topk, tile_m=16, **chosen
    )
    knobs = Knobs(num_ctas=2, copy=copy, num_warps=4)
    checked = CheckedGroup(settings, knobs, [routing], hidden=512, watchdog_s=LIMIT_S)
    checked.group.launcher.prepare("push")
    checked.prepare(routing, payload=1)
    assert checked.dispatch() == []
    assert checked.combine() == []
    return checked


def set_word(checked, rank, name, value):
    checked.tensor(rank, Slot.words)[int(name)] = value


def sentence_of(checked, *launches):
    """What is raised of launches that do not end well, which must be soon."""
    begin = time.monotonic()
    for launch in launches:
        launch()
    with pytest.raises(WatchdogTimeout) as caught:
        checked.group.synchronize()
    assert LIMIT_S <= time.monotonic() - begin < 2
    # Every rank has stopped, so that nobody reads what is not there.
    assert all(int(checked.tensor(rank, Slot.abort)) > 0 for rank in checked.group.ranks)
    return str(caught.value)


def opening(checked, *, exchange):
    return lambda: checked.group.open(exchange=exchange)


@pytest.mark.parametrize("copy", list(Copy))
@pytest.mark.parametrize(
    ("granularity", "ids", "what"),
    [
        (Granularity.tile, ALL_TO_RANK_1, "role receive, counter 0: expected 5 rows, seen 2"),
        (Granularity.expert, ALL_TO_RANK_1, "role receive, counter 0: expected 5 rows, seen 2"),
        # Rows lie by source rank: the first one is rank 0's, and launch 1 has left its flag.
        (Granularity.token, ONE_TO_RANK_1, "role receive, row 0: its flag is of launch 1, not 3"),
    ],
)
def test_a_rank_that_sends_nothing_is_missed_by_its_peer(granularity, ids, what, copy):
    checked = checked_group(ids, granularity=granularity, copy=copy)
    set_word(checked, 0, Word.num_sends, 0)

    found = sentence_of(checked, opening(checked, exchange=True), checked.group.dispatch)

    assert found == f"rank 1 waited 0.2 s (launch.watchdog_ms): {what}; epoch 3"


@pytest.mark.parametrize("copy", list(Copy))
@pytest.mark.parametrize("launch", ["combine", "push"])
@pytest.mark.parametrize(
    ("home_granularity", "what"),
    [
        (HomeGranularity.token, "role reduce, token 0: expected 2 rows x chunks, seen 1"),
        (HomeGranularity.rank, "role reduce, rank 1: expected 1 rows x chunks, seen 0"),
    ],
)
def test_a_rank_that_brings_nothing_home_is_missed_there(home_granularity, what, launch, copy):
    checked = checked_group(TO_BOTH_RANKS, home_granularity=home_granularity, copy=copy)
    set_word(checked, 1, Word.num_returns, 0)

    launches = (opening(checked, exchange=False), getattr(checked.group, launch))
    found = sentence_of(checked, *launches)

    assert found == f"rank 0 waited 0.2 s (launch.watchdog_ms): {what}; epoch 3"


@pytest.mark.parametrize(("exchange", "ahead"), [(True, 2), (False, 1)])
def test_a_rank_that_has_not_opened_the_launch_is_missed_at_the_gate(exchange, ahead):
    # Rank 1 is launches ahead, as many as give it the same half of the mailbox: rank 0 sees that
    # it has opened this launch too, while rank 1 waits for one that rank 0 never opens.
    checked = checked_group(ALL_TO_RANK_1)
    set_word(checked, 1, Word.epoch, 2 + ahead)
    for rank in range(2):
        checked.tensor(rank, Slot.recv_x).fill_(BF16_POISON)

    found = sentence_of(checked, opening(checked, exchange=exchange), checked.group.dispatch)

    waited_for = f"role gate: rank 0 has opened launch 3, not {3 + ahead}; epoch {3 + ahead}"
    assert found == f"rank 1 waited 0.2 s (launch.watchdog_ms): {waited_for}"
    for rank in range(2):
        assert bool((checked.tensor(rank, Slot.recv_x) == BF16_POISON).all()), "rows were sent"


@pytest.mark.parametrize(("num_ranks", "other"), [(2, 1), (4, 2)])
def test_ranks_with_other_settings_are_told_and_send_nothing(num_ranks, other):
    everybody = [[expert] for expert in range(num_ranks)]
    checked = checked_group([everybody] * num_ranks, num_ranks=num_ranks)
    for rank in range(num_ranks):
        checked.tensor(rank, Slot.recv_x).fill_(BF16_POISON)
    set_word(checked, other, Word.fingerprint, 12345)
    begin = time.monotonic()

    checked.group.open(exchange=True)
    checked.group.dispatch()
    sentence = f"rank {other} runs with other plan settings than rank 0: start all ranks from one"
    with pytest.raises(ValueError, match=sentence):
        checked.group.synchronize()

    assert time.monotonic() - begin < LIMIT_S, "somebody waited for rows that nobody sends"
    for rank in range(num_ranks):
        assert bool((checked.tensor(rank, Slot.recv_x) == BF16_POISON).all()), "rows were sent"


def test_a_point_whose_wait_never_ends_is_a_row_and_the_next_point_runs(tmp_path):
    name = "h200_x1" if "H200" in torch.cuda.get_device_name() else "generic_x1"
    words = (
        *(f"hardware={name}", "kernel=dispatch", "workload=tiny", "measure=quick"),
        *("launch.num_ranks=2", "launch.watchdog_ms=200", "launch.time_limit_s=120"),
        "kernel.num_comm_ctas=2",
    )
    tokens = (SPOILED_TOKENS, SPOILED_TOKENS + 1)
    points = [compose_point(*words, f"workload.num_tokens={count}") for count in tokens]

    code = run_points(points, results_dir=tmp_path, entry=rank_0_sends_nothing)

    assert code == 1
    documents = [json.loads(path.read_text()) for path in tmp_path.glob("tiny/*/point.json")]
    told = {
        document["config"]["workload"]["num_tokens"]: (document["status"], document["reason"])
        for document in documents
    }
    assert told[tokens[1]] == ("ok", "")
    status, reason = told[tokens[0]]
    assert status == "timeout"
    pattern = (
        r"rank [01] waited 0\.2 s \(launch\.watchdog_ms\): role receive, counter \d+: "
        r"expected \d+ rows, seen \d+; epoch 1"
    )
    assert re.fullmatch(pattern, reason), reason
