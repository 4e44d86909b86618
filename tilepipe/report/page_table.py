"""A table as HTML that fits wherever it stands: without room for it, a row becomes a block.

Knows nothing of what its cells mean. How much room a table needs is estimated from its texts in
the widest font that may stand in for the reader's; the rules compare that with the room there is.
"""

import re
from collections.abc import Iterable
from html import escape

from tilepipe.report.shapes import Grid

__all__ = ["TABLE_STYLE", "room_px", "table_of"]

# A number, perhaps with its interval and a mark, or the dash of one that was not measured.
_NUMBER = re.compile(r"-|-?[\d.\u202f]+[~!]?( \([^()]* to [^()]*\))?")
_INTERVAL = re.compile(r" (\([^()]* to [^()]*\))$")
# Of DejaVu Sans at the table's 14 pixels.
_DIGIT_PX, _LETTER_PX, _BOLD_LETTER_PX, _PADDING_PX = 9.0, 8.5, 9.6, 16.0
_LABEL_PX, _LONG_PX = 160.0, 224.0
_STEP_PX = 80
_LARGEST_PX = 1280  # tables that need more are blocks everywhere

_PLAIN = """
.scroll { overflow-x: auto; max-width: 100%; margin: 0.5rem 0; container-type: inline-size; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ccc; padding: 0.25rem 8px; text-align: left;
  vertical-align: top; }
th { border-bottom: 2px solid #555; vertical-align: bottom; }
td.number, th.number { text-align: right; }
.interval { white-space: nowrap; }
td.label { min-width: 160px; }
td.long { min-width: 224px; overflow-wrap: anywhere; }
"""
_BLOCKS = """{table}, {table} tbody {{ display: block; }}
{table} thead {{ display: none; }}
{table} tr {{ display: grid; gap: 0.3rem 0.8rem; padding: 0.5rem 0; border-bottom: 1px solid #ccc;
  grid-template-columns: repeat(auto-fill, minmax(7rem, 1fr)); }}
{table} td {{ display: block; border: 0; padding: 0; min-width: 0; text-align: left;
  overflow-wrap: anywhere; }}
{table} td::before {{ content: attr(data-head); display: block; font-size: 0.75rem;
  color: #444; }}
{table} td.label, {table} td.long {{ grid-column: 1 / -1; }}
{table} td.name {{ grid-column: span 2; }}
{table} td:first-child {{ font-weight: bold; }}
{table} td:first-child::before {{ font-weight: normal; }}
{table} .interval {{ display: block; font-size: 0.75rem; white-space: normal; }}
"""
_PRINT = """
@media print {
  table { font-size: 8pt; }
  table.few, tr { break-inside: avoid; }
  thead, tr:first-child { break-after: avoid; }
  tr:last-child { break-before: avoid; }
  .scroll { overflow: visible; }
  .interval { white-space: normal; }
  th, td { padding: 0.1rem 0.3rem; }
  td.label, td.long { min-width: 0; }
}
"""
_FEW_ROWS = 12
_BLOCK_CHARS = 12  # of a word that a third of a narrow block has room for


def _rules() -> str:
    """Blocks for every table that needs more room than there is; paper has smaller type."""
    rules = [_PLAIN, _BLOCKS.format(table="table.needs-more")]
    for px in range(_STEP_PX, _LARGEST_PX + 1, _STEP_PX):
        blocks = _BLOCKS.format(table=f"table.needs-{px}")
        rules.append(f"@media screen {{ @container (max-width: {px - 0.5}px) {{\n{blocks}}} }}\n")
    return "".join(rules) + _PRINT


TABLE_STYLE = _rules()


def table_of(grid: Grid) -> str:
    """The table in a box of its own, and its note."""
    kinds = [_kind(row[column] for row in grid.rows) for column in range(len(grid.head))]
    heads = [escape(cell) for cell in grid.head]
    head = "".join(
        f'<th class="{kind}">{text}</th>' for kind, text in zip(kinds, heads, strict=True)
    )
    rows = []
    for place, row in enumerate(grid.rows):
        cells = []
        for column, cell in enumerate(row):
            text = _INTERVAL.sub(r' <span class="interval">\1</span>', escape(cell))
            if (place, column) in grid.best:
                text = f"<strong>{text}</strong>"
            cells.append(f'<td class="{kinds[column]}" data-head="{heads[column]}">{text}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    note = f'\n<p class="note">{escape(grid.note)}</p>' if grid.note else ""
    body = "\n".join(rows)
    table = (
        f'<table class="{_class(grid)}"><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{body}\n</tbody></table>"
    )
    return f'<div class="scroll">{table}</div>{note}'


def room_px(grid: Grid) -> float:
    """Pixels that the table needs on a screen, its texts broken wherever they may be."""
    columns = ([head, *(row[i] for row in grid.rows)] for i, head in enumerate(grid.head))
    return sum(_column_px(head, cells) for head, *cells in columns)


def _column_px(head: str, cells: list[str]) -> float:
    kind = _kind(cells)
    # str.split() would break at the narrow spaces between thousands, too.
    pieces = [
        piece
        for cell in cells
        for piece in (_INTERVAL.split(cell) if kind == "number" else cell.split(" "))
    ]
    char_px = _DIGIT_PX if kind == "number" else _LETTER_PX
    widest = char_px * max(map(len, pieces), default=0) + _PADDING_PX
    if kind == "long":
        widest = _LONG_PX
    if kind == "label":
        widest = max(widest, _LABEL_PX)
    in_head = _BOLD_LETTER_PX * max(map(len, head.split(" "))) + _PADDING_PX
    return max(widest, in_head)


def _class(grid: Grid) -> str:
    steps = -(-room_px(grid) // _STEP_PX)
    px = int(steps) * _STEP_PX
    needs = f"needs-{px}" if px <= _LARGEST_PX else "needs-more"
    return f"{needs} few" if len(grid.rows) <= _FEW_ROWS else needs


def _kind(cells: Iterable[str]) -> str:
    """Class of a column: numbers to the right, long text with room to wrap."""
    found = [cell for cell in cells if cell]
    if found and all(_NUMBER.fullmatch(cell) for cell in found):
        return "number"
    longest = max(map(len, found), default=0)
    longest_word = max((len(word) for cell in found for word in cell.split(" ")), default=0)
    if longest > 40:
        return "long"
    if longest > 24:
        return "label"
    return "name" if longest_word > _BLOCK_CHARS else "short"
