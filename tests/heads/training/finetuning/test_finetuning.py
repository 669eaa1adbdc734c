"""Fine-tuning: what is put back learns as the recipe says, and goes on after any kill."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_dataset
from edited_runs import edited
from killed import left_by_kills
from safetensors.torch import load_file
from small_bert import save_bert
from small_extraction import OPTIONS
from small_trainings import state_of
from torch.nn.functional import kl_div

from xret.heads.evaluation.scoring import Ranker, embed_split
from xret.heads.recipes.recipe import load_recipe
from xret.heads.recipes.settings import settings_of
from xret.heads.runs.encoders import specs_of_run
from xret.heads.runs.run import Run
from xret.heads.training.finetuning.finetuning import finetune
from xret.heads.training.train import train
from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.encoders.grid import GridEncoder
from xret.pipeline.encoders.registry import load_text, load_visual
from xret.pipeline.encoders.spec import EncoderSpec
from xret.pipeline.errors import CacheError, EncoderError, RecipeError, RunError, SampleError
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.options import build_options

HEAD = ["model.dim=16", "adapter.words.word_dim=8", "schedule.name=step", "schedule.epochs=2", "optimizer.lr=0.003"]
HEAD += ["data.unit=image", "data.batch_size=12"]  # an epoch is one step
HEAD += ["augment.image=0", "augment.text=0", "loss.triplet.negatives=all", "loss.triplet.reduction=mean"]
FROZEN = ["finetune.image_frozen=99", "finetune.text_frozen=99"]
MORE = "schedule.epochs=3"
NETWORK = "mobilenet_v3_small"  # its optimiser's state is a tenth of ResNet-18's


def visual_of(weights, size):
    return load_visual(EncoderSpec(NETWORK, weights, image_size=size), "cpu")


def text_of(folder):
    return load_text(EncoderSpec("bert", str(folder)), "cpu")


class Made:
    """A data set and a BERT, and what tests ask for once: stores and heads, by the kind of their captions."""

    def __init__(self, folder):
        self.folder, self.bert = folder, save_bert(folder / "bert")
        self.manifest = tiny_dataset.__wrapped__(folder)(train=12, val=6, test=6)

    def store(self, text="bert"):
        url = self.folder / f"{text}.zarr"
        if not url.exists():
            weights = {} if text == "words" else {"text_weights": str(self.bert)}
            options = build_options(**{**OPTIONS, "visual": NETWORK, "text": text, "dtype": "float32", **weights})
            extract(load_manifest(self.manifest), str(url), options)
        return str(url)

    def head(self, text="bert"):
        run = self.folder / f"head-{text}"
        if not run.exists():
            train(self.store(text), load_recipe("vsepp", HEAD), run, device="cpu", seed=3)
        return run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("made"))


@pytest.fixture
def pictures(made):
    return made.manifest.parent


@pytest.fixture
def bert(made):
    return made.bert


@pytest.fixture
def tune(made, pictures, tmp_path):
    """Fine-tune: `tune(head, ["image"], *settings)` gives the new run's folder."""

    def run(head, sides, *settings, out="tuned", **words):
        weights = {"text_weights": str(made.bert)} if "text" in sides else {}
        arguments = {"data_root": pictures, **weights, "device": "cpu", **words}
        finetune(head, tmp_path / out, settings=settings_of([MORE, *settings]), reattach=sides, **arguments)
        return tmp_path / out

    return run


def backbone_of(state, side):
    prefix = f"{side}.backbone.network."
    return {key.removeprefix(prefix): value for key, value in state["model"].items() if key.startswith(prefix)}


def test_backbones_learn_and_batch_norms_keep_their_statistics(made, tune, bert):
    tuned = state_of(tune(made.head(), ["image", "text"], "finetune.image_lr=0.5"))
    before = visual_of("random:0", 64).network.state_dict()
    after = backbone_of(tuned, "image")
    assert after.keys() == before.keys()
    for key, value in before.items():
        kept = key.endswith(("running_mean", "running_var", "num_batches_tracked"))
        assert torch.equal(after[key], value) is kept, key
    before, after = text_of(bert).network.state_dict(), backbone_of(tuned, "text")
    same = [key for key, value in before.items() if value.is_floating_point() and torch.equal(after[key], value)]
    assert all(key.startswith("pooler.") for key in same)  # which gives no features


