"""What a tuning finds, as CSV and as the importance of its keys."""

import csv

import pytest

from xret.heads.tuning.space import Choice, Range
from xret.heads.tuning.study import importances
from xret.heads.tuning.table import Trial, as_csv, plot
from xret.pipeline.errors import RunError

SPACE = {"optimizer.lr": Range(1e-4, 1e-2, log=True, whole=False), "data.unit": Choice(("image", "caption"))}


def trial(number, lr, unit, rsum, status="done"):
    return Trial(number, status, {"optimizer.lr": lr, "data.unit": unit}, rsum, 3, 1.5, None)


def test_every_trial_is_in_the_csv():
    failed = Trial(1, "failed", {"optimizer.lr": 1e-4, "data.unit": "image"}, None, 0, 0.0, "a, b")
    first, second = csv.DictReader(as_csv((trial(0, 1 / 3000, "caption", 10 / 3), failed)).splitlines())
    assert (first["number"], float(first["rsum"]), float(first["optimizer.lr"])) == ("0", 10 / 3, 1 / 3000)
    assert (second["status"], second["error"], second["rsum"], second["data.unit"]) == ("failed", "a, b", "", "image")


def test_where_all_trials_reach_the_same_no_key_is_important():
    pytest.importorskip("sklearn")
    trials = tuple(trial(k, 1e-4 * (k + 1), "image", 100) for k in range(4))
    with pytest.raises(RunError, match="all trials reach the same RSUM"):
        importances(trials, SPACE)


def test_the_key_that_decides_is_the_important_one(tmp_path):
    pytest.importorskip("sklearn")
    rates = [1e-4 * 1.3**k for k in range(16)]
    trials = tuple(
        trial(k, lr, ("image", "caption")[k % 2], 100 + k, ("done", "pruned")[k % 3 == 0]) for k, lr in enumerate(rates)
    )
    shares = importances(trials, SPACE)
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["optimizer.lr"] > 0.9
    partial = tmp_path / ".importance.png.0a1b2c3d.partial"  # of a killed process
    partial.write_text("half")
    plot(shares, tmp_path / "importance.png")
    assert not partial.exists()
    assert (tmp_path / "importance.png").read_bytes().startswith(b"\x89PNG")
