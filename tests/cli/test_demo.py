"""The demo's own promises, at its full size."""

import json

import pytest
from click.testing import CliRunner
from PIL import Image

from xret.cli import main


def test_an_existing_folder_is_refused(tmp_path):
    result = CliRunner().invoke(main, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "exists; choose another --out" in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_recipes_reach_ten_times_chance(tmp_path):
    result = CliRunner().invoke(main, ["demo", "--out", str(tmp_path / "demo"), "--json"], catch_exceptions=False)
    out = json.loads(result.stdout)
    assert set(out) == {"seed", "seconds", "recipes"}
    assert set(out["recipes"]) == {"vsepp", "setdiv"}
    for evaluated in out["recipes"].values():
        table = evaluated["results"][0]
        assert table["images"] == 100
        assert table["image_to_text"]["R@1"] >= 10  # chance is 1 in 100
        assert table["text_to_image"]["R@1"] >= 10
    with Image.open(tmp_path / "demo" / "contact-sheet.png") as sheet:
        assert sheet.width > 1000
