"""How numbers read."""

import pytest

from xret.pipeline.wording import counted, in_bytes, in_time, printable, some_of


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 shards"), (1, "1 shard"), (2, "2 shards"), (1234567, "1,234,567 shards")]
)
def test_a_number_has_its_noun(number, text):
    assert counted(number, "shard") == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0.0 kB"),
        (540, "0.5 kB"),
        (999_999, "1.0 MB"),
        (10**6, "1.0 MB"),
        (4_712_345_678, "4.7 GB"),
        (3e12, "3.0 TB"),
        (4e15, "4,000.0 TB"),
    ],
)
def test_bytes(size, text):
    assert in_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.25, "0.2 seconds"),
        (59, "59.0 seconds"),
        (59.998, "1.0 minutes"),
        (90, "1.5 minutes"),
        (36_000_000, "10,000.0 hours"),
    ],
)
def test_times(seconds, text):
    assert in_time(seconds) == text


def test_the_first_of_many():
    assert some_of([]) == []
    assert some_of(["a", "b", "c"]) == ["a", "b", "c"]
    assert some_of(list("abcde")) == ["a", "b", "c", "and 2 more"]


def test_a_text_commands_no_terminal():
    assert printable("two  dogs, a café, पक्षी, 👩\u200d🚀") == "two  dogs, a café, पक्षी, 👩\u200d🚀"
    assert printable("a\nb\r\tc\x85d\u2028e") == "a b  c d e"
    assert printable("\x1b[2J \x07 \x7f \x9b \u202e \udcff") == r"\x1b[2J \x07 \x7f \x9b \u202e \udcff"
