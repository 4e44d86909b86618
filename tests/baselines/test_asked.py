"""What a point may ask for beside our kernels, and what it is told."""

import json

import pyarrow.parquet as pq
import pytest

from tests.launch.points import compose_point
from tilepipe import validate
from tilepipe.baselines import asked
from tilepipe.baselines.asked import left_out, torch_contender
from tilepipe.config.choices import Baseline, Operation
from tilepipe.config.schemas import Measure
from tilepipe.launch.driver import run_points
from tilepipe.launch.preflight import refusal
from tilepipe.results.schema import CONTENDERS

TINY = ("workload=tiny", "measure=quick", "launch.num_ranks=2", "kernel=dispatch")


def test_every_contender_of_torch_has_its_meaning():
    found = {torch_contender(operation) for operation in Operation}

    assert found - {None} <= set(CONTENDERS)


def test_a_package_that_is_missing_is_told_with_the_way_to_it(monkeypatch):
    monkeypatch.setattr(asked, "find_spec", lambda name: None)

    assert left_out(["torch", "deepep"], "dispatch", executor="host") == (
        "baseline deepep left out: the package deep_ep is not installed; build it from "
        "https://github.com/deepseek-ai/DeepEP on a host with NVLink GPUs, or drop deepep from "
        "measure.baselines",
    )


def test_a_package_that_is_there_is_told_to_have_no_contender(monkeypatch):
    monkeypatch.setattr(asked, "find_spec", lambda name: object())

    (sentence,) = left_out(["deepep"], "dispatch", executor="cuda")

    assert "deep_ep is installed, but this version of TilePipe has no contender" in sentence


def test_torch_runs_beside_whatever_moves_rows_and_is_left_out_elsewhere():
    for operation in ("dispatch", "combine", "dispatch_gemm", "gemm_combine"):
        assert left_out(["torch"], operation, executor="cuda") == ()
    assert left_out(["torch"], "grouped_gemm", executor="cuda") == (
        "baseline torch left out: on executor cuda this version has none for grouped_gemm; drop "
        "torch from measure.baselines",
    )


def test_a_baseline_is_named_once():
    with pytest.raises(ValueError, match=r"^measure\.baselines=\[torch,torch\]: must name each"):
        Measure(num_warmups=0, num_iters=1, baselines=[Baseline.torch] * 2)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("kernel=grouped_gemm",),
            "measure.baselines=[torch]: grouped_gemm moves no rows and has contenders of its own; "
            "type measure.baselines=[]",
        ),
        (
            ("hardware=h200_x1", "measure.regime=chained", "measure.l2=warm"),
            "measure.baselines=[torch]: torch waits for the device in each launch; type "
            "measure.regime=isolated, or type measure.baselines=[]",
        ),
        (
            ("hardware=h200_x1", "launch.fabric=nvshmem", "launch.num_ranks=2"),
            "measure.baselines=[torch]: NCCL takes one rank a GPU, hardware.num_gpus=1; type "
            "measure.baselines=[]",
        ),
        (("hardware=h200_x1", "launch.num_ranks=2"), ""),
        (("hardware=h200_x8",), ""),
    ],
)
def test_a_point_that_torch_cannot_run_beside_is_refused(words, sentence):
    point = compose_point("kernel=dispatch", "measure.baselines=[torch]", *words)

    assert refusal(point) == sentence


def test_without_a_word_nothing_runs_beside_and_the_setting_makes_another_point():
    alone = compose_point(*TINY)
    beside = compose_point(*TINY, "measure.baselines=[torch]")

    assert alone.config["measure"]["baselines"] == []
    assert alone.config_id != beside.config_id


def test_a_sweep_times_torch_and_says_in_one_sentence_what_it_left_out(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(asked, "find_spec", lambda name: None)
    points = [
        compose_point(*TINY, "measure.baselines=[torch,deepep]", f"workload.num_tokens={count}")
        for count in (5, 6)
    ]

    code = run_points(points, results_dir=tmp_path)

    assert code == 0
    assert validate.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("baseline deepep left out: the package deep_ep is not installed") == 1
    table = pq.read_table(tmp_path / "tiny" / "summary.parquet").to_pylist()
    assert {row["contender"] for row in table} == {"dispatch", "torch_dispatch"}
    assert all(row["logical_gbps"] > 0 for row in table)
    (sentence,) = {row["left_out"] for row in table}
    documents = [json.loads(path.read_text()) for path in tmp_path.glob("tiny/*/point.json")]
    assert [document["left_out"] for document in documents] == [[sentence]] * 2
