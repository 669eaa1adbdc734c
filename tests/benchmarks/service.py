"""`xret serve` under load: milliseconds and memory with many clients at once, over a gallery of generated vectors.

    python tests/benchmarks/service.py --images 1000000 --text hf:sentence-transformers/all-MiniLM-L6-v2 \\
        --index IVF512,SQ8

The first images have captions, read by a real encoder. Each image has a vector of 512 numbers, a projection of one
caption's and noise; a `linear` head of 512 dimensions learns to undo that in a moment. Each client sends texts to
``POST /search``, the next as soon as it has the answer to the last, so that a query waits for those of all others;
`alone` is a single client.
Any status but 200 ends the benchmark. Memory is that of the server's process, with what it maps of an index
(`resident`), and without (`private`). Prints a JSON line a step.
"""

import http.client
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from urllib.parse import urlsplit

import click
import numpy as np
from sizes import say, seconds_of, small

from xret.heads.recipes.recipe import load_recipe
from xret.heads.training.train import train
from xret.pipeline.data.image_columns import Caption, Images, ImageSample
from xret.pipeline.data.samples import Samples
from xret.pipeline.encoders.registry import load_text
from xret.pipeline.encoders.spec import EncoderSpec
from xret.pipeline.store import OK
from xret.pipeline.store.create import SetFacts, caption_set, image_set
from xret.pipeline.store.store import open_for_writing

WIDTH, TRAIN, VAL = 512, 800, 200
NOISE = 0.7  # length of what an image's vector adds to the unit vector of a caption
WORDS = ["a", "the", "red", "blue", "old", "big", "small", "dog", "cat", "man", "child", "boat", "car", "runs", "sits"]


def sentences(seed: int) -> Iterator[str]:
    """Yield as many sentences as are wanted."""
    rng = random.Random(seed)
    while True:
        yield " ".join(rng.choices(WORDS, k=9))


def make_store(url: Path, images: int, text: str) -> str:
    """Write the store: of the images, those to train and to validate on have a caption."""
    edges = {"train": (0, TRAIN), "val": (TRAIN, TRAIN + VAL), "test": (TRAIN + VAL, images)}
    texts = list(islice(sentences(0), TRAIN + VAL))
    of = [name for name, (first, last) in edges.items() for _ in range(first, last)]
    said = [(Caption(text, number),) for number, text in enumerate(texts)] + [()] * (images - len(texts))
    samples = tuple(ImageSample(str(n), f"{n}.jpg", of[n], -1, said[n]) for n in range(images))
    encoder, rng = load_text(EncoderSpec(text), "cpu"), np.random.default_rng(0)
    ids, made = encoder.tokenize(texts), {"spec": encoder.spec.to_json()}
    local, pooled = encoder.encode(ids)
    centres = pooled @ rng.standard_normal((pooled.shape[1], WIDTH), np.float32)
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    vectors = SetFacts("vectors", "global", {"encoder": "generated"}, "float16", None, WIDTH)
    widths = encoder.channels, encoder.global_channels
    tokens = SetFacts(encoder.name, "tokens", encoder.identity, "float16", *widths, encoder.versions, extra=made)
    with open_for_writing(str(url), Samples("generated", Images.of(samples), edges, "0"), ["full"]) as store:
        features = image_set(store, vectors)
        captions = caption_set(store, tokens, np.array([len(row) for row in ids]))
        for chunk in range(features.chunks):
            arrays, rows = features.blank(chunk), np.arange(*features.rows_in(chunk))
            noise = rng.standard_normal((len(rows), WIDTH), np.float32) * (NOISE / math.sqrt(WIDTH))
            arrays["global"], arrays["status"][:] = centres[rows % len(centres)] + noise, OK
            features.write(chunk, arrays)
        token, begin = np.concatenate(ids), np.cumsum([0, *map(len, ids)])
        for chunk in range(captions.chunks):
            (first, last), arrays = captions.rows_in(chunk), captions.blank(chunk)
            here, rows = slice(begin[first], begin[last]), slice(begin[last] - begin[first])
            arrays["local"][rows], arrays["token"][rows], arrays["global"] = (
                local[here],
                token[here],
                pooled[first:last],
            )
            arrays["start"] = chunk * captions.stored("token").chunk_rows + begin[first:last] - begin[first]
            arrays["length"], arrays["status"][:] = np.diff(begin[first : last + 1]), OK
            captions.write(chunk, arrays)
    return str(url)


