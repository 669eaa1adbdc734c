"""Samples: captions in the order of the store, and their words."""

import hashlib
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_captions import image, karpathy, manifest, refusal

from xret.pipeline.data.images import open_image
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.data.samples import SPLITS, read_samples, tokenize


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["train", "val", "test", "other", "restval", "extra"]), min_size=1, max_size=12))
def test_rows_are_ordered_by_split_then_as_in_the_source(tmp_path_factory, splits):
    images = [image(number, split) for number, split in enumerate(splits)]
    merge = "merge_splits: {restval: train}\n"
    samples = read_samples(karpathy(tmp_path_factory.mktemp("order"), images, merge))
    expected = []  # said again by looking for each split in turn
    for wanted in ("train", "val", "test", "other"):
        first = len(expected)
        for number, split in enumerate(splits):
            final = {"restval": "train", "extra": "other"}.get(split, split)
            if final == wanted:
                expected.append((str(number), wanted))
        assert samples.splits.get(wanted) == ((first, len(expected)) if len(expected) > first else None)
    assert [(i.id, i.split) for i in samples.images] == expected
    assert list(samples.splits) == [split for split in SPLITS if split in samples.splits]


def test_only_the_first_captions_are_kept_and_their_numbers_stay(tmp_path):
    counts = {0: 7, 1: 2, 2: 5}
    rows = "".join(f"{number}.jpg,text {k},train\n" for number, n in counts.items() for k in range(n))
    text = f"file_name,caption,split\n{rows}"
    kept = read_samples(manifest(tmp_path, text, ".csv", "captions_per_image: 5\n"))
    assert [[c.text for c in i.captions] for i in kept.images] == [
        [f"text {k}" for k in range(min(5, n))] for n in counts.values()
    ]
    assert [i.captions[0].sentid for i in kept.images] == [0, 7, 9]


def test_promised_counts_are_checked_after_merging(tmp_path):
    images = [image(1), image(2, "restval"), image(3, "val")]
    merge = "merge_splits: {restval: train}\n"
    good = karpathy(tmp_path, images, merge + "counts: {train: 2, val: 1, test: 0}\n")
    assert read_samples(good).splits == {"train": (0, 2), "val": (2, 3)}
    message = refusal(karpathy(tmp_path, images, merge + "counts: {train: 3, val: 1, test: 4}\n"))
    assert "it holds 2 train images where the manifest promises 3, 0 test images where" in message
    assert f"or correct 'counts' in {tmp_path / 'birds.yaml'}" in message
    assert "it holds 1 train image where" in refusal(karpathy(tmp_path, images, "counts: {train: 2}\n"))


def without_splits(folder, names):
    """Return a manifest of these names, each with two captions and no split."""
    return manifest(folder, "file_name,caption\n" + "".join(f"{name},a\n{name},b\n" for name in names), ".csv")


def splits_of(samples):
    return {image.file_name: image.split for image in samples.images}


@pytest.mark.parametrize(
    ("number", "shares"),
    [
        (2000, (1600, 200, 200)),
        (60, (48, 6, 6)),
        (15, (12, 1, 2)),
        (5, (3, 1, 1)),
        (3, (1, 1, 1)),
        (2, (1, 0, 1)),
        (1, (1, 0, 0)),
    ],
)
def test_without_splits_the_hashes_are_cut_at_80_and_90_percent_and_that_is_said_once(tmp_path, caplog, number, shares):
    names = [f"folder/bird {number}.jpg" for number in range(number)]
    found = splits_of(read_samples(without_splits(tmp_path, names)))
    order = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    expected = [split for split, count in zip(SPLITS, shares, strict=False) for _ in range(count)]
    assert [found[name] for name in order] == expected
    said = ", ".join(f"{count} {split}" for split, count in zip(SPLITS, shares, strict=False))
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path / 'captions.csv'} names no splits: {said} by ")


def fill(folder, contents):
    """Write files of pictures that nobody decodes; None: none is there."""
    for name, content in contents.items():
        if content is not None:
            (folder / "images" / name).write_bytes(content)


