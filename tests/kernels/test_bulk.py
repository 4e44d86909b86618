"""The loop of bulk copies, its own text, in 32 lanes of Python: no compiler and no GPU.

What is checked is the bookkeeping of lanes, stages, phases and flags.
"""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import settings as given_settings
from hypothesis import strategies as st

from tests.kernels.engine import (
    CLAIM_ROWS,
    NUM_AHEAD,
    ROW_BYTES,
    TEXT,
    Engine,
    constants_of,
    functions_of,
    moved,
)
from tests.kernels.warp import LANES
from tilepipe.kernels.edges import Edge

STAGES = range(1, 15)


@pytest.mark.parametrize("pieces", ROW_BYTES)
@pytest.mark.parametrize("stages", STAGES)
def test_every_row_is_loaded_stored_and_told_once_in_order(stages, pieces):
    # The least batch, and as many rows as lanes can remember. More rows than there are lanes.
    for batch, edge in ((1, Edge.dispatch), (32, Edge.dispatch), (4, Edge.opening)):
        engine = moved(constants_of(stages, pieces, batch), 50, edge=edge)

        assert sorted(engine.told) == engine.rows == list(range(50))
        assert engine.num_loaded == engine.num_stored == 50 * pieces
        assert engine.busy == ([], [])
        assert len(engine.bases) == 0, "more or less was claimed than three claims ahead"
        # No stage lies idle: it is being filled, waits to be stored, or is being read.
        assert engine.most_loading + engine.most_reading == stages


@st.composite
def claims(draw):
    """Rows of a rank and the claims of one of its warps; others take the rest."""
    edge = draw(st.sampled_from(list(CLAIM_ROWS)))
    count = draw(st.integers(0, 30 * CLAIM_ROWS[edge]))
    kept = draw(st.lists(st.booleans(), min_size=30, max_size=30))
    bases = range(0, count, CLAIM_ROWS[edge])
    return edge, count, [base for base, own in zip(bases, kept, strict=False) if own]


CONSTANTS = st.builds(
    constants_of,
    *(st.sampled_from(STAGES), st.sampled_from(list(ROW_BYTES)), st.integers(1, 32)),
    paced=st.booleans(),
    by_epoch=st.booleans(),
)


@given(CONSTANTS, claims())
@given_settings(max_examples=40, deadline=None)
def test_a_warp_moves_what_it_claims_and_nothing_else(constants, claimed):
    edge, count, bases = claimed

    engine = moved(constants, count, bases=bases, edge=edge)

    assert sorted(engine.told) == sorted(engine.rows)
    assert engine.busy == ([], [])
    assert engine.is_ring_free


@pytest.mark.parametrize("looks", [0, 1, 3])
@pytest.mark.parametrize("stages", STAGES)
def test_a_warp_that_finds_the_launch_given_up_tells_nothing_more(stages, looks):
    # It looks before the first row, then before each batch of flags.
    engine = moved(constants_of(stages, 2, 2), 50, aborted_at=looks)

    assert sorted(engine.told) == engine.rows[: 2 * max(0, looks - 1)]
    assert (engine.num_loaded > 0) == (looks > 0)
    assert engine.unwritten == []
    assert not engine.loading, "a CTA ends while a load writes to its shared memory"


@given(CONSTANTS, claims(), st.integers(0, 40))
@given_settings(max_examples=25, deadline=None)
def test_a_load_that_never_comes_ends_the_loop_and_its_row_is_not_told(constants, claimed, lost):
    edge, count, bases = claimed
    engine = moved(constants, count, bases=bases, edge=edge, lost_load=lost)

    row = engine.pieces[lost][0] if lost < len(engine.pieces) else None
    assert (row in engine.rows) == (sorted(engine.told) != sorted(engine.rows))
    assert row not in engine.told
    assert {row for row, _ in engine.loading.values()} <= {row}


@pytest.mark.parametrize("pieces", ROW_BYTES)
@pytest.mark.parametrize("stages", STAGES)
def test_lanes_remember_all_that_a_batch_leaves_untold(stages, pieces):
    """No more than 32 rows lie between the oldest that is not told and the last that is known."""
    engine = Engine(constants_of(1), 0, deque())
    functions = functions_of(engine)
    for batch in range(1, 33):
        constants = constants_of(stages, pieces, batch)
        found = functions["batch_of"](constants)
        behind, ahead = functions["_stores_behind"](constants), functions["_loads_ahead"](constants)

        # Rows of the pieces that are ahead of the row being stored, and rows stored but not told.
        in_ring = (pieces - 1 + ahead - 1) // pieces
        untold = behind + found - 1
        assert 1 <= found <= batch
        assert in_ring + untold + NUM_AHEAD * max(CLAIM_ROWS.values()) <= LANES
        assert found == batch or found >= 5, "flags hardly share a fence"


TOLD_TOO_SOON = "is told before it is known to be there"
# What is broken -> the text that does it right, another one, what is then found.
BROKEN = {
    "read_waits": ("(behind - 1, read=True)", "(behind, read=True)", "a store may still read"),
    "stages_ahead": (" - _stores_behind(constants) + 1", " + 1", "a second load on its way"),
    "phases": ("Int32(0), phase ^ 1", "Int32(0), phase", "a wait for another phase"),
    "remembered": (", max_flag_batch(constants.num_stages))", ", 32)", "forgets row"),
    "completion": ("behind * pieces, read=False", "behind * pieces, read=True", TOLD_TOO_SOON),
    "groups": ("group(behind * pieces", "group(behind * pieces + 1", TOLD_TOO_SOON),
    "barrier": ("cute.arch.sync_warp()", "pass", TOLD_TOO_SOON),
    "holder": (
        "if lane == holder:\n                n",
        "if lane == 0:\n                n",
        "twice",
    ),
    "convergence": (
        "if alive:\n                _",
        "if lane == 0:\n                _",
        "diverged",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_fault_in_the_loop_is_found(name):
    """The control of all above: the engine must see what each step of the loop is for."""
    right, wrong, said = BROKEN[name]
    assert TEXT.count(right) == 1, f"another text has taken the place of {right!r}"

    with pytest.raises(AssertionError, match=said):
        moved(constants_of(6, 2, 32), 70, text=TEXT.replace(right, wrong))
