"""Fine-tuning of image encoders and text towers of transformers, timm and open_clip, from cache to search."""

import numpy as np
import pytest
import small_open_clip
import torch
import transformers as hf
from edited_runs import edited
from encoder_contract import image_encoder, text_encoder
from PIL import Image
from safetensors.torch import load_file, save_file
from small_bert import save_bert
from small_checkpoints import CROP, save_image_model, save_text_model
from small_timm import save_timm_model
from small_trainings import state_of
from torchvision.transforms import RandomResizedCrop

import xret
from xret.heads.retrieval.hub import save_to_folder
from xret.heads.runs.run import Run
from xret.heads.training.finetuning.end_to_end import read_window, window_size
from xret.heads.training.finetuning.reattached import Backbone
from xret.pipeline.data.sources import FolderReader
from xret.pipeline.errors import EncoderError, RunError

HEAD = {"model.dim": 16, "data.unit": "image", "data.batch_size": 12, "optimizer.lr": 0.003}  # an epoch is one step
HEAD |= {"augment": {"image": 0, "text": 0}, "loss.triplet": {"negatives": "all", "reduction": "mean"}}
SLOTS = {"aggregator.image.head_dim": 8, "aggregator.text.head_dim": 8, "aggregator.image.positions": "grid"}
FROZEN = {"finetune.image_frozen": 99, "finetune.text_frozen": 99}
BOTH = ["image", "text"]
# By name the checkpoint of the pictures and that of the captions.
PAIRS = {
    "clip": ("hf:clip", "hf:clip"),
    "siglip": ("hf:siglip", "hf:siglip"),
    "whole": ("hf:clip", "hf:clip"),
    "oblong": ("hf:oblong", "hf:t5"),
    "cropped": ("hf:cropped", "hf:t5"),
    "timm": ("timm:small_swin.squashed", "hf:clip"),
    "open_clip": ("open_clip:small-ViT", "open_clip:small-ViT"),
    "words": ("resnet18", "words"),
    "bert": ("resnet18", "bert"),
}
FILES = {"timm": "swin.pth", "open_clip": "clip.pt", "bert": "bert"}


class Made:
    """A data set with checkpoints, and what tests ask for once: stores and heads."""

    def __init__(self, folder, dataset):
        self.folder, self.manifest = folder, dataset(folder=folder / "tiny", train=12, val=6, test=6)
        for family in ("clip", "siglip", "t5"):
            save_text_model(folder / family, family)
        save_bert(folder / "bert")
        save_image_model(folder / "oblong", "oblong")
        save_image_model(folder / "cropped", "clip")
        hf.CLIPImageProcessor(do_resize=False, crop_size=CROP["crop_size"]).save_pretrained(folder / "cropped")
        save_timm_model(folder / "swin.pth", "small_swin")
        small_open_clip.save_clip(folder / "clip.pt", "small-ViT")

    def named(self, name):
        """Return a name as commands take it, and the weights beside it."""
        library, _, model = name.partition(":")
        if library == "hf":
            return f"hf:{self.folder / model}", None
        if name == "resnet18":
            return name, "random:0"
        return name, str(self.folder / FILES[library]) if library in FILES else None

    def weights(self, pair):
        """Return how a later command names the weights of a pair."""
        given = [self.named(name) for name in PAIRS[pair]]
        return {f"{side}_weights": file or name for side, (name, file) in zip(("visual", "text"), given, strict=True)}

    def store(self, pair, dtype, more=""):
        url = self.folder / f"{pair}-{dtype}{more}.zarr"
        if not url.exists():
            words = {"dtype": dtype, "device": "cpu", "whole": pair == "whole"}
            words |= {"image_size": 64} if PAIRS[pair][0] == "resnet18" else {}
            for side, name in zip(("visual", "text"), PAIRS[pair], strict=True):
                words[side], file = self.named(name)
                words |= {f"{side}_weights": file} if file else {}
            xret.extract(self.manifest, url, **words)
        return url

    def image_encoder(self, pair):
        name, file = self.named(PAIRS[pair][0])
        return image_encoder(name, file)

    def text_encoder(self, pair):
        name, file = self.named(PAIRS[pair][1])
        return text_encoder(name, file)

    def head(self, pair, dtype="float32", epochs=2, recipe="vsepp", more="", **settings):
        """Train a head; its best epoch is its last."""
        run = self.folder / "-".join([pair, dtype, str(epochs), recipe, more, *settings])
        if not run.exists():
            chosen = {**HEAD, **settings, "schedule.name": "step", "schedule.epochs": epochs}
            xret.train(self.store(pair, dtype, more), recipe=recipe, out=run, settings=chosen, device="cpu", seed=3)
            state = state_of(edited(run))["model"]
            save_file({key: value.contiguous() for key, value in state.items()}, run / "model.safetensors")
        return run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    from conftest import tiny_dataset

    return Made(tmp_path_factory.mktemp("towers"), tiny_dataset.__wrapped__(tmp_path_factory.mktemp("data")))


