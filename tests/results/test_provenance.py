"""Where a number comes from: facts of the checkout, the machine and the environment."""

import json
import subprocess
import sys
from importlib.metadata import version

import pytest

from tilepipe.results.provenance import environment, git_state, gpu_facts, host_facts, provenance


@pytest.fixture
def checkout(tmp_path):
    def git(*words):
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "tilepipe").mkdir()
    (tmp_path / "tilepipe" / "a.py").write_text("a = 1\n")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    return tmp_path, git


def test_a_clean_checkout_gives_its_commit(checkout):
    root, git = checkout

    assert git_state(root) == {
        "commit": git("rev-parse", "HEAD"),
        "dirty": False,
        "diff_hash": None,
    }


def test_the_diff_hash_tells_changes_apart(checkout):
    root, _ = checkout
    source, untracked = root / "tilepipe" / "a.py", root / "tilepipe" / "b.py"

    hashes = []
    for text, new in (("a = 2\n", None), ("a = 3\n", None), ("a = 3\n", "b"), ("a = 3\n", "c")):
        source.write_text(text)
        if new is not None:
            untracked.write_text(new)
        state = git_state(root)
        assert state["dirty"] is True
        hashes.append(state["diff_hash"])

    assert len(set(hashes)) == 4
    assert git_state(root)["diff_hash"] == hashes[-1]


def test_a_new_file_that_is_no_source_leaves_a_checkout_clean(checkout):
    root, _ = checkout
    clean = git_state(root)
    (root / "trace.jsonl").write_text("[]")

    assert git_state(root) == clean
    (root / "conf").mkdir()
    (root / "conf" / "mine.yaml").write_text("")
    assert git_state(root)["dirty"] is True


def test_a_checkout_without_a_commit_is_dirty(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "a").write_text("")

    state = git_state(tmp_path)

    assert (state["commit"], state["dirty"]) == (None, True)


def test_a_copy_inside_somebody_elses_checkout_has_no_commit(checkout):
    root, _ = checkout

    assert git_state(root / "tilepipe") is None


def test_without_git_there_is_no_commit_and_no_error(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "")

    assert git_state(checkout[0]) is None


def test_only_the_environment_on_the_list_is_kept():
    variables = {
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "2",
        "NVSHMEM_DEBUG": "WARN",
        "CUDA_VISIBLE_DEVICES": "0",
        "API_TOKEN": "secret",
        "MY_CUDA_TOKEN": "secret",
    }

    assert list(environment(variables).items()) == [
        ("CUDA_VISIBLE_DEVICES", "0"),
        ("NVSHMEM_DEBUG", "WARN"),
        ("OMP_NUM_THREADS", "2"),
        ("OPENBLAS_NUM_THREADS", "1"),
    ]


def test_provenance_is_plain_json_and_names_versions():
    facts = provenance(["python", "-m", "tilepipe.run"])

    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert facts["packages"]["numpy"] == version("numpy")
    assert facts["command_line"] == ["python", "-m", "tilepipe.run"]
    assert facts["collected_utc"].endswith("+00:00")


def test_host_facts_are_those_of_this_machine():
    facts = host_facts()

    assert facts["num_cores"] >= facts["num_usable_cores"] >= 1
    assert facts["memory_bytes"] > 2**28
    assert facts["cpu_model"]


def test_gpu_facts_are_null_or_name_every_gpu():
    facts = gpu_facts()

    assert facts is None or all(gpu["name"] and gpu["uuid"] for gpu in facts["gpus"])


def test_results_import_neither_torch_nor_hydra():
    code = (
        "import sys, tilepipe.validate, tilepipe.results.store, tilepipe.results.provenance;"
        "print(sorted({'torch', 'hydra', 'omegaconf', 'cutlass'} & set(sys.modules)))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
