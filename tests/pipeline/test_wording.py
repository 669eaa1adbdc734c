"""How numbers and foreign texts read."""

import pytest

from xret.pipeline.wording import counted, in_bytes, in_time, printable, raised, reason, some_of


@pytest.mark.parametrize(
    ("wording", "number", "text"),
    [
        (in_bytes, 0, "0.0 kB"),
        (in_bytes, 999_999, "1.0 MB"),
        (in_bytes, 4_712_345_678, "4.7 GB"),
        (in_bytes, 4e15, "4,000.0 TB"),
        (in_time, 0.25, "0.2 seconds"),
        (in_time, 59.998, "1.0 minutes"),
        (in_time, 36_000_000, "10,000.0 hours"),
    ],
)
def test_numbers(wording, number, text):
    assert wording(number) == text


def test_lists_and_nouns():
    assert [counted(number, "shard") for number in (0, 1, 1234567)] == ["0 shards", "1 shard", "1,234,567 shards"]
    assert some_of(list("abc")) == ["a", "b", "c"]
    assert some_of(list("abcde")) == ["a", "b", "c", "and 2 more"]


def test_a_text_commands_no_terminal():
    assert printable("two  dogs, a café, पक्षी, 👩\u200d🚀") == "two  dogs, a café, पक्षी, 👩\u200d🚀"
    assert printable("a\nb\r\tc\x85d\u2028e") == "a b  c d e"
    assert printable("\x1b[2J \x07 \x7f \x9b \u202e \udcff") == r"\x1b[2J \x07 \x7f \x9b \u202e \udcff"


def test_an_error_of_a_file_names_it_where_no_sentence_does(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        (tmp_path / "words.txt").read_text()
    assert reason(caught.value) == "No such file or directory"
    assert raised(caught.value).startswith("FileNotFoundError: ") and "words.txt" in raised(caught.value)
    assert (reason(TimeoutError()), raised(TimeoutError())) == ("TimeoutError", "TimeoutError")
    assert raised(ValueError("a.\nb")) == "ValueError: a"
