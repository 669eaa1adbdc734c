"""A run at work: what it has cached it embeds again alike, and it finds what a plain loop finds."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from edited_runs import edited
from oriented import save as save_oriented
from oriented import shown
from PIL import Image
from safetensors.torch import load_file, save_file
from scores import score
from small_bert import save_bert
from small_checkpoints import save_image_model
from small_runs import make_pictures, make_run, make_store
from torch.nn.functional import normalize

import xret
from xret.heads.modules.embedding import Sequence, tensors_of
from xret.heads.retrieval.retriever import Retriever
from xret.heads.runs.encoders import encode_captions_by_all, encode_images_by_all
from xret.pipeline.data.images import open_image
from xret.pipeline.data.sources import FolderReader
from xret.pipeline.errors import CacheError, EncoderError, QueryError, RunError, SampleError
from xret.pipeline.store import FeatureCache

RECIPES = ["vsepp", "setdiv", "pcme", "pcmepp", "gaussian-vsepp", "scan"]


def open_run(made, run, **options):
    return Retriever(run, **{"device": "cpu", "data_root": made.pictures, "split": "test", **options})


def files(retriever):
    found = map(retriever.gallery.picture, range(len(retriever.gallery.image_ids)))
    return [one if isinstance(one, Path) else Path(one.name) for one in found]


def same(found, expected):
    """Assert that two embeddings are the same, up to what float16 features leave."""
    assert type(found) is type(expected)
    if isinstance(found, Sequence):
        assert found.length.tolist() == expected.length.tolist()
        for one, other, length in zip(found.rows, expected.rows, found.length.tolist(), strict=True):
            torch.testing.assert_close(one[:length], other[:length], atol=2e-3, rtol=2e-3)
        return
    torch.testing.assert_close(tensors_of(found), tensors_of(expected), atol=2e-3, rtol=2e-3)


def test_memory_that_does_not_suffice_names_what_a_search_can_change(made, monkeypatch):
    def embed(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("xret.heads.retrieval.gallery.embed_all", embed)
    with pytest.raises(RunError, match="does not fit in the memory of cpu; take a smaller split"):
        open_run(made, made.run()).search("red")


@pytest.mark.parametrize("recipe", RECIPES)
def test_cached_captions_and_images_get_their_embeddings_again(made, recipe):
    retriever = open_run(made, made.run(recipe))
    gallery = retriever.gallery
    same(retriever.encode_text(gallery.texts), gallery.captions)
    same(retriever.encode_images(files(retriever)), gallery.images)
    same(retriever.encode_images([Image.open(path) for path in files(retriever)]), gallery.images)
    first = next(iter(tensors_of(gallery.images).values()))
    assert not torch.allclose(first[0], first[1])


def test_weights_are_found_where_they_were_and_others_are_refused(made, tmp_path):
    bert_run = made.run("setdiv", "tokens")
    retriever = open_run(made, bert_run)
    same(retriever.encode_text(retriever.gallery.texts), retriever.gallery.captions)
    other = save_bert(tmp_path / "other", seed=1)
    with pytest.raises(EncoderError, match=r"other' is not what 'bert@\w+' was made with \(its weights differ\)"):
        open_run(made, bert_run, text_weights=str(other)).encode_text(["red"])
    with pytest.raises(EncoderError, match=r"'random:1' is not what .* as `visual_weights`"):
        open_run(made, bert_run, visual_weights="random:1").encode_images(["x.png"])


def test_videos_are_folders_of_frames(tmp_path):
    store = make_store(make_pictures(tmp_path / "pictures", frames=3), tmp_path / "s.zarr", frames=2)
    options = {"device": "cpu", "data_root": tmp_path / "pictures"}
    retriever = Retriever(make_run(store, tmp_path / "run"), **options)
    assert retriever.run.image_facts[0].kind == "frames"
    same(retriever.encode_images(files(retriever)), retriever.gallery.images)
    with pytest.raises(SampleError, match="the picture: this is no video; give a folder of frames"):
        retriever.encode_images([Image.new("RGB", (9, 9))])
    with pytest.raises(QueryError, match="searches videos"):
        Retriever(tmp_path / "run", images=tmp_path, device="cpu").search("red")


def test_words_need_no_store(made, tmp_path):
    retriever = Retriever(made.run("vsepp"), store=str(tmp_path / "nowhere"), device="cpu")
    same(retriever.encode_text(["red beside blue"]), open_run(made, made.run("vsepp")).encode_text(["red beside blue"]))
    with pytest.raises(CacheError, match="there is no feature store"):
        retriever.search("red")


def test_a_picture_is_turned_as_those_of_the_run_however_it_comes(made, tmp_path):
    retriever = open_run(made, made.run("vsepp"))
    stored = Image.open(files(retriever)[0])
    path = save_oriented(tmp_path / "turned.png", np.asarray(stored), 6)
    one, other = retriever.encode_images([stored, Image.fromarray(shown(np.asarray(stored), 6))])
    assert not torch.allclose(one, other, atol=1e-2)
    opened = FolderReader(path.parent).open(path.name)
    found = retriever.encode_images([path, str(path), Image.open(path), open_image(path.read_bytes()), opened])
    torch.testing.assert_close(found, other.expand(5, -1))
    assert retriever.search(path, 3)[0] == retriever.search(Image.open(path), 3)[0]


def test_unknown_words_of_a_query_are_logged_and_count_as_unk(made, caplog):
    retriever = open_run(made, made.run("setdiv"))
    query, other = "Zeppelin beside red, a quux zeppelin", "xyzzy beside red, a plugh xyzzy"
    for ask in (retriever.search, retriever.search_elements, lambda query: retriever.encode_text([query]).tolist()):
        caplog.clear()
        assert ask(query) == ask(other)
        assert caplog.messages == ["not in the vocabulary: zeppelin, quux", "not in the vocabulary: xyzzy, plugh"]
    assert retriever.unknown_words([query, "red", "plugh"]) == ["zeppelin", "quux", "plugh"]
    caplog.clear()
    embedding = retriever.encode_text(["a zeppelin", "zeppelin", "?!"], warn=False)
    torch.testing.assert_close(embedding[1], embedding[2])  # both are one <unk>
    assert not caplog.messages


def test_features_of_new_samples_are_rounded_as_those_of_the_store(made):
    retriever = open_run(made, made.run("setdiv", "tokens"), text_weights=str(made.folder / "bert"))
    images = encode_images_by_all(retriever.image_encoders, "cpu", files(retriever)[:1])
    for features in (*images, *encode_captions_by_all(retriever.text_encoders, "cpu", ["red"])):
        assert features.local.dtype == features.global_.dtype == torch.float16


def test_parts_of_words_are_always_known(made):
    retriever = open_run(made, made.run("setdiv", "tokens"), text_weights=str(made.folder / "bert"))
    assert retriever.unknown_words(["zeppelin"]) == []
    assert len(retriever.search("zeppelin", 2)) == len(retriever.search("?!", 2)) == 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_search_finds_what_sorting_all_scores_finds(made, recipe):
    retriever = open_run(made, made.run(recipe))
    gallery, scores = retriever.gallery, score(made.run(recipe), device="cpu")
    assert (gallery.texts, gallery.file_names) == (scores.texts, scores.file_names)
    assert gallery.caption_ids == [str(number) for number in scores.sentid]
    torch.testing.assert_close(retriever.similarity(gallery.images, gallery.captions), scores.similarity)
    for caption in (0, 3):
        column = scores.similarity[:, caption]
        hits = retriever.search(gallery.texts[caption], 4)
        assert [hit.rank for hit in hits] == [1, 2, 3, 4]
        assert [hit.score for hit in hits] == pytest.approx(sorted(column.tolist(), reverse=True)[:4], abs=2e-3)
        for hit in hits:
            row = gallery.image_ids.index(hit.id)
            assert (hit.file_name, hit.caption) == (gallery.file_names[row], None)
            assert hit.score == pytest.approx(float(column[row]), abs=2e-3)
    hits = retriever.search(files(retriever)[2], 99)
    assert sorted(hit.id for hit in hits) == sorted(gallery.caption_ids)  # more than there are: all
    for hit in hits:
        row = gallery.caption_ids.index(hit.id)
        assert (hit.caption, hit.file_name) == (gallery.texts[row], None)
        assert hit.score == pytest.approx(float(scores.similarity[2, row]), abs=2e-3)


def test_gaussians_show_how_uncertain_they_are(made):
    retriever = open_run(made, made.run("pcmepp"))
    images = retriever.gallery.images
    for hit in retriever.search("red beside blue", 3):
        covariance = np.diag(images.log_variance[retriever.gallery.image_ids.index(hit.id)].double().exp().numpy())
        assert hit.uncertainty == pytest.approx(float(np.linalg.slogdet(covariance)[1]), rel=1e-6)
        assert hit.to_dict().keys() == {"rank", "id", "score", "probability", "file_name", "uncertainty"}
    (hit,) = open_run(made, made.run("vsepp")).search("red", 1)
    assert hit.to_dict().keys() == {"rank", "id", "score", "probability", "file_name"}


def test_elements_search_one_by_one(made):
    retriever = open_run(made, made.run("setdiv"))
    (elements,) = retriever.encode_text(["red beside blue"])
    images, ids = retriever.gallery.images, retriever.gallery.image_ids
    lists = retriever.search_elements("red beside blue", 2)
    assert len(lists) == len(elements) == 4
    for element, hits in zip(elements, lists, strict=True):
        cosines = [max(float(normalize(element, dim=0) @ normalize(own, dim=0)) for own in image) for image in images]
        assert [hit.score for hit in hits] == pytest.approx(sorted(cosines, reverse=True)[:2], abs=1e-5)
        assert [hit.score for hit in hits] == pytest.approx([cosines[ids.index(hit.id)] for hit in hits], abs=1e-5)
    with pytest.raises(QueryError, match="are not sets"):
        open_run(made, made.run("vsepp")).search_elements("red")


def test_queries_that_make_no_sense_end_in_a_sentence(made, tmp_path):
    retriever = open_run(made, made.run("vsepp"))
    (tmp_path / "broken.png").write_bytes(files(retriever)[0].read_bytes()[:200])
    search = retriever.search
    for call, error, sentence in (
        (lambda: search("  "), QueryError, "the query is empty"),
        (lambda: search("a b/Photo.JPG "), QueryError, r"'a b/Photo.JPG' is a file name .* pathlib.Path\('a"),
        (lambda: search("\udcff red"), QueryError, "not UTF-8"),
        (lambda: search("?!"), QueryError, r"'\?!' has no words; describe"),
        (lambda: search("Zeppelin, quux"), QueryError, r"no word of the query is in .*\(zeppelin, quux\); use words"),
        (lambda: search("red", 0), QueryError, "0 results cannot be shown"),
        (lambda: search("red", at_least=50), QueryError, "at_least is 50; give a probability from 0 to 1"),
        (lambda: retriever.encode_text("red"), QueryError, "must be a list"),
        (lambda: retriever.encode_text([]), QueryError, "must be a list of one"),
        (lambda: retriever.encode_images([]), QueryError, "no picture to embed"),
        (lambda: search(Path("nowhere.png")), SampleError, "nowhere.png: there is no such file"),
        (lambda: search(tmp_path / "broken.png"), SampleError, "broken.png: "),
        (lambda: search(Image.new("RGB", (4000, 2))), SampleError, "the picture: it is more than 100 times"),
        (lambda: open_run(made, made.run("vsepp"), text_weights="x"), EncoderError, "takes no text weights; leave out"),
        (lambda: open_run(made, made.run("vsepp"), split="tset").search("red"), CacheError, "no split 'tset'"),
        (lambda: Retriever(tmp_path), RunError, "is no run"),
        (
            lambda: Retriever(made.run(), images=made.images, data_root=made.pictures),
            QueryError,
            "takes no `data_root`, which is of a store",
        ),
        (lambda: Retriever(made.run(), images=made.images).gallery, QueryError, "is no store; leave `images` out"),
    ):
        with pytest.raises(error, match=sentence):
            call()
    assert search("red", np.int64(3)) == search("red", 3)


def test_a_run_whose_weights_are_spoilt_is_refused(made, tmp_path):
    weights = edited(shutil.copytree(made.run("setdiv"), tmp_path / "run")) / "model.safetensors"
    save_file({name: tensor * torch.nan for name, tensor in load_file(weights).items()}, weights)
    retriever = open_run(made, tmp_path / "run")
    for search in (retriever.search, retriever.search_elements):
        with pytest.raises(RunError, match="not finite"):
            search("red")


SETTINGS = {"model.dim": 16, "schedule.epochs": 1, "data.batch_size": 8, "augment.image": 0.2}
SETTINGS |= {"aggregator.image.head_dim": 8, "aggregator.text.head_dim": 8, "aggregator.image.positions": "grid"}


def test_positions_are_those_of_a_map_that_is_not_square(tiny_dataset, tmp_path):
    save_image_model(tmp_path / "oblong", "oblong")
    manifest, store, rows = tiny_dataset(train=12, val=4, test=6), str(tmp_path / "s.zarr"), np.array([17])
    xret.extract(manifest, store, visual=f"hf:{tmp_path}/oblong", text="words", device="cpu")
    images = FeatureCache.open(store).image_set()
    assert images.grid == (4, 6)
    xret.train(store, recipe="setdiv", out=tmp_path / "run", settings=SETTINGS, device="cpu")
    retriever = xret.load(tmp_path / "run", device="cpu")
    (made,) = retriever.encode_images([manifest.parent / "images" / "17.jpg"])
    branch = retriever.model.eval().image
    local, pooled = (torch.from_numpy(array).float() for array in (images.local(rows), images.global_(rows)))
    adapted = branch.adapter(torch.tensor([24]), local, pooled, None, uses_local=True)
    with torch.inference_mode():
        right, wrong = (
            branch.aggregator(adapted.local, adapted.length, adapted.global_, grid=grid).embedding[0]
            for grid in ((4, 6), (6, 4))
        )
    np.testing.assert_allclose(normalize(made, dim=-1), normalize(right, dim=-1), atol=2e-3)
    assert (normalize(made, dim=-1) - normalize(wrong, dim=-1)).abs().max() > 5e-3
