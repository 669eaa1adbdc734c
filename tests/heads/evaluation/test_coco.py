"""Each protocol's table against recorded numbers, the package `eccv_caption`, and loops."""

import hashlib
import json
import sys

import numpy as np
import pytest
import torch
from conftest import GOLDEN
from recorded_scores import recipe_scores, recipe_uniform

from xret.heads.evaluation import metrics
from xret.heads.evaluation.coco import Instances, Judgements, ground_truth, load_judgements, relevance
from xret.heads.evaluation.metrics import WAYS, recalls
from xret.heads.evaluation.precision import plausible_matches
from xret.heads.evaluation.scoring import Scores
from xret.pipeline.errors import RunError

COCO = "eccv_caption is not installed"
# The seed offset of the factor on pairs beyond the own ones. The recorded recipe says 500, as for the own pairs, but
# 500 does not reproduce the recorded rankings. This one was found by trying 0 to 3,000; that it is right shows in the
# rankings' SHA-256, which no metric goes into.
EXTENDED_OFFSET = 498


def scores_of(similarity, cocoid, sentid, owner):
    """Return scores as of a split with these numbers, the rest of it empty."""
    return Scores(
        similarity=similarity,
        caption_image=torch.as_tensor(owner),
        ids=[],
        cocoid=np.asarray(cocoid),
        sentid=np.asarray(sentid),
        file_names=[],
        texts=[],
        skipped=0,
        log_circular_variance=None,
    )


@pytest.fixture
def small():
    """Ten images of two captions each with scores that never tie, and judgements that go beyond their own."""
    rng = np.random.default_rng(3)
    cocoid, sentid, owner = rng.permutation(900)[:10], 1000 + rng.permutation(900)[:20], np.arange(20) // 2
    similarity = torch.from_numpy(rng.permutation(200).reshape(10, 20).astype(np.float32))
    right = rng.random((2, 10, 20)) < 0.2
    right[:, np.arange(10), 2 * np.arange(10)] = True
    truths = []
    for name, one in zip(("eccv", "cxc"), right, strict=True):
        asked = range(3, 9) if name == "eccv" else range(10)
        images = {int(cocoid[i]): [int(x) for x in sentid[one[i]]] for i in asked}
        captions = {int(sentid[c]): [int(x) for x in cocoid[one[:, c]]] for c in range(20) if one[:, c].any()}
        truths.append((images, captions))
    truths[0][0][int(cocoid[3])].append(77)  # a caption that is not in the gallery
    truth = Judgements(set(cocoid.tolist()), set(sentid.tolist()), *truths)
    return scores_of(similarity, cocoid, sentid, owner), truth


def full_rankings(scores):
    """Return both ways' ids in falling order, as the package wants them: Python ints, nothing cut off."""
    images, captions = scores.cocoid.tolist(), scores.sentid.tolist()
    by_image = (-scores.similarity).argsort(1).tolist()
    by_caption = (-scores.similarity.T).argsort(1).tolist()
    return (
        {image: [captions[c] for c in order] for image, order in zip(images, by_image, strict=True)},
        {caption: [images[i] for i in order] for caption, order in zip(captions, by_caption, strict=True)},
    )


def test_the_package_gives_the_same_tables(small):
    package = pytest.importorskip("eccv_caption._metrics", reason=COCO)
    scores, truth = small
    tables = {name: truth.table(name, scores, "pessimistic") for name in ("eccv", "cxc", "rpc2")}
    for way, ranked, eccv, cxc in zip(WAYS, full_rankings(scores), truth.eccv, truth.cxc, strict=True):
        expected = package.compute_eccv_metrics(ranked, eccv)
        names = {"mAP@R": "eccv_map_at_r", "R-P": "eccv_rprecision", "R@1": "eccv_r1"}
        assert getattr(tables["eccv"], way) == pytest.approx({new: 100 * expected[old] for new, old in names.items()})
        for k in (1, 5, 10):
            assert getattr(tables["cxc"], way)[f"R@{k}"] == pytest.approx(100 * package.compute_r_at_k(ranked, cxc, k))
        assert getattr(tables["rpc2"], way) == pytest.approx({"RPC2": 100 * package.compute_rprecision(ranked, cxc)})
    assert tables["eccv"].rsum is tables["rpc2"].rsum is None
    recalls_ = [getattr(tables["cxc"], way)[f"R@{k}"] for way in WAYS for k in (1, 5, 10)]
    assert tables["cxc"].rsum == pytest.approx(sum(recalls_))


