"""The words encoder: vocabularies and ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xret.pipeline.data.samples import tokenize
from xret.pipeline.encoders.words import UNK, WordsEncoder, without_spaces
from xret.pipeline.errors import EncoderError

CAPTIONS = ["A red dog.", "a dog runs", "A cat runs", "the red cat", "A bird"]


def test_vocabulary_is_ordered_by_count_then_word():
    assert WordsEncoder.build(CAPTIONS, min_count=2).vocabulary == (UNK, "a", "cat", "dog", "red", "runs")


@pytest.mark.parametrize(("captions", "kept"), [(9_999, (UNK, "dog", "cat")), (10_000, (UNK, "dog"))])
def test_a_word_needs_four_occurrences_where_there_are_many_captions(captions, kept):
    texts = ["dog dog dog cat", "cat cat dog"]
    assert WordsEncoder.build(texts + [""] * (captions - 2)).vocabulary == kept


def test_rare_and_new_words_and_captions_without_words_become_unk():
    encoder = WordsEncoder.build(CAPTIONS, min_count=2)
    assert encoder.tokenize(["The RED bird runs!", "zebra"]) == [[0, 4, 0, 5], [0]]
    assert encoder.tokenize(["", "  ", "...", "\n"]) == [[0]] * 4
    assert WordsEncoder.build([UNK] * 9).vocabulary.count(UNK) == 1


@given(st.lists(st.text(alphabet="ab c-'É\n.", max_size=20), max_size=12), st.integers(1, 3))
def test_ids_spell_the_words(texts, min_count):
    encoder = WordsEncoder.build(texts, min_count)
    counts = [word for text in texts for word in tokenize(text)]
    for text, ids in zip(texts, encoder.tokenize(texts), strict=True):
        expected = [word if counts.count(word) >= min_count else UNK for word in tokenize(text)] or [UNK]
        assert [encoder.vocabulary[i] for i in ids] == expected
    unknown = encoder.unknown_words(texts)
    assert unknown == sorted({word for word in counts if counts.count(word) < min_count}, key=counts.index)
    again = WordsEncoder(list(encoder.vocabulary))
    assert again.tokenize(texts) == encoder.tokenize(texts)
    assert again.identity == encoder.identity


@given(st.permutations(CAPTIONS))
def test_the_order_of_captions_does_not_matter(captions):
    assert WordsEncoder.build(captions, 1).identity == WordsEncoder.build(CAPTIONS, 1).identity


@pytest.mark.parametrize("vocabulary", [[], ["a", UNK], [UNK, "a", "b", "a"], [UNK, "a", UNK]])
def test_a_vocabulary_that_cannot_be_is_refused(vocabulary):
    with pytest.raises(EncoderError, match="begins with '<unk>' and names no word twice"):
        WordsEncoder(vocabulary)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("男人骑着一匹马", True),
        ("男人 骑着 一匹 马", False),
        ("公園で男の人が馬に乗っている", True),
        ("スケートボード に 乗る 少年", False),
        ("ผู้ชายกำลังขี่ม้าอยู่ในสวน", True),
        ("ผู้ชาย กำลัง ขี่ ม้า", False),
        ("남자가 말을 타고 있다", False),
        ("a man rides 一匹马", False),
        ("", False),
    ],
)
def test_texts_of_languages_without_spaces(text, expected):
    assert without_spaces([text] * 3) == expected


def test_the_portable_tokenizer_gives_the_same_ids():
    texts = [
        "The dog's T-shirt, in 2 colours .",
        "rock’n’roll x_y ÜNÏ 3.5 km²",
        "soft\u00adened नमस्ते می\u200cخواهم 汉字",
        "İ ﬁn",
    ]
    encoder = WordsEncoder.build(texts[:2] + texts[2:3])
    tokenizer = encoder.portable_tokenizer()
    for text in [*texts, *(f"a{sign}b {sign} c" for sign in map(chr, range(0x20, 0x500)))]:
        assert (tokenizer.encode(text).ids or [0]) == encoder.tokenize([text])[0], text
    padded = tokenizer.encode_batch(texts)
    assert [sum(one.attention_mask) for one in padded] == [len(ids) for ids in encoder.tokenize(texts)]
