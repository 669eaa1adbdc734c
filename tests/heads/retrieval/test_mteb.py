"""MTEB evaluates a run on a task of our own, and comes to the numbers that xret's evaluation has."""

import sys
import warnings

import pytest
import torch
from PIL import Image
from scores import score

from xret import average
from xret.heads.modules.embedding import shape_of
from xret.heads.retrieval.mteb import MtebModel
from xret.heads.retrieval.retriever import Retriever
from xret.pipeline.errors import QueryError, RunError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    mteb = pytest.importorskip("mteb", reason="mteb is not here: pip install 'xret[mteb]'")
    import datasets
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

pytestmark = [pytest.mark.filterwarnings("ignore")]  # mteb's own


@pytest.fixture
def open_run(made):
    return lambda recipe: Retriever(made.run(recipe), split="test", device="cpu", data_root=made.pictures)


def task_of(gallery, category):
    """Return a task on a gallery, in memory."""
    pictures = [Image.open(gallery.picture(row)) for row in range(len(gallery.image_ids))]
    images = datasets.Dataset.from_dict({"id": gallery.image_ids, "image": pictures})
    captions = datasets.Dataset.from_dict({"id": gallery.caption_ids, "text": gallery.texts})
    pairs = [(gallery.image_ids[row], id_) for row, id_ in zip(gallery.caption_image, gallery.caption_ids, strict=True)]
    corpus, queries, relevant = (images, captions, {caption: {image: 1} for image, caption in pairs})
    if category == "i2t":
        corpus, queries = captions, images
        relevant = {image: {caption: 1 for own, caption in pairs if own == image} for image in gallery.image_ids}

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
            self.dataset, self.data_loaded = {"default": {"test": split}}, True

    return Task()


def evaluate(model, task):
    return mteb.evaluate(model, task, cache=None, co2_tracker=False, show_progress_bar=False)


@pytest.mark.parametrize("recipe", ["setdiv", "pcmepp"])
def test_mteb_comes_to_the_same_recalls(open_run, recipe):
    retriever = open_run(recipe)
    similarity = score(retriever.run.path, device="cpu").similarity
    owner = torch.as_tensor(retriever.gallery.caption_image)
    top = similarity.argsort(dim=0, descending=True, stable=True)
    result = evaluate(MtebModel(retriever), task_of(retriever.gallery, "t2i"))
    (scores,) = result.task_results[0].scores["test"]
    for k in (1, 3):
        expected = (top[:k] == owner).any(0).double().mean()
        assert scores[f"recall_at_{k}"] == pytest.approx(float(expected), abs=1e-4)
    assert result.model_name == f"xret/{recipe}-words"


def test_captions_are_found_for_images(open_run):
    retriever = open_run("setdiv")
    gallery, model = retriever.gallery, MtebModel(retriever, "user/name")
    assert isinstance(model, mteb.SearchProtocol) and not isinstance(model, mteb.EncoderProtocol)
    assert (model.mteb_model_meta.name, model.mteb_model_meta.embed_dim) == ("user/name", 16)
    task = task_of(gallery, "i2t")
    assert 0 <= evaluate(model, task).task_results[0].get_score() <= 1
    queries = datasets.Dataset.from_dict({"id": ["q"], "image": [Image.open(gallery.picture(2))]})
    found = model.search(queries, task_metadata=task.metadata, top_k=3)
    assert found == {
        "q": {hit.id: pytest.approx(hit.score, abs=1e-5) for hit in retriever.search(gallery.picture(2), 3)}
    }
    some = gallery.caption_ids[4:6]
    (found,) = model.search(queries, task_metadata=task.metadata, top_k=9, top_ranked={"q": some}).values()
    assert sorted(found) == sorted(some)


@pytest.mark.parametrize(("other", "width"), [("vse-infty", 32), ("setdiv", None)])
def test_an_average_is_as_wide_as_its_vectors_side_by_side(made, tmp_path, other, width):
    average([made.run("vsepp"), made.run(other)], out=tmp_path / "a", device="cpu")
    retriever = Retriever(tmp_path / "a", device="cpu")
    meta = MtebModel(retriever).mteb_model_meta
    assert meta.embed_dim == width
    assert meta.n_parameters == sum(weight.numel() for weight in retriever.model.parameters())
    assert width in (None, shape_of(retriever.gallery.images)[-1])


def test_tasks_of_another_kind_and_a_lack_of_mteb_end_in_a_sentence(open_run, monkeypatch):
    retriever = open_run("setdiv")
    metadata = task_of(retriever.gallery, "t2i").metadata.model_copy(update={"category": "t2t"})
    with pytest.raises(QueryError, match="PicturesT2I is of the category t2t"):
        MtebModel(retriever).index(datasets.Dataset.from_dict({"id": ["1"], "text": ["a"]}), task_metadata=metadata)
    monkeypatch.setitem(sys.modules, "mteb.models", None)
    with pytest.raises(RunError, match="pip install"):
        MtebModel(retriever)
