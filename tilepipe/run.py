"""Hydra entry: collect points, hand them to the driver, return its exit code.

Knows nothing of torch, kernels or how a point runs.

    python -m tilepipe.run +experiment=dispatch_gemm
"""

import io
import os
import sys
from contextlib import nullcontext, redirect_stderr
from functools import partial
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig

from tilepipe.config.mistyped import mistyped, unknown_key
from tilepipe.config.register import CONF_DIR, Root, register
from tilepipe.config.words import refused_word
from tilepipe.launch.collect import (
    announcement_of,
    own_experiment_fault,
    point_from,
    several_experiments,
)
from tilepipe.launch.typed import always_a_sweep
from tilepipe.records import Point
from tilepipe.stopping import leave, temporary_folder
from tilepipe.streams import errors_borne, heard_out

__all__ = ["main"]

_EXIT_NOT_RUN = 2
# More than the whole configuration takes as YAML.
_SCRATCH_BYTES = 1 << 16


def main() -> int:
    """Compose what was typed and run it; what cannot be composed is one sentence and code 2.

    Until the driver listens, a signal that asks this program to end does so at once.
    """
    with errors_borne():
        return _main()


def _main() -> int:
    points: list[Point] = []
    faults: list[str] = []

    def collect() -> int:
        found, fault = _collect()
        points.extend(found)
        faults.extend([fault] if fault else [])
        return 0

    code = heard_out(collect)  # Hydra may be asked to show something: --cfg, --info, --help
    if faults:
        print(*faults, file=sys.stderr)
        return _EXIT_NOT_RUN
    if code or not points:
        return code
    results_dir = Path(points[0].config["results_dir"])
    # Imported when there is something to run: the driver needs Parquet, which --cfg does not.
    from tilepipe.launch.driver import run_points

    if refused := several_experiments(points, _config_dirs(points[0])):
        print(refused, file=sys.stderr)
        return _EXIT_NOT_RUN
    announcement = announcement_of(points)
    run = partial(run_points, points, results_dir=results_dir, announcement=announcement)
    return heard_out(run) if points[0].config["dry_run"] else run()


def _config_dirs(point: Point) -> list[Path]:
    """Where options come from: the user's own folder first."""
    typed = [Path(word) for word in point.overrides[1:2] if point.overrides[0] == "--config-dir"]
    return [*typed, CONF_DIR]


def _collect() -> tuple[list[Point], str]:
    """Points of the command line in Hydra's order, or what is wrong with it, in a sentence.

    Neither where Hydra was asked to show something.
    """
    points: list[Point] = []

    def task(cfg: DictConfig) -> None:
        points.append(point_from(cfg, HydraConfig.get()))

    said = io.StringIO()
    shows_all = bool(os.environ.get("HYDRA_FULL_ERROR"))  # asks Hydra for its own account
    try:
        with (
            temporary_folder("tilepipe-") as scratch,
            always_a_sweep() as typed,
            nullcontext() if shows_all else redirect_stderr(said),
        ):
            register(scratch)
            _try_out(scratch)
            if refused := typed.fault or refused_word(typed.overrides):
                return [], refused
            hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")(task)()
    except SystemExit as ended:
        if shows_all or ended.code != 1:
            sys.stderr.write(said.getvalue())
            raise
        fault = own_experiment_fault(sys.argv) or mistyped(said.getvalue(), sys.argv[1:], root=Root)
        return [], fault
    except HydraException as error:  # what it was asked to show cannot be composed
        if shows_all:
            raise
        told = "\n".join(str(part) for part in (error, error.__cause__) if part)
        return [], mistyped(told, sys.argv[1:], root=Root)
    except OSError as error:  # the scratch folder's: what Hydra raises it tells and ends
        cause = error.strerror or str(error)
        return [], f"TMPDIR: {cause}: set it to a folder that can be written and has some room"
    sys.stderr.write(said.getvalue())
    if typed.sweeps and not points:
        return [], typed.nothing_to_run()
    unknown = (unknown_key(point.config, typed.overrides, root=Root) for point in points)
    return points, next(filter(None, unknown), "")


def _try_out(scratch: Path) -> None:
    """Raise OSError where Hydra could not write what it insists on."""
    probe = scratch / "probe"
    probe.write_bytes(bytes(_SCRATCH_BYTES))
    probe.unlink()


if __name__ == "__main__":
    leave(main())
