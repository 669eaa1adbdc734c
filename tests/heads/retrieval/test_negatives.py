"""Hard negatives: the highest scores that are wrong, by a loop over all pairs."""

import json
import shutil

import pytest
from command_line import refused
from command_line import run as call
from small_runs import make_pictures, make_run, make_store
from torch import nn

from xret.heads.retrieval.negatives import export_negatives
from xret.heads.retrieval.retriever import Retriever
from xret.pipeline.errors import QueryError, RunError


def test_negatives_are_the_highest_scores_that_are_wrong(tmp_path):
    manifest = make_pictures(tmp_path / "pictures")
    images = tmp_path / "pictures" / "images"
    shutil.copy(images / "0.png", images / "3.png")  # one picture under two names
    run = make_run(make_store(manifest, tmp_path / "store.zarr"), tmp_path / "run", "setdiv")
    words = ("export", run, "--to", "hard-negatives", "--out")
    assert "lines of split 'train'" in call(*words, tmp_path / "n.jsonl").stdout
    lines = [json.loads(line) for line in (tmp_path / "n.jsonl").read_text().splitlines()]
    retriever = Retriever(run, device="cpu", split="train")
    gallery = retriever.gallery
    names, texts, owner = list(gallery.file_names), list(gallery.texts), gallery.caption_image.tolist()
    scores = retriever.similarity(gallery.images, gallery.captions).tolist()
    twin = [names.index("0.png") if name == "3.png" else row for row, name in enumerate(names)]
    owners = [(text, twin[image]) for text, image in zip(texts, owner, strict=True)]
    told = [{text for text, image in owners if image == twin[row]} for row in range(len(names))]
    expected = {}
    for c, i in enumerate(owner):
        images = [(scores[row][c], names[row]) for row in range(len(names)) if texts[c] not in told[row]]
        captions = [(scores[i][row], texts[row]) for row in range(len(texts)) if texts[row] not in told[i]]
        expected[texts[c], names[i]] = scores[i][c], images
        expected[names[i], texts[c]] = scores[i][c], captions
    assert len(lines) == 2 * len(texts) and {(line["anchor"], line["positive"]) for line in lines} == expected.keys()
    for line in lines:
        score, wrong = expected[line["anchor"], line["positive"]]
        best = sorted((one for one, _ in wrong), reverse=True)[:10]
        of = {name: one for one, name in wrong}
        assert line["positive_score"] == pytest.approx(score, abs=1e-5)
        assert line["negative_scores"] == pytest.approx(best, abs=1e-5)
        assert [of[name] for name in line["negatives"]] == pytest.approx(best, abs=1e-5)
    assert "jsonl" in refused(*words, tmp_path / "n.json")
    assert "takes no --dims" in refused(*words, tmp_path / "m.jsonl", "--dims", 2, code=2)
    with pytest.raises(QueryError, match="hard negatives has no place for a correction of hubness"):
        export_negatives(Retriever(run, device="cpu", hubness=True), tmp_path / "m.jsonl")
    assert "the format that --out ends in: .parquet" in refused(*words[:2], "--to", "parquet", "--out", "e", code=2)


def test_scores_that_are_no_numbers_are_refused(made, tmp_path):
    retriever = Retriever(made.run(), device="cpu", split="test")
    nn.init.constant_(next(retriever.model.parameters()), float("nan"))
    with pytest.raises(RunError, match="not finite"):
        export_negatives(retriever, tmp_path / "n.jsonl")
    assert not (tmp_path / "n.jsonl").exists()