@pytest.fixture
def tune(made, tmp_path):
    """Fine-tune: `tune(head, "clip", ["image"], setting=…)` gives the new run's folder."""

    def run(head, pair, sides, out="tuned", resume=False, **settings):
        named = {"image": "visual_weights", "text": "text_weights"}
        weights = {named[side]: made.weights(pair)[named[side]] for side in sides}
        words = {"data_root": made.manifest.parent, "device": "cpu", "resume": resume, **weights}
        chosen = {"schedule.epochs": 3, **settings}
        xret.finetune(head, out=tmp_path / out, reattach=sides, settings=chosen, **words)
        return tmp_path / out

    return run


@pytest.mark.parametrize(
    ("pair", "sides", "dtype", "tolerance", "recipe", "settings"),
    [
        ("clip", BOTH, "float32", 1e-5, "vsepp", {"model.residual": "frozen"}),
        ("clip", BOTH, "float16", 2e-3, "vse-infty", {}),
        ("siglip", BOTH, "float32", 1e-5, "vse-infty", {}),
        ("oblong", BOTH, "float32", 1e-5, "setdiv", SLOTS),
        ("whole", BOTH, "float32", 1e-5, "vse-infty", {}),
        ("timm", ["image"], "float32", 1e-5, "vse-infty", {}),
        ("open_clip", BOTH, "float32", 1e-5, "vse-infty", {}),
        ("words", ["image"], "float32", 1e-5, "vse-infty", {"adapter.words.word_dim": 8}),
        ("bert", ["text"], "float32", 1e-5, "vsepp", {}),
        ("bert", BOTH, "float16", 2e-3, "vse-infty", {}),
    ],
)
def test_before_a_backbone_has_learnt_a_step_is_the_caches(made, tune, pair, sides, dtype, tolerance, recipe, settings):
    """The third epoch, of one step, from the cache and with the backbones in the loop: loss, and weights after it."""
    two, three = (made.head(pair, dtype, epochs, recipe, **settings) for epochs in (2, 3))
    tuned = tune(two, pair, sides, **FROZEN)
    assert Run(tuned).metrics()[2]["loss"] == pytest.approx(Run(three).metrics()[2]["loss"], rel=tolerance)
    before, expected, found = (state_of(run)["model"] for run in (two, three, tuned))
    for key, value in expected.items():
        moved = (value - before[key]).norm()
        assert (found[key] - value).norm() <= max(100 * tolerance * moved, 1e-6), key


