"""Tables and plots as the page's template takes them; a terminal takes the tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...pipeline.wording import aligned


@dataclass(frozen=True)
class Table:
    """A table; the first cell of every row names it. ``str`` shows it in a terminal.

    Attributes:
        caption: what it shows, with units.
        header: names of the columns, that of the first included.
        rows: text of the cells.
        heat: how strongly each cell after the first is shaded, from 0 to 1; None: not at all.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    heat: Sequence[Sequence[float]] | None = None

    def __str__(self) -> str:
        return "\n".join([self.caption, *aligned([self.header, *self.rows])])


@dataclass(frozen=True)
class Plot:
    """A drawing.

    Attributes:
        draw: returns it as SVG, by one of `plots`, which needs matplotlib.
        kind: what kind of drawing, for those who do not see it.
        caption: below it.
        table: its numbers; None where they are of no use one by one.
    """

    draw: Callable[[], str]
    kind: str
    caption: str
    table: Table | None = None


def number(value: float | None, digits: int = 2) -> str:
    """Return a number as the tables show it; a dash for None."""
    return "–" if value is None else f"{round(value, digits) + 0.0:,.{digits}f}".replace("-", "−")  # no −0.00


def heat_map(caption: str, corner: str, values: Sequence[Sequence[float]], full: float = 1.0) -> Table:
    """Return a matrix over elements as a table whose cells are shaded more strongly the larger they are.

    Args:
        caption: what it shows.
        corner: what rows and columns are.
        values: of each row.
        full: the value that is shaded most strongly; 0 and less are not shaded.
    """
    header = [corner, *(str(k) for k in range(1, len(values[0]) + 1))]
    digits = 2 if full == 1 else 1
    cells = [[str(k), *(number(value, digits) for value in row)] for k, row in enumerate(values, 1)]
    return Table(caption, header, cells, [[min(1.0, max(0.0, value / full)) for value in row] for row in values])