def test_ties_are_counted_as_asked(small):
    scores, truth = small
    constant = scores_of(torch.zeros(10, 20), scores.cocoid, scores.sentid, scores.caption_image)
    for name in ("eccv", "rpc2"):
        values = [
            [value for way in WAYS for value in getattr(truth.table(name, constant, ties), way).values()]
            for ties in ("pessimistic", "mean", "optimistic")
        ]
        assert all(worst < mean < best for worst, mean, best in zip(*values, strict=True))
    rsums = [truth.table("cxc", constant, ties).rsum for ties in ("pessimistic", "mean", "optimistic")]
    assert rsums == sorted(set(rsums))
    # By chance, each of the first R captions is right with probability R / 20.
    relevant, count = relevance(truth.cxc[0], scores.cocoid, scores.sentid)
    assert (relevant.sum(1) == count).all()
    mean = truth.table("rpc2", constant, "mean").image_to_text["RPC2"]
    assert mean == pytest.approx(100 * float((count / 20).mean()))


def test_folds_judge_what_lies_inside(small, monkeypatch):
    package = pytest.importorskip("eccv_caption._metrics", reason=COCO)
    scores, truth = small
    monkeypatch.setattr(metrics, "FOLDED", 10)
    monkeypatch.setattr(metrics, "FOLDS", [range(first, first + 2) for first in range(0, 10, 2)])
    codes = torch.rand(10, 4, generator=torch.Generator().manual_seed(1)) < 0.5
    found = {
        "RPC2 1K": truth.table("rpc2", scores, "pessimistic"),
        "PMRP 1K": Instances("file", dict(zip(scores.cocoid.tolist(), codes.numpy(), strict=True))).table(
            "pmrp", scores, "pessimistic"
        ),
    }
    owner = scores.caption_image.tolist()
    plausible = [plausible_matches(codes, zeta)[:, scores.caption_image].tolist() for zeta in (0, 1, 2)]
    for place, way in enumerate(WAYS):
        judged, plausibly = [], []
        for first in range(0, 10, 2):
            images = scores.cocoid[first : first + 2].tolist()
            captions = scores.sentid[2 * first : 2 * first + 4].tolist()
            gallery, queries = (captions, images) if place == 0 else (images, captions)
            ranked = {q: [i for i in full_rankings(scores)[place][q] if i in gallery] for q in queries}
            right = {q: [i for i in truth.cxc[place].get(q, ()) if i in gallery] for q in queries}
            judged.append(package.compute_rprecision(ranked, {q: ids for q, ids in right.items() if ids}))
            for matches in plausible:
                pairs = [
                    (scores.cocoid[i], scores.sentid[c]) for i in range(10) for c in range(len(owner)) if matches[i][c]
                ]
                right = {q: [p[1 - place] for p in pairs if p[place] == q and p[1 - place] in gallery] for q in queries}
                plausibly.append(package.compute_rprecision(ranked, right))
        assert getattr(found["RPC2 1K"], way)["RPC2 1K"] == pytest.approx(100 * np.mean(judged))
        assert getattr(found["PMRP 1K"], way)["PMRP 1K"] == pytest.approx(100 * np.mean(plausibly))


def test_other_images_or_captions_are_refused(small):
    scores, truth = small
    sentence = (
        r"protocol eccv needs the 10 images and 20 captions of COCO's test split, with their cocoid and sentid; split "
        r"'test' of x has 9 and 20, of which 9 and 20 are among them; take --protocol full"
    )
    with pytest.raises(RunError, match=sentence):
        truth.require("eccv", scores.cocoid[:9], scores.sentid, "split 'test' of x")
    with pytest.raises(RunError, match=r"here has 10 and 20, of which 10 and 19 are among them"):
        truth.require("cxc", scores.cocoid, np.r_[5, scores.sentid[1:]], "here")


def test_the_real_judgements():
    pytest.importorskip("eccv_caption", reason=COCO)
    truth = load_judgements("eccv")
    assert (len(truth.images), len(truth.captions)) == (5000, 25000)
    assert [len(right) for right in (*truth.eccv, *truth.cxc)] == [1261, 1332, 5000, 24972]
    assert all(set(right) <= ids for right, ids in zip(truth.cxc, (truth.images, truth.captions), strict=True))