@pytest.mark.parametrize("pair", ["clip", "whole", "siglip", "open_clip"])
def test_tuned_towers_are_extracted_evaluated_and_searched(made, tune, tmp_path, pair):
    learn = {"finetune.image_lr": 1, "finetune.text_lr": 1}
    tuned = tune(made.head(pair, more="-tuned", **{"model.residual": "frozen"}), pair, BOTH, **learn)
    info, state, weights = Run(tuned).info, state_of(tuned)["model"], made.weights(pair)
    for side, encoder in (("image", made.image_encoder(pair)), ("text", made.text_encoder(pair))):
        network = {key: value for key, value in encoder.network.state_dict().items() if value.is_floating_point()}
        assert len(network) > 20
        for key, value in network.items():  # the scale of CLIP's own loss has no part in the features
            learnt = state[f"{side}.backbone.network.{key}"]
            assert torch.equal(learnt, value) is key.startswith("logit_"), key
    store = made.store(pair, "float32", "-tuned")  # which gets another set
    with pytest.raises(RunError, match=r"extract it there with `xret extract … --encoder .*tuned`"):
        xret.evaluate(tuned, split="val", device="cpu")
    extract = {"encoder": tuned, "device": "cpu"}
    assert all(features.samples for features in xret.extract(made.manifest, store, **extract).sets)
    assert not any(features.samples for features in xret.extract(made.manifest, store, **extract).sets)
    result = xret.evaluate(tuned, split="val", device="cpu").results[0]
    assert result.rsum == pytest.approx(info.best_rsum)

    retriever = xret.load(tuned, device="cpu", split="test")  # its encoders are its own
    path, caption = made.manifest.parent / "images" / "19.jpg", "a picture of thing 19 number 0"
    picture, other = retriever.encode_images([path, path.with_name("20.jpg")])
    (text,) = retriever.encode_text([caption])
    scores = {hit.file_name: hit.score for hit in retriever.search(caption, k=6)}
    for name, image in (("19.jpg", picture), ("20.jpg", other)):
        assert scores[name] == pytest.approx(torch.cosine_similarity(text, image, dim=0).item(), abs=1e-5)
    (before,) = xret.load(Run(tuned).info.head, device="cpu", **weights).encode_text([caption])
    assert torch.cosine_similarity(text, before, dim=0) < 0.999
    save_to_folder(retriever, tmp_path / "hub")
    torch.testing.assert_close(xret.load(tmp_path / "hub", device="cpu").encode_images([path])[0], picture)
    again = tune(tuned, None, [], out="again", **{"schedule.epochs": 4})  # a tuned run is tuned further
    assert tuple(Run(again).info.finetuned["fingerprints"]["image"]) == info.fingerprints("image")
    if pair == "clip":  # the other side stays on what the tuned run made
        beside, settings = tmp_path / "beside", {"schedule.epochs": 4}
        xret.finetune(tuned, out=beside, reattach=["text"], settings=settings, device="cpu")
        assert xret.load(beside, device="cpu").image_encoders


def test_stopped_and_resumed_it_is_as_if_never_stopped(made, tune, monkeypatch):
    settings = {"finetune.crop_and_flip": "area", "finetune.mask_words": 0.3, "finetune.image_size": 48}
    settings |= {"finetune.checkpointing": True, "schedule.epochs": 4, "optimizer.ema": 0.9, "data.batch_size": 5}
    words = made.head("clip"), "clip", BOTH
    whole, original = tune(*words, out="whole", **settings), Run.save

    def save(self, checkpoint):
        original(self, checkpoint)
        if (checkpoint["state"]["epoch"], checkpoint["state"]["steps"]) == (3, 2):
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "save", save)
    with pytest.raises(KeyboardInterrupt):
        tune(*words, out="stopped", **settings, **{"runtime.checkpoint_steps": 1})
    monkeypatch.undo()
    stopped = tune(*words, out="stopped", resume=True, **settings)
    for name in ("model", "image_backbone/model", "text_backbone/model"):
        one, two = (load_file(run / f"{name}.safetensors") for run in (whole, stopped))
        assert one.keys() == two.keys()
        assert all(torch.equal(value, two[key]) for key, value in one.items()), name
    image = xret.load(whole, device="cpu").image_encoders[0][0]
    assert image.grid == (6, 6)  # of patches of 8 pixels


