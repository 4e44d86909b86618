"""Fixtures of the launcher's tests."""

from pathlib import Path

import pytest

from tests.launch.points import compose_point


@pytest.fixture
def point():
    return compose_point


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder
