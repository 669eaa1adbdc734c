"""`xret eval` and `xret report`: what they print and write, and the sentence that each mistake gets."""

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


def test_diagnostics_below_the_table(run, monkeypatch):
    monkeypatch.setattr("xret.pipeline.errors.on_command_line", True)
    found, words = diagnose(run, device="cpu"), ("eval", run, "--diagnostics", "--device", "cpu")
    lines = call(*words).stdout.splitlines()
    assert lines[lines.index("") + 1 :] == str(found).splitlines()
    assert json.loads(call(*words, "--json").stdout)["diagnostics"] == found.to_dict()
    assert "--diagnostics takes one run, and no store" in refused(*words, run, code=2)
    for words_of in (["--direction", "image"], ["--views"]):
        assert "leave --direction and --views out" in refused(*words, *words_of, code=2)
    assert "--data-root is for the crops of --diagnostics" in refused("eval", run, "--data-root", ".", code=2)


def test_the_command_writes_the_page_and_says_where(trained, tmp_path):
    out = tmp_path / "new" / "report.html"
    for _ in range(2):  # an earlier report is replaced
        result = call("report", trained(), "--out", out, "--device", "cpu")
    assert result.stdout.startswith(f"{out}: {out.stat().st_size / 1e3:.1f} kB, ")
    text = out.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert "give their folder as --data-root DIR" in text
    assert [file.name for file in out.parent.iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ([], 2, "Missing argument 'RUN|STORE [RUN ...]'"),
        (["{run}", "--out", "{folder}"], 1, "is a folder; give --out the name of a file"),
        (["{run}", "--out", "{folder}/taken"], 1, "taken exists and is no report of xret"),
        (["{run}", "--out", "{folder}/taken/report.html"], 1, "taken is a file; choose another --out"),
        (["{run}", "--out", "{folder}/r", "--split", "dev"], 1, "has no split 'dev'"),
    ],
)
def test_mistakes_of_a_report(trained, tmp_path, words, code, sentence):
    (tmp_path / "taken").write_text("a letter")
    words = [word.format(run=trained(), folder=tmp_path) for word in words]
    assert sentence in refused("report", *words, code=code)
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]
    assert (tmp_path / "taken").read_text() == "a letter"
