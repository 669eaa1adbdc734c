"""A feature cache that is made in a moment and can be learned: pictures of things, and captions that name them."""

import hashlib

import numpy as np

from xret.pipeline.cache import Blocks
from xret.pipeline.cache.facts import SetFacts
from xret.pipeline.cache.layout import create_caption_set, create_image_set, open_for_writing
from xret.pipeline.data.samples import Caption, ImageSample, Samples
from xret.pipeline.encoders.words import WordsEncoder

THINGS = ["disc", "cube", "star", "ring", "cone", "line"]
COLOURS = ["red", "blue", "green", "white", "black", "pink"]
ROWS, WIDTH = 4, 16


def make_store(
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
        space: that the global features of images and captions lie in; captions are tokens.
    """
    rng = np.random.default_rng(7)
    images, content, splits = [], [], {}
    for split, count in (("train", train), ("val", val), ("test", test)):
        if count:
            splits[split] = (len(images), len(images) + count)
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
    with open_for_writing(str(url), Samples(f"{mark}small", tuple(images), splits, digest), protocols) as cache:
        pass
    blocks = Blocks(8, splits)
    kinds = (image,) if isinstance(image, str) else image
    for number, kind in enumerate(kinds):
        failed = broken if number == len(kinds) - 1 else ()
        its_views = views if isinstance(views, int) else views[number]
        _fill_images(cache, blocks, content, kind, weights, failed, its_views, number, space)
    texts = [caption.text for image in images for caption in image.captions]
    learnt = int(cache.caption_start[train]) if val + test else len(texts)
    for kind in (text,) if isinstance(text, str) else text:
        _fill_texts(cache, blocks, kind, texts, learnt, space)
    return str(url)


def _fill_texts(cache, blocks, kind, texts, learnt, space):
    """Add a caption set of a kind; words are those of the first `learnt` texts."""
    if kind == "words":
        encoder = WordsEncoder.build(texts[:learnt], min_count=1)
        _fill_captions(cache, blocks, encoder.tokenize(texts), encoder.identity, "words", encoder.vocabulary)
        return
    ids = WordsEncoder.build(texts, min_count=1).tokenize(texts)
    if kind == "longer":  # states of other numbers of tokens
        ids = [[row % 100] * (row % 3) + own for row, own in enumerate(ids)]
    name = "states" if kind == "tokens" else kind
    _fill_captions(cache, blocks, ids, {"encoder": name}, name, None, space)


def _fill_images(cache, blocks, content, kind, weights, broken, views=1, seed=0, space=None):
    identity = {"encoder": kind, "weights": weights, **({"views": views} if views > 1 else {})}
    facts = SetFacts(kind, kind, identity, "float16", WIDTH, WIDTH, {}, space=space)
    create_image_set(cache, facts, ROWS, blocks, views=views)
    vectors = np.random.default_rng(1 + 10 * seed).normal(size=(36, WIDTH))
    noise = np.random.default_rng(2 + 10 * seed).normal(size=(len(content), ROWS, WIDTH)) * 0.1
    at = blocks.array_rows(np.arange(len(content)))
    local = np.zeros((len(blocks) * blocks.length, ROWS, WIDTH), dtype=np.float16)
    for row, (first, second) in enumerate(content):
        local[at[row], : ROWS // 2] = vectors[first] + noise[row, : ROWS // 2]
        local[at[row], ROWS // 2 :] = vectors[second] + noise[row, ROWS // 2 :]
    if views > 1:
        changed = np.random.default_rng(4).normal(size=(len(local), views - 1, ROWS, WIDTH)) * 0.5
        local = np.concatenate([local[:, None], (local[:, None] + changed).astype(np.float16)], axis=1)
    status = np.full(len(local), 255, dtype=np.uint8)
    status[at] = 0
    status[at[list(broken)]] = 1
    length = np.where(status == 0, ROWS, 0).astype(np.int32)
    _write(
        cache,
        f"images/{facts.name}",
        blocks,
        {"local": local, "global": local.mean(-2), "status": status, "length": length},
    )


def _fill_captions(cache, blocks, ids, identity, name, vocabulary, space=None):
    width = None if vocabulary else WIDTH if space else 12
    facts = SetFacts(name, "words" if vocabulary else "tokens", identity, "float16", width, width, {}, space=space)
    per_shard = [slice(*blocks.images(shard)) for shard in range(len(blocks))]
    first = [int(cache.caption_start[rows][0]) for rows in per_shard]
    count = [int(cache.caption_count[rows].sum()) for rows in per_shard]
    tokens = [sum(len(ids[row]) for row in range(a, a + n)) for a, n in zip(first, count, strict=True)]
    create_caption_set(cache, facts, blocks, tokens, {"vocabulary": vocabulary} if vocabulary else {})
    features = cache.caption_set(facts.name)
    size, token_size = features.attributes["shard_captions"], features.attributes["shard_tokens"]
    arrays = {
        "start": np.zeros(size * len(blocks), dtype=np.int64),
        "length": np.zeros(size * len(blocks), dtype=np.int32),
        "status": np.full(size * len(blocks), 255, dtype=np.uint8),
        "token": np.zeros(token_size * len(blocks), dtype=np.int32),
    }
    for shard, (a, n) in enumerate(zip(first, count, strict=True)):
        at = shard * token_size
        for position, row in enumerate(range(a, a + n)):
            arrays["start"][shard * size + position] = at
            arrays["length"][shard * size + position] = len(ids[row])
            arrays["token"][at : at + len(ids[row])] = ids[row]
            at += len(ids[row])
        arrays["status"][shard * size : shard * size + n] = 0
    if width:
        vectors = np.random.default_rng(3).normal(size=(100, width)).astype(np.float16)
        arrays["local"] = vectors[arrays["token"]]
        arrays["global"] = np.zeros((len(arrays["start"]), width), dtype=np.float16)
        for row, (start, length) in enumerate(zip(arrays["start"], arrays["length"], strict=True)):
            if length:
                arrays["global"][row] = arrays["local"][start : start + length].max(0)
    _write(cache, f"captions/{facts.name}", blocks, arrays)


def _write(cache, path, blocks, arrays):
    features = cache.set_at(path)
    marks = cache.store.open_array(f"{path}/done", writable=True)
    for shard in range(len(blocks)):
        of_shard = features.blank_shard()
        for name, values in arrays.items():
            rows = len(of_shard[name])
            of_shard[name] = values[shard * rows : (shard + 1) * rows]
        features.write(shard, of_shard)
        marks[shard] = 1


def seal_anew(features):
    """Let what a test wrote over finished shards count as what was written there."""
    arrays = {name: features.cache.store.read_array(f"{features.path}/{name}") for name in features.array_names()}
    for shard in np.flatnonzero(features.done()).tolist():
        of_shard = features.blank_shard()
        for name, values in of_shard.items():
            of_shard[name] = arrays[name][shard * len(values) : (shard + 1) * len(values)]
        features.write(shard, of_shard)
