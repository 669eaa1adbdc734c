"""What is done to a batch before its loss, and captions of equal text in the loss."""

import pytest
import torch
from small_store import make_store
from small_trainings import learner, recipe_of

from xret.heads.evaluation.scoring import embed
from xret.heads.modules.losses.blocks import compared_masks
from xret.heads.training.augmentation import averaged, blend, drop_rows, mask_words
from xret.heads.training.objective import Objective
from xret.pipeline.store import FeatureCache


def test_captions_with_the_text_of_a_positive_are_no_negatives():
    positives = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]).bool()
    text = torch.tensor([7, 8, 8, 9, 9])
    expected = torch.tensor([[0, 0, 1, 0, 0], [0, 1, 0, 0, 1], [0, 0, 0, 1, 0]]).bool()
    own, others = compared_masks(3, torch.tensor([0, 0, 1, 1, 2]), text, same_is_positive=False)
    assert torch.equal(own, positives) and torch.equal(others, expected)


@pytest.mark.parametrize("same", ["negative", "excluded", "positive"])
def test_the_loss_with_equal_texts_is_that_of_a_loop(tmp_path, same):
    cache = FeatureCache.open(make_store(tmp_path / "s.zarr"))
    terms = ["loss.triplet.weight=0", "loss.infonce.weight=1", "loss.infonce.scale=5", f"loss.same_text={same}"]
    recipe = recipe_of("vsepp", 1, *terms, "data.unit=image", "data.captions=null")
    model, losses, split = learner(cache, recipe)
    (batch,) = split.epoch(unit="image", batch_size=100, seed=0, epoch=0)
    found = Objective(recipe, model.double(), losses.double(), split)(batch, 0.0)[1].item()

    sides = model.embed_images(batch.images).embedding, model.embed_captions(batch.captions).embedding
    scores, owner = 5 * model.similarity(*sides), batch.caption_image
    known = cache.caption_texts(0, len(split.texts()))
    texts = [known[number] for number in batch.caption_index.tolist()]
    positive = owner == torch.arange(len(scores))[:, None]
    said = [{texts[c] for c in own.nonzero()[:, 0].tolist()} for own in positive]
    alike = torch.tensor([[text in own for text in texts] for own in said])
    assert alike.sum() > positive.sum()  # pictures of the same things are described in the same words
    positive = alike if same == "positive" else positive
    negative = ~(positive if same == "negative" else alike)
    losses_of_pairs = []
    for i, c in positive.nonzero().tolist():
        for others in (scores[i][negative[i]], scores[:, c][negative[:, c]]):
            losses_of_pairs.append(torch.cat([scores[i, c][None], others]).logsumexp(0) - scores[i, c])
    assert found == pytest.approx(torch.stack(losses_of_pairs).mean().item())


def recording(embed, read):
    """Return `embed`, which also puts what it reads into `read`."""

    def recorded(features):
        read.append(features)
        return embed(features)

    return recorded


def features_read(tmp_path, monkeypatch, name, *settings, text="words"):
    """Return a batch, the images and captions that the model embeds of it in a loss, and draws after seed 5."""
    recipe = recipe_of(name, 1, *settings)
    model, losses, split = learner(FeatureCache.open(make_store(tmp_path / "s.zarr", text=text)), recipe)
    batch = next(iter(split.epoch(unit="image", batch_size=20, seed=0, epoch=0, captions=1)))
    read = []
    monkeypatch.setattr(model, "embed_images", recording(model.embed_images, read))
    monkeypatch.setattr(model, "embed_captions", recording(model.embed_captions, read))
    objective = Objective(recipe, model.train(), losses, split)
    torch.manual_seed(5)
    objective(batch, 0.0)
    torch.manual_seed(5)
    return batch, read, model, split


def assert_read(features, expected):
    for one, other in zip(features.parts, expected.parts, strict=True):
        for field in ("local", "token", "length", "global_", "place"):
            value, wanted = getattr(one, field), getattr(other, field)
            assert (value is None) == (wanted is None), field
            assert value is None or torch.equal(value, wanted), field


@pytest.mark.parametrize(
    ("settings", "image", "text"),
    [
        (["augment.image=0.5"], (0.5, False), 0.0),
        (["augment.image=0.5", "augment.image_varies=true"], (0.5, True), 0.0),
        (["augment.text=0.5"], (0.0, False), 0.5),
        (["augment.image=0.3", "augment.text=0.6"], (0.3, False), 0.6),
    ],
)
def test_rows_are_left_out_of_the_side_and_as_often_as_the_recipe_says(tmp_path, monkeypatch, settings, image, text):
    none = ["augment.image=0", "augment.text=0", "augment.image_varies=false"]
    batch, (images, captions), *_ = features_read(tmp_path, monkeypatch, "vse-infty", *none, *settings)
    assert_read(images, drop_rows(batch.images, *image))
    assert_read(captions, drop_rows(batch.captions, text))
    assert torch.equal(images.length, batch.images.length) == (image[0] == 0)
    assert torch.equal(captions.length, batch.captions.length) == (text == 0)


def test_words_are_masked_by_the_id_after_the_last(tmp_path, monkeypatch):
    batch, (_, captions), _, split = features_read(tmp_path, monkeypatch, "vsepp", "augment.mask_words=0.9")
    mask = len(split.caption_set.vocabulary)
    assert_read(captions, mask_words(batch.captions, 0.9, mask))
    assert (captions.token == mask).any()


def test_pairs_are_blended_as_vectors(tmp_path, monkeypatch):
    batch, (images, captions), model, _ = features_read(tmp_path, monkeypatch, "fusemix", text="tokens")
    assert model.text.averages == (True,)
    means = averaged(batch.images, model.image.averages), averaged(batch.captions, model.text.averages)
    for found, expected in zip((images, captions), blend(*means, batch.caption_image, 1.0), strict=True):
        assert_read(found, expected)
    assert not torch.equal(captions.local, means[1].local)


@pytest.mark.parametrize(
    ("name", "text", "settings"),
    [("vse-infty", "words", ["augment.text=0.5", "augment.mask_words=0.5"]), ("fusemix", "tokens", [])],
)
def test_an_evaluation_draws_no_rows_no_masks_and_no_blends(tmp_path, monkeypatch, name, text, settings):
    *_, model, split = features_read(tmp_path, monkeypatch, name, "augment.image=0.5", *settings, text=text)
    before = torch.get_rng_state()
    first = embed(model.eval(), split)
    assert torch.equal(torch.get_rng_state(), before)
    for one, other in zip(first, embed(model, split), strict=True):
        assert torch.equal(one, other)
