"""`python -m tilepipe.timeline POINT` writes both files, or says in a sentence why not."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.results.chrome_trace import read
from tests.results.older import make_older
from tests.results.spans import lane, layer_of_two_ranks, recording, sms, two_ranks
from tests.test_validate import edit, made_up, store
from tilepipe import timeline
from tilepipe.records import BreakdownTerm, Interval, SpanRole, Status
from tilepipe.results.schema import SCHEMA_VERSION
from tilepipe.timeline import main
from tilepipe.timeline_figure import timeline_figure
from tilepipe.validate import validate


def recorded(config_id="c1", spans=None, **changes):
    """A point whose launch was recorded."""
    outcome = made_up(config_id)
    spans = two_ranks() if spans is None else spans
    records = tuple(replace(r, spans=tuple(spans.get(r.rank, ()))) for r in outcome.records)
    config = {
        **outcome.point.config,
        "kernel": {"order": "edf", "granularity": "tile"},
        "workload": {"num_tokens": 16},
    }
    build = {"cpu": "a processor", "cores": 2, "gpus": []}
    point = replace(outcome.point, config=config, build=build)
    return replace(outcome, records=records, point=point, **changes)


@pytest.fixture
def folder(tmp_path):
    return store(tmp_path, recorded())


def run(capsys, *words):
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err.splitlines()


def test_both_files_are_written_and_the_folder_stays_valid(folder, capsys):
    code, out, err = run(capsys, folder)

    assert (code, err) == (0, [])
    assert out == [
        f"{folder}/timeline.json: open it in https://ui.perfetto.dev or chrome://tracing",
        f"{folder}/timeline.svg",
    ]
    trace = read((folder / "timeline.json").read_bytes())
    assert sum(map(len, trace.slices.values())) == 11
    assert validate(folder).faults == []


def test_the_picture_names_lanes_kinds_shares_and_where_it_comes_from(folder, capsys):
    run(capsys, folder)

    picture = (folder / "timeline.svg").read_text()
    words = re.findall(r">([^<>\n]+)</text>", picture)
    for word in ("rank 0  computing", "rank 1  sender", "wait", "send ticket", "idle", "40 %"):
        assert word in words, words
    told = " ".join(words)
    assert "executor host, a processor, 2 cores, 2026-11-29" in told
    assert "dispatch_gemm: 2 ranks, 16 tokens a rank, order edf, granularity tile" in told


def test_equal_spans_give_equal_bytes(folder, tmp_path, capsys):
    for out in ("a", "b"):
        run(capsys, folder, f"out={tmp_path / out}")

    for name in ("timeline.json", "timeline.svg"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert not (folder / "timeline.json").exists()


def test_a_recording_of_an_older_version_is_shown_from_wherever_it_was_moved_to(
    folder, tmp_path, capsys
):
    make_older(folder, 2)
    moved = folder.rename(tmp_path / "moved")

    code, _, err = run(capsys, moved)

    assert (code, err) == (0, [])
    trace = read((moved / "timeline.json").read_bytes())
    assert sum(map(len, trace.slices.values())) == 11


def test_a_recording_of_an_older_version_is_checked_like_others(folder):
    make_older(folder, 2)
    assert validate(folder).faults == []
    path = folder / "timeline.parquet"
    table = pq.read_table(path)

    pq.write_table(pa.concat_tables([table.slice(0, 2), table.slice(3)]), path)

    assert validate(folder).faults == [
        "c1-b1/timeline.parquet: span 2 does not start where the one before it in its lane ends"
    ]


def test_an_experiment_folder_with_one_point_will_do(folder, capsys):
    assert run(capsys, folder.parent)[0] == 0
    assert (folder / "timeline.json").is_file()


def on_a_gpu(root, **stamped):
    """A recorded point of one GPU: an SM whose warps work apart and one that sends."""
    spans = [
        *lane("7.0", SpanRole.compute, ("wait", 0, 30, {"m_tile": 0, "lateness_ns": 30_000})),
        *lane("7.4", SpanRole.compute, ("tile", 40, 100, {"m_tile": 0, "n_tile": 0})),
        *lane("9", SpanRole.communication, ("send", 0, 25, {"m_tile": 0, "peer": 0})),
    ]
    outcome = recorded(spans={0: spans, 1: spans})
    late = Interval(value=11, low=10, high=12)
    terms = (*outcome.terms[:-1], BreakdownTerm(term="late", interval=late, **stamped))
    build = {**outcome.point.build, "gpus": ["NVIDIA H200"]}
    point = replace(outcome.point, executor="cuda", build=build)
    return store(root, replace(outcome, point=point, terms=terms))


def test_a_launch_on_a_gpu_is_shown_by_sm_with_what_roles_did_and_what_stamps_say(tmp_path, capsys):
    folder = on_a_gpu(tmp_path, stamped_ns=13)

    code, out, err = run(capsys, folder)

    assert (code, err) == (0, [])
    assert out[2:] == [
        *(
            f"rank {rank}, 1 SMs, {told}"
            for rank in range(2)
            for told in (
                "communication: idle 75.0 %, send 25.0 %",
                "compute: tile 60.0 %, wait 30.0 %, idle 10.0 %",
            )
        ),
        "late: 0.0 us by stamps, 0.0 us [0.0, 0.0] by the breakdown: 0.0 us apart, 0.0 us allowed: "
        "they do not agree",
    ]
    trace = read((folder / "timeline.json").read_bytes())
    assert [s.name for s in trace.slices[1, 1]] == ["wait m 0", "tile m 0 n 0"]
    assert validate(folder).faults == []


def test_where_both_launches_left_stamps_their_difference_is_told(tmp_path, capsys):
    folder = on_a_gpu(tmp_path, stamped_ns=13, stamped_loss_ns=5_013)

    _, out, _ = run(capsys, folder)

    assert out[-1].startswith("late: 5.0 us by stamps, 0.0 us [0.0, 0.0] by the breakdown: ")


def test_warps_of_an_sm_may_be_typed(tmp_path, capsys):
    folder = on_a_gpu(tmp_path)

    run(capsys, folder, "lanes=warps")

    trace = read((folder / "timeline.json").read_bytes())
    slices = [[s.name for s in trace.slices[1, thread]] for thread in (1, 2, 3)]
    assert slices == [["wait m 0"], ["tile m 0 n 0"], ["send to 0 m 0"]]


def test_one_rank_and_a_window_may_be_typed(folder, capsys):
    run(capsys, folder, "rank=1", "window_us=44,50")

    trace = read((folder / "timeline.json").read_bytes())
    assert [s.name for s in trace.slices[2, 1]] == ["copy m 0", "tile m 0 n 0"]


@pytest.mark.parametrize(
    ("window_us", "num_arrows"), [(None, 1), ((0, 1), 0), ((0, 101), 1), ((905, 950), 0)]
)
def test_a_window_of_a_layer_has_the_arrows_that_lie_in_it(window_us, num_arrows):
    pytest.importorskip("matplotlib")
    from matplotlib.text import Annotation

    from tilepipe.timeline_figure import timeline_figure

    point = recorded().point
    layer = replace(point, operation="moe_layer", config={**point.config})
    figure = timeline_figure(recording(layer, layer_of_two_ranks()), window_us=window_us)

    arrows = [
        text
        for text in figure.axes[0].texts
        if isinstance(text, Annotation) and text.arrow_patch is not None
    ]
    assert len(arrows) == num_arrows


def test_hundreds_of_thousands_of_spans_make_a_small_picture(make_lanes):
    figure, size = make_lanes

    assert size < 300_000
    assert figure.axes[0].get_yticklabels()[0].get_text() == "rank 0"


@pytest.fixture
def make_lanes():
    from tests.results.spans import recording
    from tilepipe.timeline_figure import to_svg

    figure = timeline_figure(recording(recorded().point, sms(132)))
    return figure, len(to_svg(figure, title="x"))


def two_points(root):
    store(root, recorded("c1"))
    store(root, recorded("c2"))
    return root / "exp"


def unrecorded(root):
    return store(root, made_up())


def failed(root):
    return store(root, made_up(status=Status.timeout))


def of_a_gpu(root):
    outcome = made_up()
    point = replace(outcome.point, executor="cuda", operation="dispatch")
    return store(root, replace(outcome, point=point, terms=()))


def under_way(root):
    (root / "exp" / "c1-b1.new" / "logs").mkdir(parents=True)
    return root / "exp" / "c1-b1.new"


def cut_short(root):
    folder = store(root, recorded())
    path = folder / "timeline.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    return folder


def newer(root):
    folder = store(root, recorded())
    edit(folder, lambda document: document.update(schema_version=99))
    return folder


def with_a_gap(root):
    folder = store(root, recorded())
    path = folder / "timeline.parquet"
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table.slice(0, 2), table.slice(3)]), path)
    return folder


def of_another_point(root):
    folder = store(root, recorded())
    other = store(root, recorded("c2"))
    (folder / "timeline.parquet").write_bytes((other / "timeline.parquet").read_bytes())
    return folder


def expect_sentence(sentence, expected, told):
    code, out, err = told
    assert (code, out) == (expected, [])
    assert len(err) == 1
    assert sentence in err[0]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            unrecorded,
            "no launch was recorded: type python -m tilepipe.run +experiment=dispatch_gemm "
            "measure.timeline=true",
        ),
        (failed, "the point ended timeout, so no launch was recorded"),
        (of_a_gpu, "on a GPU only dispatch_gemm and gemm_combine record one; type hardware=cpu"),
        (under_way, "a point under way, or cut short: run it again"),
        (cut_short, "timeline.parquet: cannot be read: "),
        (newer, f"point.json: schema_version is 99, want {SCHEMA_VERSION} or older: a newer "),
        (with_a_gap, "span 2 does not start where the one before it in its lane ends: run"),
        (of_another_point, "timeline.parquet: config_id is ['c2'], point.json has c1: run"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(tmp_path, capsys, make, sentence):
    expect_sentence(sentence, 1, run(capsys, make(tmp_path)))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda root: root / "no", "no such folder: name a point's, as in outputs/NAME/ID"),
        (lambda root: Path(__file__), "is a file: name the folder that holds it"),
        (lambda root: root, "holds no point that ended: name a point's folder"),
        (two_points, "holds 2 points: name one of them, as in c1-b1"),
    ],
)
def test_what_is_no_point_is_one_sentence(tmp_path, capsys, make, sentence):
    expect_sentence(sentence, 2, run(capsys, make(tmp_path)))


@pytest.mark.parametrize(
    ("word", "sentence", "expected"),
    [
        ("ranks=1", "ranks=1: unknown word: type rank=N, window_us=A,B, lanes=warps or out=DIR", 2),
        ("window_us=5", "window_us=5: must be two numbers A,B with 0 <= A < B", 2),
        ("window_us=0,inf", "window_us=0,inf: must be two numbers A,B with 0 <= A < B", 2),
        ("window_us=5,2", "window_us=5,2: must be two numbers A,B with 0 <= A < B", 2),
        ("window_us=500,600", "window_us=500,600: the launch took 100 us; begin before that", 1),
        ("lanes=all", "lanes=all: type sms or warps", 2),
        ("rank=2", "rank=2: must be in 0..1", 1),
        ("out=/proc/no", "/proc/no: ", 1),
        ("rank=0 rank=1", "rank=1: rank=0 is typed too: leave one out", 2),
        ("window_us=1_0,2_0", "window_us=1_0,2_0: must be two numbers A,B with 0 <= A < B", 2),
    ],
)
def test_a_wrong_word_is_one_sentence(folder, capsys, word, sentence, expected):
    expect_sentence(sentence, expected, run(capsys, folder, *word.split()))


def test_a_full_disk_is_one_sentence_and_leaves_no_folder(folder, capsys, mounted):
    disk = mounted("16k")
    filler = disk / "filler"
    filler.write_bytes(bytes(16384))

    code, _, err = run(capsys, folder, f"out={disk / 'new'}")

    assert code == 1
    assert err == [f"{disk / 'new'}: No space left on device: name another folder with out="]
    assert list(disk.iterdir()) == [filler]


def test_a_trace_that_no_viewer_takes_is_not_written(folder, capsys, monkeypatch):
    monkeypatch.setattr(timeline, "_MAX_JSON_BYTES", 2000)

    code, out, err = run(capsys, folder)

    assert (code, out) == (1, [])
    assert "and viewers take 0: type rank=0, or window_us=0,10" in err[0]
    assert not (folder / "timeline.json").exists()


def test_without_matplotlib_there_is_still_a_trace(folder, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)

    code, out, err = run(capsys, folder)

    assert code == 0
    assert len(out) == 1
    assert err[0].startswith("no picture: ")
    assert err[0].endswith("pip install 'tilepipe[plot]'")
    assert json.loads((folder / "timeline.json").read_text())["displayTimeUnit"] == "ns"


def test_a_point_that_is_not_ok_keeps_no_timeline(tmp_path):
    outcome = recorded(status=Status.incorrect, reason="an output is wrong")

    folder = store(tmp_path, outcome)

    assert not (folder / "timeline.parquet").exists()
