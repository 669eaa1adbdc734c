"""An index against exact search: the same answers wherever the candidates contain them."""

import json
import shutil

import numpy as np
import pytest
import torch
from command_line import refused
from command_line import run as call
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import make_pictures, make_run, make_store

from xret.heads.modules.embedding import Gaussian, Sequence, each
from xret.heads.modules.similarity import SIMILARITIES
from xret.heads.retrieval.gallery import best
from xret.heads.retrieval.index import Index, Items, build, search_exactly, vectors
from xret.heads.retrieval.indexing import index_run
from xret.heads.retrieval.retriever import Retriever
from xret.pipeline.errors import RunError
from xret.pipeline.store import FeatureCache
from xret.pipeline.store.inspect import remove_set
from xret.similarities import Chamfer, Cosine, SampledDistance, SmoothChamfer, Wasserstein

pytest.importorskip("faiss", reason="FAISS is not here: pip install 'xret[index]'")
WIDTH = 16


def embeddings(kind, count, seed, spread=0.4):
    """Return samples around 30 centres, of the same centres for every seed."""
    centres = torch.randn(30, WIDTH, generator=torch.Generator().manual_seed(99))
    draw = torch.Generator().manual_seed(seed)
    own = centres[torch.randint(30, (count,), generator=draw)]
    elements = own[:, None] + spread * torch.randn(count, 3, WIDTH, generator=draw)
    if kind == "vector":
        return elements[:, 0].contiguous()
    if kind == "gaussian":
        return Gaussian(elements[:, 0].contiguous(), 0.5 * torch.randn(count, WIDTH, generator=draw) - 1)
    if kind == "sequence":
        return Sequence(elements, torch.randint(1, 4, (count,), generator=draw))
    return elements


def part(whole, begin, end):
    return each(lambda t: t[begin:end], whole)


def comparing(similarity):
    """Return what compares captions, which search, with images."""
    return lambda queries, items: similarity(items, queries).T


def make(folder, similarity, count=400, **options):
    gallery, queries = (embeddings(similarity.embedding, size, seed) for size, seed in ((count, 1), (40, 2)))
    facts = Items.write(folder, [part(gallery, first, first + 150) for first in range(0, count, 150)])
    build(folder, facts, queries, comparing(similarity), similarity, **options)
    return Index(folder, facts, similarity), facts


def exact_of(gallery, query, similarity, k):
    scores = similarity(gallery, query)[:, 0].detach()
    order = sorted(range(len(scores)), key=lambda row: (-scores[row].item(), row))[:k]
    return order, scores[order].numpy()


@pytest.mark.parametrize("name", list(SIMILARITIES))
def test_with_all_elements_as_candidates_the_answers_are_the_exact_ones(name, tmp_path):
    similarity = SIMILARITIES[name]().eval()
    index, _ = make(tmp_path / "index", similarity, 150)
    index.set_effort(1024)
    gallery, queries = (embeddings(similarity.embedding, count, seed) for count, seed in ((150, 1), (5, 3)))
    for row in range(5):
        query = part(queries, row, row + 1)
        rows, scores = index.search(query, 7, comparing(similarity))
        expected, values = exact_of(gallery, query, similarity, 7)
        np.testing.assert_allclose(scores, values, rtol=1e-4, atol=1e-5)
        assert rows.tolist() == expected


@pytest.mark.parametrize("factory", [None, "IVF16,SQ8", "HNSW16,SQ8", "PCA8,IVF8,Flat", "IVF8,PQ4x6"])
def test_answers_are_the_best_of_the_candidates_and_recall_is_what_it_says(factory, tmp_path):
    similarity, k = Chamfer(), 10
    index, facts = make(tmp_path / "index", similarity, 1000, factory=factory, recall=0.95)
    gallery, hits = embeddings("set", 1000, 1), 0
    assert facts["recall"] >= 0.95
    assert (facts["samples"], facts["elements"], facts["factory"]) == (1000, 3000, factory or "Flat")
    for query in embeddings("set", 40, 2).split(1):  # those that the recall was measured with
        candidates = set(index.candidates(query, k).tolist())
        order, values = exact_of(gallery, query, similarity, 1000)
        expected = [row for row in order if row in candidates][:k]
        rows, scores = index.search(query, k, comparing(similarity))
        assert rows.tolist() == expected
        np.testing.assert_allclose(scores, values[[order.index(row) for row in expected]], rtol=1e-5)
        hits += len(set(order[:k]) & candidates)
    assert hits / 400 == pytest.approx(facts["recall"])


def test_as_many_answers_as_were_asked_for(tmp_path):
    index, _ = make(tmp_path / "index", SmoothChamfer(), factory="IVF16,SQ8")
    index.set_effort(1)
    for k in (1, 50, 399, 400, 1000):
        rows, scores = index.search(embeddings("set", 1, 5), k, comparing(SmoothChamfer()))
        assert len(rows) == len(set(rows.tolist())) == len(scores) == min(k, 400)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=30), st.integers(1, 12))
