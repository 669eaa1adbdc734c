"""``xret extract``: options that would change nothing are refused, and only those."""

import sys

import numpy as np
import pytest
from click.testing import CliRunner
from small_checkpoints import save_text_model

from xret.cli import main
from xret.pipeline.extraction.options import Options
from xret.pipeline.store import FeatureCache


@pytest.fixture
def extract(tiny_dataset, tmp_path):
    start = ["extract", str(tiny_dataset()), "--store", str(tmp_path / "s")]
    return lambda *words: CliRunner().invoke(main, [*start, *words])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--text none --text-weights DIR", "--text-weights has no effect on --text none; leave it out"),
        ("--text none --text-layer -1 --max-tokens 9", "--text-layer and --max-tokens have no effect on --text none"),
        ("--visual none --visual-weights imagenet", "--visual-weights has no effect on --visual none; leave it out"),
        (
            "--visual none --regions 36 --frames 4",
            "--regions and --frames have no effect on --visual none; leave them out, or choose",
        ),
        ("--visual none --image-size 64 --trust", "--image-size and --trust have no effect on --visual none"),
        ("--visual none --views 2 --augment dihedral", "--views and --augment have no effect on --visual none"),
        ("--augment blur --views 2", "'blur' is not one of 'crop-flip', 'dihedral'"),
        ("--scheduler tcp://127.0.0.1:9 --workers 4", "--workers has no effect beside --scheduler"),
    ],
)
def test_options_of_what_is_not_there_are_refused(words, sentence, extract, tmp_path):
    result = extract(*words.split())
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--views 2", "--views goes with --augment crop-flip|dihedral; give both or neither"),
        ("--augment dihedral", "--augment goes with --views N; give both or neither"),
        ("--views 9 --augment dihedral", "a square has eight turns and mirrorings; ask for at most 8"),
        ("--views 2 --augment dihedral --frames 3", "--views is for pictures that become a grid, and not for videos"),
    ],
)
def test_views_that_cannot_be_made_are_refused(words, sentence, extract, tmp_path):
    images = ["--visual", "resnet18", "--visual-weights", "random:0", "--image-size", "64", "--text", "none"]
    result = extract(*images, *words.split())
    assert result.exit_code == 1
    assert sentence in result.stderr
    assert not (tmp_path / "s").exists()


def test_weights_of_a_text_tower_may_be_trusted(extract, tmp_path):
    (tmp_path / "w.bin").touch()
    result = extract(*f"--visual none --text open_clip:ViT-B-32 --text-weights {tmp_path}/w.bin --trust".split())
    assert "--trust has no effect" not in result.stderr


def test_views_are_told(extract, tmp_path):
    images = ["--visual", "resnet18", "--visual-weights", "random:0", "--image-size", "64", "--text", "none"]
    assert extract(*images, "--views", "3", "--augment", "dihedral", "--splits", "val").exit_code == 0
    for command in (["info", "s"], ["ls", "s"]):
        words = ["cache", command[0], str(tmp_path / command[1])]
        assert "3 views x 4 x 512" in CliRunner().invoke(main, words).stdout


def test_what_failed_is_named_and_what_to_do(tiny_dataset, tmp_path):
    manifest, store = tiny_dataset(), tmp_path / "s"
    words = ["extract", manifest, "--store", store, "--visual", "resnet18", "--visual-weights", "random:0"]
    words += ["--image-size", "64", "--text", "none", "--on-error", "skip"]
    for number in (1, 3, 5, 7):
        (manifest.parent / "images" / f"{number}.jpg").write_bytes(b"")
    for _ in range(2):  # the second finds everything done
        result = CliRunner().invoke(main, [str(word) for word in words])
        assert result.exit_code == 0, result.stderr
        lines = result.stdout.splitlines()
        assert lines[0] == f"tiny: 32 images, 80 captions in {store}"
        assert lines[1].endswith(" there before, 4 failed")
        assert [line.split(":")[1].strip() for line in lines[2:5]] == ["1.jpg", "3.jpg", "5.jpg"]
        assert lines[5] == "    and 1 more"
        assert lines[6].startswith(f"`xret cache verify {store}` lists all that failed; repair those files and run `")
        again = lines[6].rpartition("run `")[2].removesuffix("`.")
        assert again.startswith(f"xret extract {manifest} --visual resnet18 --visual-weights random:0 --image-size 64 ")
        assert again.endswith(f" --store {store} --repair")
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


