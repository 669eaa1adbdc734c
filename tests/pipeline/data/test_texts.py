"""Many texts in one buffer, against lists."""

import builtins
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_disk import small_disk

from xret.errors import OutputError
from xret.pipeline.data import texts as module
from xret.pipeline.data.texts import Texts, distinct

ANY = st.lists(st.sampled_from(["", "a", "ä", "日本", "\ud800", "a\0", "a b"]) | st.text(max_size=3), max_size=12)


@given(ANY)
def test_texts_are_a_sequence(texts):
    kept = Texts(texts)
    assert [*kept] == texts and len(kept) == len(texts)
    assert [kept[row] for row in range(-len(texts), len(texts))] == texts * 2
    assert (kept[1:-1], kept[::-2]) == (texts[1:-1], texts[::-2])


def test_what_lies_in_a_file_is_the_same(monkeypatch):
    texts = ["ä", "", "b" * 9, "\ud800", "ä", "cd"]
    rows = np.array([5, 0, 0, 4, 1, 2])
    for pending in (1 << 18, 2):
        monkeypatch.setattr(module, "_PENDING", pending)
        monkeypatch.setattr(module, "_BLOCK", 4)
        kept = Texts(texts)
        assert [*kept] == texts
        chosen = [texts[row].encode() for row in rows]
        assert [bytes(text) for block in kept.in_blocks(rows) for text in block] == chosen
        edges = np.concatenate([*kept.offsets(rows)])
        assert edges.tolist() == [len(b"".join(chosen[:row])) for row in range(7)]
        assert [*pickle.loads(pickle.dumps(kept))] == texts
        kept.append("more")
        assert kept[-1] == "more" and len(kept) == 7


def test_a_full_disk_names_the_folder_of_temporary_files(monkeypatch):
    monkeypatch.setattr(module, "_PENDING", 2)
    with small_disk(64), pytest.raises(OutputError, match=r"cannot be written .*File too large.*set TMPDIR"):
        Texts(["a text"] * 100)


@given(ANY)
def test_equal_texts_are_counted_by_their_first(texts):
    first, which = distinct(Texts(texts))
    once = [*dict.fromkeys(texts)]
    assert [texts[row] for row in first] == once and [*which] == [once.index(text) for text in texts]


def test_different_texts_with_one_hash_stay_apart(monkeypatch):
    monkeypatch.setattr(module, "hash", lambda pair: builtins.hash(pair) if pair[0] > 1 else 7, raising=False)
    assert distinct(Texts("abca"))[1].tolist() == [0, 1, 2, 0]
