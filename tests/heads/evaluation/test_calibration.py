"""Probabilities of answers: against draws from a known softmax, SciPy and values counted by hand."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from command_line import refused, run
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax
from scores import score
from small_runs import make_pictures, make_run, make_store

from xret import evaluate
from xret.heads.evaluation.calibration import Calibration, expected_error, fit_calibration, reliability
from xret.heads.evaluation.metrics import WAYS


@given(st.integers(2, 300), st.floats(0.1, 40), st.integers(0, 9))
def test_without_an_offset_it_is_the_softmax_of_the_gallery(items, slope, seed):
    scores = torch.from_numpy(np.random.default_rng(seed).uniform(-1, 1, (3, items)))
    found = Calibration(slope, 0.0).probabilities(scores).numpy()
    np.testing.assert_allclose(found, softmax(slope * scores.numpy(), axis=1), rtol=1e-6, atol=1e-12)


def test_extremes_stay_probabilities():
    scores = torch.tensor([[1.0, -1.0, -1.0], [0.5, 0.5, 0.5]])
    found = Calibration(1e4, 0.0).probabilities(scores)
    np.testing.assert_allclose(found, [[1, 0, 0], [1 / 3] * 3], atol=1e-9)
    assert Calibration(5.0, 0.0).probabilities(torch.tensor([0.3])).tolist() == [1.0]  # nothing else could fit


@pytest.mark.parametrize("slope", [4.0, 15.0])
def test_the_fit_finds_the_softmax_that_answers_were_drawn_from(slope):
    rng = np.random.default_rng(0)
    scores = rng.normal(0.2, 0.15, (4000, 60))
    drawn = np.array([rng.choice(60, p=row) for row in softmax(slope * scores, axis=1)])
    fits = torch.from_numpy(drawn[:, None] == np.arange(60))
    found = fit_calibration(torch.from_numpy(scores).float(), fits)
    assert found.slope == pytest.approx(slope, rel=0.1)
    assert found.offset == pytest.approx(0, abs=0.15)
    said = found.probabilities(torch.from_numpy(scores))
    order = said.argsort(dim=1, descending=True)[:, :10]
    seen = reliability(60, 1, said.gather(1, order), fits.gather(1, order), said[:, 0])
    assert seen.ece < 0.01
    assert seen.first_ece < 0.03


def test_reliability_counted_by_hand():
    said = torch.tensor([[0.95, 0.25], [0.91, 0.05], [0.55, 0.15]])
    fits = torch.tensor([[True, False], [True, False], [False, True]])
    found = reliability(7, 1, said, fits, torch.tensor([0.2, 0.5, 0.9]))
    # Of the first answers two say 0.93 on average and fit, one says 0.55 and does not.
    assert found.first_ece == pytest.approx((2 * 0.07 + 0.55) / 3)
    assert found.ece == pytest.approx((2 * 0.07 + 0.55 + 0.25 + 0.85 + 0.05) / 6)
    assert (found.first, found.fits) == (pytest.approx(2.41 / 3), pytest.approx(2 / 3))
    assert found.wrong == pytest.approx(2 / 3)
    assert found.precise == pytest.approx(0.91)
    nine = reliability(1, 1, torch.linspace(1, 0.1, 10)[None], torch.arange(10)[None] < 9, torch.zeros(1))
    assert nine.precise == pytest.approx(0.1)  # 90% of all ten fit
    equal = torch.tensor([[0.8, 0.8, 0.5, 0.5, 0.5]])
    assert reliability(1, 1, equal, torch.tensor([[1, 1, 1, 0, 0]]) > 0, torch.zeros(1)).precise == pytest.approx(0.8)
    assert reliability(1, 1, equal, torch.tensor([[1, 0, 1, 0, 0]]) > 0, torch.zeros(1)).precise is None
    assert expected_error([(3, 0.2, 0.5), (0, 0.0, 0.0), (1, 0.9, 1.0)]) == pytest.approx((3 * 0.3 + 0.1) / 4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibration")
    store = make_store(make_pictures(folder / "pictures", val=12), folder / "s.zarr")
    return make_run(store, folder / "run")


def test_a_run_keeps_what_was_fitted_with_its_weights(trained):
    path = trained
    report = evaluate(path, calibration=True, device="cpu").calibration
    kept = json.loads((path / "calibration.json").read_text())
    assert kept["text_to_image"] == vars(report.calibrations["text_to_image"])
    said = evaluate(path, calibration=True, device="cpu").calibration
    assert said == report
    others = {"weights": "others", **{way: {"slope": 1, "offset": 0} for way in WAYS}}
    replaced = {**kept, **others, "weights": kept["weights"], "pictures": "others"}
    for other in (json.dumps(others), json.dumps(replaced), "{", "[]"):  # of other weights or pictures, or damaged
        (path / "calibration.json").write_text(other)
        assert evaluate(path, calibration=True, device="cpu").calibration == report
    assert json.loads((path / "calibration.json").read_text()) == kept


def test_a_query_whose_match_is_taken_out(trained, tmp_path):
    """By the module's formula in a loop, with an offset at which half of the best wrong answers say 0.5 or more."""
    run, seen = shutil.copytree(trained, tmp_path / "run"), score(trained, device="cpu")
    scores, owner, slope, kept = seen.similarity.double().numpy(), seen.caption_image.numpy(), 30.0, {}
    for way, matrix, fits in (
        ("image_to_text", scores, np.arange(6)[:, None] == owner),
        ("text_to_image", scores.T, owner[:, None] == np.arange(6)),
    ):
        kept[way] = []
        for row, right in zip(slope * matrix, fits, strict=True):
            others = row[~right]
            odds = [one - np.log(np.exp(np.delete(others, at)).sum()) for at, one in enumerate(others)]
            kept[way].append(max(odds))
    offsets = {way: {"slope": slope, "offset": 1e-6 - float(np.median(odds))} for way, odds in kept.items()}
    file = run / "calibration.json"
    evaluate(run, calibration=True, device="cpu")
    file.write_text(json.dumps(json.loads(file.read_text()) | offsets))
    found = evaluate(run, calibration=True, device="cpu").calibration.reliability
    for way, odds in kept.items():
        assert found[way][0].wrong == np.mean(np.array(odds) >= np.median(odds) - 1e-6)