def test_a_backbone_is_frozen_for_the_first_epochs_of_the_head(made, tune):
    """Frozen until epoch 3, it learns in the fourth at its multiple of the rate, which is Adam's first step."""
    settings = ["finetune.image_lr=0.5", "finetune.image_frozen=3"]
    before = visual_of("random:0", 64).network.state_dict()
    three = backbone_of(state_of(tune(made.head("words"), ["image"], *settings, out="three")), "image")
    assert all(torch.equal(three[key], value) for key, value in before.items())
    four = backbone_of(state_of(tune(made.head("words"), ["image"], *settings, "schedule.epochs=4")), "image")
    moved = (four["features.0.0.weight"] - before["features.0.0.weight"]).abs().max().item()
    assert moved == pytest.approx(0.003 * 0.5, rel=0.02)


def test_words_are_masked_as_pieces_of_one_word(bert):
    from xret.heads.training.finetuning.end_to_end import change_words

    encoder = text_of(bert)
    text = "a picture of thing 123 number 45"
    (ids,), (words,) = encoder.tokenize([text]), encoder.words([text])
    assert words == [None, 0, 1, 2, 3, 4, 4, 4, 5, 6, 6, None]
    rng, mask = np.random.default_rng(0), encoder.mask_token
    fates = {"kept": 0, "masked": 0, "replaced": 0, "dropped": 0}
    rounds = 4000
    for _ in range(rounds):
        changed = change_words(encoder, 0.2, ids, words, rng)
        assert (changed[0], changed[-1]) == (ids[0], ids[-1])  # special tokens stay
        # Without what is dropped the order stays, so that the word of three pieces can be read off alone.
        one = change_words(encoder, 0.2, ids[5:8], [4, 4, 4], rng)
        known = {tuple(ids[5:8]): "kept", (mask,) * 3: "masked", (mask,): "dropped"}
        fates[known.get(tuple(one), "replaced")] += 1
    shares = {fate: count / rounds for fate, count in fates.items()}
    expected = {"kept": 0.8, "masked": 0.1, "replaced": 0.02, "dropped": 0.08}
    assert shares == pytest.approx(expected, abs=0.02)


def test_augmentation_changes_the_pixels_and_repeats_itself(made, tune):
    losses = {}
    crop, mask = "finetune.crop_and_flip=sides", "finetune.mask_words=0.9"
    for out, chosen in {"plain": [], "one": [crop], "other": [crop], "masked": [mask]}.items():
        losses[out] = Run(tune(made.head(), ["image", "text"], *FROZEN, *chosen, out=out)).metrics()[2]["loss"]
    assert losses["one"] == losses["other"]
    assert len(set(losses.values())) == 3


def test_images_on_the_cache_beside_a_text_backbone(made, tune, lockless):
    tuned = tune(made.head(), ["text"], data_root=None)
    assert len(lockless()) == 1
    assert list(specs_of_run(tuned)) == ["text"]
    assert Run(tuned).info.image == Run(made.head()).info.image
    assert not (tuned / "image_backbone.safetensors").exists()


@pytest.mark.parametrize("step", [9, pytest.param(3, marks=pytest.mark.slow)])
def test_after_any_kill_it_goes_on_as_if_there_was_none(made, tune, tmp_path, step):
    words = [["image", "text"], "finetune.image_lr=1", "finetune.text_lr=1", "schedule.epochs=4"]
    with left_by_kills(tmp_path / "whole", tmp_path) as killed:
        whole = tune(made.head(), *words, out="whole")
    assert len(killed) > 12
    for run in killed[::step]:
        if Run(run).info.best_epoch is None:
            with pytest.raises(RunError, match=r"no finished epoch yet; continue it with `xret finetune"):
                specs_of_run(run)
        resumed = tune(made.head(), *words, out=run.name, resume=True)
        assert {path.name for path in resumed.iterdir()} == {path.name for path in whole.iterdir()}
        assert Run(resumed).info.fingerprints("image") == Run(whole).info.fingerprints("image")
        for file in (*whole.glob("*.safetensors"), *whole.glob("text_backbone/*")):
            assert (resumed / file.relative_to(whole)).read_bytes() == file.read_bytes()
        for branch in ("image", "text"):  # refuses a backbone of other weights than run.json says
            Ranker(resumed, device="cpu").encoders(branch)


