"""Points whose ranks are processes of their own, and what became of them.

Imported by rank processes too. Knows nothing of how many GPUs there are.
"""

import json
from pathlib import Path

import pyarrow.parquet as pq

from tilepipe.kernels.group import DeviceGroup
from tilepipe.launch.worker import Job, Records, at_job_boundary, run_point

# Points of so many tokens are the ones that go wrong.
SPOILED_TOKENS = 33


def rank_1_fails_in_the_loop(job: Job) -> Records:
    """Runs the point of `job`; in that of SPOILED_TOKENS tokens rank 1 raises where the timed loop
    begins, while kernels of its peers wait for it."""

    def body(job: Job, rank: int) -> Records:
        if rank == 1 and job["config"]["workload"]["num_tokens"] == SPOILED_TOKENS:
            DeviceGroup.meet = _fail
        return run_point(job, rank)

    return at_job_boundary(job, body)


def _fail(group: DeviceGroup) -> None:
    raise IndexError("made up")


def told(folder: Path) -> dict[int, tuple[str, str]]:
    """Tokens of each point of a results folder -> its status and reason."""
    documents = [json.loads(path.read_text()) for path in folder.glob("*/*/point.json")]
    return {
        document["config"]["workload"]["num_tokens"]: (document["status"], document["reason"])
        for document in documents
    }


def faults_of(folder: Path, *, num_ranks: int) -> list[str]:
    """What is not as it must be in a results folder whose points shall all be ok."""
    faults = []
    for path in sorted(folder.glob("*/*/point.json")):
        document = json.loads(path.read_text())
        words = " ".join(document["overrides"])
        if document["status"] != "ok":
            faults.append(f"{words}: {document['status']}: {document['reason']}")
            continue
        samples = pq.read_table(path.with_name("samples.parquet")).to_pylist()
        taken = {
            rank: {row["iteration"] for row in samples if row["rank"] == rank}
            for rank in range(num_ranks)
        }
        if not taken[0] or any(taken[rank] != taken[0] for rank in taken):
            faults.append(f"{words}: iterations by rank {taken}")
        faults += [f"{words}: {line}" for line in unfinished(path.parent)]
    return faults


def unfinished(folder: Path) -> list[str]:
    """Lines of the logs of ranks that did not end NVSHMEM as they should."""
    bad = ("not finalized", "not freed", "freed implicitly", "could not be")
    return [
        f"{log.name}: {line}"
        for log in sorted(folder.glob("logs/rank*.log"))
        for line in log.read_text(errors="replace").splitlines()
        if any(words in line for words in bad)
    ]
