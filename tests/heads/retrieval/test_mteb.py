"""MTEB evaluates a run on a task of our own, and comes to the numbers that xret's evaluation has."""

import sys
import warnings

import pytest
import torch
from PIL import Image
from scores import score
from small_runs import make_pictures, make_run, make_store

from xret.heads.retrieval.mteb import MtebModel
from xret.heads.retrieval.retriever import Retriever
from xret.pipeline.errors import QueryError, RunError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    mteb = pytest.importorskip("mteb", reason="mteb is not here: pip install 'xret[mteb]'")
    import datasets
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

pytestmark = pytest.mark.filterwarnings("ignore")  # mteb's and datasets' own


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("mteb")
    store = make_store(make_pictures(folder / "pictures"), folder / "s.zarr")
    for recipe in ("setdiv", "pcmepp"):
        make_run(store, folder / recipe, recipe)
    yield folder
    torch.set_num_threads(threads)


def task_of(gallery, category, **more):
    """Return a task on a gallery, in memory."""
    images = datasets.Dataset.from_dict(
        {
            "id": gallery.image_ids,
            "image": [Image.open(gallery.picture(row)) for row in range(len(gallery.image_ids))],
        }
    )
    captions = datasets.Dataset.from_dict({"id": gallery.caption_ids, "text": gallery.texts})
    owners = [gallery.image_ids[row] for row in gallery.caption_image]
    if category == "t2i":
        relevant = {caption: {image: 1} for caption, image in zip(gallery.caption_ids, owners, strict=True)}
    else:
        pairs = list(zip(owners, gallery.caption_ids, strict=True))
        relevant = {image: {caption: 1 for own, caption in pairs if own == image} for image in gallery.image_ids}
    corpus, queries = (images, captions) if category == "t2i" else (captions, images)

    class Task(AbsTaskRetrieval):
        metadata = TaskMetadata(
            name=f"Pictures{category.upper()}",
            description="Pictures of two colours.",
            reference=None,
            dataset={"path": "none", "revision": "1"},
            type="Any2AnyRetrieval",
            category=category,
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="recall_at_1",
            modalities=["text", "image"],
        )

        def load_data(self, **_):
            split = {"corpus": corpus, "queries": queries, "relevant_docs": relevant, "top_ranked": None}
            self.dataset, self.data_loaded = {"default": {"test": split | more}}, True

    return Task()


@pytest.mark.parametrize("recipe", ["setdiv", "pcmepp"])
def test_mteb_comes_to_the_same_recalls(folder, recipe):
    retriever = Retriever(folder / recipe, device="cpu", data_root=folder / "pictures")
    similarity = score(folder / recipe, device="cpu").similarity
    owner = torch.as_tensor(retriever.gallery.caption_image)
    top = similarity.argsort(dim=0, descending=True, stable=True)
    for k in (1, 3):
        expected = (top[:k] == owner).any(0).double().mean()
        result = mteb.evaluate(
            MtebModel(retriever),
            task_of(retriever.gallery, "t2i"),
            cache=None,
            co2_tracker=False,
            show_progress_bar=False,
        )
        (scores,) = result.task_results[0].scores["test"]
        assert scores[f"recall_at_{k}"] == pytest.approx(float(expected), abs=1e-4)
    assert result.model_name == f"xret/{recipe}"


def test_captions_are_found_for_images(folder):
    retriever = Retriever(folder / "setdiv", device="cpu", data_root=folder / "pictures")
    gallery, model = retriever.gallery, MtebModel(retriever, "user/name")
    task = task_of(gallery, "i2t")
    result = mteb.evaluate(model, task, cache=None, co2_tracker=False, show_progress_bar=False)
    assert 0 <= result.task_results[0].get_score() <= 1
    queries = datasets.Dataset.from_dict({"id": ["q"], "image": [Image.open(gallery.picture(2))]})
    found = model.search(queries, task_metadata=task.metadata, top_k=3)
    hits = retriever.search(gallery.picture(2), 3)
    assert found == {"q": {hit.id: pytest.approx(hit.score, abs=1e-5) for hit in hits}}
    some = gallery.caption_ids[4:6]
    (found,) = model.search(queries, task_metadata=task.metadata, top_k=9, top_ranked={"q": some}).values()
    assert sorted(found) == sorted(some)


def test_what_mteb_asks_of_a_model_is_there(folder):
    model = MtebModel(Retriever(folder / "setdiv", device="cpu"), "user/name")
    assert isinstance(model, mteb.SearchProtocol)
    assert not isinstance(model, mteb.EncoderProtocol)
    assert (model.mteb_model_meta.name, model.mteb_model_meta.embed_dim) == ("user/name", 16)
    assert len(model.mteb_model_meta.revision) == 40


def test_tasks_of_another_kind_and_a_lack_of_mteb_end_in_a_sentence(folder, monkeypatch):
    retriever = Retriever(folder / "setdiv", device="cpu", data_root=folder / "pictures")
    task = task_of(retriever.gallery, "t2i")
    metadata = task.metadata.model_copy(update={"category": "t2t"})
    with pytest.raises(QueryError, match="PicturesT2I is of the category t2t"):
        MtebModel(retriever).index(datasets.Dataset.from_dict({"id": ["1"], "text": ["a"]}), task_metadata=metadata)
    with pytest.raises(RunError, match="'name' is not of that form"):
        MtebModel(retriever, "name")
    monkeypatch.setitem(sys.modules, "mteb.models", None)
    with pytest.raises(RunError, match="pip install"):
        MtebModel(retriever)
