"""Say what this machine can run: `python -m tilepipe.doctor [--json]`.

Knows nothing of what is good or bad; the sections do.

Ends 0 if the main job, `make run`, can run on what hardware=auto picks here, else 1.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tilepipe.doctor.fact import Fact, State
from tilepipe.doctor.interpreter import python_fact
from tilepipe.stopping import leave
from tilepipe.streams import heard_out

__all__ = ["main"]

# results_dir of conf/config.yaml.
RESULTS_DIR = Path("outputs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Look, print, and return the exit code."""
    description = "What this machine can run, what is missing and how to get it."
    parser = argparse.ArgumentParser(prog="python -m tilepipe.doctor", description=description)
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    as_json = parser.parse_args(arguments).json
    python = python_fact(sys.version_info[:3])
    if python.state is State.missing:
        # The rest of TilePipe may not even load.
        facts, option = [python], None
    else:
        from tilepipe.doctor.examination import examine

        facts, option = examine(python, RESULTS_DIR)
    print(as_document(facts, option) if as_json else as_text(facts, option))
    return 0 if is_ready(facts) else 1


def is_ready(facts: Sequence[Fact]) -> bool:
    """Whether the main job can run."""
    return all(fact.state is not State.missing for fact in facts)


def as_text(facts: Sequence[Fact], option: str | None) -> str:
    """A line for each fact, its next step below it; `option` is what hardware=auto picks."""
    lines = []
    section = ""
    for fact in facts:
        if fact.section != section:
            section = fact.section
            lines.append(section)
        lines.append(f"  {fact.state.name:<8} {fact.name:<18} {fact.text}")
        if fact.next_step:
            lines.append(f"{'':<30}-> {fact.next_step}")
    return "\n".join([*lines, "", verdict(facts, option)])


def as_document(facts: Sequence[Fact], option: str | None) -> str:
    """The same for programs."""
    rows = [
        {
            "section": fact.section,
            "name": fact.name,
            "state": fact.state.name,
            "text": fact.text,
            "next_step": fact.next_step or None,
        }
        for fact in facts
    ]
    document = {"ready": is_ready(facts), "hardware": option, "facts": rows}
    return json.dumps(document, indent=2)


def verdict(facts: Sequence[Fact], option: str | None) -> str:
    """The last line."""
    where = f" on hardware={option}" if option else ""
    missing = [f"{fact.section}: {fact.name}" for fact in facts if fact.state is State.missing]
    if missing:
        return f"make run cannot run here{where}; missing: {', '.join(missing)}"
    return f"make run can run here{where}"


if __name__ == "__main__":
    leave(heard_out(main))
