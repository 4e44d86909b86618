"""How much room a table is said to need, and how it is marked for it."""

import re

from tilepipe.report.page_table import TABLE_STYLE, room_px, table_of
from tilepipe.report.shapes import Grid


def grid(*rows, head=("point", "time")):
    return Grid(title="", head=head, rows=rows)


def classes(text):
    return re.search(r'<table class="([^"]*)"', text)[1].split()


def test_a_value_and_its_interval_may_stand_on_lines_of_their_own():
    alone = room_px(grid(("edf", "1" * len("(1.0 to 2.0)"))))
    both = room_px(grid(("edf", "1.5 (1.0 to 2.0)")))

    assert both == alone
    assert '<span class="interval">(1.0 to 2.0)</span>' in table_of(grid(("a", "1.5 (1.0 to 2.0)")))


def test_thousands_keep_together():
    short, long = (room_px(grid(("edf", text))) for text in ("234", "1\u202f234\u202f567"))

    assert long > short


def test_room_grows_by_column_and_names_a_rule_that_exists():
    widths = []
    for count in range(1, 30):
        table = grid(("1.5 (1.0 to 2.0)",) * count, head=("time",) * count)
        widths.append(room_px(table))
        (needs, few) = classes(table_of(table))
        assert f"table.{needs} tr" in TABLE_STYLE
        assert few == "few"

    assert widths == sorted(set(widths))
    assert needs == "needs-more"


def test_every_cell_knows_its_head_for_where_heads_are_not_shown():
    text = table_of(grid(("edf", "2"), head=("<point>", 'a "b"')))

    assert 'data-head="&lt;point&gt;">edf' in text
    assert 'data-head="a &quot;b&quot;">2' in text


def test_a_table_without_rows_is_still_one():
    assert "<tbody>" in table_of(grid())