@pytest.mark.parametrize("name", ["hf:clip", "hf:oblong", "timm:small_swin.squashed", "open_clip:small-ViT"])
def test_checkpointing_gives_the_same_gradients(made, monkeypatch, name):
    monkeypatch.setattr("xret.heads.training.finetuning.reattached._TOGETHER", 2)
    named, file = made.named(name)
    found = []
    for checkpointing in (False, True):
        encoder = image_encoder(named, file, layer=0)
        backbone = Backbone(encoder, checkpointing).train()
        for module in backbone.modules():  # they draw in another order for other parts
            for rate in {"p", "drop_prob"} & vars(module).keys():
                setattr(module, rate, 0.0)
        pixels = torch.randn(5, 3, *(side * 8 for side in (4, 6 if name == "hf:oblong" else 4)))
        local, global_ = backbone(torch.linspace(-1, 1, pixels.numel()).view_as(pixels))
        (local.square().mean() + global_.sin().mean()).backward()
        found.append({key: p.grad for key, p in backbone.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and len(found[0]) > 20
    for key, gradient in found[0].items():
        assert (gradient - found[1][key]).norm() <= 1e-4 * gradient.norm() + 1e-7, key


@pytest.mark.parametrize(("kind", "least"), [("area", 0.08), ("large-area", 0.36)])
@pytest.mark.parametrize("size", [(640, 480), (300, 60)])
def test_windows_by_area_are_those_of_torchvision(kind, least, size):
    """Areas and proportions are distributed as those of `RandomResizedCrop.get_params`."""
    rng, image = np.random.default_rng(0), Image.new("RGB", size)
    made = np.array([window_size(*size, rng, kind) for _ in range(4000)])
    theirs = [RandomResizedCrop.get_params(image, [least, 1], [3 / 4, 4 / 3]) for _ in range(4000)]
    theirs = np.array([(width, height) for _, _, height, width in theirs])
    assert (made > 0).all() and (made <= size).all()
    for of in (lambda sizes: sizes.prod(1) / np.prod(size), lambda sizes: np.log(sizes[:, 0] / sizes[:, 1])):
        shares = [0.01, 0.25, 0.5, 0.75, 0.99]
        assert np.quantile(of(made), shares) == pytest.approx(np.quantile(of(theirs), shares), abs=0.03)


@pytest.mark.parametrize("kind", ["sides", "area"])
def test_a_window_is_prepared_as_the_checkpoint_says(made, kind):
    """Of a picture of one colour every window, mirrored or not, has the pixels of the whole."""
    encoder, path = made.image_encoder("clip"), made.folder / "red.png"
    Image.new("RGB", (90, 60), (200, 30, 30)).save(path)
    whole, size = encoder.decode(path)
    window = read_window(encoder, FolderReader(made.folder), path.name, np.random.default_rng(0), kind)
    assert (window.shape, size) == ((3, 32, 32), (90, 60))
    torch.testing.assert_close(window, whole)
    mean, std = torch.tensor(hf.CLIPImageProcessor().image_mean), torch.tensor(hf.CLIPImageProcessor().image_std)
    torch.testing.assert_close(window[:, 0, 0], (torch.tensor([200, 30, 30]) / 255 - mean) / std, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_a_sentence(made, tune, tmp_path):
    def fails(error, match, pair, sides, **settings):
        with pytest.raises(error, match=match) as caught:
            tune(made.head(pair), pair, sides, **settings)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "tuned").exists()

    words = {"data_root": made.manifest.parent, "out": tmp_path / "tuned", "settings": {"schedule.epochs": 3}}
    other = save_text_model(tmp_path / "other", "clip", seed=1)
    with pytest.raises(EncoderError, match=r"was made with \(its weights differ\); .* as `visual_weights`"):
        xret.finetune(made.head("clip"), reattach=["image"], device="cpu", visual_weights=str(other), **words)
    masks = r"cannot mask words; set finetune\.mask_words=0"
    fails(EncoderError, masks, "open_clip", ["text"], **{"finetune.mask_words": 0.1})
    size = r"finetune\.image_size=48 does not suit the backbone: image weights .* the processor resizes nothing"
    fails(EncoderError, size, "cropped", ["image"], **{"finetune.image_size": 48})
    crop = r"processor of 'cropped' resizes nothing, so that a window .*; set finetune\.crop_and_flip=none"
    fails(EncoderError, crop, "cropped", ["image"], **{"finetune.crop_and_flip": "area"})
    size = r"finetune\.image_size=48 does not suit the backbone: its weights are for images of 32 pixels"
    fails(EncoderError, size, "open_clip", ["image"], **{"finetune.image_size": 48})
