"""A tuning read by Optuna's command."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from foreign import needed, of_others
from small_store import make_store
from small_tunings import tuned

pytestmark = of_others


def test_optuna_names_the_best_trial(tmp_path):
    needed("optuna")
    found = tuned(make_store(tmp_path / "s.zarr"), tmp_path / "tuned", trials=2)
    program = Path(sys.executable).with_name("optuna")
    command = [program if program.exists() else shutil.which("optuna"), "best-trial", "--study-name", "tuning"]
    command += ["--storage", tmp_path / "tuned/journal.log", "--storage-class", "JournalFileStorage", "-f", "json"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    named = json.loads(done.stdout)
    assert (named["number"], float(named["value"])) == (found.best.number, pytest.approx(found.best.rsum))
