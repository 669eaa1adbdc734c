"""A feature cache that is made in a moment and can be learned: pictures of things, and captions that name them."""

import hashlib
import shutil
from pathlib import Path

import numpy as np

from xret.pipeline.data.image_columns import Caption, Images, ImageSample
from xret.pipeline.data.samples import Samples
from xret.pipeline.encoders.words import WordsEncoder
from xret.pipeline.store.create import SetFacts, caption_set, image_set
from xret.pipeline.store.sets import FAILED, NOT_DONE, OK
from xret.pipeline.store.store import open_for_writing

THINGS = ["disc", "cube", "star", "ring", "cone", "line"]
COLOURS = ["red", "blue", "green", "white", "black", "pink"]
ROWS, WIDTH = 4, 16
made_once = None  # a folder in which a session of tests has a store of each kind, to copy


def make_store(url, **kind):
    """Make a store as `new_store` does and return its URL."""
    first = None if made_once is None else made_once / hashlib.sha256(repr(sorted(kind.items())).encode()).hexdigest()
    if first is None or "://" in str(url) or Path(url).exists():
        return new_store(url, **kind)
    if not first.exists():
        new_store(first, **kind)
    return str(shutil.copytree(first, url))


def new_store(
    url,
    *,
    train=48,
    val=12,
    test=12,
    image="grid",
    text="words",
    weights="a",
    words=None,
    broken=(),
    protocols=("full",),
    views=1,
    space=None,
    mark="",
    splits=("train", "val", "test"),
    files=None,
):
    """Make a store and return its URL.

    Args:
        url: where.
        train, val, test: images; each has two colours and things, and two or three captions.
        image: kind and name of the image set, ``grid``, ``roi`` or ``frames``; a tuple makes a set of each, the
            features of the first being those of a store with that one alone.
        text: kind of the caption set, ``words`` or ``tokens``; ``longer`` are tokens of other numbers. A tuple
            likewise.
        weights: goes into the fingerprint of the image set.
        words: extra words that the captions begin with.
        broken: rows of images that could not be read; of several sets by the last.
        protocols: of the data set.
        views: of an image; the first is what a store of one view has. A tuple: of each set.
        mark: what every name and text of the data set begins with.
        splits: that are done.
        files: which files the pictures are, a number; None: nobody knows, as of imports.
        space: that the global features of images and captions lie in; captions are tokens.
    """
    rng = np.random.default_rng(7)
    images, content, rows = [], [], {}
    for split, count in (("train", train), ("val", val), ("test", test)):
        if count:
            rows[split] = (len(images), len(images) + count)
        for _ in range(count):
            number = len(images)
            first, second = (int(x) for x in rng.choice(36, 2, replace=False))
            names = [f"{COLOURS[k % 6]} {THINGS[k // 6]}" for k in (first, second)]
            texts = [f"a {names[0]} and a {names[1]}", f"{names[1]} and {names[0]}", f"a {names[0]}"][: 2 + number % 2]
            captions = tuple(
                Caption(f"{mark}{words or ''} {text}".strip(), 10 * number + k) for k, text in enumerate(texts)
            )
            images.append(ImageSample(f"{mark}{number}", f"{mark}{number}.jpg", split, -1, captions))
            content.append((first, second))
    digest = hashlib.sha256(repr(images).encode()).hexdigest()
    with open_for_writing(str(url), Samples(f"{mark}small", Images.of(images), rows, digest), protocols) as cache:
        kinds = (image,) if isinstance(image, str) else image
        for number, kind in enumerate(kinds):
            failed = broken if number == len(kinds) - 1 else ()
            its_views = views if isinstance(views, int) else views[number]
            fill_images(cache, content, kind, weights, failed, its_views, number, space, splits, files)
        texts = [caption.text for image in images for caption in image.captions]
        learnt = int(cache.caption_start[train]) if val + test else len(texts)
        for kind in (text,) if isinstance(text, str) else text:
            fill_texts(cache, kind, texts, learnt, space, splits)
    return str(url)


def fill_texts(cache, kind, texts, learnt, space=None, splits=None):
    """Add a caption set of a kind; words are those of the first `learnt` texts."""
    if kind == "words":
        encoder = WordsEncoder.build(texts[:learnt])
        _fill_captions(cache, encoder.tokenize(texts), encoder.identity, "words", encoder.vocabulary, None, splits)
        return
    ids = WordsEncoder.build(texts).tokenize(texts)
    if kind == "longer":  # states of other numbers of tokens
        ids = [[row % 100] * (row % 3) + own for row, own in enumerate(ids)]
    name = "states" if kind == "tokens" else kind
    _fill_captions(cache, ids, {"encoder": name}, name, None, space, splits)


