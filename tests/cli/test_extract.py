"""``xret extract``: its options, and the sentence each mistake gets."""

import sys

import pytest
from click.testing import CliRunner
from small_checkpoints import save_text_model

from xret.cli import main
from xret.pipeline.store import FeatureCache

SMALL = ("--visual", "resnet18", "--visual-weights", "random:0", "--image-size", "64", "--text", "none")


@pytest.fixture
def extract(tiny_dataset, tmp_path):
    start = ["extract", str(tiny_dataset()), "--store", str(tmp_path / "s")]
    return lambda *words: CliRunner().invoke(main, [*start, *map(str, words)])


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ("--workers two", 2, "'two' is neither a number nor the address of a Dask scheduler"),
        ("--layers 6,x", 2, "'6,x' names no layers; give one, as 9, or several, as 6,9,12"),
        ("--pool 4", 2, "'4' is no window; give height and width in cells, as 2x2"),
        ("--visual none --text none", 1, "nothing to extract: give an encoder of images or captions"),
        ("--splits dev", 1, "has no image in split dev; it has train, val, test"),
        ("--dtype bfloat16", 1, "Zarr has no bfloat16; choose float16"),
        ("--encoder hf:m --text words", 1, "--encoder is in the place of --visual and --text"),
        ("--encoder resnet18", 1, "give a model of pictures and texts as hf:ID, hf:DIR or open_clip:ARCH/TAG"),
        ("--visual none --text berd", 1, "berd"),
        ("--visual timm:test_vitt --text none", 1, "did you mean 'test_vit'?"),
        ("--visual hf:../absent --text none", 1, "'../absent': there is no such folder"),
        ("--views dihedral:9 --visual resnet18 --visual-weights random:0 --text none", 1, "8"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(words, code, sentence, extract, tmp_path):
    result = extract(*words.split())
    assert (result.exit_code, sentence in result.stderr) == (code, True), result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "s").exists()


def test_views_and_threads(extract, tmp_path):
    result = extract(*SMALL, "--views", "dihedral:3", "--splits", "val", "--workers", "2")
    assert result.exit_code == 0, result.stderr
    for command in (["info", "s"], ["ls", "s"]):
        words = ["cache", command[0], str(tmp_path / command[1])]
        assert "3 views x 4 x 512" in CliRunner().invoke(main, words).stdout


def test_what_failed_is_named_and_what_to_do(extract, tmp_path):
    extract("--visual", "none", "--text", "words")
    pictures = next(tmp_path.rglob("1.jpg")).parent
    for number in (1, 3, 5, 7):
        (pictures / f"{number}.jpg").write_bytes(b"")
    for _ in range(2):  # the second finds everything done
        result = extract(*SMALL, "--on-error", "skip")
        assert result.exit_code == 0, result.stderr
        lines = result.stdout.splitlines()
        assert lines[0] == f"tiny: 32 images, 80 captions in {tmp_path / 's'}"
        assert lines[1].endswith(" there before, 4 failed")
        assert [line.split(":")[1].strip() for line in lines[2:5]] == ["1.jpg", "3.jpg", "5.jpg"]
        assert lines[5] == "    and 1 more"
        assert lines[6].endswith("; repair those files and run the same command with --repair.")
        assert len(lines) == 7


@pytest.mark.parametrize("under", ["file", "file/deeper/s", "mine"])
def test_a_store_that_cannot_be_made_is_refused_before_the_encoders_are(under, tiny_dataset, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_text("mine")
    words = ["extract", tiny_dataset(), "--store", tmp_path / under, "--visual", "no-such-network"]
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == 1
    assert "choose another store" in result.stderr
    assert "no-such-network" not in result.stderr


def test_both_towers_of_a_checkpoint(extract, tmp_path):
    folder = save_text_model(tmp_path / "clip", "clip")
    for done in ("encoded", "0 encoded"):  # the second finds everything done
        result = extract("--encoder", f"hf:{folder}", "--prompt", "a photo of {}", "--pool", "2x2")
        assert result.exit_code == 0, result.stderr
        assert done in result.stdout
    cache = FeatureCache.open(str(tmp_path / "s"))
    images, captions = cache.image_set("clip"), cache.caption_set("clip")
    assert images.space == captions.space is not None
    assert (images.grid, images.rows, images.global_channels) == ((2, 2), 4, captions.global_channels)
    assert captions.identity["preprocessing"]["prompt"] == "a photo of {}"


@pytest.mark.parametrize(("library", "extra"), [("timm", "timm"), ("open_clip", "open-clip")])
def test_a_library_that_is_not_installed_is_named_with_its_extra(library, extra, extract, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    result = extract("--visual", f"{library}:ViT-B-32", "--visual-weights", "random:9", "--text", "none")
    assert result.exit_code == 1
    assert f"pip install 'xret[{extra}]'" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "s").exists()
