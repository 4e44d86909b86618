"""What was typed, as Hydra is to see it, and what Hydra would not say of it in a sentence.

Knows nothing of points and of keys.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hydra._internal.utils import get_args_parser

__all__ = ["Typed", "always_a_sweep"]

# Flags that each say what is to be done with the configuration.
_FLAGS = ("run", "multirun", "cfg", "info", "shell_completion")


@dataclass(frozen=True, kw_only=True)
class Typed:
    """A command line."""

    overrides: list[str]
    sweeps: bool  # points are wanted; False: Hydra is asked to show something, or to run once
    fault: str  # of flags that do not go together; empty: none

    def nothing_to_run(self) -> str:
        """Why a sweep has no points, in a sentence."""
        functions = ("range(", "glob(", "choice(")
        word = next((w for w in self.overrides if any(f in w for f in functions)), "the sweep")
        key, _, value = word.partition("=")
        what = "no option matches" if "glob(" in value else "no value is left"
        return f"{word}: {what}, so there is nothing to run; type {key if value else 'KEY'}=a,b"


@contextmanager
def always_a_sweep() -> Iterator[Typed]:
    """Type --multirun for the user unless Hydra is asked to show something.

    Left to itself Hydra composes once to learn whether an experiment sweeps, swallows what goes
    wrong there, and answers a mistyped key beside a comma list with "Ambiguous value".
    """
    typed = sys.argv
    args = get_args_parser().parse_args()
    shown = (args.help, args.hydra_help, args.cfg, args.info, args.shell_completion)
    sweeps = not any(shown) and not args.run
    if sweeps and not args.multirun:
        sys.argv = [*typed, "--multirun"]
    chosen = [f"--{flag.replace('_', '-')}" for flag in _FLAGS if getattr(args, flag)]
    fault = ""
    if len(chosen) > 1:
        fault = f"{' '.join(chosen)}: one of them at a time; leave {' or '.join(chosen[1:])} out"
    try:
        yield Typed(overrides=args.overrides, sweeps=sweeps, fault=fault)
    finally:
        sys.argv = typed
