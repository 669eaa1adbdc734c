"""Evaluation against a plain one: every sample embedded alone, every rank counted in a loop."""

import json
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import torch
from captioned_store import make_captioned_store
from earlier_runs import without_digests
from safetensors.torch import load_file, save_file
from small_store import make_store

from xret.heads.evaluation import evaluation, protocols, scoring, subjects
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.evaluation.judgements import Judgements
from xret.heads.evaluation.metrics import WAYS, ranks, recall_table
from xret.heads.evaluation.paper_rows import ROWS, row_of
from xret.heads.evaluation.protocols import recalls
from xret.heads.evaluation.scoring import compare, representatives
from xret.heads.evaluation.subjects import score
from xret.heads.modules.similarity import blocks
from xret.heads.recipes.blocks import Expected
from xret.heads.recipes.recipe import load_recipe
from xret.heads.runs import features as run_features
from xret.heads.runs.run import Run
from xret.heads.training.training import train
from xret.pipeline.cache.feature_cache import FeatureCache
from xret.pipeline.data.samples import tokenize
from xret.pipeline.errors import CacheError, RunError
from xret.pipeline.reading.batches import Features

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ["model.dim=16", "data.batch_size=16", "adapter.words.word_dim=8", "optimizer.lr=0.01"]
HEADS = [f"aggregator.{side}.head_dim=16" for side in ("image", "text")]


def recipe_of(name, *settings):
    return load_recipe(name, [*SMALL, *(HEADS if name == "setdiv" else []), "schedule.epochs=2", *settings])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("evaluation")


@pytest.fixture(scope="module")
def store(folder):
    return make_store(folder / "small.zarr")


@pytest.fixture(scope="module")
def setdiv(store, folder):
    train(store, recipe_of("setdiv"), folder / "setdiv", device="cpu")
    return folder / "setdiv"


@pytest.fixture(scope="module")
def vsepp(store, folder):
    train(store, recipe_of("vsepp"), folder / "vsepp", device="cpu")
    return folder / "vsepp"


@torch.no_grad()
def plain_similarity(run, store, split="test"):
    """Compare every image and caption of a split, each embedded by itself, its words looked up in the run's list."""
    run, cache = Run(run), FeatureCache.open(store)
    model, images = run.model(torch.device("cpu")), cache.image_set()
    first, last = cache.splits[split]
    rows = [row for row in range(first, last) if images.status[row] == 0]
    captions = [c for c in range(len(cache.caption_image)) if cache.caption_image[c] in rows]
    words = {word: number for number, word in enumerate(run.vocabulary)}
    similarity = torch.empty(len(rows), len(captions))
    for j, caption in enumerate(captions):
        (text,) = cache.caption_texts(caption, caption + 1)
        ids = [words.get(word, 0) for word in tokenize(text)]
        embedded = model.embed_captions(Features(torch.tensor([len(ids)]), token=torch.tensor([ids])))
        for i, row in enumerate(rows):
            local = torch.from_numpy(images.local(np.array([row])))
            global_ = torch.from_numpy(images.global_(np.array([row])))
            features = Features(torch.tensor([local.shape[1]]), local, global_)
            similarity[i, j] = model.similarity(model.embed_images(features).embedding, embedded.embedding)
    return similarity, [rows.index(cache.caption_image[caption]) for caption in captions]


def plain_rsum(similarity, owner):
    total = 0.0
    for k in (1, 5, 10):
        image_hits = caption_hits = 0
        for i in range(len(similarity)):
            best = max(similarity[i, c] for c in range(len(owner)) if owner[c] == i)
            image_hits += sum(similarity[i, c] >= best - 1e-6 for c in range(len(owner)) if owner[c] != i) < k
        for c in range(len(owner)):
            own = similarity[owner[c], c]
            caption_hits += sum(similarity[i, c] >= own - 1e-6 for i in range(len(similarity)) if i != owner[c]) < k
        total += 100 * image_hits / len(similarity) + 100 * caption_hits / len(owner)
    return total


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


