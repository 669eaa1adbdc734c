"""YAML and JSON: what was written comes back, and what would be misread is refused."""

import json
import tracemalloc

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from xret.pipeline import documents
from xret.pipeline.documents import DocumentError, json_items, parse_json, read_yaml


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1: the key 'a' stands twice"),
        ("a: *b", "line 1, column 4: found undefined alias 'b'"),
        ("a: [open\nb: 1", "line 2, column 2: expected ',' or ']'"),
        ("a: !!python/object:os.system x", "line 1, column 4: could not determine a constructor"),
        ("a: 1\n---\nb: 2\n", "line 2, column 1: but found another document"),
        ("[" * 100_000, "recursion"),
        ("a: !!int x", "invalid literal for int"),
        ("a: \x01", "unacceptable character"),
        ("a: !!int ''", "invalid literal for int"),
    ],
)
def test_other_yaml_is_refused(tmp_path, text, reason):
    (tmp_path / "y").write_text(text)
    with pytest.raises(DocumentError, match=reason) as caught:
        read_yaml(tmp_path / "y")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' stands twice"),
        ("[" * 100_000, "recursion"),
        ("9" * 5000, "integer string conversion"),
        ('{"a": 1,\n"b" 2}', "line 2 column 5"),
        (b'"\xff"', "utf-8"),
    ],
)
def test_other_json_is_refused(text, reason):
    with pytest.raises(DocumentError, match=reason):
        parse_json(text)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


def test_whole_numbers_are_decimal(tmp_path):
    (tmp_path / "y").write_text("[024, -010, +7, 0, 1_000, 08, 1:30, 0x1F]")
    assert read_yaml(tmp_path / "y") == [24, -10, 7, 0, 1000, 8, "1:30", "0x1F"]


def test_dates_are_texts(tmp_path):
    (tmp_path / "y").write_text("name: 2024-13-45\nother: 2024-01-02\n")
    assert read_yaml(tmp_path / "y") == {"name": "2024-13-45", "other": "2024-01-02"}


@settings(deadline=None, max_examples=60)
@given(plain)
def test_whatever_was_written_comes_back(tmp_path_factory, value):
    assert parse_json(json.dumps(value)) == value
    path = tmp_path_factory.getbasetemp() / "y"
    path.write_bytes(b"\xef\xbb\xbf" + yaml.safe_dump(value).encode())
    assert read_yaml(path) == value


@settings(deadline=None, max_examples=300)
@given(
    st.dictionaries(st.text(max_size=3), plain, max_size=4), st.integers(1, 9), st.sampled_from([None, 1]), st.data()
)
def test_items_of_blocks_are_those_of_the_whole(tmp_path_factory, value, block, indent, data):
    path, text = tmp_path_factory.getbasetemp() / "blocks.json", json.dumps(value, indent=indent)
    if data.draw(st.booleans(), "damaged"):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(st.sampled_from(["", ",", "]", "}", "1", '"', "{", " "])) + text[at + 1 :]
    path.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_BLOCK", block)
        try:
            expected = parse_json(text)
        except DocumentError as error:
            with pytest.raises(DocumentError) as caught:
                list(json_items(path))
            assert str(caught.value) == str(error)
            return
        found: dict = {}
        for key, number, item in json_items(path):
            if number is None:
                found[key] = item
            else:
                assert number == len(found[key])
                found[key].append(item)
        assert found == (expected if isinstance(expected, dict) else {})


def test_items_are_not_in_memory_together(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_BLOCK", 4096)
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"a": [{"number": number, "text": "x" * 90} for number in range(5000)]}))
    tracemalloc.start()
    assert sum(1 for _ in json_items(path)) == 5001
    assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 5
    tracemalloc.stop()
