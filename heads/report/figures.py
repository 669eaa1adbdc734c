"""Tables and plots as the page's template takes them; a terminal takes the tables."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...pipeline.wording import aligned

T = TypeVar("T")


@dataclass(frozen=True)
class Table:
    """A table; the first cell of every row names it. ``str`` shows it in a terminal.

    Attributes:
        caption: what it shows, with units.
        header: names of the columns, that of the first included.
        rows: text of the cells.
        values: of each cell after the first, by which it is shaded; None: it is not. None: no cell is.
        whole: the values that are not shaded and shaded most strongly; None: the lowest and the highest of `values`.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    values: Sequence[Sequence[float | None]] | None = None
    whole: tuple[float, float] | None = None

    @property
    def heat(self) -> list[list[float | None]] | None:
        """How strongly each cell after the first is shaded, from 0 to 1; None: not at all."""
        if self.values is None:
            return None
        known = [value for row in self.values for value in row if value is not None]
        low, high = self.whole or (min(known, default=0.0), max(known, default=0.0))
        width = max(high - low, 1e-9)
        return [
            [None if value is None else min(1.0, max(0.0, (value - low) / width)) for value in row]
            for row in self.values
        ]

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


@dataclass(frozen=True)
class Mark:
    """An element of a sample on a map.

    Attributes:
        modality: ``image`` or ``caption``; in a legend also ``slot``.
        colour: number of its colour, from 0; None: of none.
        left, top: its place, percent of the map's width and height.
        title: what it is, for who points at it.
    """

    modality: str
    colour: int | None
    left: float
    top: float
    title: str


@dataclass(frozen=True)
class Map:
    """A map of an embedding space.

    Attributes:
        caption: below it.
        legend: name and mark of each kind; where they are does not matter.
        samples: the marks of each, those of an image and of its caption together.
    """

    caption: str
    legend: Sequence[tuple[str, Mark]]
    samples: Sequence[Sequence[Mark]]


def number(value: float | None, digits: int = 2) -> str:
    """Return a number as the tables show it; a dash for None."""
    return "–" if value is None else f"{round(value, digits) + 0.0:,.{digits}f}".replace("-", "−")  # no −0.00


def heat_map(
    caption: str,
    corner: str,
    values: Sequence[Sequence[float]],
    digits: int = 2,
    whole: tuple[float, float] | None = None,
) -> Table:
    """Return a matrix over elements as a table whose cells are shaded more strongly the larger they are.

    Args:
        caption: what it shows.
        corner: what rows and columns are.
        values: of each row.
        digits: after the point.
        whole: see `Table`.
    """
    header = [corner, *(str(k) for k in range(1, len(values[0]) + 1))]
    cells = [[str(k), *(number(value, digits) for value in row)] for k, row in enumerate(values, 1)]
    return Table(caption, header, cells, values, whole)


def by_kind(runs: Mapping[str, Mapping[str, T]]) -> list[tuple[str, str, T]]:
    """Return what several runs have, those of a kind together, as run, kind and thing."""
    kinds = dict.fromkeys(kind for found in runs.values() for kind in found)
    return [(run, kind, found[kind]) for kind in kinds for run, found in runs.items() if kind in found]


def side_by_side(tables: Mapping[str, Table], several: bool) -> list[Table]:
    """Return the tables of runs, which have the same columns, as one a caption.

    Args:
        tables: by run.
        several: the page has several runs, even if one alone has such a table: rows begin with the run's name.
    """
    if not several:
        return list(tables.values())
    together = []
    for caption in dict.fromkeys(table.caption for table in tables.values()):
        own = {run: table for run, table in tables.items() if table.caption == caption}
        first = next(iter(own.values()))
        rows = [[run, *row] for run, table in own.items() for row in table.rows]
        values = [[None, *row] for table in own.values() for row in table.values or ()]
        together.append(Table(caption, ["run", *first.header], rows, values or None, first.whole))
    return together
