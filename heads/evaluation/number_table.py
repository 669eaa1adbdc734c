"""Tables of numbers, for a terminal, a page or JSON."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...pipeline.wording import aligned, printable

Cell = str | int | float | None
Rows = list[list[Cell]]


@dataclass(frozen=True)
class NumberTable:
    """A table; the first cell of every row names it. ``str`` shows it in a terminal."""

    caption: str  # what it shows, with units
    header: Sequence[str]  # names of the columns, that of the first included
    rows: Sequence[Sequence[Cell]]  # None where a number is not known
    digits: int = 2  # after the point

    @property
    def cells(self) -> list[list[str]]:
        """The rows as text."""
        return [[shown(cell, self.digits) for cell in row] for row in self.rows]

    def __str__(self) -> str:
        rows = [list(self.header), *([printable(cell) for cell in row] for row in self.cells)]
        return "\n".join([self.caption, *aligned(rows)])


def shown(value: Cell, digits: int = 2) -> str:
    """Return a cell as text: a dash for None, ``1,234.50``."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    text = f"{value:,}" if isinstance(value, int) else f"{round(value, digits) + 0.0:,.{digits}f}"  # no −0.00
    return text.replace("-", "−")
