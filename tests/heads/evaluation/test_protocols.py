"""Each protocol's table against recorded numbers, the package `eccv_caption`, and loops; and where none applies."""

import hashlib
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from captioned_store import make_captioned_store
from conftest import GOLDEN
from recorded_scores import recipe_scores, recipe_uniform
from scores import score
from small_store import make_store

from xret.heads.evaluation import metrics, protocols
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.evaluation.metrics import WAYS, recalls
from xret.heads.evaluation.precision import plausible_matches
from xret.heads.evaluation.protocols import load_judgements, load_protocol, read_classes, relevance
from xret.pipeline.errors import CacheError, RunError

COCO = "eccv_caption is not installed"
# The seed offset of the factor on pairs beyond the own ones. The recorded recipe says 500, as for the own pairs, but
# 500 does not reproduce the recorded rankings. This one was found by trying 0 to 3,000; that it is right shows in the
# rankings' SHA-256, which no metric goes into.
EXTENDED_OFFSET = 498


def scores_of(similarity, cocoid, sentid, owner):
    """Return scores as of a split with these numbers, the rest of it empty."""
    numbers = {"cocoid": np.asarray(cocoid), "sentid": np.asarray(sentid)}
    return SimpleNamespace(split="test", similarity=similarity, caption_image=torch.as_tensor(owner), **numbers)


def truth_of(images, captions, eccv, cxc):
    """Return what was judged, right captions by image and right images by caption, as the package holds it."""
    eccv_gts, cxc_gts = ({"i2t": one[0], "t2i": one[1]} for one in (eccv, cxc))
    coco_gts = {"i2t": dict.fromkeys(images.tolist())}
    return SimpleNamespace(coco_gts=coco_gts, coco_ids=captions, eccv_gts=eccv_gts, cxc_gts=cxc_gts)


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
    return scores_of(similarity, cocoid, sentid, owner), truth_of(cocoid, sentid, *truths)


def judged(truth, name, scores, ties):
    """Return the table of a protocol by these judgements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocols, "load_judgements", lambda protocol: truth)
        return load_protocol(name)[1](scores, ties)


def plausible(classes, scores, ties):
    """Return the table of ``pmrp`` by these classes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocols, "read_classes", lambda file: classes)
        return load_protocol("pmrp:classes")[1](scores, ties)


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
    tables = {name: judged(truth, name, scores, "pessimistic") for name in ("eccv", "cxc", "rpc2")}
    for way, ranked, key in zip(WAYS, full_rankings(scores), ("i2t", "t2i"), strict=True):
        eccv, cxc = truth.eccv_gts[key], truth.cxc_gts[key]
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
            [value for way in WAYS for value in getattr(judged(truth, name, constant, ties), way).values()]
            for ties in ("pessimistic", "mean", "optimistic")
        ]
        assert all(worst < mean < best for worst, mean, best in zip(*values, strict=True))
    rsums = [judged(truth, "cxc", constant, ties).rsum for ties in ("pessimistic", "mean", "optimistic")]
    assert rsums == sorted(set(rsums))
    # By chance, each of the first R captions is right with probability R / 20.
    relevant, count = relevance(truth.cxc_gts["i2t"], scores.cocoid, scores.sentid)
    assert (relevant.sum(1) == count).all()
    mean = judged(truth, "rpc2", constant, "mean").image_to_text["RPC2"]
    assert mean == pytest.approx(100 * float((count / 20).mean()))


