"""``xret extract``: options that would change nothing are refused, and only those."""

import pytest
from click.testing import CliRunner

from xret.cli import main


@pytest.fixture
def extract(tiny_dataset, tmp_path):
    start = ["extract", str(tiny_dataset()), "--store", str(tmp_path / "s")]
    return lambda *words: CliRunner().invoke(main, [*start, *words])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--text none --text-weights DIR", "--text-weights has no effect on --text none; leave it out"),
        ("--text none --text-layer -1 --max-tokens 9", "--text-layer, --max-tokens has no effect on --text none"),
        ("--visual none --visual-weights imagenet", "--visual-weights has no effect on --visual none; leave it out"),
        ("--visual none --regions 36 --frames 4", "--regions, --frames has no effect on --visual none"),
        ("--visual none --image-size 64 --trust", "--image-size, --trust has no effect on --visual none"),
        ("--scheduler tcp://127.0.0.1:9 --workers 4", "--workers has no effect beside --scheduler"),
    ],
)
def test_options_of_what_is_not_there_are_refused(words, sentence, extract, tmp_path):
    result = extract(*words.split())
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert not (tmp_path / "s").exists()


def test_their_defaults_are_not(extract):
    images = ("--visual", "resnet18", "--visual-weights", "random:0", "--image-size", "64")
    for words in (("--visual", "none", "--text", "words", "--workers", "2"), (*images, "--text", "none")):
        result = extract(*words)
        assert result.exit_code == 0, result.stderr
