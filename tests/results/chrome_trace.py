"""A strict reader of Chrome trace events: what the format asks for, and what importers do with it.

Times go through an importer's arithmetic, slices through its stack, flows through its look for the
slice that is open; whatever an importer would drop, mend or guess is an error here.
"""

import json
from collections import defaultdict
from dataclasses import dataclass, field

PHASES = {"X", "M", "s", "f"}
METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


@dataclass
class Slice:
    name: str
    start_ns: int
    end_ns: int
    args: dict


@dataclass
class Trace:
    slices: dict = field(default_factory=lambda: defaultdict(list))  # by (pid, tid)
    flows: list = field(default_factory=list)  # pairs of slices
    processes: dict = field(default_factory=dict)
    threads: dict = field(default_factory=dict)


def to_ns(time_us):
    """What an importer makes of microseconds: it multiplies and cuts off."""
    assert isinstance(time_us, (int, float))
    assert not isinstance(time_us, bool)
    assert time_us >= 0
    return int(time_us * 1000)


def read(content):
    text = content.decode()
    document = json.loads(text, parse_constant=lambda word: 1 / 0)
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert text.index('"displayTimeUnit"') < text.index('"traceEvents"')
    assert document["displayTimeUnit"] == "ns"
    assert isinstance(document["otherData"], dict)
    trace, started, last_ns = Trace(), {}, 0
    for event in document["traceEvents"]:
        assert event["ph"] in PHASES, event
        assert isinstance(event["name"], str)
        assert event["name"]
        for key in ("pid", "tid"):
            assert type(event[key]) is int, event
            assert 0 < event[key] < 2**32, "0 is the idle task of a kernel"
        if event["ph"] == "M":
            _metadata(trace, event)
            continue
        assert isinstance(event["cat"], str)
        time_ns = to_ns(event["ts"])
        assert time_ns >= last_ns, "an importer sorts, and equal times stay as they came"
        last_ns = time_ns
        if event["ph"] == "X":
            _slice(trace, event, time_ns)
        else:
            _flow(trace, event, time_ns, started)
    assert not started, f"flows without an end: {started}"
    for pid, tid in trace.slices:
        assert pid in trace.processes
        assert tid in trace.threads
    return trace


def _metadata(trace, event):
    assert event["name"] in METADATA
    key, kind = ("name", str) if event["name"].endswith("_name") else ("sort_index", int)
    assert set(event["args"]) == {key}
    assert type(event["args"][key]) is kind
    if event["name"] == "process_name":
        assert event["pid"] not in trace.processes
        trace.processes[event["pid"]] = event["args"]["name"]
    if event["name"] == "thread_name":
        # Through all processes: an importer may look a thread up by its number alone.
        assert event["tid"] not in trace.threads
        trace.threads[event["tid"]] = event["args"]["name"]


def _slice(trace, event, start_ns):
    assert set(event) == {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"}
    assert all(isinstance(value, (int, str)) for value in event["args"].values())
    track = trace.slices[event["pid"], event["tid"]]
    end_ns = start_ns + to_ns(event["dur"])
    assert not track or start_ns >= track[-1].end_ns, f"{event} overlaps {track[-1]}"
    track.append(Slice(event["name"], start_ns, end_ns, event["args"]))


def _flow(trace, event, time_ns, started):
    assert type(event["id"]) is int
    track = trace.slices[event["pid"], event["tid"]]
    assert track, "no slice before the flow"
    place = track[-1]  # the one that an importer takes for open
    assert place.start_ns <= time_ns <= place.end_ns, f"{event} lies outside {place}"
    key = event["id"], event["cat"], event["name"]
    if event["ph"] == "s":
        assert set(event) == {"ph", "name", "cat", "pid", "tid", "ts", "id"}
        assert key not in started
        started[key] = time_ns, place
        return
    assert event["bp"] == "e"
    begun_ns, source = started.pop(key)
    assert begun_ns <= time_ns
    trace.flows.append((source, place))
