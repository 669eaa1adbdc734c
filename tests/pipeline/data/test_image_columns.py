"""Images in columns, against dictionaries."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xret.errors import ManifestError
from xret.pipeline.data.image_columns import Caption, Images, ImageSample, read_rows
from xret.pipeline.data.manifest import SPLITS

COMPOSED, DECOMPOSED = "\u00e9.png", "e\u0301.png"
CAPTION = st.builds(Caption, st.sampled_from(["", "a", "\u00e4"]), st.none() | st.integers(-1, 5))
ROW = st.tuples(st.sampled_from([COMPOSED, DECOMPOSED, "a.png", "b.png"]), st.lists(CAPTION, max_size=3))


@given(st.lists(ROW, max_size=8), st.booleans(), st.integers(1, 3), st.data())
def test_rows_of_an_image_are_joined_and_settled(rows, one_file, most, data):
    alike = {COMPOSED, DECOMPOSED}
    expected: dict[str, list] = {}
    for name, captions in rows:
        begun = next((other for other in expected if one_file and {other, name} <= alike), name)
        expected.setdefault(begun, []).extend(captions)
    samples = ((f"line {n}", ImageSample(None, name, None, -1, own)) for n, (name, own) in enumerate(rows))
    images = read_rows(samples, lambda *_: one_file)
    for _ in range(2):
        assert [(image.file_name, [*image.captions]) for image in images] == [*expected.items()]
    splits = data.draw(st.lists(st.integers(0, 3), min_size=len(expected), max_size=len(expected)))
    images.settle(np.array(splits, np.uint8), most)
    captions = [caption for own in expected.values() for caption in own]
    running = iter(range(len(captions)))
    if any(caption.sentid is None for caption in captions):
        expected = {name: [Caption(own.text, next(running)) for own in some] for name, some in expected.items()}
    ordered = sorted(zip(splits, expected.items(), strict=True), key=lambda pair: pair[0])
    settled = [
        ImageSample(name, name, SPLITS[split], -1, tuple(captions[:most])) for split, (name, captions) in ordered
    ]
    assert [*images] == settled == [images[row] for row in range(len(images))] == images[:]
    assert np.diff(images.edges).tolist() == [len(image.captions) for image in settled]


@given(st.permutations(range(6)))
def test_what_a_row_has_stays_with_it(numbers):
    rows = [
        ImageSample(f"i{n}", f"{n}.png", ("train", None, "odd")[n % 3], n, (Caption("a", n),), (n, n + 1, 1 << 40))
        for n in numbers
    ]
    assert [*Images(rows)] == [*read_rows(("", row) for row in rows)] == rows
    joined = read_rows((("", row) for row in [*rows, *rows]), lambda *_: True)
    assert [(image.id, image.cocoid, image.place) for image in joined] == [(r.id, r.cocoid, r.place) for r in rows]


def test_what_is_wrong_names_both_rows():
    def rows(*wanted):
        return (
            (f"line {number}", ImageSample(None, name, split, -1, [Caption("a", None)]))
            for number, (name, split) in enumerate(wanted, 1)
        )

    wrong = ("a", "x"), ("b", None), ("b", "y"), ("a", "y")
    with pytest.raises(ManifestError, match=r"^line 3: the split of 'b' is 'y' here and 'none' before"):
        read_rows(rows(*wrong), lambda *_: True)
    with pytest.raises(ManifestError, match=r"^line 3: the file 'b' is in line 2 already"):
        read_rows(rows(*wrong))