def test_folds_judge_what_lies_inside(small, monkeypatch):
    package = pytest.importorskip("eccv_caption._metrics", reason=COCO)
    scores, truth = small
    monkeypatch.setattr(metrics, "FOLDED", 10)
    monkeypatch.setattr(metrics, "FOLDS", [range(first, first + 2) for first in range(0, 10, 2)])
    codes = torch.rand(10, 4, generator=torch.Generator().manual_seed(1)) < 0.5
    classes = dict(zip(scores.cocoid.tolist(), codes.numpy(), strict=True))
    found = {
        "RPC2 1K": judged(truth, "rpc2", scores, "pessimistic"),
        "cxc": judged(truth, "cxc", scores, "pessimistic"),
        "PMRP 1K": plausible(classes, scores, "pessimistic"),
    }
    owner = scores.caption_image.tolist()
    plausible_ = [plausible_matches(codes, zeta)[:, scores.caption_image].tolist() for zeta in (0, 1, 2)]
    for place, (way, key) in enumerate(zip(WAYS, ("i2t", "t2i"), strict=True)):
        by_judges, plausibly, hits = [], [], {1: [], 5: [], 10: []}
        for first in range(0, 10, 2):
            images = scores.cocoid[first : first + 2].tolist()
            captions = scores.sentid[2 * first : 2 * first + 4].tolist()
            gallery, queries = (captions, images) if place == 0 else (images, captions)
            ranked = {q: [i for i in full_rankings(scores)[place][q] if i in gallery] for q in queries}
            right = {q: [i for i in truth.cxc_gts[key].get(q, ()) if i in gallery] for q in queries}
            by_judges.append(package.compute_rprecision(ranked, {q: ids for q, ids in right.items() if ids}))
            for k, shares in hits.items():
                shares.append(np.mean([bool({*ranked[q][:k]} & {*ids}) for q, ids in right.items() if ids]))
            for matches in plausible_:
                pairs = [
                    (scores.cocoid[i], scores.sentid[c]) for i in range(10) for c in range(len(owner)) if matches[i][c]
                ]
                right = {q: [p[1 - place] for p in pairs if p[place] == q and p[1 - place] in gallery] for q in queries}
                plausibly.append(package.compute_rprecision(ranked, right))
        assert getattr(found["RPC2 1K"], way)["RPC2 1K"] == pytest.approx(100 * np.mean(by_judges))
        assert getattr(found["PMRP 1K"], way)["PMRP 1K"] == pytest.approx(100 * np.mean(plausibly))
        names = ["R@1", "R@5", "R@10", "medr", "R@1 1K", "R@5 1K", "R@10 1K"]
        assert list(getattr(found["cxc"], way)) == names
        for k, shares in hits.items():
            assert getattr(found["cxc"], way)[f"R@{k} 1K"] == pytest.approx(100 * np.mean(shares))


@pytest.mark.parametrize(
    ("images", "captions", "counts"), [(slice(9), 1000, "9 and 20, of which 9 and 20"),
                                       (slice(10), 5, "10 and 20, of which 10 and 19")],
)  # fmt: skip
def test_other_images_or_captions_are_refused(small, images, captions, counts):
    scores, truth = small
    other = np.r_[scores.sentid[0] if captions == 1000 else 5, scores.sentid[1:]]
    there = scores_of(scores.similarity, scores.cocoid[images], other, scores.caption_image)
    sentence = f"protocol eccv needs the 10 images and 20 captions of COCO's test split, .* split .test. has {counts}"
    with pytest.raises(RunError, match=sentence):
        judged(truth, "eccv", there, "pessimistic")


def test_the_real_judgements():
    pytest.importorskip("eccv_caption", reason=COCO)
    truth = load_judgements("eccv")
    images, captions = set(truth.coco_gts["i2t"]), set(truth.coco_ids.tolist())
    assert (len(images), len(captions)) == (5000, 25000)
    both = [truth.eccv_gts["i2t"], truth.eccv_gts["t2i"], truth.cxc_gts["i2t"], truth.cxc_gts["t2i"]]
    assert [len(right) for right in both] == [1261, 1332, 5000, 24972]
    assert [sum(map(len, right.values())) for right in both[2:]] == [35585, 35585]
    assert all(set(right) <= ids for right, ids in zip(both, (images, captions) * 2, strict=True))
    # RPC2 counts a query's right items in the gallery; none of them lies outside.
    assert {caption for ids in both[2].values() for caption in ids} <= captions
    assert {image for ids in both[3].values() for image in ids} <= images


def test_without_the_package_there_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "eccv_caption", None)
    with pytest.raises(RunError, match=r"protocol rpc2 .*eccv_caption.*'xret\[eccv\]'"):
        load_protocol("rpc2")


def annotations(file, **changes):
    """Write instance annotations in COCO's form: five images, four classes, one of which no image shows."""
    shown = {11: [1, 1, 3], 12: [1, 3], 13: [3], 14: [], 15: [90]}
    content = {
        "info": {"description": "COCO 2014 Dataset"},
        "images": [{"id": image, "file_name": f"COCO_val2014_{image:012d}.jpg"} for image in shown],
        "annotations": [
            {"segmentation": [[1.0, 2.0]], "iscrowd": category % 2, "image_id": image, "category_id": category}
            for image, categories in shown.items()
            for category in categories
        ],
        "categories": [{"id": one, "name": f"class {one}"} for one in (1, 3, 80, 90)],
    } | changes
    file.write_text(json.dumps(content))
    return file


