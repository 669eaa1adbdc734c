"""A user-defined model put to work as a run is: search, index, export, report and diagnoses, against its own matrix."""

import numpy as np
import pytest
import torch
from torch import nn

import xret
from xret.errors import RunError
from xret.heads.diagnostics import diagnose
from xret.heads.report import write_report
from xret.heads.retrieval.export import export_embeddings
from xret.heads.retrieval.hub import save_to_folder
from xret.heads.retrieval.indexing import index_run


class Means(nn.Module):
    """Linear maps of mean rows; `similarity` is any function."""

    def __init__(self, cache, similarity=None):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = (nn.Linear(one.channels, 6) for one in (cache.image_set(), cache.caption_set()))
        self.similarity = similarity or (lambda images, captions: images @ captions.T)

    def embed_images(self, features):
        return self.image(features.local.float().mean(1))

    def embed_captions(self, features):
        rows = features.local.float()
        valid = xret.nn.valid_rows(rows, features.length)[..., None]
        return self.text(rows.masked_fill(~valid, 0).sum(1) / valid.sum(1))


class Plain:
    def __init__(self, model):
        self.parts = [model]

    def __getattr__(self, name):
        return getattr(self.parts[0], name)


@pytest.fixture
def loaded(made):
    def load(similarity=None, **options):
        model = Means(xret.FeatureCache.open(made.store("tokens")), similarity)
        options = {"device": "cpu", "data_root": made.pictures, "split": "test", **options}
        return model, xret.load(model, store=made.store("tokens"), **options)

    return load


def test_it_is_searched_with_new_texts_and_pictures(loaded, made):
    model, retriever = loaded()
    scores = model.similarity(retriever.encode_images(list(made.images.iterdir())[:3]), retriever.gallery.captions)
    assert torch.isfinite(scores).all()
    text = retriever.gallery.texts[0]  # of the store: its embedding is the one that it has there
    expected = model.similarity(retriever.gallery.images, retriever.gallery.captions[:1])[:, 0]
    hits = retriever.search(text, 3)
    assert [hit.id for hit in hits] == [
        retriever.gallery.image_ids[row] for row in expected.argsort(descending=True)[:3]
    ]
    torch.testing.assert_close(
        [hit.score for hit in hits], expected.sort(descending=True).values[:3].tolist(), rtol=1e-3, atol=1e-3
    )
    assert (
        len(loaded(images=made.images, split=None, data_root=None)[1].search("red beside blue", 30)) == 22
    )  # kept nowhere
    assert len(loaded(hubness=True)[1].search(text, 3)) == 3


def test_it_is_exported_and_indexed(loaded, tmp_path):
    pytest.importorskip("faiss", reason="FAISS is not here: pip install 'xret[index]'")
    model, retriever = loaded()
    told = export_embeddings(retriever, tmp_path / "all")
    assert (told["run"], told["recipe"], told["unit"]) == ("Means", "a user-defined model", False)
    assert np.array_equal(np.load(tmp_path / "all" / "images.npy"), retriever.gallery.images.detach().numpy())
    index_run(retriever, tmp_path / "index")
    found = loaded(index=tmp_path / "index")[1].search("red beside blue", 4)
    assert [hit.id for hit in found] == [hit.id for hit in retriever.search("red beside blue", 4)]
    with pytest.raises(RunError, match="can be made smaller"):
        export_embeddings(retriever, tmp_path / "small", dims=3)
    small = export_embeddings(loaded(xret.similarities.Cosine())[1], tmp_path / "small", dims=3)
    assert (small["unit"], small["measure"], small["shapes"]["images"]) == (True, "dot product", [6, 3])
    plain = Plain(model)  # which holds the module, and is none
    index_run(xret.load(plain, store=retriever.cache.url, split="test"), tmp_path / "plain")
    nn.init.zeros_(model.text.weight)
    for ranks, index in ((model, "index"), (plain, "plain")):
        with pytest.raises(RunError, match="weights differ"):
            xret.load(ranks, store=retriever.cache.url, split="test", index=tmp_path / index).search("red", 2)
    with pytest.raises(RunError, match="Means is a model without a run folder"):
        save_to_folder(retriever, tmp_path / "hub")


def test_it_has_a_page_beside_a_run_and_diagnoses(loaded, made, tmp_path):
    model, retriever = loaded()
    runs = [model, made.run("vsepp", "tokens")]
    write_report(runs, tmp_path / "page.html", store=retriever.cache.url, data_root=made.pictures, device="cpu")
    text = (tmp_path / "page.html").read_text()
    rsum = xret.evaluate(model, store=retriever.cache.url).results[0].rsum
    assert "a user-defined model" in text and f"{rsum:.2f}" in text
    found = diagnose(model, store=retriever.cache.url, data_root=made.pictures, device="cpu")
    assert found.tables["cost"].rows[0] == ["multiply-accumulates", 6]


def test_it_answers_a_service_and_mteb(loaded):
    pytest.importorskip("gradio", reason="Gradio is not here: pip install 'xret[serve]'")
    from xret.heads.retrieval.serve import Answers

    _, retriever = loaded()
    assert Answers(retriever).find("red beside blue", 2).result() == retriever.search("red beside blue", 2)
    mteb = pytest.importorskip("mteb", reason="mteb is not here: pip install 'xret[mteb]'")
    from xret.heads.retrieval.mteb import MtebModel

    assert isinstance(MtebModel(retriever), mteb.SearchProtocol)
