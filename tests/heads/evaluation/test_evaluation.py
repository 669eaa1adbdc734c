"""Evaluation against a plain one."""

import json
import shutil
from dataclasses import asdict

import pytest
import torch
from captioned_store import make_captioned_store
from edited_runs import edited
from plain_evaluation import plain_rsum, plain_similarity
from safetensors.torch import load_file, save_file
from small_store import make_store

from xret.heads.evaluation import scoring
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.evaluation.paper_rows import ROWS, row_of
from xret.heads.recipes.blocks import Expected
from xret.heads.runs.run import Run
from xret.pipeline.errors import CacheError, RunError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", ["setdiv", "vsepp"])
def test_the_table_is_that_of_a_plain_count(request, store, name):
    run = request.getfixturevalue(name)
    result = evaluate([run], device="cpu")
    assert (result.runs, result.stores) == ((str(run),), (store,))
    (table,) = result.results
    similarity, owner = plain_similarity(run, store)
    assert table.rsum == pytest.approx(plain_rsum(similarity, owner))
    assert (table.images, table.captions, table.skipped) == (12, 30, 0)
    assert (table.split, table.protocol, table.ties) == ("test", "full", "pessimistic")
    assert (table.log_circular_variance is None) == (name == "vsepp")
    written = json.loads(json.dumps(result.to_dict()))
    assert (written["run"], written["store"]) == (str(run), store)
    assert written["results"] == [asdict(table)]


def test_ties_are_counted_as_asked(vsepp):
    tables = {
        ties: evaluate([vsepp], ties=ties, device="cpu").results[0] for ties in ("pessimistic", "mean", "optimistic")
    }
    assert [table.ties for table in tables.values()] == list(tables)
    rsums = [table.rsum for table in tables.values()]
    assert rsums == sorted(rsums)


def test_constant_embeddings_score_chance(store, vsepp, folder):
    run = edited(shutil.copytree(vsepp, folder / "constant"))
    weights = load_file(run / "model.safetensors")
    save_file(
        {k: torch.full_like(v, 0.01) if "layer" in k else v for k, v in weights.items()}, run / "model.safetensors"
    )
    (table,) = evaluate([run], ties="mean", device="cpu").results
    weights["image.adapter.layer.weight"] *= 0
    save_file(weights, run / "model.safetensors")
    (table,) = evaluate([run], ties="mean", device="cpu").results
    assert table.text_to_image["R@1"] == pytest.approx(100 / 12)
    (table,) = evaluate([run], device="cpu").results
    assert table.text_to_image["R@10"] == 0


@pytest.mark.parametrize("captions", [20, 10])  # MSR-VTT, VATEX
def test_many_captions_an_image(vsepp, tmp_path, captions):
    store = make_captioned_store(tmp_path / "videos.zarr", captions=captions, order=range(6))
    (table,) = evaluate([vsepp], store=store, device="cpu").results
    assert (table.images, table.captions, table.captions_per_image) == (6, 6 * captions, captions)
    similarity, owner = plain_similarity(vsepp, store)
    assert owner == [row // captions for row in range(6 * captions)]
    assert table.rsum == pytest.approx(plain_rsum(similarity, owner))
    assert table.mean_recall == pytest.approx(table.rsum / 6)
    assert f"6 images, {6 * captions} captions ({captions}.00 an image)" in str(table)


def test_the_papers_number_stands_beside_ours(vsepp, tmp_path):
    flickr = make_captioned_store(tmp_path / "flickr.zarr", order=range(1000), captions=1, dataset="flickr30k")
    (table,) = evaluate([vsepp], store=flickr, device="cpu").results
    assert table.paper_rsum == Run(vsepp).recipe.expected.f30k == 409.8
    assert str(table).splitlines()[-1] == (f"the paper's RSUM 409.80, difference {table.rsum - 409.8:+.2f}")
    assert evaluate([vsepp, vsepp], store=flickr, device="cpu").results[0].paper_rsum is None
    assert evaluate([vsepp], device="cpu").results[0].paper_rsum is None
    fewer = make_captioned_store(tmp_path / "fewer.zarr", order=range(999), captions=1, dataset="flickr30k")
    assert evaluate([vsepp], store=fewer, device="cpu").results[0].paper_rsum is None


def test_recipes_expect_values_of_the_rows_whose_number_of_images_is_known():
    known = {name: (*row[1:],) for name, row in ROWS.items() if row.images is not None}
    assert known == {
        "coco_1k": ("coco", "1k-folds", 5000),
        "coco_5k": ("coco", "full", 5000),
        "f30k": ("flickr30k", "full", 1000),
    }
    assert set(known) == set(asdict(Expected()))
    assert [row_of("coco", "full"), row_of("vatex", "full"), row_of("vatex", "1k-folds")] == ["coco_5k", "vatex", None]


def test_failed_samples_are_left_out_and_counted(setdiv, folder):
    other = make_store(folder / "broken.zarr", broken=(61, 64))
    (table,) = evaluate([setdiv], store=other, device="cpu").results
    assert (table.images, table.captions, table.skipped) == (10, 25, 2)
    similarity, owner = plain_similarity(setdiv, other)
    assert table.rsum == pytest.approx(plain_rsum(similarity, owner))


def test_splits(setdiv):
    with pytest.raises(CacheError, match="no split 'tset'"):
        evaluate([setdiv], split="tset", device="cpu")
    assert evaluate([setdiv], split="val", device="cpu").results[0].split == "val"


def test_memory_that_does_not_suffice_is_a_sentence(setdiv, monkeypatch):
    def embed(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(scoring, "embed", embed)
    with pytest.raises(RunError, match=r"fit in the memory of cpu; choose a smaller data\.batch_size or model\.dim"):
        evaluate([setdiv], device="cpu")
