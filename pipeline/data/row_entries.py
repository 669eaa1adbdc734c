"""The images of rows, in columns, so that millions of them take next to no memory."""

import unicodedata
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import numpy as np

from ..errors import ManifestError
from .rows import Entry
from .texts import Column, Texts, grouped

_NO_NUMBER = -(1 << 63)  # of a caption that its file does not number


class RowEntries:
    """The images of rows, in the order of their first ones, each with the captions of all its rows."""

    def __init__(self, rows: Iterable[tuple[str, Entry]], is_one: Callable[[str, str], bool] | None = None) -> None:
        """Take rows with their places; `is_one` says whether names that differ in their normal form are of one file.

        None: an image has one row. ManifestError: it has several, or of several splits.
        """
        self.names, keys, places, self._texts = Texts(), Texts(), Texts(), Texts()
        starts, sentids, splits, inside = (Column("q") for _ in range(4))
        numbers: dict[str | None, int] = {}
        decomposed: set[int] = set()  # rows whose name is not in NFC
        for row, (where, entry) in enumerate(rows):
            key = unicodedata.normalize("NFC", entry.file_name) if is_one else entry.file_name
            if key != entry.file_name:
                decomposed.add(row)
            for texts, text in ((self.names, entry.file_name), (keys, key), (places, where)):
                texts.append(text)
            splits.append(numbers.setdefault(entry.split, len(numbers)))
            starts.append(len(self._texts))
            for text, sentid in entry.captions:
                self._texts.append(text)
                sentids.append(_NO_NUMBER if sentid is None else sentid)
            for number in entry.place or ():
                inside.append(number)
        starts.append(len(self._texts))
        self._starts, self._sentids, self._places = starts.read(), sentids.read(), inside.read().reshape(-1, 3)
        self._splits, self._kinds = splits.read(), [*numbers]
        self._order, self._edges = grouped(keys)
        if is_one and decomposed:
            self._keep_apart(decomposed, is_one)
        first = np.repeat(self._order[self._edges[:-1]], np.diff(self._edges))
        wrong = self._splits[self._order] != self._splits[first] if is_one else self._order != first
        if wrong.any():
            at = np.flatnonzero(wrong)[np.argmin(self._order[wrong])]  # the first row that is
            row, before = int(self._order[at]), int(first[at])
            name, here = self.names[row], places[row]
            if not is_one:
                raise ManifestError(f"'{name}' is in {places[before]} and {here}; remove one of them.")
            now, then = (self._kinds[self._splits[number]] or "none" for number in (row, before))
            both = f"'{now}' here and '{then}' before"
            raise ManifestError(f"{here}: the split of '{name}' is {both}; give it one split.")

    def _keep_apart(self, decomposed: set[int], is_one: Callable[[str, str], bool]) -> None:
        """Group the rows again: names of one normal form, but of two files, are two images."""
        keys = [""] * len(self.names)
        for rows in np.split(self._order, self._edges[1:-1]):
            first = self.names[rows[0]]
            mixed = not decomposed.isdisjoint(rows.tolist())
            for row in rows.tolist():
                name = self.names[row] if mixed else first
                keys[row] = first if name == first or is_one(first, name) else name
        self._order, self._edges = grouped(keys)

    def __iter__(self) -> Iterator[Entry]:
        order, starts, sentids, places = (
            values.data for values in (self._order, self._starts, self._sentids, self._places)
        )
        for begin, end in pairwise(self._edges.data):
            captions = [
                (self._texts[at], None if sentids[at] == _NO_NUMBER else sentids[at])
                for row in order[begin:end]
                for at in range(starts[row], starts[row + 1])
            ]
            first = order[begin]
            entry = Entry(self.names[first], self._kinds[self._splits[first]], captions)
            if len(places):
                entry.place = places[first, 0], places[first, 1], places[first, 2]
            yield entry
