"""Images of rows in columns, against dictionaries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xret.errors import ManifestError
from xret.pipeline.data.row_entries import RowEntries
from xret.pipeline.data.rows import Entry

COMPOSED, DECOMPOSED = "\u00e9.png", "e\u0301.png"
CAPTIONS = st.lists(st.tuples(st.sampled_from(["", "a", "\u00e4"]), st.none() | st.integers(-1, 5)), max_size=3)
ROWS = st.lists(st.tuples(st.sampled_from([COMPOSED, DECOMPOSED, "a.png", "b.png"]), CAPTIONS), max_size=8)


@given(ROWS, st.booleans())
def test_rows_of_an_image_are_joined(rows, one_file):
    alike = {COMPOSED, DECOMPOSED}
    expected: dict[str, list] = {}
    for name, captions in rows:
        begun = next((other for other in expected if one_file and {other, name} <= alike), name)
        expected.setdefault(begun, []).extend(captions)
    entries = RowEntries(
        ((f"line {n}", Entry(name, None, own)) for n, (name, own) in enumerate(rows)), lambda *_: one_file
    )
    for _ in range(2):
        assert [(entry.file_name, entry.captions) for entry in entries] == [*expected.items()]


@given(st.permutations(range(6)))
def test_places_and_splits_are_those_of_each_row(numbers):
    rows = [Entry(f"{n}.png", ("train", None, "odd")[n % 3], [("a", n)], place=(n, n + 1, 1 << 40)) for n in numbers]
    assert [*RowEntries(("", row) for row in rows)] == rows


def test_what_is_wrong_names_both_rows():
    rows = [Entry(name, split, [("a", None)]) for name, split in (("a", "x"), ("b", None), ("b", "y"), ("a", "y"))]
    named = [(f"line {number}", row) for number, row in enumerate(rows, 1)]
    with pytest.raises(ManifestError, match=r"^line 3: the split of 'b' is 'y' here and 'none' before"):
        RowEntries(named, lambda *_: True)
    with pytest.raises(ManifestError, match=r"^'b' is in line 2 and line 3"):
        RowEntries(named)
