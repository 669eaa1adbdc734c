"""Runs under each protocol, and where one does not apply."""

import json

import pytest
from captioned_store import make_captioned_store
from scores import score
from small_store import make_store

from xret.heads.evaluation import coco, rankers, scoring
from xret.heads.evaluation.coco import Judgements
from xret.heads.evaluation.evaluation import evaluate
from xret.heads.evaluation.metrics import WAYS
from xret.heads.runs import features as run_features
from xret.pipeline.errors import CacheError, RunError

pytestmark = pytest.mark.usefixtures("one_thread")


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
    monkeypatch.setattr(coco, "load_judgements", lambda protocol: truth)
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
    there = make_captioned_store(tmp_path / "coco.zarr", captions=5)
    truth = judgements_of(score(setdiv, store=there, device="cpu"))
    monkeypatch.setattr(coco, "load_judgements", lambda protocol: truth)
    instances = tmp_path / "instances_val2014.json"
    instances.write_text(json.dumps({"images": [{"id": 500}], "categories": [{"id": 1}], "annotations": []}))
    original = run_features.image_set_of_run

    def one_failed(run, cache):
        found = original(run, cache)
        found.status[3] = 1
        return found

    monkeypatch.setattr(scoring, "embed", None)
    with monkeypatch.context() as patch:
        patch.setattr(rankers, "image_set_of_run", one_failed)
        with pytest.raises(RunError, match=r"eccv needs the 12 images and 60 captions .* has 11 and 55"):
            evaluate([setdiv], store=there, protocol="eccv", device="cpu")
    with pytest.raises(
        RunError, match=r"of COCO's test split, .*split 'test' of .*small\.zarr has 12 and 30, of which 0"
    ):
        evaluate([setdiv], protocol="cxc", device="cpu")
    with pytest.raises(RunError, match=r"does not know 11 of the 12 images of split 'test' of .*coco\.zarr"):
        evaluate([setdiv], store=there, protocol=f"pmrp:{instances}", device="cpu")
    with pytest.raises(RunError, match="only the protocol pmrp takes a file of annotations, not full"):
        evaluate([setdiv], store=there, protocol=f"full:{instances}", device="cpu")
    with pytest.raises(CacheError, match="no split 'tset'"):
        evaluate([setdiv], store=there, protocol="cxc", split="tset", device="cpu")


def test_protocols(setdiv, store, folder):
    with pytest.raises(
        RunError, match=r"needs exactly 5,000 images and split 'test' of .* has 12; take --protocol full"
    ):
        evaluate([setdiv], protocol="1k-folds", device="cpu")
    with pytest.raises(RunError, match=r"no protocol '5k-folds' \(did you mean '1k-folds'\?\); `xret list protocols`"):
        evaluate([setdiv], protocol="5k-folds", device="cpu")
    there = make_store(folder / "coco.zarr", protocols=("1k-folds", "full"))
    with pytest.raises(RunError, match="1k-folds needs"):
        evaluate([setdiv], store=there, protocol="1k-folds", device="cpu")
    assert evaluate([setdiv], store=there, protocol="full", device="cpu").results[0].protocol == "full"


def test_what_the_manifest_names_and_does_not_apply_is_left_out_with_a_warning(setdiv, folder, caplog):
    both = make_store(folder / "both.zarr", protocols=("1k-folds", "pmrp", "full"))
    assert [table.protocol for table in evaluate([setdiv], store=both, device="cpu").results] == ["full"]
    first, second = caplog.messages
    assert first.startswith("protocol 1k-folds is left out: ") and "needs exactly 5,000 images" in first
    assert second.startswith("protocol pmrp is left out: ")
    alone = make_store(folder / "alone.zarr", protocols=("1k-folds",))
    with pytest.raises(RunError, match="1k-folds needs"):
        evaluate([setdiv], store=alone, device="cpu")
    with pytest.raises(RunError, match="--protocol pmrp:instances_val2014"):
        evaluate([setdiv], store=both, protocol="pmrp", device="cpu")
    with pytest.raises(RunError, match="nowhere"):
        evaluate([setdiv], store=both, protocol=f"pmrp:{folder / 'nowhere.json'}", device="cpu")
