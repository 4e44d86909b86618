"""Names that GPU tests import are there, though nothing imports those tests where no GPU is."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OWN = ("tilepipe", "tests", "benchmarks")
FILES = sorted(
    path.relative_to(ROOT)
    for folder in ("tests/gpu", "tests/multi_gpu")
    for path in (ROOT / folder).glob("*.py")
)


def module_file(module):
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def names_of(path):
    """What a module's text defines or imports at its top, branches included; its submodules."""
    names = {found.stem for found in path.parent.glob("*.py")} if path.stem == "__init__" else set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@pytest.mark.parametrize("file", FILES, ids=str)
def test_what_a_gpu_test_imports_from_this_project_exists(file):
    missing = []
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] not in OWN:
            continue
        path = module_file(node.module)
        if not path.is_file():
            missing.append(node.module)
            continue
        folder = path.parent if path.stem == "__init__" else None
        for alias in node.names:
            is_package = folder is not None and (folder / alias.name).is_dir()
            if alias.name not in names_of(path) and not is_package:
                missing.append(f"{node.module}.{alias.name}")

    assert missing == []