def test_without_the_package_there_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "eccv_caption", None)
    with pytest.raises(RunError, match=r"protocol rpc2 reads .* eccv_caption, .* pip install 'xret\[eccv\]'"):
        ground_truth("rpc2", "")


# ---- plausible matches ----


def annotations(file, **changes):
    """Write instance annotations in COCO's form: five images, four classes, one of which no image shows."""
    shown = {11: [1, 1, 3], 12: [1, 3], 13: [3], 14: [], 15: [90]}
    content = {
        "info": {"description": "COCO 2014 Dataset"},
        "images": [{"id": image, "file_name": f"COCO_val2014_{image:012d}.jpg"} for image in shown],
        "annotations": [
            {
                "segmentation": [[1.0, 2.0, 3.0, 4.0]],
                "iscrowd": category % 2,
                "image_id": image,
                "category_id": category,
            }
            for image, categories in shown.items()
            for category in categories
        ],
        "categories": [{"id": one, "name": f"class {one}"} for one in (1, 3, 80, 90)],
    } | changes
    file.write_text(json.dumps(content))
    return file


def test_plausible_matches_come_from_the_annotations(tmp_path):
    truth = ground_truth("pmrp", annotations(tmp_path / "instances.json"))
    # Classes: {1, 3}, {1, 3}, {3}, {}, {90}; the store has the images in another order, two captions of each.
    cocoid = [15, 12, 11, 14, 13]
    shown = [{90}, {1, 3}, {1, 3}, set(), {3}]
    similarity = torch.randn(5, 10, generator=torch.Generator().manual_seed(0))
    owner = np.arange(10) // 2
    found = truth.table("pmrp", scores_of(similarity, cocoid, np.arange(10), owner), "pessimistic")
    for zeta in (0, 1, 2):
        match = [[len(a ^ shown[k]) <= zeta for k in owner] for a in shown]
        to_text = [
            np.mean([match[i][c] for c in similarity[i].argsort(descending=True)[: sum(match[i])]]) for i in range(5)
        ]
        right = [[match[i][c] for i in range(5)] for c in range(10)]
        to_image = [
            np.mean([right[c][i] for i in similarity[:, c].argsort(descending=True)[: sum(right[c])]])
            for c in range(10)
        ]
        assert found.image_to_text[f"zeta {zeta}"] == pytest.approx(100 * np.mean(to_text))
        assert found.text_to_image[f"zeta {zeta}"] == pytest.approx(100 * np.mean(to_image))
    for way in WAYS:
        assert list(getattr(found, way)) == ["PMRP", "zeta 0", "zeta 1", "zeta 2"]
        assert getattr(found, way)["PMRP"] == pytest.approx(
            np.mean([getattr(found, way)[f"zeta {zeta}"] for zeta in (0, 1, 2)])
        )
    assert found.rsum is None


def test_annotations_that_do_not_fit(tmp_path):
    with pytest.raises(RunError, match="--protocol pmrp:instances_val2014"):
        ground_truth("pmrp", "")
    with pytest.raises(RunError, match=r"none\.json cannot be read: No such file"):
        ground_truth("pmrp", tmp_path / "none.json")
    for changes in (
        {"categories": []},
        {"annotations": [{"image_id": 11, "id": 3, "caption": "a car"}]},
        {"images": [11]},
        {"annotations": None},
    ):
        file = annotations(tmp_path / "other.json", **changes)
        with pytest.raises(RunError, match=r"other\.json is not COCO's instance annotations, .*instances_val2014"):
            ground_truth("pmrp", file)
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "damaged.json").write_bytes(b'{"images": [\xff')
    for name in ("list.json", "damaged.json"):
        with pytest.raises(RunError, match=f"{name} is not COCO's instance annotations"):
            ground_truth("pmrp", tmp_path / name)
    truth = ground_truth("pmrp", annotations(tmp_path / "instances.json"))
    with pytest.raises(RunError, match=r"does not know 2 of the 3 images of here, among them cocoid 4: pmrp needs"):
        truth.require("pmrp", np.array([11, 4, -1]), np.arange(3), "here")


