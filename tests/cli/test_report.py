"""`xret report`: what it says, and the sentence that each mistake gets."""

import pytest
from command_line import refused, run


def test_the_command_writes_the_page_and_says_where(trained, tmp_path):
    out = tmp_path / "new" / "report.html"
    for _ in range(2):  # an earlier report is replaced
        result = run("report", trained(), "--out", out, "--device", "cpu")
    assert result.stdout.startswith(f"{out}: {out.stat().st_size / 1e3:.1f} kB, ")
    text = out.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert "give their folder as --data-root DIR" in text
    assert [file.name for file in out.parent.iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ([], 2, "Missing argument 'RUN [RUN ...]'"),
        (["{run}", "--out", "{folder}"], 1, "is a folder; give --out the name of a file"),
        (["{run}", "--out", "{folder}/taken"], 1, "taken exists and is no report of xret"),
        (["{run}", "--out", "{folder}/taken/report.html"], 1, "taken is a file; choose another --out"),
        (["{run}", "--out", "{folder}/r", "--split", "dev"], 1, "has no split 'dev'"),
    ],
)
def test_mistakes(trained, tmp_path, words, code, sentence):
    (tmp_path / "taken").write_text("a letter")
    words = [word.format(run=trained(), folder=tmp_path) for word in words]
    assert sentence in refused("report", *words, code=code)
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]
    assert (tmp_path / "taken").read_text() == "a letter"
