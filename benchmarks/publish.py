"""Make a results folder fit to be committed: results stay, the machine's own names go.

    python -m benchmarks.publish results/h200_x1

Removes logs and locks, names of host and kernel, serial numbers of GPUs, and the folder from which
the program was typed; nothing that was measured changes.
"""

import json
import shutil
import sys
from pathlib import Path

from benchmarks.program import run


def main() -> int:
    folders = [Path(word) for word in sys.argv[1:]]
    if not folders or not all(folder.is_dir() for folder in folders):
        sys.stderr.write("usage: python -m benchmarks.publish RESULTS_DIR...\n")
        return 2
    for folder in folders:
        for path in sorted(folder.glob("*/*/point.json")):
            point = json.loads(path.read_text(encoding="utf-8"))
            facts = point["provenance"]
            facts["host"].update(hostname=None, kernel=None)
            for gpu in (facts["gpu"] or {}).get("gpus", ()):
                gpu["uuid"] = None
            words = facts["command_line"]
            if words:
                words[0] = Path(words[0]).name
            path.write_text(json.dumps(point, indent=2) + "\n", encoding="utf-8")
        for path in [*folder.glob("*/*/logs"), *folder.glob("*/logs")]:
            shutil.rmtree(path)
        for path in folder.rglob("*.lock"):
            path.unlink()
    return 0


if __name__ == "__main__":
    run(main)