def fill_images(cache, content, kind, weights, broken=(), views=1, seed=0, space=None, splits=None, files=None):
    """Add an image set: half of an image's rows show its first thing, half its second."""
    identity = {"encoder": kind, "weights": weights, **({"views": views} if views > 1 else {})}
    names = ("size",) if files is None else ("size", "digest")
    facts = SetFacts(kind, kind, identity, "float16", WIDTH, WIDTH, space=space, rows=ROWS, views=views, arrays=names)
    if kind == "grid":
        facts.extra["grid"] = (2, 2)
    vectors = np.random.default_rng(1 + 10 * seed).normal(size=(36, WIDTH))
    noise = np.random.default_rng(2 + 10 * seed).normal(size=(len(content), ROWS, WIDTH)) * 0.1
    local = np.zeros((len(content), ROWS, WIDTH), dtype=np.float16)
    for row, (first, second) in enumerate(content):
        local[row, : ROWS // 2] = vectors[first] + noise[row, : ROWS // 2]
        local[row, ROWS // 2 :] = vectors[second] + noise[row, ROWS // 2 :]
    if views > 1:
        changed = np.random.default_rng(4).normal(size=(len(local), views - 1, ROWS, WIDTH)) * 0.5
        local = np.concatenate([local[:, None], (local[:, None] + changed).astype(np.float16)], axis=1)
    status = np.full(len(local), OK, dtype=np.uint8)
    status[list(broken)] = FAILED
    length = np.where(status == OK, ROWS, 0).astype(np.int32)
    size = np.full((len(local), 2), 64, dtype=np.int32)
    features = image_set(cache, facts, most=8)
    arrays = {"local": local, "global": local.mean(-2), "length": length, "size": size, "status": status}
    if files is not None:
        arrays["digest"] = np.random.default_rng(files).integers(1, 256, (len(local), 16), dtype=np.uint8)
    write(features, arrays, splits)


def _fill_captions(cache, ids, identity, name, vocabulary, space=None, splits=None):
    width = None if vocabulary else WIDTH if space else 12
    extra = {"vocabulary": list(vocabulary)} if vocabulary else {}
    kind, dtype = ("words", "int32") if vocabulary else ("tokens", "float16")
    facts = SetFacts(name, kind, identity, dtype, width, width, space=space, extra=extra)
    length = np.array([len(own) for own in ids], dtype=np.int32)
    features = caption_set(cache, facts, length, most=16)
    tokens = features.stored("token")
    arrays = {
        "start": np.zeros(len(ids), dtype=np.int64),
        "length": length,
        "status": np.full(len(ids), OK, dtype=np.uint8),
        "token": np.zeros(tokens.shape[0], dtype=np.int32),
    }
    for chunk in range(features.chunks):
        at = chunk * tokens.chunk_rows
        for row in range(*features.rows_in(chunk)):
            arrays["start"][row] = at
            arrays["token"][at : at + len(ids[row])] = ids[row]
            at += len(ids[row])
    if width:
        vectors = np.random.default_rng(3).normal(size=(100, width)).astype(np.float16)
        arrays["local"] = vectors[arrays["token"]]
        pooled = [arrays["local"][a : a + n].max(0) for a, n in zip(arrays["start"], length, strict=True)]
        arrays["global"] = np.array(pooled)
    write(features, arrays, splits)


def write(features, arrays, splits=None):
    """Write the chunks of a set that hold rows of these splits; `arrays` are those of all samples."""
    wanted = features.cache.splits if splits is None else [one for one in splits if one in features.cache.splits]
    status = np.full_like(arrays["status"], NOT_DONE)
    for split in wanted:
        status[features.rows_of(split)] = arrays["status"][features.rows_of(split)]
    arrays = {**arrays, "status": status}
    for chunk in features.missing(wanted):
        own, (first, last) = features.blank(chunk), features.rows_in(chunk)
        for name, values in arrays.items():
            rows = features.stored(name).chunk_rows
            own[name] = values[chunk * rows : chunk * rows + len(own[name])]
        failed = {row: "it is broken" for row in range(first, last) if status[row] == FAILED}
        features.write(chunk, own, failed)
