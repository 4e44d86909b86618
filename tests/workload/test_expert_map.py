"""A map of physical experts is read alike from every format, and refused in one sentence."""

import json
import os
import re

import numpy as np
import pytest

from tilepipe.config import placements
from tilepipe.config.choices import Replica
from tilepipe.workload import Routing, place
from tilepipe.workload.expert_map import read_expert_map

# Two layers of 4 experts on 2 ranks, 6 physical experts: a replica of 0, and one that holds none.
LAYERS = [[0, 1, 0, 3, 2, -1], [3, 2, 1, 0, 0, 3]]
TOKENS = [[[0, 3], [3, -1]], [[0, 1]]]
ROUTING = Routing(
    topk_idx=tuple(np.array(ids, np.int32) for ids in TOKENS),
    topk_weights=tuple(np.ones(np.shape(ids), np.float32) for ids in TOKENS),
    num_experts=4,
)


def write(path, content):
    """As the suffix says; bytes and text as they are."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str):
        path.write_text(content)
    elif path.suffix == ".npy":
        np.save(path, content)
    elif path.suffix == ".npz":
        np.savez(path, **content)
    else:
        path.write_text(json.dumps(content))
    return str(path)


FORMATS = {
    "list.json": LAYERS,
    "sglang.json": {"physical_to_logical_map": LAYERS},
    "eplb.json": {"phy2log": LAYERS, "logcnt": [[2, 1, 1, 1], [2, 1, 1, 2]]},
    "map.npy": np.array(LAYERS, np.int64),
    "map.npz": {"phy2log": np.array(LAYERS, np.int16), "log2phy": np.zeros(3)},
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layer", [0, 1])
def test_every_format_holds_the_same_layers(name, layer, tmp_path):
    found = read_expert_map(write(tmp_path / name, FORMATS[name]), layer)

    assert found.tolist() == LAYERS[layer]
    assert found.dtype == np.int32


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("one.json", LAYERS[0]),
        ("one.json", [LAYERS[0]]),
        ("one.json", {"physical_to_logical_map": LAYERS[0]}),
        ("one.npy", np.array(LAYERS[0])),
        ("one.npy", np.array([LAYERS[0][:5]], np.uint8)),
    ],
)
def test_the_only_layer_needs_no_number(name, content, tmp_path):
    assert read_expert_map(write(tmp_path / name, content), None).tolist()[:5] == LAYERS[0][:5]


def test_a_map_places_a_routing(tmp_path):
    path = write(tmp_path / "map.json", LAYERS)

    spread = place(placements.FilePlacement(path=path, layer=1), ROUTING)
    local = place(placements.FilePlacement(path=path, layer=1, replica=Replica.local), ROUTING)

    # Expert 0 is held by 3 and 4 on rank 1, expert 3 by 0 on rank 0 and 5 on rank 1.
    assert [ids.tolist() for ids in spread.physical.topk_idx] == [[[3, 0], [5, -1]], [[4, 2]]]
    assert [ids.tolist() for ids in local.physical.topk_idx] == [[[3, 0], [0, -1]], [[4, 2]]]
    assert spread.physical.num_experts == 6


def test_what_is_no_regular_file_is_called_what_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe.npy")
    write(tmp_path / "map.json", LAYERS)
    pipe = "is a device or a pipe; write it to a file, which is read twice"
    wrong = {
        tmp_path: "is a folder; type the path of one file in it, such as map.json",
        tmp_path / "pipe.npy": pipe,
        "/dev/null": pipe,
        "": "no such file; type placement.path=FILE",
    }

    for path, told in wrong.items():
        with pytest.raises(ValueError, match="placement") as refused:
            read_expert_map(str(path), None)

        assert str(refused.value) == f"placement.path={path}: {told}"


REFUSED = [
    ("no.json", None, 0, "no.json: no such file; type placement.path=FILE"),
    ("map.pt", b"x", 0, "map.pt: a file of torch, which may run code when it is read; store the "),
    ("map.txt", "x", 0, "map.txt: unknown suffix .txt; give a .json, .npy or .npz file"),
    ("map", "x", 0, "map: unknown suffix (none); give a"),
    ("cut.json", "[[0, 1, 2", 0, "cut.json: is not valid JSON, or was cut short; write the file"),
    ("cut.json", b"\xff\xfe\x00", 0, "cut.json: is not valid JSON, or was cut short"),
    ("deep.json", "[" * 100_000, 0, "deep.json: is not valid JSON, or was cut short"),
    ("cut.npy", b"\x93NUMPY\x01\x00", 0, "cut.npy: not an array file of numbers, or cut short"),
    (
        "torn.npy",
        b"\x93NUMPY\x01\x00\x10\x00{'descr': '''<i4\n",
        0,
        "torn.npy: not an array file of numbers",
    ),
    ("cut.npz", b"PK\x03\x04", 0, "cut.npz: not an array file of numbers, or cut short; write"),
    ("other.npz", {"a": np.zeros(2)}, 0, "other.npz: holds a, not exactly one of "),
    ("a.json", {"b": 1, "a": 2}, 0, "a.json: holds a, b, not exactly one of physical_to_logical_"),
    (
        "two.json",
        {"phy2log": LAYERS, "physical_to_logical_map": LAYERS},
        0,
        "two.json: holds phy2log, physical_to_logical_map, not exactly one of ",
    ),
    (
        "counts.json",
        {"logical_count": [[1, 2]]},
        0,
        "counts.json: holds logical_count, from which a map is yet to be made; make it with EPLB, "
        "or type placement=balanced",
    ),
    ("float.json", [0, 1.0, 2, 3], None, "float.json: the map holds 1.0 at place 1, which is no "),
    ("bool.json", [[0, True]], None, "bool.json: layer 0 holds true at place 1, which is no exp"),
    ("huge.json", [0, 10**30], None, "huge.json: the map holds 10000000000000000000... at place 1"),
    ("null.json", "null", None, "null.json: the map is no list of expert numbers; write the file"),
    ("mixed.json", [[0, 1], 2], 0, "mixed.json: layer 1 is no list of expert numbers"),
    ("empty.json", [], None, "empty.json: the map is no list of expert numbers"),
    (
        "ragged.json",
        [[0, 1, 2, 3], [0, 1]],
        0,
        "ragged.json: has 2 physical experts in one layer and 4 in another; write as many for",
    ),
    ("float.npy", np.zeros(4), None, "float.npy: the map is float64, not integers; store expert"),
    ("shape.npy", np.zeros((1, 2, 3), int), 0, "shape.npy: the map has shape (1, 2, 3); store (nu"),
    ("empty.npy", np.zeros((0, 4), int), 0, "empty.npy: the map has shape (0, 4); store (num_phys"),
    ("id.npy", np.array([0, -2]), None, "id.npy: the map holds -2, which is no expert number"),
    ("wide.npy", np.array([0, 2**40]), None, "wide.npy: the map holds 1099511627776, which is no"),
    ("short.json", [0, 1], None, "short.json: 2 physical experts cannot hold workload.num_expert"),
    (
        "odd.json",
        [0, 1, 2, 3, 0],
        None,
        "odd.json: 5 physical experts are no multiple of launch.num_ranks=2; make the map for this",
    ),
    (
        "range.json",
        [0, 1, 2, 3, 4, 0],
        None,
        "range.json: physical expert 4 holds expert 4, but workload.num_experts=4; make the map",
    ),
    (
        "missing.json",
        [0, 0, 0, 3],
        None,
        "missing.json: no physical expert holds expert 1 and 1 more of 4; give every expert one",
    ),
    ("unused.json", [0, 1, 3, -1], None, "unused.json: no physical expert holds expert 2 of 4; gi"),
]


@pytest.mark.parametrize(("name", "content", "layer", "sentence"), REFUSED)
def test_a_bad_map_is_refused_in_one_sentence(name, content, layer, sentence, tmp_path):
    path = tmp_path / name if content is None else write(tmp_path / name, content)
    wanted = re.escape(f"placement.path={tmp_path}/{sentence}")

    with pytest.raises(ValueError, match=wanted) as refused:
        place(placements.FilePlacement(path=str(path), layer=layer), ROUTING)

    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "layer", "sentence"),
    [
        (LAYERS, None, "placement.layer=null: {} holds layers 0..1; type one of them"),
        (LAYERS, 2, "placement.layer=2: {} holds layers 0..1; type one of them"),
        (LAYERS[:1], 1, "placement.layer=1: {} holds layer 0; type one of them"),
        (
            LAYERS[0],
            0,
            "placement.layer=0: {} does not tell layers apart; type placement.layer=null",
        ),
    ],
)
def test_a_layer_that_is_not_there_is_refused(content, layer, sentence, tmp_path):
    path = write(tmp_path / "map.json", content)

    with pytest.raises(ValueError, match=re.escape(sentence.format(path))):
        read_expert_map(path, layer)