# ---- at COCO's size ----


@pytest.mark.slow
def test_recorded_coco_test_split():
    eccv_caption = pytest.importorskip("eccv_caption", reason=COCO)
    recorded = json.loads((GOLDEN / "metrics.json").read_text())["extended_coco"]
    recipe, package = recorded["recipe"], eccv_caption.Metrics()
    sentid = package.coco_ids
    owners = [package.coco_gts["t2i"][caption][0] for caption in sentid.tolist()]
    cocoid = np.array(list(dict.fromkeys(owners)))
    truth = load_judgements("eccv")

    similarity = torch.empty(5000, 25000, dtype=torch.float64)
    for first in range(0, 5000, 100):
        block = recipe_scores(recipe["seed"], 5000, recipe["W"], first, first + 100)
        similarity[first : first + 100] = torch.from_numpy(block)
    marked = relevance(truth.eccv[0], cocoid, sentid)[0] | relevance(truth.eccv[1], sentid, cocoid)[0].T
    marked[torch.arange(25000) // 5, torch.arange(25000)] = False
    assert int(marked.sum()) == recorded["n_boosted_pairs_outside_own"]
    rows, columns = marked.nonzero(as_tuple=True)
    v = recipe_uniform(recipe["seed"] + EXTENDED_OFFSET, (rows * 25000 + columns).numpy().astype(np.uint64))
    similarity[rows, columns] *= torch.from_numpy(((v * v) * v) * recipe["W_extended"])
    del marked
    top = similarity.topk(100, 1).indices.numpy(), similarity.T.topk(100, 1).indices.numpy()
    for places, ids, way in ((top[0], sentid, "i2t"), (top[1], cocoid, "t2i")):
        digest = hashlib.sha256(ids[places[:, :10]].astype("<i8").tobytes()).hexdigest()
        assert digest == recorded[f"sha256_top10_{way}"]

    scores, expected = scores_of(similarity, cocoid, sentid, np.arange(25000) // 5), recorded["expected"]
    found = {name: truth.table(name, scores, "pessimistic") for name in ("eccv", "cxc", "rpc2")}
    plain = {name: recalls(similarity, scores.caption_image, name, "pessimistic") for name in ("full", "1k-folds")}
    for way, short in zip(WAYS, ("i2t", "t2i"), strict=True):
        values = {
            "eccv_map_at_r": getattr(found["eccv"], way)["mAP@R"],
            "eccv_rprecision": getattr(found["eccv"], way)["R-P"],
            "eccv_r1": getattr(found["eccv"], way)["R@1"],
            "cxc_rprecision": getattr(found["rpc2"], way)["RPC2"],
        }
        for k in (1, 5, 10):
            values[f"cxc_r{k}"] = getattr(found["cxc"], way)[f"R@{k}"]
            values[f"coco_5k_r{k}"] = getattr(plain["full"], way)[f"R@{k}"]
            values[f"coco_1k_r{k}"] = getattr(plain["1k-folds"], way)[f"R@{k}"]
        for name, value in values.items():
            assert value == pytest.approx(100 * expected[name][short], rel=1e-12), (name, short)
        assert 0 < getattr(found["rpc2"], way)["RPC2 1K"] < 100

    # The package itself; more of a ranking than any query has right items changes none of these numbers.
    ranked = {
        "i2t": dict(zip(cocoid.tolist(), sentid[top[0]].tolist(), strict=True)),
        "t2i": dict(zip(sentid.tolist(), cocoid[top[1]].tolist(), strict=True)),
    }
    theirs = package.compute_all_metrics(
        ranked["i2t"], ranked["t2i"], ("eccv_r1", "eccv_map_at_r", "eccv_rprecision", "cxc_recalls"), Ks=(1, 5, 10)
    )
    for way, short in zip(WAYS, ("i2t", "t2i"), strict=True):
        for name, value in (("mAP@R", "eccv_map_at_r"), ("R-P", "eccv_rprecision"), ("R@1", "eccv_r1")):
            assert getattr(found["eccv"], way)[name] == pytest.approx(100 * theirs[value][short], rel=1e-12)
        for k in (1, 5, 10):
            assert getattr(found["cxc"], way)[f"R@{k}"] == pytest.approx(100 * theirs[f"cxc_r{k}"][short], rel=1e-12)
