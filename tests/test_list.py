"""`python -m tilepipe.list` names every option and every column, from the files themselves."""

import os
import resource
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from tilepipe.config.keys import GROUPS as GROUPS_OF_KEYS
from tilepipe.config.register import CONF_DIR, Root
from tilepipe.list import main, options, read_option
from tilepipe.results.schema import BREAKDOWN, SAMPLES, SUMMARY, TIMELINE

GROUPS = {
    "experiments": "experiment",
    "kernels": "kernel",
    "workloads": "workload",
    "routings": "routing",
    "placements": "placement",
    "hardware": "hardware",
}


def listed(capsys, *words):
    """Lines on the screen."""
    assert main(words) == 0
    return capsys.readouterr().out.splitlines()


def names_in(lines):
    """First words of the lines that start an option: continuation lines are indented further."""
    return [line.split()[0] for line in lines if line[:2] == "  " and line[2:3].strip()]


@pytest.mark.parametrize(
    ("text", "sentence", "command"),
    [
        ("# One thing.\nkey: 1\n", "One thing.", None),
        ("# One thing. And more of it.\n", "One thing.", None),
        (
            "# A thing (card a/B-V0.1) of\n# two lines.\na:\n",
            "A thing (card a/B-V0.1) of two lines.",
            None,
        ),
        ("# @package _global_\n# Sweeps.\n#   python -m x\n#   y\n", "Sweeps.", "python -m x"),
        ("# Ends\nkey: 1\n# Not this.\n", "Ends", None),
        ("key: 1\n# Too late.\n", "(its file has no comment)", None),
        ("", "(its file has no comment)", None),
    ],
)
def test_the_first_sentence_and_the_command_of_the_leading_comment_are_read(
    text, sentence, command
):
    option = read_option("name", text.splitlines(keepends=True))

    assert (option.sentence, option.command) == (sentence, command)


@pytest.mark.parametrize("kind", GROUPS)
def test_every_option_file_is_listed_with_a_sentence(kind, capsys):
    folder = CONF_DIR / GROUPS[kind]
    files = {path.stem for path in folder.glob("*.yaml")}

    lines = listed(capsys, kind)

    assert set(names_in(lines)) == files | ({"auto"} if kind == "hardware" else set())
    assert all(option.sentence.endswith(".") for option in options(GROUPS[kind], None))


def test_an_experiment_is_a_line_and_its_exact_command_another(capsys):
    lines = listed(capsys, "experiments")

    place = next(i for i, line in enumerate(lines) if line.startswith("  dispatch_gemm_order "))
    head = (CONF_DIR / "experiment" / "dispatch_gemm_order.yaml").read_text().splitlines()
    assert lines[place].split(maxsplit=1)[1] == head[1].removeprefix("# ")
    assert lines[place + 1].strip() == head[2].removeprefix("#   ")
    assert lines[place + 1].strip() == "python -m tilepipe.run +experiment=dispatch_gemm_order"


def test_without_a_word_all_kinds_are_listed(capsys):
    lines = listed(capsys)

    for kind in GROUPS:
        for line in listed(capsys, kind):
            assert line in lines
    assert "  python -m tilepipe.list keys" in lines
    assert "  python -m tilepipe.list columns" in lines
    assert lines[-1] == "  python -m tilepipe.list routing FILE num_ranks=8"


def test_every_column_is_listed_with_unit_and_meaning(capsys):
    text = "\n".join(listed(capsys, "columns"))

    schemas = {"samples": SAMPLES, "breakdown": BREAKDOWN, "summary": SUMMARY, "timeline": TIMELINE}
    tables = dict(zip(schemas, text.split(".parquet\n")[1:], strict=True))
    for name, schema in schemas.items():
        rows = [line.split(maxsplit=1) for line in tables[name].splitlines() if line[:2] == "  "]
        want = [
            [field.name, field.metadata[b"unit"].decode(), field.metadata[b"meaning"].decode()]
            for field in schema
        ]
        found = [[key, *rest.removeprefix("[").split("]", 1)] for key, rest in rows]
        assert [[key, unit, told.strip()] for key, unit, told in found] == want


def test_every_key_is_listed_with_what_it_takes_and_means(capsys):
    lines = [line.split(maxsplit=1) for line in listed(capsys, "keys")]

    told = dict(lines)
    want = {field.name for field in fields(Root)} - GROUPS_OF_KEYS.keys()
    for group, by_option in GROUPS_OF_KEYS.items():
        for schema in by_option.values():
            want |= {f"{group}.{field.name}" for field in fields(schema)}
    assert set(told) == want
    assert len(lines) == len(want)
    for name, text in told.items():
        allowed, _, meaning = text.partition(": ")
        assert allowed, name
        assert meaning.strip(), name


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("kernel.walk", "one of expert, chunk or null (kernel=gemm_combine, moe_layer): chunk: "),
        ("kernel.order", "one of edf, edf_list, expert, token, random (kernel=dispatch, "),
        ("workload.num_tokens", "a whole number or null: per rank; a trace brings its own count"),
        ("measure.baselines", "a list in brackets, each one of torch, deepep: "),
        ("routing.law", "one of uniform, zipf, "),
        ("dry_run", "true or false: "),
    ],
)
def test_a_key_says_its_values_and_the_options_that_have_it(key, text, capsys):
    told = dict(line.split(maxsplit=1) for line in listed(capsys, "keys"))

    assert told[key].startswith(text)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_on_a_terminal_meanings_wrap_under_each_other_and_nothing_is_lost(
    columns, capsys, monkeypatch
):
    whole = listed(capsys, "columns")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))

    wrapped = listed(capsys, "columns")

    assert max(map(len, whole)) > 1000
    # Only a word that is longer than the room left to it sticks out.
    assert all(len(line) <= columns or len(line.split()) == 1 for line in wrapped)
    assert " ".join(wrapped).split() == " ".join(whole).split()
    names = [line.split()[0] for line in wrapped if line[:2] == "  " and line[2] != " "]
    assert len(names) == sum(line.startswith("  ") for line in whole)