def test_best_is_a_sort_by_score_then_row(scores, k):
    rows = np.arange(len(scores))[::-1].copy()
    found, values = best(rows, np.array(scores, np.float32), k)
    expected = sorted(zip(scores, rows.tolist(), strict=True), key=lambda pair: (-pair[0], pair[1]))[:k]
    assert list(zip(values.tolist(), found.tolist(), strict=True)) == expected


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 5))
@settings(max_examples=25)
def test_exact_search_in_blocks_is_exact_search(block, count, seed):
    gallery, queries = embeddings("set", count, seed), embeddings("set", 2, seed + 10)

    class Gallery:
        bias, biased = None, Items.biased

        def blocks(self, _queries):
            return ((first, gallery[first : first + block]) for first in range(0, count, block))

    found = search_exactly(queries, Gallery(), comparing(Chamfer()), 6)
    for (rows, scores), query in zip(found, queries.split(1), strict=True):
        expected, values = exact_of(gallery, query, Chamfer(), 6)
        assert rows.tolist() == expected
        np.testing.assert_allclose(scores, values, rtol=1e-5)


def test_wide_vectors_are_looked_up_by_few_numbers_and_ranked_by_all(tmp_path):
    draw, similarity = torch.Generator().manual_seed(0), Cosine()
    latent = torch.randn(100, 24, generator=draw)[torch.randint(100, (12_000,), generator=draw)]
    rows = (latent + 0.5 * torch.randn(12_000, 24, generator=draw)) @ torch.randn(24, 160, generator=draw)
    gallery = rows + 0.5 * torch.randn(12_000, 160, generator=draw)
    queries = rows[:60] + 0.5 * torch.randn(60, 160, generator=draw)
    facts = Items.write(tmp_path, [gallery])
    build(tmp_path, facts, queries, comparing(similarity), similarity)
    index = Index(tmp_path, facts, similarity)
    assert facts["factory"].startswith("PCA128,IVF") and facts["recall"] >= 0.99
    for k in (10, 100):
        hits = 0
        for query in queries.split(1):
            expected, scores = exact_of(gallery, query, similarity, k)
            answers, values = index.search(query, k, comparing(similarity))
            hits += len(set(answers) & set(expected))
            np.testing.assert_allclose(values[0], scores[0], rtol=1e-4)
        assert hits / (60 * k) >= 0.97


@pytest.mark.parametrize("form", ["closed", "printed"])
def test_distances_of_the_vectors_are_those_of_the_gaussians(form):
    images, captions = embeddings("gaussian", 6, 1), embeddings("gaussian", 4, 2)
    wasserstein = Wasserstein(form)
    for similarity in (wasserstein, SampledDistance()):
        a, b = vectors(similarity, images), vectors(similarity, captions, query=True)
        squares = torch.from_numpy(((a[:, None] - b[None]) ** 2).sum(-1))
        own = captions.log_variance.exp().sum(1)
        scores = -similarity(images, captions)
        expected = squares.sqrt() if similarity is wasserstein else squares + own
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["vector", "set", "gaussian", "sequence"])
def test_items_come_back_as_they_went_in(kind, tmp_path):
    whole = embeddings(kind, 23, 4)
    items = Items(tmp_path, Items.write(tmp_path, [part(whole, 0, 9), part(whole, 9, 11), part(whole, 11, 23)]))
    picked = np.array([20, 3, 3, 10])
    found, expected = items[picked], each(lambda t: t[picked], whole)
    owners = np.repeat(np.arange(23), 3 if kind == "set" else 1)
    if kind == "sequence":
        assert found.length.tolist() == expected.length.tolist()
        for row, length in enumerate(expected.length.tolist()):
            assert torch.equal(found.rows[row, :length], expected.rows[row, :length])
        owners = np.repeat(np.arange(23), whole.length.numpy())
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert items.owners(np.arange(items.elements)).tolist() == owners.tolist()


@pytest.fixture(scope="module")
def folder(made, tmp_path_factory):
    folder = tmp_path_factory.mktemp("indexed")
    for recipe in ("pcmepp", "scan"):
        index_run(Retriever(made.run(recipe), device="cpu"), folder / f"{recipe}.index")
    return folder


@pytest.mark.parametrize("recipe", ["pcmepp", "scan"])
def test_an_index_answers_as_the_gallery_does(made, folder, recipe):
    exact = Retriever(made.run(recipe), device="cpu")
    indexed = Retriever(made.run(recipe), device="cpu", index=folder / f"{recipe}.index")
    for query in ("red beside blue", made.images / "17.png"):
        for k in (2, 50):
            found, expected = indexed.search(query, k), exact.search(query, k)
            assert [hit.id for hit in found] == [hit.id for hit in expected]
            assert [hit.score for hit in found] == pytest.approx([hit.score for hit in expected], abs=1e-5)
            assert found[0].uncertainty == pytest.approx(expected[0].uncertainty, abs=1e-5)
    assert "images" not in vars(indexed.gallery)  # nothing of the gallery was embedded again


