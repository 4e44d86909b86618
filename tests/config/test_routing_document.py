"""The examples of docs/routing.md, run as they stand there."""

import dataclasses
import gzip
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tilepipe import list as listing
from tilepipe.config import schemas
from tilepipe.config.schemas import config_from_dict
from tilepipe.workload import draw
from tilepipe.workload.trace import Selection, read_counts, read_trace
from tilepipe.workload.trace import names as known_names
from tilepipe.workload.trace.reading import FORMATS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "routing.md"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Folder in which every Python example has run, and the ids they all record."""
    folder = tmp_path_factory.mktemp("examples")
    names = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for code in blocks("python"):
            exec(code, names)
    return folder, names["ids"]


@pytest.fixture
def folder(written, monkeypatch):
    monkeypatch.chdir(written[0])
    return written[0]


def test_every_example_records_the_same_tokens(written, folder):
    traces = sorted(path.name for path in folder.iterdir() if not path.name.startswith("load"))

    assert len(traces) == 9
    for name in traces:
        for layer, ids in enumerate(written[1]):
            trace = read_trace(name, Selection(layer=layer, num_topk=2))
            assert np.array_equal(trace.topk_idx, ids), name


def test_every_example_of_counts_has_the_same_load(written, folder):
    files = [path.name for path in folder.iterdir() if path.name.startswith("load")]

    assert len(files) == 4
    for name in [*files, "log.jsonl", "table.parquet"]:
        for layer, ids in enumerate(written[1]):
            counts = np.bincount(ids.ravel(), minlength=8).tolist()
            found = read_counts(name, layer).tolist()
            assert found + [0] * (8 - len(found)) == counts, name


def test_every_command_of_the_document_is_sound(written, folder, container, capsys):
    commands = [shlex.split(line) for block in blocks("bash") for line in block.splitlines()]
    # The one file that the document takes from its reader.
    ids = np.arange(24).reshape(6, 4).tolist()
    Path("trace.jsonl").write_text(
        "\n".join(json.dumps({"layer": 12, "topk_ids": row}) for row in ids)
    )

    listed = [words[4:] for words in commands if words[:4] == LIST]
    run = [words[3:] for words in commands if words[:3] == RUN]
    assert (len(listed), len(run)) == (3, 2)
    for words in listed:
        assert listing.main(["routing", *words]) == 0, capsys.readouterr().err
    for words in run:
        config = config_from_dict(container(*words))
        draw(
            config.routing,
            num_ranks=config.launch.num_ranks,
            num_tokens=config.workload.num_tokens,
            num_experts=config.workload.num_experts,
            num_topk=config.workload.num_topk,
        )
    Path("trace.jsonl").unlink()


LIST = ["python", "-m", "tilepipe.list", "routing"]
RUN = ["python", "-m", "tilepipe.run"]


def test_the_sheet_is_what_is_printed(folder, capsys):
    assert listing.main(["routing", "log.jsonl", "num_ranks=2", "num_experts=8"]) == 0

    assert capsys.readouterr().out == blocks("text")[0]


def test_the_sentences_are_those_of_such_files(folder, tmp_path, monkeypatch):
    log = Path("log.jsonl").read_text()
    monkeypatch.chdir(tmp_path)
    Path("log.jsonl").write_text(log)
    Path("cut.jsonl").write_text("".join(log.splitlines(keepends=True)[:3])[:-9])
    Path("floats.jsonl").write_text(json.dumps({"topk_ids": [5.0, 0]}))
    np.save("twice.npy", [[0, 5], [0, 2], [7, 7]])
    np.savez("below.npz", topk_ids=[[0, 5], [-2, 2]])
    Path("mixed.json").write_text(json.dumps([{"0": [[0, 5]]}, {"0": [[0, 2, 4]]}]))
    pq.write_table(pa.table({"tokens": [[0, 5]]}), "unknown.parquet")
    Path("packed.jsonl.gz").write_bytes(gzip.compress(log.encode()))

    sentences = blocks("text")[1].splitlines()
    assert len(sentences) == 8
    for sentence in sentences:
        name = re.match(r"routing\.\w+=(?:7: )?([\w.]+\w)", sentence).group(1)
        layer = {"log.jsonl": 7, "cut.jsonl": 0}.get(name)
        with pytest.raises(ValueError, match=r"^routing\.") as caught:
            read_trace(name, Selection(layer=layer, num_topk=2))
        assert str(caught.value) == sentence


def test_every_key_and_every_name_is_in_the_document():
    text = DOCUMENT.read_text()

    for law in (schemas.TraceRouting, schemas.CountsRouting):
        for field in dataclasses.fields(law):
            if field.name not in ("law", "seed"):
                assert f"`routing.{field.name}`" in text
    groups = (known_names.IDS, known_names.WEIGHTS, known_names.LAYER, known_names.REQUEST)
    for group in (*groups, known_names.COUNTS):
        assert f"| {', '.join(f'`{name}`' for name in group)} |" in text
    assert len(FORMATS) == 10  # a new one belongs into the document
