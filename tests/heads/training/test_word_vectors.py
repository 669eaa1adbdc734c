"""Word vectors in files as GloVe and fastText write them, and files that are none."""

import gzip

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xret.heads.training.word_vectors import read_word_vectors
from xret.pipeline.errors import VectorsError

WORDS = ("<unk>", "a", "dog", "t-shirt", "naïve", "zebra")
GLOVE = """\
the 0.5 0.25 -1
a 1 2 3
. . . 7 8 9
dog -0.125 4e-1 -6
at name@domain.com 1 1 1
naïve 0.1 0.2 0.3
"""


@pytest.fixture
def write(tmp_path):
    def make(content, name="vectors.txt"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return make


def test_glove(write):
    read = read_word_vectors(write(GLOVE), WORDS)
    expected = [[0, 0, 0], [1, 2, 3], [-0.125, 0.4, -6], [0, 0, 0], [0.1, 0.2, 0.3], [0, 0, 0]]
    assert read.vectors.dtype == np.float32
    np.testing.assert_array_equal(read.vectors, np.array(expected, dtype=np.float32))
    assert read.found.tolist() == [False, True, True, False, True, False]
    assert read.missing == ("<unk>", "t-shirt", "zebra")


def test_words_with_spaces_numbers_and_headers(write):
    read = read_word_vectors(write(GLOVE), [". . .", "at", "name@domain.com", "at name@domain.com"])
    assert read.vectors.tolist() == [[7, 8, 9], [0, 0, 0], [0, 0, 0], [1, 1, 1]]
    lines = GLOVE.replace("\n", " \n")  # fastText writes a space after each number
    expected, read = (read_word_vectors(write(text), WORDS) for text in (GLOVE, f"6 3\n{lines}"))
    np.testing.assert_array_equal(read.vectors, expected.vectors)
    assert read.missing == expected.missing
    assert read_word_vectors(write("2 3\n2 4 5 6\nx 7 8 9\n"), ["2"]).vectors.tolist() == [[4, 5, 6]]
    assert read_word_vectors(write("2 3 4\nx 7 8\n"), ["2"]).vectors.tolist() == [[3, 4]]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("compressed", [True, False])
def test_line_endings_and_compression(write, ending, last, compressed):
    content = GLOVE.replace("\n", ending).removesuffix("" if last else ending).encode()
    path = write(gzip.compress(content), "glove.txt.gz") if compressed else write(content)
    found, expected = (read_word_vectors(one, WORDS).vectors for one in (path, write(GLOVE)))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("space", ["\x85", "\u2028", "\x0b", "\x1c", "\u00a0"])
def test_words_that_are_line_ends_or_spaces_of_other_kinds(write, space):
    lines = f"3 2\n{space} 1 2\nb{space}c 3 4\n".encode() + b"\xff\xfe 3 4\ndog 5 6\n"  # not all is UTF-8
    assert read_word_vectors(write(lines), [space, f"b{space}c", "dog"]).vectors.tolist() == [[1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize(
    ("order", "row"),
    [
        (["Dog", "DOG"], 0),  # both become the word: the first
        (["Dog", "dog"], 1),  # the very word counts more, wherever it is
        (["dog", "Dog"], 0),
        (["dog", "dog"], 0),
        (["Dog", "dog", "dog"], 1),
        (["dogs", "Dog"], 1),
    ],
)
def test_case_and_duplicates(write, order, row):
    lines = "".join(f"{word} {number} 1\n" for number, word in enumerate(order))
    assert read_word_vectors(write(lines), ["cat", "dog"]).vectors.tolist() == [[0, 0], [row, 1]]


BROKEN = {
    "cut": (GLOVE[:-5], "line 6 is not a word with 3 numbers"),
    "blank": (GLOVE.replace("dog", "\ndog"), "line 4 is not a word with 3 numbers"),
    "after a header": ("2 3\na 1 2 3\ndog 1 2\n", "line 3 is not a word with 3 numbers"),
    "wide": ("2 999999\na 1 2 3\n", "does not begin with a word and its numbers"),
    "binary": (b"2 3\na \x00\x00\x80?\x00\x00\x00@\n", "does not begin with a word and its numbers"),
    "empty": ("", "does not begin with a word and its numbers"),
    "words only": ("a\ndog\n", "does not begin with a word and its numbers"),
    "no numbers": ("a red dog\n", "line 1 has something other than numbers"),
    "not finite": ("a 1 2\ndog nan 1\n", "line 2 has a number that is not finite"),
    "too large": ("a 1 2\ndog 1e39 1\n", "line 2 has a number that is not finite"),
    "fewer": ("5 2\na 1 2\ndog 1 2\n", "promises 5 vectors and it has 2"),
    "foreign": ("der 1 2\nhund 3 4\n", "no word of the vocabulary"),
    "only a header": ("0 300\n", "no word of the vocabulary"),
}


@pytest.mark.parametrize(("content", "message"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_holds_no_vectors_is_refused(write, content, message):
    with pytest.raises(VectorsError, match=rf"vectors\.txt.*{message}"):
        read_word_vectors(write(content), WORDS)


def test_a_file_that_cannot_be_read_is_refused(tmp_path, write):
    with pytest.raises(VectorsError, match=r"nowhere.txt cannot be read \(No such file or directory\)"):
        read_word_vectors(tmp_path / "nowhere.txt", WORDS)
    with pytest.raises(VectorsError, match="cannot be read"):
        read_word_vectors(tmp_path, WORDS)
    whole = gzip.compress(GLOVE.encode() * 50)
    for damaged in (GLOVE.encode(), whole[:-20], whole[:40] + b"torn" + whole[44:]):
        with pytest.raises(VectorsError, match="cannot be read"):
            read_word_vectors(write(damaged, "glove.gz"), WORDS)


characters = st.characters(exclude_characters="\n\r", exclude_categories=["Cs"])
words = st.text(characters, min_size=1).filter(lambda word: word.strip(" ") == word)
row = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3, max_size=3)


@given(st.dictionaries(words, row, min_size=1), st.booleans())
def test_what_was_written_is_read(tmp_path_factory, table, header):
    path = tmp_path_factory.getbasetemp() / "written.vec"
    lines = [f"{len(table)} 3"] * header + [f"{word} {' '.join(map(repr, row))}" for word, row in table.items()]
    if not header and " " in next(iter(table)):
        lines.insert(0, "a-word-of-no-other-kind 0 0 0")  # the first line shows the width
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    read = read_word_vectors(path, list(table))
    np.testing.assert_array_equal(read.vectors, np.array(list(table.values()), dtype=np.float32))
    assert read.missing == ()
