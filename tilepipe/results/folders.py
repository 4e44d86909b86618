"""What a folder that was named is, and what is said of one that will not do.

Knows nothing of what lies in the files.
"""

import os
from pathlib import Path

from tilepipe.results.check import POINT_FILES

__all__ = ["CUT_SHORT", "folder_fault", "is_point"]

CUT_SHORT = "a point under way, or cut short: run it again"


def folder_fault(folder: Path, wanted: str = "a results folder, as in outputs") -> str | None:
    """Why nothing can be read from a folder, in a sentence; None where it can be entered."""
    try:
        if not folder.exists():
            return f"{folder}: no such folder: name {wanted}"
        if not folder.is_dir():
            return f"{folder}: is a file: name the folder that holds it"
        with os.scandir(folder):
            return None
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        return f"{folder}: cannot be read: {cause}: name a folder that can"


def is_point(folder: Path) -> bool:
    """Whether it is a point's: known by what it holds, so that a cut-short one is seen too."""
    return any((folder / name).exists() for name in (*POINT_FILES, "logs"))
