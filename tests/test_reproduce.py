"""`python -m tilepipe.reproduce` runs every experiment once, and says what it left out."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tilepipe import reproduce
from tilepipe.config import detect
from tilepipe.config.checks import check_config
from tilepipe.config.choices import Operation
from tilepipe.config.register import CONF_DIR, register
from tilepipe.config.schemas import config_from_dict
from tilepipe.reproduce import experiments, main

ROOT = Path(__file__).resolve().parents[1]
DOC = (ROOT / "docs" / "reproducing.md").read_text(encoding="utf-8")
NAMES = {path.stem for path in (CONF_DIR / "experiment").glob("*.yaml")}
HARDWARE = {path.stem for path in (CONF_DIR / "hardware").glob("*.yaml")}


def test_every_experiment_belongs_to_one_kernel_and_runs_once():
    found = experiments([])

    assert sorted(found) == sorted(NAMES)
    by_kernel = [experiments([operation.name]) for operation in Operation]
    assert [name for names in by_kernel for name in names] == found


def test_words_choose_experiments_in_their_order():
    found = experiments(["gemm_combine", "grouped_gemm"])

    assert found == ["gemm_combine", "gemm_combine_paced", "grouped_gemm"]


def test_an_experiment_with_a_kernel_for_each_kind_of_hardware_counts_as_that_of_the_hardware():
    assert "imbalance" in experiments(["dispatch"], hardware="h200_x1")
    assert "imbalance" not in experiments(["dispatch"], hardware="cpu")
    assert "imbalance" in experiments(["dispatch_gemm"], hardware="cpu")


def test_an_unknown_word_is_refused_with_the_ones_there_are(capsys):
    assert main(["comm"]) == 2
    assert capsys.readouterr().err == (
        "comm: no kernel option: choose of dispatch, combine, grouped_gemm, dispatch_gemm, "
        "gemm_combine, moe_layer; type none for all\n"
    )


@pytest.fixture
def ran(monkeypatch):
    """Commands that would have been run, each with the exit code of `codes`, 0 past their end."""
    commands, codes = [], []

    def wait_for(command):
        commands.append(command[1:])
        return codes.pop(0) if codes else 0

    monkeypatch.setattr(reproduce, "_wait_for", wait_for)
    return commands, codes


def test_overrides_reach_every_run(ran, tmp_path):
    commands, _ = ran
    words = ["measure=quick", f"results_dir={tmp_path}"]

    assert main(["dispatch", *words]) == 0
    assert commands == [
        ["-m", "tilepipe.run", f"+experiment={name}", *words] for name in experiments(["dispatch"])
    ]


def test_a_failed_run_keeps_no_other_from_running_and_is_told(ran, tmp_path, capsys):
    commands, codes = ran
    codes += [0, 1]

    assert main(["dispatch", f"results_dir={tmp_path}"]) == 1
    assert len(commands) == len(experiments(["dispatch"]))
    assert "ended with code 1; see above" in capsys.readouterr().out


def test_an_interrupted_run_ends_the_list(ran, tmp_path, capsys):
    commands, codes = ran
    codes += [0, 130]

    assert main([f"results_dir={tmp_path}"]) == 130
    assert len(commands) == 2
    left = len(NAMES) - 2
    assert f"stopped: {left} experiments did not run; type the same again" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(("option", "num_needs"), [("cpu", 2), ("h200_x1", 1), ("h200_x8", 0)])
def test_the_last_lines_name_the_hardware_that_the_rest_needs(
    monkeypatch, ran, tmp_path, capsys, option, num_needs
):
    monkeypatch.setattr(detect, "hardware_option", lambda: option)

    main(["grouped_gemm", f"results_dir={tmp_path}"])

    out = capsys.readouterr().out
    assert f"reproduced on {option}, points ok of points:" in out
    named = re.findall(r"hardware=([\w, ]+)\)", out)
    assert len(named) == num_needs
    assert {name for names in named for name in names.split(", ")} <= HARDWARE


def test_points_that_ran_and_points_that_lack_hardware_are_counted_with_their_reasons(tmp_path):
    words = ["workload=tiny", "measure=quick", f"results_dir={tmp_path}"]
    command = [sys.executable, "-m", "tilepipe.reproduce", "grouped_gemm", *words]

    here = subprocess.run([*command, "hardware=cpu"], capture_output=True, text=True, check=False)
    # Never there: no kernel of this version, and no machine with eight of them.
    absent = subprocess.run(
        [*command, "hardware=b200_x8"], capture_output=True, text=True, check=False
    )

    assert (here.returncode, absent.returncode) == (0, 0), here.stderr + absent.stderr
    assert re.search(r"^  grouped_gemm +4 of 4$", here.stdout, re.MULTILINE)
    assert re.search(
        r"^  grouped_gemm +0 of \d+\n    left out: .*hardware=b200_x8", absent.stdout, re.MULTILINE
    )


def test_targets_of_the_makefile_type_what_these_commands_take():
    recipes = re.findall(
        r"^([a-z-]+):.*## .+\n\t\$\(BIN\)/python -m (tilepipe\.\w+)(.*)$",
        (ROOT / "Makefile").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    typed = {target: (module, words.split()) for target, module, words in recipes}

    assert typed["repro"] == ("tilepipe.reproduce", [])
    assert typed["report"] == ("tilepipe.report", ["outputs"])
    chosen = [words for module, words in typed.values() if module == "tilepipe.reproduce"]
    parts = [experiments(words) for words in chosen if words]
    assert sorted(name for names in parts for name in names) == sorted(NAMES)
    runs = [words for module, words in typed.values() if module == "tilepipe.run"]
    assert {word.removeprefix("+experiment=") for words in runs for word in words} <= NAMES


def test_the_makefile_has_at_most_fifteen_targets_each_with_a_word_of_help():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")

    targets = re.findall(r"^([a-z-]+):", text, re.MULTILINE)
    helped = re.findall(r"^([a-z-]+):.*## ", text, re.MULTILINE)
    phony = " ".join(re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)).split()
    assert targets == helped
    assert sorted(targets) == sorted(phony)
    assert len(targets) <= 15


FLAGS = {
    "--token-sweep": "workload.num_tokens",
    "--dispatch-ctas": "kernel.num_comm_ctas",
    "--comm-sms": "kernel.num_comm_ctas",
    "--comm-impl": "kernel.copy",
    "--copy": "kernel.copy",
    "--experts": "workload.num_experts",
}


def originals():
    """Flags of each original command line of the doc, and the words that replace it."""
    rows = re.findall(
        r"^\| `torchrun (.+)` \| `python -m tilepipe\.run (.+)` \|$", DOC, re.MULTILINE
    )
    for original, here in rows:
        words = original.split()
        flags = dict(zip(words, [*words[1:], ""], strict=True))
        yield {flag: value for flag, value in flags.items() if flag[0] == "-"}, here.split()


def test_what_replaces_an_original_command_line_sweeps_what_that_one_swept():
    found = list(originals())

    assert len(found) == 4
    register()
    for flags, words in found:
        words = [*words, "hardware=h200_x8"]
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            cfg = compose("config", overrides=words, return_hydra_config=True)
        for flag, key in FLAGS.items():
            if flag in flags:
                swept = OmegaConf.select(cfg, "hydra.sweeper.params").get(key)
                values = str(swept or OmegaConf.select(cfg, key)).split(",")
                assert set(flags[flag].split(",")) <= {v.removeprefix("Copy.") for v in values}
        assert cfg.launch.num_ranks == int(flags["--nproc-per-node"])
        assert (cfg.workload.hidden, cfg.workload.num_topk) == (7168, 8)
        if "--gemm-n" in flags:
            assert 2 * cfg.workload.intermediate == int(flags["--gemm-n"])
        # What would be run is not refused, whichever count of the sweep it is.
        del cfg.hydra
        check_config(config_from_dict(OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)))


def test_every_key_of_the_doc_is_one_that_can_be_typed():
    typed = re.findall(r"`((?:kernel|workload|measure|launch)\.\w+)", DOC)

    register()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        cfg = compose("config", overrides=["hardware=h200_x8", "kernel=dispatch_gemm"])
    assert {
        key for key in typed if OmegaConf.select(cfg, key, default=KeyError) is KeyError
    } == set()


def test_targets_of_the_doc_are_those_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")

    rows = re.findall(r"^\| `make ([a-z-]+)` \| `python -m (.+?)` \|", DOC, re.MULTILINE)
    assert len(rows) == 7
    for target, words in rows:
        assert re.search(
            rf"^{target}:.*\n\t\$\(BIN\)/python -m {re.escape(words)}$", makefile, re.MULTILINE
        )


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_to_this_program_alone_reaches_the_run(name):
    program = f"import os, signal, time\nos.kill(os.getppid(), signal.{name})\ntime.sleep(20)\n"

    code = reproduce._wait_for([sys.executable, "-c", program])

    assert code == 128 + getattr(signal, name)
