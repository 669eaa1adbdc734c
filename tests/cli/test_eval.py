"""`xret eval`: what it prints, and that what it offers is what there is."""

import json

import pytest
from command_line import refused
from command_line import run as call

from xret.heads.diagnostics import diagnose
from xret.heads.evaluation.evaluation import evaluate


@pytest.fixture
def run(trained):
    return str(trained())


def test_the_command_prints_the_table(run):
    found = evaluate(run, device="cpu")
    lines = call("eval", run, "--device", "cpu").stdout.splitlines()
    assert lines == str(found).splitlines()
    assert lines[0] == f"{run} on {found.stores[0]}"
    assert lines[1].startswith("split test, protocol full: 12 images, 30 captions (2.50 an image), 0 skipped")
    (expected,) = found.results
    for line, way in zip(lines[3:5], (expected.image_to_text, expected.text_to_image), strict=True):
        numbers = [float(number) for number in line.split()[3:]]
        assert numbers == pytest.approx([way[name] for name in ("R@1", "R@5", "R@10", "medr")], abs=0.05)
    assert lines[5].startswith(f"RSUM {expected.rsum:.2f}, mean recall {expected.rsum / 6:.2f}, chance RSUM ")
    assert lines[6] == "12 images are too few to tell how good this is; take 100 or more"
    assert json.loads(call("eval", run, "--device", "cpu", "--json").stdout) == found.to_dict()


def test_diagnostics_below_the_table(run):
    found, words = diagnose(run, device="cpu"), ("eval", run, "--diagnostics", "--device", "cpu")
    lines = call(*words).stdout.splitlines()
    assert lines[lines.index("") + 1 :] == str(found).splitlines()
    assert json.loads(call(*words, "--json").stdout)["diagnostics"] == found.to_dict()
    assert "--diagnostics takes one run, and no store" in refused(*words, run, code=2)
    assert "--data-root is for the crops of --diagnostics" in refused("eval", run, "--data-root", ".", code=2)
