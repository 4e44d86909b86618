"""What keeps a path that was typed from being read as a file.

Knows nothing of formats, nor of which key the path belongs to.
"""

from collections.abc import Sequence
from pathlib import Path
from stat import S_ISDIR, S_ISREG

__all__ = ["path_fault"]


def path_fault(path: str, *, key: str, suffixes: Sequence[str]) -> tuple[str, str] | None:
    """What is wrong with `path` and the next step, in words; None where it can be read.

    `suffixes` are of files that a folder is searched for. Opens nothing but regular files: a pipe
    would wait for a writer.
    """
    try:
        mode = Path(path).stat().st_mode if path else 0
        if not path or S_ISREG(mode):
            with open(path, "rb") as file:
                file.read(1)  # some say only then that they cannot be
                return None
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a zero byte
        return "no such file", f"type {key}=FILE"
    except OSError as error:
        return f"cannot be read ({error.strerror})", "type the path of a file that can"
    if S_ISDIR(mode):
        inside = sorted(file.name for file in Path(path).iterdir() if file.suffix in suffixes)
        named = f", such as {inside[0]}" if inside else ""
        return "is a folder", f"type the path of one file in it{named}"
    return "is a device or a pipe", "write it to a file, which is read twice"