def test_scores_belong_to_their_files_and_texts(setdiv, folder):
    other = make_store(folder / "scored.zarr", broken=(61,))
    scores = score(setdiv, store=other, device="cpu")
    expected, owner = plain_similarity(setdiv, other)
    torch.testing.assert_close(scores.similarity, expected)
    assert scores.caption_image.tolist() == owner
    assert scores.file_names == [f"{row}.jpg" for row in (60, *range(62, 72))]
    cache = FeatureCache.open(other)
    texts = zip(cache.caption_image, cache.caption_texts(0, cache.captions), strict=True)
    assert scores.texts == [text for image, text in texts if image >= 60 and image != 61]


def test_ties_are_counted_as_asked(vsepp):
    tables = {
        ties: evaluate([vsepp], ties=ties, device="cpu").results[0] for ties in ("pessimistic", "mean", "optimistic")
    }
    assert [table.ties for table in tables.values()] == list(tables)
    rsums = [table.rsum for table in tables.values()]
    assert rsums == sorted(rsums)


def test_constant_embeddings_score_chance(store, vsepp, folder):
    run = without_digests(shutil.copytree(vsepp, folder / "constant"))
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


def test_blocks_change_nothing(setdiv, monkeypatch):
    whole = evaluate([setdiv], device="cpu")
    monkeypatch.setattr(blocks, "side", lambda *_: 7)
    monkeypatch.setattr(scoring, "BATCH", 5)
    assert evaluate([setdiv], device="cpu").results[0].rsum == whole.results[0].rsum


def test_captions_of_one_text_and_one_embedding_are_one():
    base = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).repeat(3, 1)  # rows 0, 2, 4 and rows 1, 3, 5 are alike
    base[2] *= 1 + 1e-5  # another rounding
    base[4] *= 1.1  # another embedding
    texts = ["a", "b", "a", "c", "a", "b"]
    assert representatives(base, texts).tolist() == [0, 1, 0, 3, 4, 1]
    sets = base[:, None].repeat(1, 3, 1)
    assert representatives(sets, texts).tolist() == [0, 1, 0, 3, 4, 1]


