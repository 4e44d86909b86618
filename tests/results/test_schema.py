"""The tables' columns say what they hold, and a strange table is told apart."""

from dataclasses import fields

import pyarrow as pa
import pytest

from tilepipe.config import choices
from tilepipe.config.placements import PLACEMENTS
from tilepipe.config.routings import ROUTINGS
from tilepipe.config.schemas import KERNELS, Workload
from tilepipe.records import Span, SpanKind, Status
from tilepipe.results.columns import allowed_words
from tilepipe.results.schema import (
    BREAKDOWN,
    CONTENDER_FIGURES,
    CONTENDERS,
    PERFORMANCE_COLUMNS,
    PLACEMENT_KEYS,
    POINT_FIGURES,
    ROUTING_KEYS,
    SAMPLES,
    SUMMARY,
    TIMELINE,
)
from tilepipe.results.spans import SPAN_KINDS
from tilepipe.results.versions import schema_faults

TABLES = {"samples": SAMPLES, "breakdown": BREAKDOWN, "summary": SUMMARY, "timeline": TIMELINE}


@pytest.mark.parametrize("name", TABLES)
def test_every_field_says_what_it_means_in_which_unit_and_window(name):
    schema = TABLES[name]

    assert schema.metadata == {b"table": name.encode(), b"schema_version": b"7"}
    assert len(set(schema.names)) == len(schema.names)
    for field in schema:
        assert all(field.metadata[key] for key in (b"meaning", b"unit", b"window")), field.name
        # A time without a window, or a unit that its name contradicts, is no number.
        if field.name.endswith("_ns"):
            assert field.metadata[b"unit"] == b"ns"
            # A setting is no time that was measured.
            assert (b"barrier" in field.metadata[b"window"]) == (field.name != "pace_latency_ns")
        if "gbps" in field.name:
            assert field.metadata[b"unit"] == b"1e9 byte/s"
        if field.name.endswith("_mhz"):
            assert field.metadata[b"unit"] == b"MHz"


def test_words_are_those_of_the_choices():
    assert allowed_words(SUMMARY.field("status")) == tuple(status.name for status in Status)
    assert allowed_words(SAMPLES.field("order")) == tuple(o.name for o in choices.Order)
    assert allowed_words(SAMPLES.field("contender")) == tuple(CONTENDERS)
    assert allowed_words(SAMPLES.field("config_id")) == ()
    assert allowed_words(SAMPLES.field("l2")) == ("cold", "warm")
    assert allowed_words(SUMMARY.field("regime")) == ("isolated", "chained")


def test_every_part_of_a_span_has_a_column_and_every_kind_a_sentence():
    assert {field.name for field in fields(Span)} < set(TIMELINE.names)
    assert list(SPAN_KINDS) == [kind.name for kind in SpanKind]
    assert allowed_words(TIMELINE.field("kind")) == tuple(SPAN_KINDS)


def test_a_timeline_says_that_it_is_no_sample():
    window = TIMELINE.field("start_ns").metadata[b"window"]

    assert b"recorded after all timed ones, so no sample is stamped" in window


def test_the_window_says_how_a_gpu_is_timed():
    window = SAMPLES.field("duration_ns").metadata[b"window"]

    assert b"by CUDA events, from the launch gate's start to the kernel's end" in window


def test_every_performance_column_may_be_null_and_every_figure_has_a_column():
    for name in (*PERFORMANCE_COLUMNS, *POINT_FIGURES, *CONTENDER_FIGURES):
        assert SUMMARY.field(name).nullable, name


def test_a_schema_has_no_faults_against_itself():
    assert schema_faults(SAMPLES, SAMPLES) == []


# value_ns and low_ns come after it.
TERM = BREAKDOWN.names.index("term")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda s: s.remove_metadata(), "table is nothing, want breakdown"),
        (
            lambda s: s.with_metadata({**s.metadata, b"schema_version": b"9"}),
            "schema_version is 9, want 7 or older: "
            "a newer TilePipe wrote it, read it with that one",
        ),
        (lambda s: s.remove(TERM), "columns missing ['term'], unknown []"),
        (lambda s: s.append(pa.field("x", "int8")), "columns missing [], unknown ['x']"),
        (
            lambda s: s.set(TERM + 1, s.field(TERM + 1).with_type(pa.int32())),
            "column value_ns is int32, want int64",
        ),
        (
            lambda s: s.set(TERM, s.field(TERM).with_nullable(True)),
            "column term is string, want string not null",
        ),
        (
            lambda s: s.set(
                TERM + 2,
                s.field(TERM + 2).with_metadata({**s.field(TERM + 2).metadata, b"unit": b"us"}),
            ),
            "column low_ns: unit is not what this version writes",
        ),
        (lambda s: pa.schema([*s][::-1], s.metadata), "columns are in another order"),
    ],
)
def test_a_strange_schema_is_told_apart(change, fault):
    assert schema_faults(change(BREAKDOWN), BREAKDOWN) == [fault]


def test_every_setting_that_a_law_a_placement_or_a_kernel_has_got_a_column():
    laws = {key for law in ROUTINGS.values() for key in fields_of(law)} - {"law"}
    kernels = {key for kernel in KERNELS.values() for key in fields_of(kernel)}

    placements = {key for rule in PLACEMENTS.values() for key in fields_of(rule)} - {"rule"}

    assert laws == set(ROUTING_KEYS)
    # How many the Plan has is told instead of how many were asked for.
    assert placements - {"num_redundant"} == set(PLACEMENT_KEYS)
    assert "num_redundant" in SUMMARY.names
    assert kernels <= set(SUMMARY.names)
    assert fields_of(Workload) <= set(SUMMARY.names)


def fields_of(schema):
    return {field.name for field in fields(schema)}
