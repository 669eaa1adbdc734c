"""An index against exact search: the same answers wherever the candidates contain them, and nothing half-made."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_index import build_index

from xret.heads.modules.embedding import Gaussian, Sequence, each
from xret.heads.modules.similarity import SIMILARITIES, Chamfer, Cosine, SampledDistance, SmoothChamfer, Wasserstein
from xret.heads.retrieval.hits import best
from xret.heads.retrieval.index import build as build_module
from xret.heads.retrieval.index.build import IndexOptions, add
from xret.heads.retrieval.index.candidates import KINDS, Candidates, Effort
from xret.heads.retrieval.index.effort import Measurement, cheapest
from xret.heads.retrieval.index.exact import search_exactly
from xret.heads.retrieval.index.items import Items, append
from xret.heads.retrieval.index.search import Index
from xret.heads.retrieval.index.vectors import form_of, vectors
from xret.pipeline.errors import RunError
from xret.pipeline.store.storage.lease import locked

pytestmark = pytest.mark.usefixtures("one_thread")

FACTS = {"store": "s", "split": "test", "modality": "images", "weights": "w"}
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


def comparing(similarity):
    """Return what compares captions, which search, with images."""
    return lambda queries, items: similarity(items, queries).T


def make(folder, similarity=None, count=400, **options):
    similarity = similarity or SmoothChamfer()
    queries = options.pop("queries", None)
    return build_index(
        options.pop("embeddings", [embeddings(similarity.embedding, count, 1)]),
        [f"id {row}" for row in range(count)],
        folder,
        queries=embeddings(similarity.embedding, 40, 2) if queries is None else queries,
        compare=comparing(similarity),
        form=form_of(similarity),
        facts=FACTS,
        options=IndexOptions(**options),
    )


def exact_of(gallery, query, similarity, k):
    scores = similarity(gallery, query)[:, 0].detach()
    order = sorted(range(len(scores)), key=lambda row: (-scores[row].item(), row))[:k]
    return order, scores[order]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index") / "built"
    make(folder)
    return folder


@pytest.fixture
def folder(built, tmp_path):
    return shutil.copytree(built, tmp_path / "copy")


@pytest.mark.parametrize("name", list(SIMILARITIES))
def test_with_all_elements_as_candidates_the_answers_are_the_exact_ones(name, tmp_path):
    similarity = SIMILARITIES[name]().eval()
    kind, count = similarity.embedding, 150
    make(tmp_path / "index", similarity, count, effort=Effort(1, 8))
    index = Index(tmp_path / "index", FACTS)
    gallery, queries = embeddings(kind, count, 1), embeddings(kind, 5, 3)
    for row in range(5):
        query = each(lambda t, row=row: t[row : row + 1], queries)
        rows, scores = index.search(query, 7, comparing(similarity), Effort(10_000, 10_000))
        expected, values = exact_of(gallery, query, similarity, 7)
        np.testing.assert_allclose(scores, values.numpy(), rtol=1e-4, atol=1e-5)
        assert rows.tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_best_of_the_candidates_and_recall_is_what_it_says(kind, tmp_path):
    similarity, k = Chamfer(), 10
    report = make(tmp_path / "index", similarity, kind=kind, recall=0.95)
    index, gallery = Index(tmp_path / "index"), embeddings("set", 400, 1)
    assert report.recall == index.recall >= 0.95
    assert report.bytes == sum(p.stat().st_size for p in (tmp_path / "index").iterdir() if p.name != "index.json")
    hits = 0
    for query in embeddings("set", 40, 2).split(1):  # those that it was measured with
        candidates = set(index.candidates(query, k).tolist())
        order, values = exact_of(gallery, query, similarity, 400)
        expected = [row for row in order if row in candidates][:k]
        rows, scores = index.search(query, k, comparing(similarity))
        assert rows.tolist() == expected
        np.testing.assert_allclose(scores, values[[order.index(row) for row in expected]], rtol=1e-5)
        hits += len(set(order[:k]) & set(index.candidates(query).tolist()))
    assert hits / 400 == pytest.approx(index.recall)


def test_fewer_candidates_than_asked_for_are_made_more(built):
    index = Index(built)
    query = embeddings("set", 1, 5)
    for k in (1, 50, 399, 400, 1000):
        rows, scores = index.search(query, k, comparing(SmoothChamfer()), Effort(1, 1))
        assert len(rows) == len(set(rows.tolist())) == len(scores) == min(k, 400)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=30), st.integers(1, 12))
@settings(deadline=None)
def test_best_is_a_sort_by_score_then_row(scores, k):
    rows = np.arange(len(scores))[::-1].copy()
    found, values = best(rows, np.array(scores, np.float32), k)
    expected = sorted(zip(scores, rows.tolist(), strict=True), key=lambda pair: (-pair[0], pair[1]))[:k]
    assert list(zip(values.tolist(), found.tolist(), strict=True)) == expected


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 5))
@settings(deadline=None, max_examples=25)
def test_exact_search_in_blocks_is_exact_search(block, count, seed):
    gallery, queries = embeddings("set", count, seed), embeddings("set", 2, seed + 10)

    class Gallery:
        size, width = 3, WIDTH

        def blocks(self, _size):
            return ((first, gallery[first : first + block]) for first in range(0, count, block))

    for (rows, scores), query in zip(
        search_exactly(queries, Gallery(), comparing(Chamfer()), 6), queries.split(1), strict=True
    ):
        expected, values = exact_of(gallery, query, Chamfer(), 6)
        assert rows.tolist() == expected
        np.testing.assert_allclose(scores, values, rtol=1e-5)


@pytest.mark.parametrize("form", ["closed", "printed"])
def test_distances_of_the_vectors_are_those_of_the_gaussians(form):
    images, captions = embeddings("gaussian", 6, 1), embeddings("gaussian", 4, 2)
    wasserstein = Wasserstein(form, squared=True)
    for similarity in (wasserstein, SampledDistance()):
        a = vectors(form_of(similarity), images)
        b = vectors(form_of(similarity), captions, query=True)
        squares = torch.from_numpy(((a[:, None] - b[None]) ** 2).sum(-1))
        own = 0 if similarity is wasserstein else captions.log_variance.exp().sum(1)
        torch.testing.assert_close(-similarity(images, captions), squares + own, rtol=1e-4, atol=1e-4)
        assert a.shape[1] % 8 == 0


@pytest.mark.parametrize("kind", ["vector", "set", "gaussian", "sequence"])
def test_items_come_back_as_they_went_in(kind, tmp_path):
    whole = embeddings(kind, 23, 4)
    names = [f"é{row}" * (row % 3) for row in range(23)]  # some are empty

    def part(begin, end):
        return each(lambda t: t[begin:end], whole)

    record = append(tmp_path, [part(0, 9), part(9, 11)], names[:11], names[:11], FACTS)
    with (tmp_path / "id.bin").open("ab") as file:
        file.write(b"left by a stopped addition")
    record = append(tmp_path, [part(11, 23)], names[11:], names[11:], FACTS, record)
    items = Items(tmp_path, record["items"])
    assert [items.ids[row] for row in range(23)] == names == [items.labels[row] for row in range(23)]
    assert {name: entry["bytes"] for name, entry in record["files"].items()} == {
        p.name: p.stat().st_size for p in tmp_path.iterdir()
    }
    picked = np.array([20, 3, 3, 10])
    found, expected = items.some(picked), each(lambda t: t[picked], whole)
    if kind == "sequence":
        assert found.length.tolist() == expected.length.tolist()
        for row, length in enumerate(expected.length.tolist()):
            torch.testing.assert_close(found.rows[row, :length], expected.rows[row, :length], rtol=0, atol=0)
        owners = np.repeat(np.arange(23), whole.length.numpy())
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        owners = np.repeat(np.arange(23), 3 if kind == "set" else 1)
    assert items.owners(np.arange(items.elements)).tolist() == owners.tolist()
    with pytest.raises(ValueError, match="do not fit"):
        append(tmp_path, [torch.zeros(1, 2)], ["x"], ["x"], FACTS, record)
    with pytest.raises(ValueError, match="1 embeddings, 2 ids and 1 labels"):
        append(tmp_path, [part(0, 1)], ["x", "y"], ["x"], FACTS, record)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_bytes(kind, tmp_path):
    for name in "ab":
        make(tmp_path / name, count=120, kind=kind, seed=3)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


@pytest.mark.parametrize("kind", ["ivf", "flat"])
def test_added_is_as_if_it_had_been_there(kind, tmp_path):
    similarity, gallery = SmoothChamfer(), embeddings("set", 400, 1)
    make(tmp_path / "all", kind=kind)
    make(tmp_path / "grown", count=250, embeddings=gallery[:250].split(100), kind=kind)
    ids = [f"id {row}" for row in range(250, 400)]
    add(tmp_path / "grown", gallery[250:].split(60), ids, ids, {**FACTS, "split": "val"}, comparing(similarity))
    whole, grown = Index(tmp_path / "all"), Index(tmp_path / "grown", {**FACTS, "split": "val"})
    assert [part["samples"] for part in grown.parts] == [250, 150]
    assert grown.parts[0] == {**FACTS, "samples": 250}
    assert grown.recall >= 0.99
    for query in embeddings("set", 20, 6).split(1):
        ((expected, values),) = search_exactly(query, whole.items, comparing(similarity), 10)
        for index in (whole, grown):
            rows, scores = index.search(query, 10, comparing(similarity), Effort(10_000, 10_000))
            assert rows.tolist() == expected.tolist()
            np.testing.assert_allclose(scores, values, rtol=1e-5)
        hit = grown.hits(query, 3, comparing(similarity))[0]
        assert (hit.rank, hit.id, hit.file_name) == (1, f"id {expected[0]}", f"id {expected[0]}")
    assert len(list((tmp_path / "grown").glob("*.faiss"))) == 1


def test_what_is_in_or_of_another_run_is_not_added(folder):
    before = sorted((p.name, p.read_bytes()) for p in folder.iterdir())
    for facts, sentence in (
        (FACTS, r"has these samples already \(store s, split test\)"),
        (
            {**FACTS, "split": "val", "weights": "other"},
            "is an index of another run: the weights there have the SHA-256 w…, those of this run other…; name the run",
        ),
        ({**FACTS, "split": "val", "modality": "captions"}, "modality is images there and captions here"),
    ):
        with pytest.raises(RunError, match=sentence):
            add(folder, [embeddings("set", 5, 7)], list("abcde"), list("abcde"), facts, comparing(SmoothChamfer()))
    assert sorted((p.name, p.read_bytes()) for p in folder.iterdir()) == before


@pytest.mark.parametrize("where", ["append", "_settle", "write_record"])
def test_a_stopped_addition_changes_nothing(folder, where, monkeypatch):
    query, compare = embeddings("set", 1, 8), comparing(SmoothChamfer())
    before, ids = Index(folder).hits(query, 20, compare), [f"new {row}" for row in range(50)]
    new = [embeddings("set", 50, 9)], ids, ids, {**FACTS, "split": "val"}, compare

    def stopped(*arguments, **options):
        if where == "append":  # everything is written, but does not count yet
            append(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(build_module, where, stopped)
    with pytest.raises(KeyboardInterrupt):
        add(folder, *new)
    monkeypatch.undo()
    index = Index(folder, FACTS)
    assert (len(index), index.hits(query, 20, compare)) == (400, before)
    add(folder, *new)
    assert Index(folder).items.ids[449] == "new 49"


def test_two_cannot_add_at_once(folder):
    with locked(folder, OSError()), pytest.raises(RunError, match="another process is adding"):
        add(folder, [embeddings("set", 1, 7)], ["a"], ["a"], {**FACTS, "split": "val"}, comparing(SmoothChamfer()))


def test_every_damaged_file_is_found(built, tmp_path):
    for name in sorted(file.name for file in built.iterdir()):
        for damage in ("flip", "cut", "gone"):
            copy = shutil.copytree(built, tmp_path / f"{name} {damage}")
            content = bytearray((copy / name).read_bytes())
            content[len(content) // 2] ^= 1
            if damage == "gone":
                (copy / name).unlink()
            else:
                (copy / name).write_bytes(content if damage == "flip" else content[: len(content) // 2])
            with pytest.raises(RunError, match=r"build|make one") as caught:
                Index(copy)
            assert str(caught.value).startswith(str(copy))
            assert "\n" not in str(caught.value)


def test_an_index_of_something_else_is_refused(built):
    with pytest.raises(
        RunError,
        match=f"another run: .* SHA-256 w…, those of this run {'a' * 8}…; name the run .* or build one of this run",
    ):
        Index(built, {**FACTS, "weights": "a" * 64})
    with pytest.raises(
        RunError,
        match="store is s there and t here; split is test there and val here; name what it was built from",
    ):
        Index(built, {**FACTS, "store": "t", "split": "val"})


@pytest.mark.parametrize("files", [None, [1], {"items.bin": 3}, {"items.bin": {"bytes": "x", "crc32c": 0}}])
def test_a_forged_record_is_refused(folder, files):
    from xret.heads.retrieval.index.folder import write_record

    record = json.loads((folder / "index.json").read_text())
    write_record(folder, {key: value for key, value in record.items() if key != "digest"} | {"files": files})
    (folder / "items.bin").write_bytes(b"")
    with pytest.raises(RunError, match=r"index\.json"):
        Index(folder)


def test_a_record_that_nests_too_deep_is_refused(folder):
    (folder / "index.json").write_text("[" * 100_000)
    with pytest.raises(RunError, match=r"index\.json"):
        Index(folder)


def test_another_version_is_refused(folder):
    record = json.loads((folder / "index.json").read_text())
    del record["digest"]
    record["version"] = 2
    from xret.heads.retrieval.index.folder import _digest

    (folder / "index.json").write_text(json.dumps({**record, "digest": _digest(record)}))
    with pytest.raises(RunError, match="version 1; build it again"):
        Index(folder)


@pytest.mark.parametrize("error", [RuntimeError("full"), KeyboardInterrupt()])
def test_an_interrupted_build_leaves_nothing(tmp_path, monkeypatch, error):
    def stopped(*_):
        raise error

    monkeypatch.setattr(Candidates, "write", stopped)
    with pytest.raises(type(error)):
        make(tmp_path / "index", count=50)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_build_leaves_nothing_that_looks_whole(tmp_path):
    script = (
        "import os, signal, torch\n"
        "from small_index import build_index\n"
        "from xret.heads.retrieval.index.vectors import form_of\n"
        "from xret.heads.retrieval.index.candidates import Candidates\n"
        "from xret.heads.modules.similarity import Cosine\n"
        "Candidates.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "c = Cosine()\n"
        f"build_index([torch.randn(50, 8)], list(map(str, range(50))), {str(tmp_path / 'index')!r},\n"
        "    queries=torch.randn(5, 8), compare=lambda q, x: c(x, q).T, form=form_of(c), facts={})\n"
    )
    support = Path(__file__).parents[3] / "support"
    paths = os.pathsep.join([str(support), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    assert subprocess.run([sys.executable, "-c", script], env=environment, check=False).returncode == -9
    (partial,) = tmp_path.iterdir()
    for folder in (tmp_path / "index", partial):
        with pytest.raises(RunError, match="not an index, or was never finished"):
            Index(folder)


def test_what_exists_is_not_overwritten(built):
    with pytest.raises(RunError, match="exists; take another --out, or add"):
        make(built)


def test_a_gallery_of_one_and_a_query_without_elements(tmp_path):
    cross = SIMILARITIES["cross-attention"]()
    for kind in KINDS:
        one = Sequence(torch.randn(1, 2, 8), torch.tensor([2]))
        make(tmp_path / kind, cross, 1, embeddings=[one], queries=one, kind=kind)
        index = Index(tmp_path / kind)
        for query in (one, one._replace(length=torch.tensor([0]))):
            assert index.search(query, 3, comparing(cross))[0].tolist() == [0]


def test_scores_that_are_not_finite_are_refused(built):
    with pytest.raises(RunError, match="not finite"):
        Index(built).search(torch.full((1, 3, WIDTH), 1.0), 3, lambda q, x: torch.full((1, len(x)), torch.nan))


def test_the_cheapest_effort_that_is_enough_is_chosen(tmp_path):
    curve = [
        Measurement(probes=1, candidates=16, recall=0.5, error=0.0, work=1),
        Measurement(probes=1, candidates=64, recall=0.9, error=0.0, work=9),
        Measurement(probes=2, candidates=16, recall=0.95, error=0.02, work=5),
        Measurement(probes=4, candidates=16, recall=0.95, error=0.04, work=4),
    ]
    assert cheapest(curve, 0.9) == curve[2]
    assert cheapest(curve, 0.5) == curve[0]
    assert cheapest(curve, 0.99) == curve[3]
    low = make(tmp_path / "low", Cosine(), recall=0.3)
    high = make(tmp_path / "high", Cosine(), recall=1.0)
    assert low.recall < high.recall
    fixed = make(tmp_path / "fixed", Cosine(), effort=Effort(2, 5))
    assert fixed.effort == Effort(2, 5)
    assert len(fixed.curve) == 1
    assert Index(tmp_path / "fixed").effort == Effort(2, 5)
    make(tmp_path / "few", Cosine(), count=40, effort=Effort(2, 500))  # kept, as more may be added
    assert Index(tmp_path / "few").effort == Effort(2, 500)


def test_without_faiss_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(RunError, match=r"needs FAISS, which is not installed: pip install 'xret\[index\]'"):
        make(tmp_path / "index", count=20)


@pytest.mark.parametrize("most", [2_000, 76_820, 80_000])  # less than embeddings, FAISS's file, queries
def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path, most):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    queries = embeddings("set", 4000 if most == 80_000 else 40, 2)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        with pytest.raises(RunError, match=r"i cannot be written: File too large; make room, or take"):
            make(tmp_path / "i", kind="flat" if most == 76_820 else "ivf", queries=queries)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