def test_the_moving_average_of_head_and_backbone_is_kept(made, tune):
    """Epochs of one step: after the first the average is the weights, after the second it has moved towards them."""
    words = [made.head("words"), ["image"], "finetune.image_lr=1", "optimizer.ema=0.75"]
    one, two = (state_of(tune(*words, f"schedule.epochs={epochs}", out=str(epochs))) for epochs in (3, 4))
    moved = 0
    for key, before in one["model"].items():
        assert torch.equal(one["average"][f"module.{key}"], before)
        average, after = two["average"][f"module.{key}"], two["model"][key]
        if before.is_floating_point():
            torch.testing.assert_close(average, 0.75 * before + 0.25 * after)
            moved += key.startswith("image.backbone.") and not torch.equal(average, after)
    assert moved
    run = tune(*words, "schedule.epochs=4", out="4", resume=True)
    kept = {3: one, 4: two}[Run(run).info.best_epoch]["average"]
    backbone, head = (load_file(run / name) for name in ("image_backbone.safetensors", "model.safetensors"))
    for key, value in kept.items():
        name = key.removeprefix("module.")
        saved = backbone.get(name.removeprefix("image.backbone.network."), head.get(name))
        assert saved is None if key == "n_averaged" else torch.equal(saved, value), key


def test_what_disturbs_a_head_in_training_alone_may_change(made, tune, caplog):
    """The backbone learns nothing here, so that only the dropout makes these two of one head differ."""
    plain = tune(made.head("words"), ["image"], *FROZEN, out="plain")
    dropped = tune(made.head("words"), ["image"], *FROZEN, "adapter.grid.dropout=0.5", out="dropped")
    assert Run(dropped).recipe.adapter["grid"]["dropout"] == 0.5
    assert Run(dropped).metrics()[-1]["loss"] != Run(plain).metrics()[-1]["loss"]
    caplog.clear()
    blends = tune(made.head("words"), ["image"], *FROZEN, "augment.mix=1", "data.captions=1", out="blends")
    assert Run(blends).recipe.augment.mix == 0
    assert "a fine-tuning blends nothing" in caplog.text


def test_rows_of_a_head_that_blended_vectors_can_be_left_out(made, tune, tmp_path):
    """From the cache it reads the mean of a caption's tokens; with the backbone in the loop it reads the tokens."""
    sets = Run(made.head()).info  # other tests put more into the store
    sets = [f"data.{side}={sets.names(side)[0]}" for side in ("image", "text")]
    recipe = load_recipe("fusemix", ["model.dim=16", "data.batch_size=12", "schedule.epochs=2", *sets])
    train(made.store(), recipe, tmp_path / "head", device="cpu", seed=3)
    losses = [
        Run(tune(tmp_path / "head", ["text"], *FROZEN, chosen, out=chosen)).metrics()[-1]["loss"]
        for chosen in ("augment.text=0", "augment.text=0.9")
    ]
    assert losses[0] != losses[1]


def test_the_teacher_of_a_head_teaches_its_fine_tuning(made, tune, tmp_path):
    recipe, teacher = load_recipe("vsepp", HEAD), made.head("words")
    train(made.store("words"), recipe, tmp_path / "head", device="cpu", seed=5, distil=teacher)
    tuned = tune(tmp_path / "head", ["image"], *FROZEN)
    both = (embed_split(Ranker(run, device="cpu"), "train").similarity for run in (tmp_path / "head", teacher))
    ours, theirs = (30 * similarity for similarity in both)
    ways = ((ours, theirs), (ours.T, theirs.T))
    expected = sum(kl_div(one.log_softmax(1), other.softmax(1), reduction="batchmean") / 2 for one, other in ways)
    assert Run(tuned).metrics()[-1]["parts"]["distillation"] == pytest.approx(float(expected), rel=1e-3)
    with pytest.raises(RunError, match="other weights than when it taught"):
        tune(edited(tmp_path / "head", teacher="others"), ["image"], *FROZEN, out="again")


