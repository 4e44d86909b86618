"""A store of made-up points, and one report in which every kind of figure is drawn."""

import pytest

from tests.report.made_up import Store, store_everything
from tilepipe.report.__main__ import main
from tilepipe.report.content import report_of
from tilepipe.report.points import find_points


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "outputs")


@pytest.fixture(scope="session")
def everything(tmp_path_factory):
    """Folder of points of both executors; every kind of figure has data in it."""
    root = tmp_path_factory.mktemp("everything") / "outputs"
    store_everything(Store(root))
    return root


@pytest.fixture(scope="session")
def full_report(everything):
    return report_of(find_points(everything), title="TilePipe report: outputs")


@pytest.fixture(scope="session")
def written(everything, tmp_path_factory):
    """Folder into which the report of everything was written."""
    out = tmp_path_factory.mktemp("written")
    assert main([str(everything), f"out={out}"]) == 0
    return out
