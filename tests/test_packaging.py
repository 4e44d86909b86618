"""The wheel carries conf/ and runs far from the checkout."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*command, cwd):
    """Output of a command; PYTHONPATH is dropped, since it would show the checkout."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=clean,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = (sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, ROOT)
    run(*build, cwd=folder)
    (built,) = folder.glob("tilepipe-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Python of a fresh environment with the wheel, and the libraries of this one behind it."""
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-c", ask, cwd=folder).strip())
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # A bare path in a .pth is searched after site-packages itself, and the .pth files found there,
    # an editable install of the checkout among them, are not read.
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def test_the_wheel_holds_every_yaml_once(wheel):
    expected = {
        f"tilepipe/conf/{path.relative_to(ROOT / 'conf').as_posix()}"
        for path in (ROOT / "conf").rglob("*.yaml")
    }

    names = zipfile.ZipFile(wheel).namelist()

    assert {name for name in names if name.endswith(".yaml")} == expected
    assert len(names) == len(set(names))
    assert not [name for name in names if name.startswith(("tests/", "conf/", "outputs/"))]


def test_the_installed_wheel_composes_from_another_folder(installed, tmp_path):
    where = "import tilepipe.config.register as r; print(r.__file__); print(r.CONF_DIR)"
    found = run(installed, "-c", where, cwd=tmp_path).split()
    words = ("--cfg", "job", "--resolve", "+experiment=dispatch_gemm", "hardware=cpu")
    shown = run(installed, "-m", "tilepipe.run", *words, cwd=tmp_path)

    site = installed.parents[1]
    assert [Path(path).is_relative_to(site) for path in found] == [True, True]
    assert "name: dispatch_gemm\noperation: dispatch_gemm\n" in shown
    assert "fabric: host\n" in shown
    assert list(tmp_path.iterdir()) == []
