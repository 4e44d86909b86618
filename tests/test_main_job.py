"""The program as a user types it: every operation, order, granularity and layout, and a trace.

Most of it in this process, which has imported the libraries once; as a process of its own there are
a good run, one whose reader leaves, and those of test_streams.py, test_bursts.py and others.
"""

import itertools
import json
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pyarrow.parquet as pq
import pytest

from tilepipe.config.choices import Granularity, HomeGranularity, Law, Layout, Operation, Order
from tilepipe.run import main

# What comes of every value with every operation: tests/experiments/test_conformance.py.
OUT_OR_HOME = [Operation.dispatch_gemm, Operation.combine]
HOME_TOO = [Operation.moe_layer, Operation.gemm_combine]
ALWAYS = ("hardware=cpu", "measure=quick")


@dataclass(frozen=True)
class Done:
    """What a command left."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch, tmp_path, capfd):
    """Run the program, its ranks included, on the words of a command line."""
    monkeypatch.chdir(tmp_path)

    def typed(*words):
        monkeypatch.setattr(sys, "argv", ["run.py", *ALWAYS, *words])
        code = main()
        return Done(code, *capfd.readouterr())

    return typed


def summary(cwd, name):
    return pq.read_table(cwd / "outputs" / name / "summary.parquet").to_pylist()


def axis(key, members):
    return f"{key}={','.join(member.name for member in members)}"


def values(rows, *columns):
    """What the columns of the points that ended ok hold, each combination once."""
    assert {(row["status"], row["reason"]) for row in rows} == {("ok", "")}
    return {tuple(row[column] for column in columns) for row in rows}


def names(*axes):
    return set(itertools.product(*([member.name for member in axis] for axis in axes)))


# Operations share one command: composing its points costs as much as running them.
def test_rows_go_out_and_home_over_every_layout_and_granularity(run, tmp_path):
    done = run(
        axis("kernel", OUT_OR_HOME),
        "workload=tiny",
        "launch.num_ranks=2",
        axis("kernel.layout", Layout),
        axis("kernel.granularity", Granularity),
        "name=moving",
    )

    assert done.returncode == 0, done.stderr
    found = values(summary(tmp_path, "moving"), "operation", "layout", "granularity")
    assert found == names(OUT_OR_HOME, Layout, Granularity)


def test_rows_go_out_and_home_in_every_order(run, tmp_path):
    done = run(
        axis("kernel", HOME_TOO),
        "workload=tiny",
        "launch.num_ranks=2",
        axis("kernel.order", Order),
        "name=moving",
    )

    assert done.returncode == 0, done.stderr
    assert values(summary(tmp_path, "moving"), "operation", "order") == names(HOME_TOO, Order)


@pytest.mark.parametrize(
    ("operations", "key", "members"),
    [
        ([Operation.grouped_gemm], "layout", Layout),
        ([Operation.combine, Operation.gemm_combine], "home_granularity", HomeGranularity),
    ],
)
def test_what_only_some_operations_have_takes_every_value(run, operations, key, members, tmp_path):
    done = run(
        axis("kernel", operations),
        "workload=tiny",
        "launch.num_ranks=2",
        axis(f"kernel.{key}", members),
        "name=some",
    )

    assert done.returncode == 0, done.stderr
    assert values(summary(tmp_path, "some"), "operation", key) == names(operations, members)


def test_every_law_meets_ranks(run, tmp_path):
    laws = [law.name for law in Law if law not in (Law.trace, Law.counts)]

    done = run(
        "kernel=gemm_combine",
        f"routing={','.join(laws)}",
        "workload=tiny",
        "workload.num_topk=2",
        "launch.num_ranks=4",
        "name=laws",
    )

    assert done.returncode == 0, done.stderr
    found = [row["law"] for row in summary(tmp_path, "laws") if row["contender"] == "fused"]
    assert sorted(found) == sorted(laws)


def write_trace(path, num_tokens, num_experts, num_topk):
    rng = np.random.default_rng(0)
    lines = [{"type": "meta", "top_k": num_topk}]
    ids = np.argsort(rng.random((num_tokens, num_experts)), axis=1)[:, :num_topk]
    lines += [
        {
            "type": "route",
            "layer": layer,
            "token_idx": token,
            "topk_ids": row,
            "topk_weights": [1 / num_topk] * num_topk,
        }
        for layer in (3, 5)
        for token, row in enumerate(ids.tolist())
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return np.bincount(ids.ravel(), minlength=num_experts)


@pytest.mark.parametrize("experiment", ["dispatch_gemm", "gemm_combine"])
def test_a_recorded_trace_is_one_point_with_all_its_tokens_and_its_imbalance(
    run, experiment, tmp_path
):
    loads = write_trace(tmp_path / "trace.jsonl", 203, 8, 2)

    done = run(
        f"+experiment={experiment}",
        "workload=tiny",
        "workload.num_experts=8",
        "workload.num_topk=2",
        "routing=trace",
        "routing.path=trace.jsonl",
        "routing.layer=5",
        "launch.num_ranks=4",
    )

    assert done.returncode == 0, done.stderr
    rows = summary(tmp_path, experiment)
    assert len({row["config_id"] for row in rows}) == 1
    assert {row["num_tokens_total"] for row in rows} == {203}
    assert rows[0]["expert_max_over_mean"] == pytest.approx(loads.max() / loads.mean())
    by_rank = loads.reshape(4, 2).sum(axis=1)
    assert rows[0]["rank_max_over_mean"] == pytest.approx(by_rank.max() / by_rank.mean())
    assert f"{rows[0]['expert_max_over_mean']:.3g}" in done.stdout


def test_a_typed_token_count_caps_a_trace(run, tmp_path):
    write_trace(tmp_path / "trace.jsonl", 203, 8, 2)

    done = run(
        "kernel=dispatch",
        "workload=tiny",
        "workload.num_experts=8",
        "workload.num_topk=2",
        "workload.num_tokens=5",
        "routing=trace",
        "routing.path=trace.jsonl",
        "routing.layer=3",
        "launch.num_ranks=3",
        "workload.num_experts=9",
    )

    assert done.returncode == 0, done.stderr
    assert {row["num_tokens_total"] for row in summary(tmp_path, "typed_dispatch")} == {15}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("routing=trace", "routing.path=trace.jsonl", "routing.layer=3"),
            "workload.num_topk=4: trace.jsonl was recorded with topk 2; type workload.num_topk=2",
        ),
        (("kernel.order=fifo",), "kernel.order=fifo: must be one of edf, edf_list, expert"),
        (("workload.toknes=3",), "workload.toknes=3: unknown key; workload has num_tokens"),
        (("kernel.tile_m=100",), "kernel.tile_m=100: must be a multiple of 16 in 16..1024"),
        (("results_dir=/proc/none",), "/proc/none: "),
        (("launch.time_limit_s=inf",), "launch.time_limit_s=inf: must be a finite number"),
        (("results_dir=one,two",), "results_dir=two: a sweep has one value, and one was typed too"),
    ],
)
def test_bad_input_leaves_one_clear_sentence_and_an_exit_code(run, words, sentence, tmp_path):
    write_trace(tmp_path / "trace.jsonl", 20, 8, 2)

    done = run("workload=tiny", "workload.num_topk=4", "launch.num_ranks=2", *words)

    assert done.returncode != 0
    assert sentence in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_good_run_says_nothing_on_stderr(tmp_path):
    words = ("kernel=dispatch", "workload=tiny", "launch.num_ranks=2")

    done = subprocess.run(
        [sys.executable, "-m", "tilepipe.run", *ALWAYS, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_numbers_that_no_table_holds_are_refused_and_the_other_points_run(run, tmp_path):
    wrong = [
        "workload.num_tokens=9223372036854775808",
        "kernel.capacity_factor=nan",
        "routing.seed=18446744073709551616",
    ]
    good = ["5", "null", "5"]

    done = run(
        "kernel=dispatch",
        "workload=tiny",
        "launch.num_ranks=2",
        *(f"{word},{value}" for word, value in zip(wrong, good, strict=True)),
    )

    rows = summary(tmp_path, "typed_dispatch")
    refused = [row["reason"] for row in rows if row["status"] == "refused"]
    assert done.returncode == 1
    assert [row["reason"] for row in rows if row["status"] == "ok"] == [""] * (len(rows) - 7)
    assert len(refused) == 7
    assert {reason.partition(": ")[0] for reason in refused} == set(wrong)


def test_a_reader_that_leaves_does_not_stop_the_sweep(tmp_path):
    command = (
        f"{sys.executable} -m tilepipe.run hardware=cpu measure=quick kernel=dispatch "
        "workload=tiny launch.num_ranks=2 kernel.order=edf,token,random | head -1"
    )

    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    assert len(summary(tmp_path, "typed_dispatch")) == 3