@pytest.fixture
def own_dir(tmp_path):
    """A user's folder: an experiment with a command, one without, one whose name is taken."""
    folder = tmp_path / "my conf" / "experiment"
    (folder / "deep").mkdir(parents=True)
    command = "python -m tilepipe.run --config-dir=. +experiment=mine"
    (folder / "mine.yaml").write_text(f"# Mine alone.\n#   {command}\n")
    (folder / "deep" / "two.yaml").write_text("# @package _global_\n# Two deep.\n")
    (folder / "dispatch.yaml").write_text("# Another dispatch.\n")
    return folder.parent


def test_options_in_a_folder_of_the_users_are_found(own_dir, capsys):
    lines = listed(capsys, "experiments", "--config-dir", str(own_dir))

    ours = listed(capsys, "experiments")
    words = [" ".join(line.split()) for line in lines]
    assert [" ".join(line.split()) for line in ours] == words[: len(ours)]
    assert words[len(ours) :] == [
        "deep/two Two deep.",
        f"python -m tilepipe.run --config-dir '{own_dir}' +experiment=deep/two",
        "dispatch Never taken: TilePipe has experiment=dispatch itself; "
        "give the file another name.",
        "mine Mine alone.",
        "python -m tilepipe.run --config-dir=. +experiment=mine",
    ]


def test_hydra_takes_our_option_where_a_users_file_has_its_name(own_dir):
    # The sentence "Never taken" rests on the order of Hydra's search path.
    command = [sys.executable, "-m", "tilepipe.run", "--config-dir", str(own_dir)]

    done = subprocess.run(
        [*command, "+experiment=dispatch", "hardware=cpu", "--cfg", "job", "--package", "name"],
        cwd=CONF_DIR.parent,
        capture_output=True,
        text=True,
    )

    # Of the user's file, which sets no name, the default kernel's would have come.
    assert done.stdout == "dispatch\n", done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["recipes"],
            "kind=recipes: must be one of experiments, kernels, workloads, routings, placements, "
            "hardware, keys, columns, routing; type none to list all",
        ),
        (
            ["--config-dir", "nowhere"],
            "--config-dir=nowhere: no such folder: name one that holds option files",
        ),
        (
            ["kernels", "--config-dir", "."],
            "--config-dir=.: holds none of the folders experiment, kernel, workload, routing, "
            "placement, hardware: put option files into one of them",
        ),
    ],
)
def test_a_wrong_word_is_one_sentence_and_code_2(words, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    assert main(words) == 2

    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"{sentence}\n")


def test_a_recording_is_listed_with_its_imbalance(tmp_path, capsys):
    path = tmp_path / "trace.npy"
    np.save(path, [[0, 1], [0, 2], [0, 3], [2, 3]])

    lines = listed(capsys, "routing", str(path), "num_ranks=2", "num_experts=4")

    assert lines[:2] == [str(path), "  format    NumPy array"]
    assert lines[7].split()[:7] == ["-", "4", "2", "no", "4", "1.50", "1.00"]


@pytest.mark.parametrize("counts", [[[7, 7, 1]], [5, 6, 7]])
def test_an_array_that_may_hold_counts_is_asked_about(counts, tmp_path, capsys):
    path = tmp_path / "load.npy"
    np.save(path, counts)

    assert main(["routing", str(path)]) == 2
    assert capsys.readouterr().err.endswith(
        ", or, if it holds counts of experts, type law=counts\n"
    )
    assert main(["routing", str(path), "law=counts"]) == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "kind=routing: needs a file; type python -m tilepipe.list routing FILE"),
        (["nowhere.npy"], "routing.path=nowhere.npy: no such file; type routing.path=FILE"),
        (
            ["f", "ranks=4"],
            "ranks=4: unknown word; type num_ranks, num_experts, layer, first_token, max_tokens, "
            "num_topk, num_layers with =N, or law=counts",
        ),
        (["f", "num_ranks=0"], "num_ranks=0: must be a whole number of 1 or more"),
        (["f", "layer=x"], "layer=x: must be a whole number of 0 or more"),
    ],
)
def test_a_wrong_word_about_a_recording_is_one_sentence(words, sentence, capsys):
    assert main(["routing", *words]) == 2

    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"{sentence}\n")


def test_other_kinds_take_no_more_words(capsys):
    assert main(["kernels", "layer=3"]) == 2

    told = "layer=3: only kind routing takes more words; leave it out\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("words", [[], ["columns"]])
def test_it_takes_less_than_half_a_second_and_no_torch(words, tmp_path):
    block = tmp_path / "torch"
    block.mkdir()
    (block / "__init__.py").write_text("raise ImportError('no torch here')")
    root = str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), root])}

    spent_s = []
    # Of a core: other tests run beside this one. The best of three: the first may compile bytecode.
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-m", "tilepipe.list", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    assert done.returncode == 0, done.stderr
    assert min(spent_s) < 0.5