def test_their_defaults_are_not(extract):
    images = ("--visual", "resnet18", "--visual-weights", "random:0", "--image-size", "64")
    for words in (("--visual", "none", "--text", "words", "--workers", "2"), (*images, "--text", "none")):
        result = extract(*words)
        assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (
            "--visual hf:m --visual-weights w.pth",
            2,
            "--visual hf:m names its weights itself; leave --visual-weights out",
        ),
        ("--visual none --text hf:m --text-weights w", 2, "--text hf:m names its weights itself; leave --text-weights"),
        ("--text berd", 2, "'berd' is none of bert, words, none, hf:ID, hf:DIR and open_clip:ARCH/TAG"),
        ("--text words --prompt a{}", 2, "--prompt has no effect on --text words"),
        ("--encoder hf:m --text words", 2, "--encoder decides --text; leave out one or the other"),
        (
            "--encoder resnet18",
            2,
            "--encoder resnet18: give a model of pictures and texts as hf:ID, hf:DIR or open_clip:ARCH/TAG",
        ),
        (
            "--text timm:test_vit",
            2,
            "'timm:test_vit' is none of bert, words, none, hf:ID, hf:DIR and open_clip:ARCH/TAG",
        ),
        ("--encoder timm:test_vit", 2, "--encoder timm:test_vit: give a model of pictures and texts"),
        ("--visual timm:test_vitt --text none", 1, "timm has no model 'test_vitt' (did you mean 'test_vit'?)"),
        ("--visual none --text open_clip:ViT-B-31/openai", 1, "no architecture 'ViT-B-31' (did you mean 'ViT-B-32'?)"),
        ("--encoder open_clip:RN50", 1, "open_clip:RN50 names no weights; give a tag as open_clip:RN50/TAG, or a file"),
        ("--visual none --pool 2x2", 2, "--pool has no effect on --visual none"),
        ("--visual none --whole", 2, "--whole has no effect on --visual none"),
        ("--visual butd --whole", 1, "--whole is for grids, and 'butd' prepares its pictures itself; leave it out"),
        ("--pool 4", 2, "'4' is no window; give height and width in cells, as 2x2"),
        (
            "--visual resnet18 --visual-weights random:0 --visual-layer 2 --text none",
            1,
            "--visual-layer is for models of hf:, timm:, open_clip:; 'resnet18'",
        ),
        ("--visual hf:../absent --text none", 1, "'../absent': there is no such folder; give a folder or a model id"),
        ("--dtype bfloat16", 1, "Zarr has no such dtype; take float16, which is finer and reaches up to 65,504"),
    ],
)
def test_what_names_an_encoder_is_checked(words, code, sentence, extract, tmp_path):
    result = extract(*words.split())
    assert (result.exit_code, sentence in result.stderr) == (code, True), result.stderr
    assert not (tmp_path / "s").exists()


def test_both_towers_of_a_checkpoint(extract, tmp_path, monkeypatch):
    folder = save_text_model(tmp_path / "clip", "clip")
    words = ["--encoder", f"hf:{folder}", "--prompt", "a photo of {}", "--pool", "2x2"]
    for done in ("encoded", "0 encoded"):  # the second finds everything done
        result = extract(*words)
        assert result.exit_code == 0, result.stderr
        assert done in result.stdout
        monkeypatch.delattr(Options, "load_visual", raising=False)  # nobody loads it again
    cache = FeatureCache.open(str(tmp_path / "s"))
    images, captions = cache.image_set("clip"), cache.caption_set("clip")
    assert images.space == captions.space is not None
    assert (images.grid, images.rows, images.global_channels) == ((2, 2), 4, captions.global_channels)
    assert captions.identity["preprocessing"]["prompt"] == "a photo of {}"


def test_whole_pictures_are_another_set(extract, tmp_path):
    words = ("--visual", "resnet18", "--visual-weights", "random:0", "--image-size", "64", "--text", "none")
    for more in ((), ("--whole",), ("--whole",)):
        result = extract(*words, *more)
        assert result.exit_code == 0, result.stderr
    assert " 0 encoded" in result.stdout
    cache = FeatureCache.open(str(tmp_path / "s"))
    cut, whole = sorted(cache.set_names("images"), key=lambda name: "stretch" in str(cache.image_set(name).identity))
    rows = np.arange(len(cache.image_set(cut).status))[:3]
    assert not np.array_equal(cache.image_set(cut).global_(rows), cache.image_set(whole).global_(rows))
    told = CliRunner().invoke(main, ["cache", "ls", str(tmp_path / "s")]).output
    assert told.count("64 pixels, whole pictures, EXIF orientation applied") == 1
    assert told.count("64 pixels, EXIF orientation applied") == 1


@pytest.mark.parametrize(("library", "extra"), [("timm", "timm"), ("open_clip", "open-clip")])
def test_a_library_that_is_not_installed_is_named_with_its_extra(library, extra, extract, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    result = extract("--visual", f"{library}:ViT-B-32", "--visual-weights", "random:9", "--text", "none")
    assert result.exit_code == 1
    assert f"pip install 'xret[{extra}]'" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "s").exists()