def test_an_index_of_something_else_or_a_damaged_one_is_refused(made, folder, tmp_path):
    run, index = made.run("pcmepp"), shutil.copytree(folder / "pcmepp.index", tmp_path / "index")
    index_run(Retriever(run, split="test", device="cpu"), tmp_path / "test")
    for sentence, options in (
        (r"of something else \(weights differ\)", {"index": folder / "scan.index"}),
        ("of all pictures; leave `split` out", {"index": index, "split": "val"}),
        ("of split 'test'; choose it with `split` test", {"index": tmp_path / "test"}),
        ("is not an index; make one with", {"index": tmp_path / "none"}),
    ):
        with pytest.raises(RunError, match=sentence):
            Retriever(run, device="cpu", **options).search("red")
    for name in ("images/elements.faiss", "images/mean"):
        content = (index / name).read_bytes()
        (index / name).write_bytes(content[: len(content) // 2 + 1])
        with pytest.raises(RunError, match="images is damaged; build the index again"):
            Retriever(run, device="cpu", index=index).search("red")
        (index / name).write_bytes(content)


def test_an_index_from_before_a_repair_or_of_other_pictures_is_refused(tmp_path):
    manifest = make_pictures(tmp_path / "pictures")
    picture = tmp_path / "pictures/images/17.png"
    sound = picture.read_bytes()
    picture.write_bytes(b"")
    store = make_store(manifest, tmp_path / "s.zarr", on_error="skip")
    run = make_run(store, tmp_path / "run")
    index_run(Retriever(run, device="cpu"), tmp_path / "index")
    assert Retriever(run, device="cpu", index=tmp_path / "index").search("red", 9)
    picture.write_bytes(sound)
    make_store(manifest, store, on_error="skip", repair=True)
    with pytest.raises(RunError, match="usable samples and pictures differ"):
        Retriever(run, device="cpu", index=tmp_path / "index").search("red", 9)
    index_run(Retriever(run, device="cpu"), tmp_path / "repaired")
    assert Retriever(run, device="cpu", index=tmp_path / "repaired").search("red", 9)
    picture.write_bytes((tmp_path / "pictures/images/16.png").read_bytes())
    remove_set(store, FeatureCache.open(store).image_set().path)
    make_store(manifest, store)
    with pytest.raises(RunError, match="pictures differ"):
        Retriever(run, device="cpu", index=tmp_path / "repaired").search("red", 9)


def test_the_command(made, tmp_path):
    run, out = made.run("scan"), tmp_path / "deep" / "index"
    lines = call("index", run, "--out", out, "--factory", "HNSW8,SQ8", "--device", "cpu").stdout.splitlines()
    assert lines[1].startswith("images   22 with 88 elements, HNSW8,SQ8, ")
    assert "recall of the exact top 10 1.000" in lines[1]
    by_index, by_all = (json.loads(call("search", run, "red", *how, "--json").stdout) for how in (("--index", out), ()))
    assert by_index == [{key: value for key, value in hit.items() if key != "probability"} for hit in by_all]
    report = json.loads(call("index", run, "--out", tmp_path / "other", "--split", "val", "--json").stdout)
    assert (report["images"]["samples"], report["images"]["recall"]) == (4, 1)
    assert "index exists already; name another --out" in refused("index", run, "--out", out)
    wrong = refused("index", run, "--out", tmp_path / "a", "--factory", "IVF400,PQ4")
    assert "FAISS cannot build 'IVF400,PQ4' of 88 elements" in wrong
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "other"]


@pytest.mark.parametrize("name", ["cosine", "smooth-chamfer", "wasserstein", "cross-attention"])
def test_biases_are_in_the_candidates_and_in_the_scores(tmp_path, name):
    similarity = SIMILARITIES[name]()
    gallery, queries = (embeddings(similarity.embedding, size, seed) for size, seed in ((400, 1), (40, 2)))
    facts, rng = Items.write(tmp_path, [gallery]), np.random.default_rng(0)
    spread = float(comparing(similarity)(queries, gallery).detach().std())
    bias = (spread * rng.normal(size=400)).astype(np.float32)
    bias.tofile(tmp_path / "bias")
    build(tmp_path, facts, queries, comparing(similarity), similarity)
    assert facts["recall"] >= 0.99
    index = Index(tmp_path, facts, similarity)
    if name == "cosine":  # the nearest vectors are then the best answers
        index.set_effort(1)
    for row in range(40):
        query = part(queries, row, row + 1)
        scores = comparing(similarity)(query, gallery)[0].detach().numpy() + bias
        rows, found = index.search(query, 5, comparing(similarity))
        missed = set(np.argsort(-scores, kind="stable")[:5]) - set(rows)
        assert len(missed) <= (0 if name == "cosine" else 1)
        np.testing.assert_allclose(found, scores[rows], rtol=1e-4, atol=1e-4)
