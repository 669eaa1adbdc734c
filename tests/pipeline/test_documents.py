"""YAML and JSON of strangers: what is read, and what is refused before it costs anything."""

import gc
import json
import resource

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from xret.pipeline.documents import DocumentError, parse_json, parse_yaml, read_json, read_yaml

MERGES = "a0: &a0 {k: 1}\n" + "".join(f"a{i}: &a{i}\n  <<: [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 28))
ALIASES = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 100))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (MERGES, "line 29, column 8: it holds more than 100,000 values"),
        (ALIASES, "column .*: it holds more than 100,000 values"),
        (CHAIN, "more than 64 lists and mappings lie inside one another"),
        ("a: &a [*a]", "line 1, column 8: an alias lies inside of what it repeats"),
        ("a: *b", "line 1, column 4: found undefined alias 'b'"),
        ("[" * 100_000, "line 1, column 66: more than 64 lists and mappings"),
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1: the key 'a' stands twice"),
        (f"a: {'9' * 5000}", "line 1, column 4: a number is too long"),
        (f"a: 0x{'f' * 5000}", "line 1, column 4: a number is too long"),
        (f"a: {':'.join(['1'] * 5000)}", "line 1, column 4: a number is too long"),
        (f"a: {':'.join(['1'] * 5000)}.5", "line 1, column 4: a number is too long"),
        ("a: !!int x", "invalid literal for int"),
        ("a: !!int ''", "index out of range"),
        ("a: !!bool x", "x"),
        ("a: !!timestamp 2024-13-45", "line 1, column 4: could not determine a constructor"),
        ("a: !!python/object:os.system x", "line 1, column 4: could not determine a constructor"),
        ("{[a]: b}: c", "line 1, column 1: found unhashable key"),
        ("a: [open\nb: 1", "line 2, column 2: expected ',' or ']'"),
        ("a: \x01", "unacceptable character"),
        ("a: 1\n---\nb: 2\n", "line 2, column 1: but found another document"),
    ],
)
def test_yaml_beyond_the_bounds_is_refused(text, reason):
    with pytest.raises(DocumentError, match=reason) as caught:
        parse_yaml(text.encode())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 65 + "]" * 65, '{"a":' * 100_000, '{"a":' * 65 + "1" + "}" * 65])
def test_deep_json_is_refused(text):
    with pytest.raises(DocumentError, match="more than 64 lists and mappings lie inside one another"):
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' stands twice"),
        ("9" * 5000, "integer string conversion"),
        ('{"a": 1,\n"b" 2}', "line 2 column 5"),
        (b'"\xff"', "utf-8"),
    ],
)
def test_other_json_is_refused(text, reason):
    with pytest.raises(DocumentError, match=reason):
        parse_json(text)
    assert gc.isenabled()


def test_dates_are_texts_and_aliases_in_bounds_are_read():
    text = "day: 2024-13-45\nbase: &b {x: 1, y: 0x10}\nmore: {<<: *b, y: 2.5}\nagain: [*b, *b]\nyes: true\nno: ~\n"
    base = {"x": 1, "y": 16}
    assert parse_yaml(b"\xef\xbb\xbf" + text.encode()) == {
        "day": "2024-13-45",
        "base": base,
        "more": {"x": 1, "y": 2.5},
        "again": [base, base],
        True: True,
        False: None,
    }


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@settings(deadline=None, max_examples=60)
@given(plain)
def test_whatever_was_written_comes_back(value):
    assert parse_json(json.dumps(value)) == value
    assert parse_yaml(yaml.safe_dump(value).encode()) == value


def test_a_large_file_is_refused_unread(tmp_path):
    path, before = tmp_path / "large", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DocumentError, match="more than 1,048,576 bytes"):
        read_yaml(path)
    with pytest.raises(DocumentError, match="more than 2,147,483,648 bytes"):
        read_json(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