def test_files_of_equal_bytes_are_in_one_split_and_several_times_in_train(tmp_path):
    contents = {f"{number}.jpg": b"%03d" % (number // 5 if number < 100 else number) for number in range(200)}
    contents |= {f"lost {number}.jpg": None for number in range(10)}  # of which nothing is known
    where = without_splits(tmp_path, contents)
    fill(tmp_path, contents)
    found = splits_of(read_samples(where))
    assert [[*found.values()].count(split) for split in SPLITS[:3]] == [168, 21, 21]
    assert {found[f"{number}.jpg"] for number in range(100)} == {"train"}
    for number in range(200):  # now all are there five times
        (tmp_path / "images" / f"{number}.jpg").write_bytes(b"%03d" % (number // 5))
    again = splits_of(read_samples(where))
    assert all(len({again[f"{5 * group + k}.jpg"] for k in range(5)}) == 1 for group in range(40))
    assert {"train", "val", "test"} == {*again.values()}


def test_what_was_split_stays_and_what_is_new_is_split_by_itself(tmp_path):
    old = {f"{number}.jpg": b"%03d" % number for number in range(60)}
    where = without_splits(tmp_path, old)
    fill(tmp_path, old)
    kept = splits_of(read_samples(where))
    new = {f"new {number}.jpg": b"%03d" % (number + 60) for number in range(40)}
    new |= {f"copy of {name}": content for name, content in old.items()}
    fill(tmp_path, new)
    found = splits_of(read_samples(without_splits(tmp_path, old | new), kept=lambda: kept))
    assert {name: found[name] for name in old} == kept
    assert {name: found[f"copy of {name}"] for name in old} == kept
    shares = [found[f"new {number}.jpg"] for number in range(40)]
    assert [shares.count(split) for split in SPLITS[:3]] == [32, 4, 4]


def test_the_digest_does_not_know_where_the_folder_lies_nor_how_the_file_is_laid_out(tmp_path):
    images = [image(1), image(2, "val", ["a", "b"])]
    one = read_samples(karpathy(tmp_path / "one", images))
    two = read_samples(manifest(tmp_path / "two" / "deeper", json.dumps({"images": images}, indent=3)))
    assert one.digest == two.digest
    assert len(bytes.fromhex(one.digest)) == 32


def test_the_digest_changes_with_every_value_of_every_row(tmp_path):
    def fresh():
        return [image(n, "train", ["ab", "c"], filepath="f", cocoid=50 + n) for n in range(3)]

    changed = [fresh()]
    for row in range(3):
        for key, value in {"filename": "9.jpg", "split": "val", "cocoid": 9, "filepath": "g"}.items():
            changed.append(fresh())
            changed[-1][row][key] = value
        for sentence in range(2):
            for key, value in {"raw": "AB", "sentid": 999}.items():
                changed.append(fresh())
                changed[-1][row]["sentences"][sentence][key] = value
        changed.append(fresh())
        changed[-1][row]["imgid"] = 77
        for sentence in changed[-1][row]["sentences"]:
            sentence["imgid"] = 77
        changed.append(fresh())
        changed[-1][row]["sentences"].pop()
        changed.append(fresh())
        changed[-1].pop(row)
    changed.append(fresh()[::-1])
    changed.append([image(n, "train", ["a", "bc"], filepath="f", cocoid=50 + n) for n in range(3)])
    digests = [read_samples(karpathy(tmp_path, images)).digest for images in changed]
    renamed = karpathy(tmp_path, fresh())
    renamed.path.write_text(renamed.path.read_text().replace("birds", "fish"))
    digests.append(read_samples(load_manifest(renamed.path)).digest)
    assert len(set(digests)) == len(digests) == 2 + 3 * 11 + 2


def check_against_the_source(samples, source: Path) -> None:
    """Compare with the JSON, read here in the plainest way."""
    found = {i.file_name: i for i in samples.images}
    order = {"train": [], "val": [], "test": []}
    for entry in json.loads(source.read_text())["images"]:
        order[entry["split"]].append(entry["filename"])
        sample = found.pop(entry["filename"])
        assert sample.id == str(entry["imgid"])
        assert [c.text for c in sample.captions] == [s["raw"] for s in entry["sentences"]]
        assert [c.sentid for c in sample.captions] == entry["sentids"]
    assert not found
    assert [i.file_name for i in samples.images] == order["train"] + order["val"] + order["test"]


def test_rsicd_with_its_bundled_manifest(shared_data):
    rsicd = load_manifest("rsicd", shared_data("rsicd").parent)
    samples = read_samples(rsicd)
    assert samples.splits == {"train": (0, 7734), "val": (7734, 8734), "test": (8734, 9828)}
    texts = [caption.text for i in samples.images for caption in i.captions]
    assert (len(texts), len(set(texts))) == (49_140, 15_097)
    assert [text.strip() for text in texts if not tokenize(text)] == [".", ".", "."]
    check_against_the_source(samples, rsicd.captions)
    assert open_image(rsicd.images / samples.images[0].file_name).size == (224, 224)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (".", []),
        ("", []),
        ("Two Dogs , running.", ["two", "dogs", "running"]),
        ("the dogs' owner", ["the", "dogs", "owner"]),
        ("it’s a well-known 'quote'", ["it's", "a", "well-known", "quote"]),
        ("FRÜHSTÜCK im Café", ["frühstück", "im", "café"]),
        ("cafe\u0301", ["café"]),
        ("पक्षी उड़ता है", ["पक्षी", "उड़ता", "है"]),
        ("鳥が飛ぶ。", ["鳥が飛ぶ"]),
        ("می\u200cرود خانه\u200c.", ["می\u200cرود", "خانه"]),
        ("র\u200d\u09cdযাব \u200d x\u200d", ["র\u200d\u09cdযাব", "x"]),
        ("\ufeffco\u00adoperate\u200e a\u200bb", ["cooperate", "a", "b"]),
    ],
)
def test_words(text, words):
    assert tokenize(text) == words


@given(st.text())
def test_words_are_lower_case_whole_and_stay_the_same_when_split_again(text):
    words = tokenize(text)
    assert tokenize(" ".join(words)) == words
    for word in words:
        assert word == word.lower()
        assert not any(character.isspace() for character in word)
        assert word[0].isalnum()
    assert bool(words) == any(character.isalnum() for character in text)


@given(st.text(alphabet=st.characters(max_codepoint=127)))
def test_ascii_words_by_hand(text):
    expected, word = [], ""
    padded = f"{text.lower()}  "
    for character, following in itertools.pairwise(padded):
        joins = character in "'-" and word and word[-1].isalnum() and following.isalnum()
        if character.isalnum() or joins:
            word += character
        elif word:
            expected.append(word)
            word = ""
    assert tokenize(text) == expected


def test_images_of_a_split_that_is_not_known_are_named(tmp_path, caplog):
    images = [image(0), image(1, "extra"), image(2, "extra"), image(3, "restval")]
    assert read_samples(karpathy(tmp_path, images)).splits == {"train": (0, 1), "other": (1, 4)}
    assert "count as 'other' (2 in 'extra', 1 in 'restval'); map them to train, val or test" in caplog.text
    caplog.clear()
    samples = read_samples(karpathy(tmp_path, images, "merge_splits: {extra: val, restval: train}\n"))
    assert samples.splits == {"train": (0, 2), "val": (2, 4)}
    assert not caplog.messages
