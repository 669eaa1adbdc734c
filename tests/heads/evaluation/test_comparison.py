"""Comparing two runs, against loops over queries and the normal approximation."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from command_line import refused, run
from plain_evaluation import plain_similarity

from xret.heads.evaluation import comparison, pairs, scoring
from xret.heads.evaluation.comparison import bootstrap, compare_runs
from xret.heads.evaluation.evaluation import evaluate
from xret.pipeline.errors import RunError
from xret.similarities import Cosine


def test_the_interval_is_that_of_the_normal_approximation():
    rng = np.random.default_rng(3)
    count = rng.integers(1, 6, 4000)
    images = rng.choice([-1, 0, 1], p=[0.1, 0.7, 0.2], size=(4000, 3)).astype(float)
    captions = np.stack([rng.choice([-1, 0, 1], p=[0.1, 0.8, 0.1], size=(one, 3)).sum(0) for one in count])
    low, high = bootstrap(images, captions, count)
    of_captions = captions.sum(0) / count.sum()
    # Each image's part of the error: that of a mean, and, to first order, that of a ratio.
    errors = np.hstack([images - images.mean(0), (captions - of_captions * count[:, None]) / count.mean()])
    errors = np.hstack([errors, errors.sum(1, keepdims=True)])
    middle = np.append(np.concatenate([images.mean(0), of_captions]), images.mean(0).sum() + of_captions.sum())
    width = 1.96 * errors.std(0) / np.sqrt(4000)
    np.testing.assert_allclose(low, 100 * (middle - width), atol=5 * width.max())
    np.testing.assert_allclose(high - low, 200 * width, rtol=0.05)


def test_blocks_of_resamples_change_nothing_but_the_draws(monkeypatch):
    images, captions, count = np.ones((4, 3)), 2.0 * np.ones((4, 3)), np.full(4, 2)
    monkeypatch.setattr(comparison, "CELLS", 12)
    for resamples in (1, 7):
        low, high = bootstrap(images, captions, count, resamples)
        assert low.tolist() == high.tolist() == [100.0] * 6 + [600.0]


def test_two_runs_query_by_query(store, setdiv, vsepp):
    found = compare_runs(setdiv, vsepp, device="cpu")
    first, second = (evaluate(run, device="cpu").results[0] for run in (setdiv, vsepp))
    by_name = {one.name: one for one in found.differences}
    assert (by_name["RSUM"].first, by_name["RSUM"].second) == pytest.approx((first.rsum, second.rsum))
    for way in ("image_to_text", "text_to_image"):
        for k in (1, 5, 10):
            one = by_name[f"{way} R@{k}"]
            expected = [getattr(result, way)[f"R@{k}"] for result in (first, second)]
            assert [one.first, one.second] == pytest.approx(expected)
            assert one.low <= one.second - one.first <= one.high
    ranks = []
    for similarity, owner in (plain_similarity(one, store) for one in (setdiv, vsepp)):
        ranks.append([int((similarity[:, c] >= similarity[row, c]).sum()) for c, row in enumerate(owner)])
    ratios = sorted((abs(np.log(after / before)) for before, after in zip(*ranks, strict=True)), reverse=True)
    told = [one for one in found.changes if one.way == "text_to_image"]
    assert [abs(np.log(one.second / one.first)) for one in told] == pytest.approx(ratios[: len(told)])


def test_a_run_does_not_differ_from_itself(vsepp):
    found = compare_runs(vsepp, vsepp, device="cpu")
    assert {(one.low, one.high, one.second - one.first) for one in found.differences} == {(0, 0, 0)}
    assert "better" not in str(found)
    other = replace(found.differences[-1], first=400.0, second=402.5, low=1.25, high=3.0)
    told = str(replace(found, differences=(other,)))
    assert re.search(r"RSUM +400\.00 +402\.50 +2\.50 +1\.25 +3\.00 +better\n", told)
    assert not found.changes and str(found).endswith("\nno rank changes")


def test_queries_are_matched_by_their_ids_and_others_are_refused(setdiv, vsepp, elsewhere, monkeypatch):
    """Images without a caption ask nothing."""
    orders, given, drawn = ([*range(12)], [*range(7, 12), *range(7)]), [], comparison.bootstrap
    one, two = (elsewhere(run, str(at), order=orders[at], mute=(3, 10)) for at, run in enumerate((vsepp, setdiv)))
    monkeypatch.setattr(comparison, "bootstrap", lambda *hits: given.extend(hits) or drawn(*hits))
    found = compare_runs(one, two, device="cpu")
    expected = [evaluate(run, device="cpu").results[0].rsum for run in (one, two)]
    assert [found.differences[-1].first, found.differences[-1].second] == pytest.approx(expected)
    to_text, to_image, count = given
    assert count.tolist() == [3] * 10
    differences = [one.second - one.first for one in found.differences[:6]]
    assert differences == pytest.approx([*100 * to_text.mean(0), *100 * to_image.sum(0) / 30])
    plain = [plain_similarity(run, f"{run}.zarr") for run in (one, two)]
    for change in (change for change in found.changes if change.way == "image_to_text"):
        for rank, order, (similarity, owner) in zip((change.first, change.second), orders, plain, strict=True):
            scores, own = similarity[order.index(int(change.query))], np.array(owner) == order.index(int(change.query))
            assert rank == 1 + int((scores[~own] >= scores[own].max() - 1e-6).sum())
    with pytest.raises(RunError, match="cannot be compared: of 12 and 12 images"):
        compare_runs(one, elsewhere(setdiv, "three", captions=2), device="cpu")


def test_no_matrix_of_all_pairs_is_made_of_a_large_split(vsepp, elsewhere, monkeypatch):
    runs = elsewhere(vsepp, "one"), elsewhere(vsepp, "two", order=[*range(7, 12), *range(7)])
    expected, rows = compare_runs(*runs, device="cpu"), []
    monkeypatch.setattr(scoring, "WHOLE", 0)
    monkeypatch.setattr(pairs, "block_side", lambda *_: 5)
    compare = Cosine.forward
    monkeypatch.setattr(Cosine, "forward", lambda *both: rows.append(max(map(len, both[1:]))) or compare(*both))
    found = compare_runs(*runs, device="cpu")
    assert max(rows) <= 5
    for one, other in zip(found.differences, expected.differences, strict=True):
        assert [one.first, one.second, one.low] == pytest.approx([other.first, other.second, other.low])


def test_the_command(setdiv, vsepp):
    words = ["eval", setdiv, vsepp, "--compare", "--device", "cpu"]
    told = json.loads(run(*words, "--json").stdout)
    assert told == json.loads(json.dumps(compare_runs(setdiv, vsepp, device="cpu").to_dict()))
    assert str(compare_runs(setdiv, vsepp, device="cpu")) in run(*words).stdout
    for more in (["--hubness"], ["--diagnostics"], ["--protocol", "eccv"], [vsepp]):
        refused(*words, *more, code=2)
