"""A feature cache of one split whose images have many captions, and the numbers that COCO gives to both."""

import numpy as np
import small_store
from small_store import COLOURS, THINGS

from xret.pipeline.data.image_columns import Caption, Images, ImageSample
from xret.pipeline.data.samples import Samples
from xret.pipeline.store.store import open_for_writing


def make_captioned_store(url, *, order=range(12), captions=20, dataset="small", kind="grid", mute=()):
    """Make a store with a split `test` and return its URL; a run that was trained on `small_store`'s can be scored.

    Args:
        url: where.
        order: the images; number n shows and says the same wherever it stands, has the id n, the cocoid 500 + 7 n and
            captions with the sentids 100,000 - `captions` n, and downwards.
        captions: of each image but those that are `mute`.
        dataset: the manifest's name.
        kind: of the image set.
    """
    images, content = [], []
    for number in order:
        rng = np.random.default_rng(number)
        content.append(tuple(int(x) for x in rng.choice(36, 2, replace=False)))
        texts = [f"{COLOURS[a % 6]} {THINGS[a // 6]}" for a in rng.integers(0, 36, captions)]
        spoken = tuple(Caption(text, 100_000 - captions * number - k) for k, text in enumerate(texts))
        said = () if number in mute else spoken
        images.append(ImageSample(str(number), f"{number}.jpg", "test", 500 + 7 * number, said))
    splits = {"test": (0, len(images))}
    with open_for_writing(str(url), Samples(dataset, Images.of(images), splits, "digest"), ("full",)) as cache:
        small_store.fill_images(cache, content, kind, "a")
        texts = [caption.text for image in images for caption in image.captions]
        small_store.fill_texts(cache, "words", texts, len(texts))
    return str(url)