@contextmanager
def served(run: str, *options: str) -> Iterator[tuple[int, str]]:
    """Serve a run; give the process's number and the address."""
    words = [sys.executable, "-m", "xret.cli", "serve", run, *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        line = server.stdout.readline()
        try:
            yield server.pid, line.split()[-1]
        finally:
            server.terminate()
        assert server.wait() == 0


def ask(address: str, seconds: float, client: int) -> list[float]:
    """Ask one thing after another for some time; return how long each took."""
    took, until = [], time.perf_counter() + seconds
    with closing(http.client.HTTPConnection(urlsplit(address).netloc)) as connection:
        for text in sentences(client):
            body, began = json.dumps({"query": text}), time.perf_counter()
            connection.request("POST", "/search", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            hits = json.load(answer)
            took.append(time.perf_counter() - began)
            assert (answer.status, len(hits.get("hits", ()))) == (200, 10), hits
            if time.perf_counter() > until:
                return took
    raise AssertionError


def load(step: str, address: str, clients: int, seconds: float) -> None:
    """Let clients ask at once, and print what they waited for."""
    with ThreadPoolExecutor(clients) as pool:
        took = sorted(chain.from_iterable(pool.map(partial(ask, address, seconds), range(1, clients + 1))))
    median, p95 = (round(1000 * took[int(share * len(took))], 1) for share in (0.5, 0.95))
    say(what=step, clients=clients, queries=len(took), a_second=round(len(took) / seconds, 1), median=median, p95=p95)


def memory(process: int) -> dict[str, int]:
    """Return the MiB that a process has in memory, the most that it has had, and what of the first is no file."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    of = {name: int(kib) >> 10 for name, kib in found}
    return {"resident": of["VmRSS"], "peak": of["VmHWM"], "private": of["RssAnon"]}


@click.command()
@click.option("--images", default=10_000, show_default=True)
@click.option("--text", required=True, help="The encoder of texts, as of `xret extract`.")
@click.option("--index", metavar="FACTORY", help="Search with an index, as of `xret index --factory`.")
@click.option("--clients", default=20, show_default=True)
@click.option("--seconds", default=60.0, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), help="Keep store, run and index here, and take them up.")
@small(images=TRAIN + VAL + 200, clients=3, seconds=1.0)
def main(images: int, text: str, index: str | None, clients: int, seconds: float, folder: Path | None) -> None:
    """How long a query takes, and what memory, when many ask at once."""
    with tempfile.TemporaryDirectory() as scratch:
        place = folder or Path(scratch)
        url, run, options = place / "s.zarr", place / "run", []
        if not run.exists():
            say(what="store", images=images, seconds=seconds_of(lambda: make_store(url, images, text)))
            settings = ["model.dim=512", "schedule.epochs=5", "schedule.warmup_epochs=0"]
            train(str(url), load_recipe("linear", settings), run, device="cpu")
        if index:
            options = ["--index", str(place / "index")]
            if not (place / "index").exists():
                words = [sys.executable, "-m", "xret.cli", "index", str(run), "--out", options[1], "--factory", index]
                say(what="index", seconds=seconds_of(lambda: subprocess.run(words, check=True, stdout=sys.stderr)))
        began = time.perf_counter()
        with served(str(run), *options) as (process, address):
            say(what="ready", seconds=time.perf_counter() - began, **memory(process))
            load("alone", address, 1, seconds / 6)
            load("together", address, clients, seconds)
            say(what="afterwards", **memory(process))


if __name__ == "__main__":
    main()
