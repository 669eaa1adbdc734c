"""Many texts in one buffer, against lists."""

import builtins

from hypothesis import given
from hypothesis import strategies as st

from xret.pipeline.data import texts as module
from xret.pipeline.data.texts import Texts, distinct

ANY = st.lists(st.sampled_from(["", "a", "ä", "日本", "\ud800", "a\0", "a b"]) | st.text(max_size=3), max_size=12)


@given(ANY)
def test_texts_are_a_sequence(texts):
    kept = Texts(texts)
    assert [*kept] == texts and len(kept) == len(texts)
    assert [kept[row] for row in range(-len(texts), len(texts))] == texts * 2
    assert (kept[1:-1], kept[::-2]) == (texts[1:-1], texts[::-2])


@given(ANY)
def test_equal_texts_are_counted_by_their_first(texts):
    first, which = distinct(Texts(texts))
    once = [*dict.fromkeys(texts)]
    assert [texts[row] for row in first] == once and [*which] == [once.index(text) for text in texts]


def test_different_texts_with_one_hash_stay_apart(monkeypatch):
    monkeypatch.setattr(module, "hash", lambda pair: builtins.hash(pair) if pair[0] > 1 else 7, raising=False)
    assert distinct(Texts("abca"))[1].tolist() == [0, 1, 2, 0]