def test_plausible_matches_come_from_the_annotations(tmp_path):
    _, measure = load_protocol(f"pmrp:{annotations(tmp_path / 'instances.json')}")
    # Classes: {1, 3}, {1, 3}, {3}, {}, {90}; the store has the images in another order, two captions of each.
    cocoid = [15, 12, 11, 14, 13]
    shown = [{90}, {1, 3}, {1, 3}, set(), {3}]
    similarity = torch.randn(5, 10, generator=torch.Generator().manual_seed(0))
    owner = np.arange(10) // 2
    found = measure(scores_of(similarity, cocoid, np.arange(10), owner), "pessimistic")
    for zeta in (0, 1, 2):
        match = np.array([[len(a ^ shown[k]) <= zeta for k in owner] for a in shown])
        for way, right, scored in (("image_to_text", match, similarity), ("text_to_image", match.T, similarity.T)):
            precision = [
                np.mean([own[item] for item in row.argsort(descending=True)[: own.sum()]])
                for own, row in zip(right, scored, strict=True)
            ]
            assert getattr(found, way)[f"zeta {zeta}"] == pytest.approx(100 * np.mean(precision))
    for way in WAYS:
        mean, *each = getattr(found, way).items()
        assert [name for name, _ in each] == ["zeta 0", "zeta 1", "zeta 2"]
        assert mean == ("PMRP", pytest.approx(np.mean([value for _, value in each])))
    assert found.rsum is None


def test_annotations_that_do_not_fit(tmp_path):
    with pytest.raises(RunError, match=r"none\.json cannot be read: No such file"):
        load_protocol(f"pmrp:{tmp_path / 'none.json'}")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "damaged.json").write_bytes(b'{"images": [\xff')
    wrong = [{"categories": []}, {"annotations": [{"image_id": 11, "id": 3}]}, {"images": [11]}, {"annotations": None}]
    others = [annotations(tmp_path / f"{number}.json", **changes) for number, changes in enumerate(wrong)]
    for file in (tmp_path / "list.json", tmp_path / "damaged.json", *others):
        with pytest.raises(RunError, match=f"{file.name} is not COCO's instance annotations, .*instances_val2014"):
            read_classes(file)
    classes = read_classes(annotations(tmp_path / "instances.json"))
    with pytest.raises(RunError, match=r"do not know 2 of the 3 images of split 'test', among them cocoid 4: pmrp"):
        plausible(classes, scores_of(torch.zeros(3, 3), [11, 4, -1], np.arange(3), np.arange(3)), "mean")