def test_what_another_store_gives_is_not_kept(trained, tmp_path):
    other = make_store(make_pictures(tmp_path / "pictures", train=20, val=15), tmp_path / "s.zarr")
    before = (trained / "calibration.json").read_text()
    found = evaluate(trained, store=other, calibration=True, device="cpu").calibration
    assert vars(found.calibrations["text_to_image"]) != json.loads(before)["text_to_image"]
    assert (trained / "calibration.json").read_text() == before


def test_galleries_are_whole_ones_of_images_with_their_captions(trained, monkeypatch):
    monkeypatch.setattr("xret.heads.evaluation.calibration.GALLERIES", (2, 4, 100))
    found = evaluate(trained, calibration=True, device="cpu").calibration.reliability["text_to_image"]
    assert [(one.images, one.galleries) for one in found] == [(2, 3), (4, 1), (6, 1)]
    answers = [sum(count for count, _, _ in one.bins) for one in found]
    some = torch.randperm(6, generator=torch.Generator().manual_seed(0))[:4]
    asked = torch.isin(score(trained).caption_image, some).sum()
    assert answers == [9 * 2, asked * 4, 9 * 6]


def test_the_command_line_and_what_is_refused(trained):
    path = trained
    found = json.loads(run("eval", path, "--calibration", "--json").stdout)["calibration"]
    assert [one["images"] for one in found["reliability"]["text_to_image"]] == [6]
    assert (
        sum(count for count, _, _ in found["reliability"]["text_to_image"][0]["bins"]) == 6 * 9
    )  # captions ask for all
    told = run("eval", path, "--calibration").stdout
    bins = zip(*(found["reliability"][way][0]["bins"] for way in WAYS), strict=True)
    cells = [re.findall(r"[\d.]+%|none", line[16:]) for line in told.splitlines()[-10:]]
    assert cells == [[f"{100 * fits:.1f}%" if count else "none" for count, _, fits in both] for both in bins]
    assert "90% fit from" in told
    assert "another split" in refused("eval", path, "--calibration", "--split", "val")
    assert "single run" in refused("eval", path, path, "--calibration")
