"""``xret extract``: its options, and the sentence each mistake gets."""

import pytest
from command_line import refused, run
from small_checkpoints import save_text_model

from xret.pipeline.store import FeatureCache

SMALL = ("--visual", "resnet18", "--visual-weights", "random:0", "--image-size", "64", "--text", "none")


@pytest.fixture
def extract(tiny_dataset, tmp_path):
    start = ["extract", tiny_dataset(), "--store", tmp_path / "s"]
    return lambda *words, **options: run(*start, *words, **options)


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ("--workers two", 2, "'two' is neither a number nor the address of a Dask scheduler"),
        ("--layers 6,x", 2, "'6,x' names no layers; give one, as 9, or several, as 6,9,12"),
        ("--pool 4", 2, "'4' is no window; give height and width in cells, as 2x2"),
        ("--on-error stop", 2, "'stop' is not one of"),
        ("--price 2", 2, "--price is for --plan"),
        ("--device cuda:77", 1, "is missing"),
        ("--visual hf:../absent --text none", 1, "'../absent': there is no such folder"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(words, code, sentence, extract, tmp_path):
    assert sentence in extract(*words.split(), code=code).stderr
    assert not (tmp_path / "s").exists()


def test_a_plan_is_printed_and_writes_nothing(extract, tmp_path):
    printed = extract(*SMALL, "--plan", "--price", "2")
    lines = printed.stdout.splitlines()
    assert printed.stderr == "measuring on 32 pictures\n"
    assert "32 images" in lines[1] and lines[2].startswith("in all ") and "at 2 an hour of a worker" in lines[2]
    assert not (tmp_path / "s").exists()


def test_views_and_threads(extract, tmp_path):
    extract(*SMALL, "--views", "dihedral:3", "--splits", "val", "--workers", "2")
    for command in ("info", "ls"):
        assert "3 views x 4 x 512" in run("cache", command, tmp_path / "s").stdout


def test_sets_of_one_network_can_be_told_apart(extract, tmp_path):
    for seed, pool in ((1, "2x2"), (2, "1x2")):
        weights = ("--visual-weights", f"random:{seed}", "--pool", pool)
        extract(*SMALL, *weights, "--splits", "val")
    for command in ("info", "ls"):
        shown = run("cache", command, tmp_path / "s").stdout
        assert "64 pixels, weights random:1, pool [2, 2]" in shown and "weights random:2, pool [1, 2]" in shown


def test_what_failed_is_named_and_what_to_do(extract, tmp_path):
    extract("--visual", "none", "--text", "words")
    pictures = next(tmp_path.rglob("1.jpg")).parent
    for number in (1, 3, 5, 7):
        (pictures / f"{number}.jpg").write_bytes(b"")
    for _ in range(2):  # the second finds everything done
        lines = extract(*SMALL, "--on-error", "skip").stdout.splitlines()
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
    said = refused("extract", tiny_dataset(), "--store", tmp_path / under, "--visual", "no-such-network")
    assert "choose another store" in said
    assert "no-such-network" not in said


def test_both_towers_of_a_checkpoint(extract, tmp_path):
    folder = save_text_model(tmp_path / "clip", "clip")
    for done in ("encoded", "0 encoded"):  # the second finds everything done
        assert done in extract("--encoder", f"hf:{folder}", "--prompt", "a photo of {}", "--pool", "2x2").stdout
    cache = FeatureCache.open(str(tmp_path / "s"))
    images, captions = cache.image_set("clip"), cache.caption_set("clip")
    assert images.space == captions.space is not None
    assert (images.grid, images.rows, images.global_channels) == ((2, 2), 4, captions.global_channels)
    assert captions.identity["preprocessing"]["prompt"] == "a photo of {}"