def test_judged_protocols_read_the_numbers_of_the_store(setdiv, store, tmp_path, monkeypatch):
    there = make_captioned_store(tmp_path / "coco.zarr", captions=5)
    scores = score(setdiv, store=there, device="cpu")
    assert scores.cocoid.tolist() == [500 + 7 * number for number in range(12)]
    assert scores.sentid.tolist() == [100_000 - row for row in range(60)]
    images = {image: scores.sentid[5 * row : 5 * row + 5].tolist() for row, image in enumerate(scores.cocoid.tolist())}
    own = images, {caption: [image] for image, captions in images.items() for caption in captions}
    monkeypatch.setattr(protocols, "load_judgements", lambda protocol: truth_of(scores.cocoid, scores.sentid, own, own))
    tables = {
        name: evaluate([setdiv], store=there, protocol=name, device="cpu").results[0]
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
    values = list(tables["eccv"].image_to_text.values())
    assert [float(value) for value in printed[2].split()[3:]] == pytest.approx(values, abs=0.005)
    assert not any("RSUM" in line for line in printed)
    with pytest.raises(RunError, match=r"cxc needs the 12 images and 60 captions .* has 12 and 30, of which 0 and 0"):
        evaluate([setdiv], store=store, protocol="cxc", device="cpu")
    with pytest.raises(CacheError, match="has no split 'tset'"):
        evaluate([setdiv], store=there, protocol="cxc", split="tset", device="cpu")


@pytest.mark.parametrize(
    ("protocol", "sentence"),
    [
        ("1k-folds", "needs exactly 5,000 images and split .test. has 12; take `protocol` full"),
        (
            "5k-folds",
            r"no protocol '5k-folds' \(did you mean '1k-folds'\?\): full, 1k-folds, .*; or write module:Class",
        ),
        ("full:instances.json", "protocol full takes nothing after its name; leave out ':instances.json'"),
        ("nowhere:Mine", "protocol nowhere:Mine: there is no module 'nowhere'"),
        ("pmrp", "`protocol` pmrp:instances_val2014"),
        ("pmrp:nowhere.json", "nowhere"),
    ],
)
def test_protocols_that_do_not_apply(setdiv, protocol, sentence):
    with pytest.raises(RunError, match=sentence):
        evaluate([setdiv], protocol=protocol, device="cpu")


def test_what_the_manifest_names_and_does_not_apply_is_left_out_with_a_warning(setdiv, folder, caplog):
    both = make_store(folder / "both.zarr", protocols=("1k-folds", "pmrp", "full"))
    assert [table.protocol for table in evaluate([setdiv], store=both, device="cpu").results] == ["full"]
    assert sorted(message.split(":")[0] for message in caplog.messages) == [
        "protocol 1k-folds is left out", "protocol pmrp is left out",
    ]  # fmt: skip
    alone = make_store(folder / "alone.zarr", protocols=("1k-folds",))
    with pytest.raises(RunError, match="1k-folds needs"):
        evaluate([setdiv], store=alone, device="cpu")


def test_a_protocol_of_the_users_own(setdiv, folder, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from xret.metrics import Protocol, Table, recall\n\n\nclass Recall(Protocol):\n"
        "    def __init__(self, k='2'):\n        self.k = int(k)\n\n"
        "    def __call__(self, scores, ties):\n"
        "        both = [{f'R@{self.k}': recall(ranks, self.k, ties)} for ranks in scores.ranks()]\n"
        "        return Table(*both)\n"
    )
    monkeypatch.chdir(tmp_path)
    there = make_store(folder / "mine.zarr", protocols=("mine:Recall", "full"))
    assert [table.protocol for table in evaluate([setdiv], store=there, device="cpu").results] == ["full"]
    (table,) = evaluate([setdiv], store=there, protocol="mine:Recall:5", device="cpu").results
    known, full = evaluate([setdiv], store=there, device="cpu").results  # once it was named
    assert (table.protocol, known.protocol, known.rsum) == ("mine:Recall", "mine:Recall", None)
    for way in WAYS:
        assert getattr(table, way) == {"R@5": getattr(full, way)["R@5"]}
        assert list(getattr(known, way)) == ["R@2"]
    text = (tmp_path / "mine.py").read_text()
    (tmp_path / "mine.py").write_text(text.replace("k='2'", "k"))
    with pytest.raises(RunError, match="protocol mine:Recall needs more: mine:Recall:ARGUMENT"):
        evaluate([setdiv], store=there, protocol="mine:Recall", device="cpu")
    for wrong in ("dict(both=both)", "Table(both[0], {'R@1': 3.0})", "Table(*[{'R@1': 'many'}] * 2)"):
        (tmp_path / "mine.py").write_text(text.replace("Table(*both)", wrong))
        with pytest.raises(RunError, match=r"mine:Recall must return an xret\.metrics\.Table that has numbers"):
            evaluate([setdiv], store=there, protocol="mine:Recall", device="cpu")
    (tmp_path / "mine.py").write_text(text.replace("(Protocol)", ""))
    with pytest.raises(RunError, match=r"Recall is no protocol: it must derive from xret\.metrics\.Protocol"):
        evaluate([setdiv], store=there, protocol="mine:Recall", device="cpu")


@pytest.mark.slow
def test_recorded_coco_test_split():
    pytest.importorskip("eccv_caption", reason=COCO)
    recorded = json.loads((GOLDEN / "metrics.json").read_text())["extended_coco"]
    recipe, truth = recorded["recipe"], load_judgements("eccv")
    sentid = truth.coco_ids
    cocoid = np.array(list(dict.fromkeys(truth.coco_gts["t2i"][caption][0] for caption in sentid.tolist())))
    similarity = recipe_scores(recipe)
    marked = relevance(truth.eccv_gts["i2t"], cocoid, sentid)[0] | relevance(truth.eccv_gts["t2i"], sentid, cocoid)[0].T
    marked[torch.arange(25000) // 5, torch.arange(25000)] = False
    assert int(marked.sum()) == recorded["n_boosted_pairs_outside_own"]
    rows, columns = marked.nonzero(as_tuple=True)
    v = recipe_uniform(recipe["seed"] + EXTENDED_OFFSET, (rows * 25000 + columns).numpy().astype(np.uint64))
    similarity[rows, columns] *= torch.from_numpy(((v * v) * v) * recipe["W_extended"])
    del marked
    for matrix, ids, way in ((similarity, sentid, "i2t"), (similarity.T, cocoid, "t2i")):
        digest = hashlib.sha256(ids[matrix.topk(10, 1).indices.numpy()].astype("<i8").tobytes()).hexdigest()
        assert digest == recorded[f"sha256_top10_{way}"]

    scores, expected = scores_of(similarity, cocoid, sentid, np.arange(25000) // 5), recorded["expected"]
    found = {name: judged(truth, name, scores, "pessimistic") for name in ("eccv", "cxc", "rpc2")}
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