def test_ties_of_equal_captions_are_exact(setdiv):
    torch.manual_seed(0)
    model = Run(setdiv).model(torch.device("cpu"))
    captions = torch.randn(60, 4, 16)
    captions[1::2] = captions[::2] * (1 + 1e-5 * torch.randn(30, 1, 1))
    texts = [str(row // 2) for row in range(60)]
    similarity = compare(model, torch.randn(7, 4, 16), captions, texts)
    assert torch.equal(similarity[:, ::2], similarity[:, 1::2])
    # Not by chance: compared one by one, they differ.
    other = compare(model, torch.randn(7, 4, 16), captions, [str(row) for row in range(60)])
    assert not torch.equal(other[:, ::2], other[:, 1::2])


def test_an_ensemble_is_the_mean_of_its_similarities(store, setdiv, vsepp):
    result = evaluate([setdiv, vsepp], device="cpu")
    assert result.to_dict()["run"] == [str(setdiv), str(vsepp)]
    first, owner = plain_similarity(setdiv, store)
    second, _ = plain_similarity(vsepp, store)
    assert result.results[0].rsum == pytest.approx(plain_rsum((first + second) / 2, owner))
    assert result.results[0].log_circular_variance is None
    alone, twice = evaluate([vsepp], device="cpu"), evaluate([vsepp, vsepp], device="cpu")
    assert twice.results[0].rsum == alone.results[0].rsum


def test_runs_of_two_stores_are_one_ensemble_by_default(vsepp, folder, store):
    regions = make_store(folder / "regions.zarr", image="roi")
    train(regions, recipe_of("vsepp"), folder / "regions", device="cpu")
    result = evaluate([vsepp, folder / "regions"], device="cpu")
    assert result.to_dict()["store"] == [store, regions]
    first, owner = plain_similarity(vsepp, store)
    second, _ = plain_similarity(folder / "regions", regions)
    assert result.results[0].rsum == pytest.approx(plain_rsum((first + second) / 2, owner))
    with pytest.raises(RunError, match=r"regions needs the feature set 'roi@.*' of images, and .*small\.zarr has grid"):
        evaluate([vsepp, folder / "regions"], store=store, device="cpu")


def run_on(run, store, path):
    """Copy a run as if it had been trained on another store with the same features."""
    return without_digests(shutil.copytree(run, path), store=store)


def test_an_ensemble_goes_by_ids_not_by_order(setdiv, vsepp, tmp_path):
    there = make_captioned_store(tmp_path / "there.zarr", captions=3)
    turned = make_captioned_store(tmp_path / "turned.zarr", captions=3, order=[7, *range(7), *range(11, 7, -1)])
    runs = [run_on(setdiv, there, tmp_path / "one"), run_on(vsepp, turned, tmp_path / "two")]
    (table,) = evaluate(runs, device="cpu").results
    first, second = (score(run, device="cpu") for run in runs)
    mean = torch.empty(12, 36)
    for i, image in enumerate(first.ids):
        for c, caption in enumerate(first.sentid):
            at = second.ids.index(image), second.sentid.tolist().index(caption)
            mean[i, c] = (first.similarity[i, c] + second.similarity[at]) / 2
    expected = recall_table(*ranks(mean, first.caption_image))
    assert {key: getattr(table, key) for key in asdict(expected)} == asdict(expected)
    assert second.caption_image.tolist() != [second.ids.index(first.ids[row]) for row in first.caption_image]


@pytest.mark.parametrize(("change", "counts"), [({"order": range(1, 13)}, "11.*36 and 36"), ({"captions": 2}, "12")])
def test_stores_that_differ_make_no_ensemble(setdiv, vsepp, tmp_path, change, counts):
    there = make_captioned_store(tmp_path / "there.zarr", captions=3)
    other = make_captioned_store(tmp_path / "other.zarr", **{"captions": 3} | change)
    runs = [run_on(setdiv, there, tmp_path / "one"), run_on(vsepp, other, tmp_path / "two")]
    sentence = f"two and .*one cannot be one ensemble: of 12 and 12 images {counts} .* or their stores hold different"
    with pytest.raises(RunError, match=sentence):
        evaluate(runs, device="cpu")


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


def judgements_of(scores):
    """Return each image's own captions as what was judged."""
    images = {int(number): [] for number in scores.cocoid}
    captions = {}
    for caption, owner in zip(scores.sentid.tolist(), scores.caption_image.tolist(), strict=True):
        images[int(scores.cocoid[owner])].append(caption)
        captions[caption] = [int(scores.cocoid[owner])]
    return Judgements(set(images), set(captions), (images, captions), (images, captions))


def test_judged_protocols_read_the_numbers_of_the_store(setdiv, tmp_path, monkeypatch):
    store = make_captioned_store(tmp_path / "coco.zarr", captions=5)
    scores = score(setdiv, store=store, device="cpu")
    assert scores.cocoid.tolist() == [500 + 7 * number for number in range(12)]
    assert scores.sentid.tolist() == [100_000 - row for row in range(60)]
    truth = judgements_of(scores)
    monkeypatch.setattr(protocols, "load_judgements", lambda protocol: truth)
    tables = {
        name: evaluate([setdiv], store=store, protocol=name, device="cpu").results[0]
        for name in ("full", "eccv", "cxc", "rpc2")
    }
    # With nothing but the own captions, these are the ordinary recalls.
    for key in ("image_to_text", "text_to_image", "rsum", "mean_recall"):
        assert getattr(tables["cxc"], key) == getattr(tables["full"], key)
    for way in WAYS:
        assert getattr(tables["eccv"], way)["R@1"] == getattr(tables["full"], way)["R@1"]
        assert getattr(tables["eccv"], way)["R-P"] == getattr(tables["rpc2"], way)["RPC2"]
    # One right image each: R is 1.
    assert set(tables["eccv"].text_to_image.values()) == {tables["full"].text_to_image["R@1"]}
    assert tables["eccv"].rsum is tables["eccv"].mean_recall is tables["eccv"].paper_rsum is None
    printed = str(tables["eccv"]).splitlines()
    assert printed[1].split() == ["mAP@R", "R-P", "R@1"]
    assert [float(v) for v in printed[2].split()[3:]] == pytest.approx(
        list(tables["eccv"].image_to_text.values()), abs=0.005
    )
    assert not any("RSUM" in line for line in printed)


def test_what_is_not_judged_is_refused_before_it_is_embedded(setdiv, store, tmp_path, monkeypatch):
    coco = make_captioned_store(tmp_path / "coco.zarr", captions=5)
    truth = judgements_of(score(setdiv, store=coco, device="cpu"))
    monkeypatch.setattr(protocols, "load_judgements", lambda protocol: truth)
    instances = tmp_path / "instances_val2014.json"
    instances.write_text(json.dumps({"images": [{"id": 500}], "categories": [{"id": 1}], "annotations": []}))
    original = run_features.image_set_of_run

    def one_failed(run, cache):
        found = original(run, cache)
        found.status[3] = 1
        return found

    monkeypatch.setattr(scoring, "embed", None)
    with monkeypatch.context() as patch:
        patch.setattr(subjects, "image_set_of_run", one_failed)
        with pytest.raises(RunError, match=r"eccv needs the 12 images and 60 captions .* has 11 and 55"):
            evaluate([setdiv], store=coco, protocol="eccv", device="cpu")
    with pytest.raises(
        RunError, match=r"of COCO's test split, .*split 'test' of .*small\.zarr has 12 and 30, of which 0"
    ):
        evaluate([setdiv], protocol="cxc", device="cpu")
    with pytest.raises(RunError, match=r"does not know 11 of the 12 images of split 'test' of .*coco\.zarr"):
        evaluate([setdiv], store=coco, protocol="pmrp", annotations=instances, device="cpu")
    with pytest.raises(RunError, match="--annotations is for the protocol pmrp, and this is full; leave it out"):
        evaluate([setdiv], store=coco, protocol="full", annotations=instances, device="cpu")
    with pytest.raises(CacheError, match="no split 'tset'"):
        evaluate([setdiv], store=coco, protocol="cxc", split="tset", device="cpu")


def test_words_of_another_store_are_read_with_the_vocabulary_of_the_run(setdiv, folder):
    other = make_store(folder / "other.zarr", test=20, words="unheard")
    cache, run = FeatureCache.open(other), Run(setdiv)
    assert cache.caption_set().fingerprint != run.info.fingerprints["text"]
    result = evaluate([setdiv], store=other, device="cpu")
    similarity, owner = plain_similarity(setdiv, other)
    assert result.stores == (other,)
    assert result.results[0].images == 20
    assert result.results[0].rsum == pytest.approx(plain_rsum(similarity, owner))


def test_features_that_are_not_those_of_the_run_are_refused(setdiv, store, folder):
    other = make_store(folder / "weights.zarr", weights="b")
    with pytest.raises(RunError) as caught:
        evaluate([setdiv], store=other, device="cpu")
    needed, there = Run(setdiv).info.image_set, FeatureCache.open(other).image_set().name
    assert f"needs the feature set '{needed}' of images, and {other} has {there}" in str(caught.value)
    states = make_store(folder / "states.zarr", text="tokens")
    train(states, recipe_of("vsepp"), folder / "states", device="cpu")
    with pytest.raises(RunError, match=r"needs the feature set 'states@.*' of captions, and .* has words@"):
        evaluate([folder / "states"], store=store, device="cpu")


def test_failed_samples_are_left_out_and_counted(setdiv, folder):
    other = make_store(folder / "broken.zarr", broken=(61, 64))
    (table,) = evaluate([setdiv], store=other, device="cpu").results
    assert (table.images, table.captions, table.skipped) == (10, 25, 2)
    similarity, owner = plain_similarity(setdiv, other)
    assert table.rsum == pytest.approx(plain_rsum(similarity, owner))


def test_an_ensemble_must_see_the_same_samples(store, setdiv, folder, monkeypatch):
    original = run_features.image_set_of_run

    def one_broken(run, cache):
        found = original(run, cache)
        if run.path.name == "setdiv2":
            found.status[61] = 1
        return found

    shutil.copytree(setdiv, folder / "setdiv2")
    monkeypatch.setattr(subjects, "image_set_of_run", one_broken)
    with pytest.raises(
        RunError, match="cannot be one ensemble: of 11 and 12 images 11 are in both, of 27 and 30 captions 27: "
    ):
        evaluate([setdiv, folder / "setdiv2"], device="cpu")


def test_folds_are_averaged():
    similarity = torch.rand(5000, 5000, generator=torch.Generator().manual_seed(0))
    similarity.fill_diagonal_(0.99)
    owner = torch.arange(5000)
    table = recalls(similarity, owner, "1k-folds", "pessimistic", "here")
    blocks = [similarity[a : a + 1000, a : a + 1000] for a in range(0, 5000, 1000)]
    folds = [recall_table(*ranks(block, torch.arange(1000))) for block in blocks]
    assert table.rsum == pytest.approx(sum(fold.rsum for fold in folds) / 5)
    by_hand = sum(float((block >= 0.99).sum(1).eq(1).float().mean()) for block in blocks) * 20
    assert table.image_to_text["R@1"] == pytest.approx(by_hand, abs=0.01)


def test_protocols(setdiv, store, folder):
    with pytest.raises(
        RunError, match=r"needs exactly 5,000 images and split 'test' of .* has 12; take --protocol full"
    ):
        evaluate([setdiv], protocol="1k-folds", device="cpu")
    with pytest.raises(RunError, match=r"no protocol '5k-folds' \(did you mean '1k-folds'\?\); `xret list protocols`"):
        evaluate([setdiv], protocol="5k-folds", device="cpu")
    coco = make_store(folder / "coco.zarr", protocols=("1k-folds", "full"))
    with pytest.raises(RunError, match="1k-folds needs"):
        evaluate([setdiv], store=coco, protocol="1k-folds", device="cpu")
    assert evaluate([setdiv], store=coco, protocol="full", device="cpu").results[0].protocol == "full"


def test_what_the_manifest_names_and_does_not_apply_is_left_out_with_a_line(setdiv, folder, capsys):
    both = make_store(folder / "both.zarr", protocols=("1k-folds", "full"))
    results = evaluate([setdiv], store=both, device="cpu").results
    assert [table.protocol for table in results] == ["full"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "protocol 1k-folds is left out: it needs exactly 5,000 images, not 12"
    alone = make_store(folder / "alone.zarr", protocols=("1k-folds",))
    with pytest.raises(RunError, match="1k-folds needs"):
        evaluate([setdiv], store=alone, device="cpu")
    assert evaluation._applicable(("1k-folds", "full"), 5000) == ("1k-folds", "full")


def test_a_store_that_was_moved_is_asked_for(folder, tmp_path):
    url = make_store(tmp_path / "before.zarr")
    train(url, recipe_of("vsepp"), tmp_path / "run", device="cpu")
    (tmp_path / "before.zarr").rename(tmp_path / "after.zarr")
    sentence = (
        r"is not there or not usable \(.*before\.zarr: no feature cache is there.*; name where it is now with --store"
    )
    with pytest.raises(RunError, match=sentence):
        evaluate([tmp_path / "run"], device="cpu")
    with pytest.raises(RunError, match=sentence):
        score(tmp_path / "run", device="cpu")
    assert evaluate([tmp_path / "run"], store=str(tmp_path / "after.zarr"), device="cpu").results
    with pytest.raises(CacheError, match="no feature cache is there"):
        evaluate([tmp_path / "run"], store=url, device="cpu")


def test_splits(setdiv):
    with pytest.raises(CacheError, match="no split 'tset'"):
        evaluate([setdiv], split="tset", device="cpu")
    assert evaluate([setdiv], split="val", device="cpu").results[0].split == "val"


def test_a_folder_that_is_no_run(tmp_path, setdiv):
    with pytest.raises(RunError, match=r"is no run: it has no run\.json"):
        evaluate([tmp_path], device="cpu")
    shutil.copytree(setdiv, tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    with pytest.raises(RunError, match=r"has lost its model\.safetensors"):
        evaluate([tmp_path / "run"], device="cpu")
    # Killed between its weights and run.json, a run of an earlier version has weights of an unknown epoch.
    (tmp_path / "run" / "model.safetensors").write_bytes((setdiv / "model.safetensors").read_bytes())
    for begun, command in (({}, "train-head"), ({"finetuned": {"epoch": 1}}, "finetune")):
        without_digests(tmp_path / "run", best_epoch=None, **begun)
        with pytest.raises(RunError, match=f"has no finished epoch yet; continue it with `xret {command}"):
            evaluate([tmp_path / "run"], device="cpu")
    (tmp_path / "run" / "config.json").write_text("{")
    with pytest.raises(RunError, match=r"config\.json is missing or damaged"):
        evaluate([tmp_path / "run"], device="cpu")


DAMAGE = [
    ("run.json", "[]"),
    ("run.json", '{"format": "xret-run", "version": 1}'),
    ("run.json", '{"format": "xret-run", "version": 1, "store": 3, "image_set": "", "text_set": ""}'),
    ("run.json", "[" * 100_000),
    ("config.json", "{}"),
    ("config.json", "[]"),
    ("config.json", '{"recipe": {}, "image": {}, "text": {}}'),
    ("vocabulary.json", "{}"),
    ("vocabulary.json", '["<unk>"]'),
    ("vocabulary.json", "of other words"),
]


@pytest.mark.parametrize(("name", "content"), DAMAGE)
def test_a_damaged_file_is_named(tmp_path, setdiv, name, content):
    without_digests(shutil.copytree(setdiv, tmp_path / "run"))
    if content == "of other words":  # as many, but no words
        content = json.dumps([3] * len(Run(setdiv).vocabulary))
    (tmp_path / "run" / name).write_text(content)
    with pytest.raises(RunError, match=rf"run/{name} "):
        evaluate([tmp_path / "run"], device="cpu")


@pytest.mark.parametrize("content", [b"{", b"3\n", b"\xff\n", b"[" * 100_000])
def test_damaged_metrics_are_named(tmp_path, setdiv, content):
    without_digests(shutil.copytree(setdiv, tmp_path / "run"))
    (tmp_path / "run" / "metrics.jsonl").write_bytes(content)
    with pytest.raises(RunError, match=r"metrics\.jsonl is missing or damaged"):
        Run(tmp_path / "run").metrics()


def test_memory_that_does_not_suffice_is_a_sentence(setdiv, monkeypatch):
    def embed(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(scoring, "embed", embed)
    with pytest.raises(RunError, match=r"fit in the memory of cpu; choose a smaller data\.batch_size or model\.dim"):
        evaluate([setdiv], device="cpu")


@pytest.mark.parametrize("damage", [b"half", None])
def test_weights_that_do_not_fit(tmp_path, setdiv, vsepp, damage):
    without_digests(shutil.copytree(setdiv, tmp_path / "run"))
    (tmp_path / "run" / "model.safetensors").write_bytes(damage or (vsepp / "model.safetensors").read_bytes())
    with pytest.raises(RunError, match=r"does not fit the run's config\.json or is damaged"):
        evaluate([tmp_path / "run"], device="cpu")


def test_spoilt_weights_are_not_ranked(tmp_path, setdiv):
    without_digests(shutil.copytree(setdiv, tmp_path / "run"))
    weights = load_file(tmp_path / "run" / "model.safetensors")
    weights["image.adapter.layer.bias"][0] = torch.nan
    save_file(weights, tmp_path / "run" / "model.safetensors")
    with pytest.raises(RunError, match="similarities that are not finite"):
        evaluate([tmp_path / "run"], device="cpu")
