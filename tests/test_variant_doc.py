"""docs/adding_a_kernel_variant.md does what it says: typed as it stands into a copy of the sources.

Left out: what needs a GPU, what compiles kernels, the conformance test, which takes every member of
Order by itself, and composing the order alone, which the sweep does too.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parents[1]
DOC = (ROOT / "docs" / "adding_a_kernel_variant.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"```python\n# (\S+), (above|in place of) `([^\n]+)`\n(.*?)```", re.DOTALL)


def typed_into(root):
    """Every block of code where the doc says that it goes."""
    blocks = BLOCK.findall(DOC)
    assert len(blocks) == DOC.count("```python")
    for name, how, line, code in blocks:
        lines = (root / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (place,) = [n for n, text in enumerate(lines) if text.strip().startswith(line)]
        indent = re.match(" *", lines[place])[0]
        block = textwrap.indent(code, indent) + ("" if indent else "\n\n")
        lines[place : place + (how == "in place of")] = [block]
        (root / name).write_text("".join(lines), encoding="utf-8")
    schema = root / "tilepipe" / "results" / "schema.py"
    text = schema.read_text(encoding="utf-8")
    raised, count = re.subn(
        r"(?m)^SCHEMA_VERSION = (\d+)$", lambda m: f"SCHEMA_VERSION = {int(m[1]) + 1}", text
    )
    assert count == 1
    schema.write_text(raised, encoding="utf-8")


@pytest.fixture(scope="module")
def variant(tmp_path_factory):
    """A copy of the sources with the doc's variants."""
    root = tmp_path_factory.mktemp("variant")
    for name in ("tilepipe", "conf", "tests"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    typed_into(root)
    return root


def typed(part):
    """The one command of the doc that begins so."""
    (command,) = re.findall(rf"(?m)^python -m {re.escape(part)}.*$", DOC)
    return shlex.split(command)[1:]


def run_in(root, words):
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_new_copy_composes_with_the_keys_that_it_takes(variant):
    command = typed("tilepipe.run kernel=dispatch hardware=h200_x1 kernel.copy=cached")

    shown = run_in(variant, [*command, "kernel.num_loads=7"])

    assert "1 point, nothing is run" in shown


def test_the_tests_of_orders_hold_for_the_new_one(variant):
    command = typed("pytest -q tests/schedule/test_orders.py")

    # Those that name the order or take every one.
    words = ["-k", "by_peer or returns or permutation", "-n", "0", "-p", "no:cacheprovider"]
    shown = run_in(variant, [*command, *words])

    assert re.search(r"^3 passed", shown, re.MULTILINE)


def test_a_sweep_of_the_new_order_passes_the_gate(variant, tmp_path):
    command = typed("tilepipe.run kernel=dispatch_gemm,gemm_combine kernel.order")
    words = [word for word in command if not word.startswith("results_dir=")]

    run_in(variant, [*words, "hardware=cpu", "launch.num_ranks=2", f"results_dir={tmp_path}"])

    paths = tmp_path.glob("*/summary.parquet")
    rows = [row for path in paths for row in pq.read_table(path).to_pylist()]
    assert {(row["operation"], row["order"], row["status"]) for row in rows} == {
        (operation, order, "ok")
        for operation in ("dispatch_gemm", "gemm_combine")
        for order in ("edf", "by_peer")
    }