def fail(tune, made, error, match, *words, text="words", **named):
    with pytest.raises(error, match=match) as caught:
        tune(made.head(text), *words, **named)
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_is_a_sentence(made, tune, tmp_path):
    for error, match, *words in (
        (CacheError, r"no states of a text encoder .*take `reattach` image", ["text"]),
        (RecipeError, r"`reattach` takes image, text or image,text, not 'text,pixels'", "text,pixels"),
        (RecipeError, r"says of no backbone that it learns; say which .*`reattach`", []),
        (RecipeError, r"cannot change: aggregator\.image", ["image"], "aggregator.image=gpo"),
        (RecipeError, r"augment\.mask_words > 0 is False there and True", ["image"], "augment.mask_words=0.1"),
        (RecipeError, r"cannot change: data\.image is", ["image"], "data.image=resnet152"),
        (RunError, r"end of its schedule, epoch 2; .*schedule.epochs=12", ["image"], "schedule.epochs=2"),
    ):
        fail(tune, made, error, match, *words)
    weights = r"'random:1' is not what 'mobilenet_v3_small@\w+' was made with \(its weights differ\); .* as `visual"
    fail(tune, made, EncoderError, weights, ["image"], visual_weights="random:1")
    other, weights = str(save_bert(tmp_path / "other", seed=1)), r"its weights differ\); .* `text_weights`"
    fail(tune, made, EncoderError, weights, ["text"], text="bert", text_weights=other)
    idle = r"images is not put back, and takes no weights; leave `visual_weights` out, or name image in `reattach`"
    fail(tune, made, RecipeError, idle, ["text"], text="bert", visual_weights="random:1")
    fail(tune, made, CacheError, r"give their folder as `data_root=DIR`", ["image"], data_root=tmp_path)
    fail(tune, made, CacheError, r"no folder was given; .*data_root", ["image"], data_root=None)
    assert not (tmp_path / "tuned").exists()


@pytest.mark.parametrize(("began", "key", "value"), [("false", "learned", "true"), ("true", "scale", "5")])
def test_what_the_losses_have_learned_stays_of_its_kind(made, tune, tmp_path, began, key, value):
    """A scale that is not learned may change."""
    recipe = ["model.dim=16", "data.batch_size=12", "schedule.epochs=2", f"loss.infonce.learned={began}"]
    train(made.store("words"), load_recipe("linear", recipe), tmp_path / "head", device="cpu", seed=3)
    with pytest.raises(RecipeError, match=rf"so that this cannot change: loss\.infonce\.{key} is .*; train another"):
        tune(tmp_path / "head", ["image"], *FROZEN, f"loss.infonce.{key}={value}")
    assert not (tmp_path / "tuned").exists()
    if began == "false":
        tuned = tune(tmp_path / "head", ["image"], *FROZEN, "loss.infonce.scale=5")
        assert Run(tuned).recipe.loss["infonce"]["scale"] == 5


def test_missing_and_other_images_are_a_sentence(made, tune, pictures, tmp_path):
    copied = Path(shutil.copytree(pictures, tmp_path / "data"))
    shutil.copy(copied / "images" / "5.jpg", copied / "images" / "0.jpg")
    fail(tune, made, CacheError, r"0\.jpg has other features than 'mobilenet_v3_small@", ["image"], data_root=copied)
    shutil.copy(pictures / "images" / "0.jpg", copied / "images" / "0.jpg")
    (copied / "images" / "1.jpg").unlink()
    sentence = r"1\.jpg: there is no such file; put the extracted file back, or check `data_root`"
    fail(tune, made, SampleError, sentence, ["image"], data_root=copied)
    assert not (tmp_path / "tuned").exists()


def test_memory_that_does_not_suffice_is_a_sentence(made, tune, monkeypatch):
    monkeypatch.setattr(GridEncoder, "features", lambda *_: torch.empty(10**15))
    fail(tune, made, RunError, r"does not fit in the memory of cpu; set finetune\.checkpointing=true", ["image"])


def test_what_stays_on_the_cache_lies_where_the_recipe_says(made, tune):
    tuned = tune(made.head("words"), ["image"], "finetune.image_lr=1", "runtime.cache=stream")
    assert json.loads((tuned / "run.json").read_text())["shuffled"] == "in groups of runs of 64 neighbours"
