"""What a head takes before its first step: word vectors in files, and files that are none; the scores of a teacher."""

import gzip
import shutil

import numpy as np
import pytest
import torch
from command_line import refused
from edited_runs import edited
from hypothesis import given
from hypothesis import strategies as st
from small_store import make_store
from small_trainings import assert_equal, numbers, recipe_of, stopped_after

from xret.heads.evaluation.scoring import Ranker, embed_split
from xret.heads.runs.features import batches_of
from xret.heads.runs.run import Run
from xret.heads.training.beginning import Teacher, read_word_vectors
from xret.heads.training.train import train
from xret.losses import Distillation
from xret.pipeline.errors import RecipeError, RunError, VectorsError

CPU = torch.device("cpu")
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


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("unit", ["image", "caption"])
def test_scores_are_those_of_the_teachers_embeddings(uninterrupted, unit, share):
    ranker = Ranker(uninterrupted, device="cpu")
    whole = embed_split(ranker, "train")
    split = batches_of(ranker.sets, ranker.model, "train", CPU, share=share)
    teacher = Teacher(uninterrupted, split, CPU, trust=False)
    image_of = {row: number for number, row in enumerate(whole.batches.image_rows.tolist())}
    caption_of = {row: number for number, row in enumerate(whole.batches.caption_rows.tolist())}
    for batch in split.epoch(unit=unit, batch_size=7, seed=0, epoch=1):
        captions = [caption_of[split.caption_rows[at]] for at in batch.caption_index.tolist()]
        owners = torch.tensor(
            [image_of[split.image_rows[split.caption_image[at]]] for at in batch.caption_index.tolist()]
        )
        images = torch.empty(len(batch.images.length), dtype=torch.long)
        images[batch.caption_image] = owners
        torch.testing.assert_close(teacher.scores(batch), whole.similarity[images][:, captions], atol=1e-5, rtol=0)


def test_a_head_comes_near_its_teacher_and_goes_on_as_if_never_stopped(store, uninterrupted, tmp_path):
    recipe = recipe_of("vsepp", 4, "loss.triplet.weight=0", "loss.distillation.weight=1", "optimizer.lr=0.02")
    train(store, recipe, tmp_path / "whole", distil=uninterrupted, device="cpu")
    first, *_, last = (line["loss"] for line in Run(tmp_path / "whole").metrics())
    assert last < 0.7 * first
    with stopped_after(8):
        train(store, recipe, tmp_path / "stopped", distil=uninterrupted, device="cpu")
    train(store, recipe, tmp_path / "stopped", resume=True, device="cpu")
    assert_equal(numbers(tmp_path / "whole"), numbers(tmp_path / "stopped"))
    given = Run(tmp_path / "whole")
    assert given.info.distil == str(uninterrupted)
    of_both = [embed_split(Ranker(run, device="cpu"), "train") for run in (uninterrupted, tmp_path / "whole")]
    nothing = torch.zeros_like(of_both[0].similarity) > 0
    divergence = Distillation()(of_both[1].similarity, nothing, None, None, taught=of_both[0].similarity)
    train(store, recipe_of("vsepp", 4, "optimizer.lr=0.02"), tmp_path / "alone", device="cpu")
    alone = embed_split(Ranker(tmp_path / "alone", device="cpu"), "train").similarity
    assert divergence < Distillation()(alone, nothing, None, None, taught=of_both[0].similarity)


def test_a_teacher_adds_its_term_and_is_asked_for(store, uninterrupted, tmp_path):
    train(store, recipe_of("vsepp", 1), tmp_path / "run", distil=uninterrupted, device="cpu")
    assert set(Run(tmp_path / "run").recipe.terms) == {"triplet", "distillation"}
    with pytest.raises(RecipeError, match="needs a teacher: name a run by `distil`"):
        train(store, recipe_of("vsepp", 1, "loss.distillation.weight=1"), tmp_path / "none", device="cpu")
    with pytest.raises(RunError, match="was begun with `distil`"):
        train(store, recipe_of("vsepp", 2), tmp_path / "run", distil=tmp_path / "run", resume=True, device="cpu")
    other = make_store(tmp_path / "other.zarr", weights="b")
    how = ["--recipe", "vsepp", "--device", "cpu", "--out", tmp_path / "o"]
    assert "has no image features equal to" in refused("train-head", other, *how, "--distil", uninterrupted)
    more = make_store(tmp_path / "more.zarr", mark="more ")
    assert "a teacher is of one store" in refused("train-head", store, more, *how, "--distil", uninterrupted)
    blends = "augment.mix=1", "data.unit=image", "data.captions=1", "loss.same_text=negative"
    settings = [word for setting in blends for word in ("--set", setting)]
    assert "no blends" in refused("train-head", store, *how, "--distil", uninterrupted, *settings)
    assert not (tmp_path / "o").exists()


def test_another_run_in_the_place_of_the_teacher_is_refused(store, tmp_path):
    teacher, recipe = tmp_path / "teacher", recipe_of("vsepp", 1)
    train(store, recipe, teacher, device="cpu")
    with stopped_after(1):
        train(store, recipe, tmp_path / "run", distil=teacher, device="cpu")
    shutil.rmtree(teacher)
    train(store, recipe, teacher, device="cpu", seed=1)
    for name in (None, teacher):
        with pytest.raises(RunError, match=r"teacher has other weights than when it taught .*run;"):
            train(store, recipe, tmp_path / "run", distil=name, resume=True, device="cpu")
    edited(tmp_path / "run", teacher=None)  # as of runs from before
    assert train(store, recipe, tmp_path / "run", resume=True, device="cpu").epochs == 1


def test_a_teacher_that_lacks_a_sample_is_refused(tmp_path):
    store = make_store(tmp_path / "s.zarr", image=("grid", "roi"), broken=(3,))
    train(store, recipe_of("vsepp", 1, "data.image=roi"), tmp_path / "teacher", device="cpu")
    recipe = recipe_of("vsepp", 1, "data.image=grid")
    with pytest.raises(RunError, match="no embedding of 1 image of train"):
        train(store, recipe, tmp_path / "run", distil=tmp_path / "teacher", device="cpu")
    assert not (tmp_path / "run").exists()
