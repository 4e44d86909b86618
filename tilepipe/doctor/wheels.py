"""Do installed files still hold what their wheels recorded, and did two wheels write one file?

Knows nothing of what the wheels are for.

Wheels may claim one path with different contents: the CuTe DSL's libs-base and libs-cu13 did up to
4.5 (NVIDIA/cutlass issues 3170 and 3259), nvshmem4py-cu12 and -cu13 do. Installers write both, so
the result depends on their order, and uninstalling one takes files of the other away.
"""

import base64
import hashlib
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import Distribution
from pathlib import Path

__all__ = ["file_faults"]

_CHUNK_BYTES = 2**20


def file_faults(wheels: Sequence[Distribution]) -> list[str]:
    """A sentence for each way in which the files of these wheels are not as recorded."""
    recorded = {wheel.name: _recorded(wheel) for wheel in wheels}
    owners: dict[Path, dict[str, str]] = {}
    for name, files in sorted(recorded.items()):
        for path, digest in files.items():
            owners.setdefault(path, {})[name] = digest
    found = {path: _digest(path) for path in owners}
    contested = [path for path, claims in owners.items() if len(set(claims.values())) > 1]
    faults = _contested_faults(contested, owners, found)
    for name, files in sorted(recorded.items()):
        gone = [path for path in files if found[path] is None]
        changed = [
            path
            for path, digest in files.items()
            if found[path] not in (None, digest) and found[path] not in owners[path].values()
        ]
        faults += _counted(gone, f"of {name}", "gone")
        faults += _counted(changed, f"of {name}", "not what its wheel holds")
    return faults


def _contested_faults(
    contested: Sequence[Path],
    owners: dict[Path, dict[str, str]],
    found: dict[Path, str | None],
) -> list[str]:
    groups: dict[tuple[str, ...], list[Path]] = {}
    for path in contested:
        groups.setdefault(tuple(owners[path]), []).append(path)
    faults = []
    for names, paths in sorted(groups.items()):
        on_disk = Counter(
            name for path in paths for name in names if owners[path][name] == found[path]
        )
        won = ", ".join(f"{on_disk[name]} of {name}" for name in names)
        faults.append(
            f"{' and '.join(names)} both hold {_number(paths)} with different contents, "
            f"such as {paths[0].name}; on disk are {won}"
        )
    return faults


def _counted(paths: Sequence[Path], owner: str, state: str) -> list[str]:
    if not paths:
        return []
    verb = "is" if len(paths) == 1 else "are"
    return [f"{_number(paths)} {owner} {verb} {state}, such as {paths[0].name}"]


def _number(paths: Sequence[Path]) -> str:
    return f"{len(paths)} file{'' if len(paths) == 1 else 's'}"


def _recorded(wheel: Distribution) -> dict[Path, str]:
    """Path on disk -> digest, for the files that RECORD has one for: compiled Python has none."""
    return {
        Path(str(file.locate())): file.hash.value
        for file in wheel.files or ()
        if file.hash is not None and file.hash.mode == "sha256" and not _is_metadata(file.parts)
    }


def _is_metadata(parts: Sequence[str]) -> bool:
    """Installers rewrite scripts and their own notes."""
    return any(part.endswith(".dist-info") for part in parts) or parts[0] == ".."


def _digest(path: Path) -> str | None:
    """As RECORD spells it; None where there is no such file."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError:
        return None
    return base64.urlsafe_b64encode(digest.digest()).decode("ascii").rstrip("=")
