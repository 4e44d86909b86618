"""Benchmarks run on GPUs only: what they use of the package is there nevertheless."""

import importlib
import pkgutil

import pytest

import benchmarks

pytest.importorskip("torch")
pytest.importorskip("cutlass")


NAMES = [found.name for found in pkgutil.iter_modules(benchmarks.__path__)]


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_finds_all_that_it_uses(name):
    importlib.import_module(f"benchmarks.{name}")
