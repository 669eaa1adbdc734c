"""How a store grows: seconds and memory of each step of its life, by its number of rows.

    python tests/benchmarks/growth.py --rows 10000,100000,1000000

A generator writes embeddings of images and captions in clip-retrieval's form, a pair a row, float16. A hundred rows lie
around a centre, and a caption lies beside its image. A hundredth of the rows, 1,000 at most, are validated on, a tenth,
100,000 at most, are tested on. Each step is a process of its own that does what a command of xret does; some are timed
inside, too. Its time begins when Python and PyTorch are loaded, which take 330 MB; beside that of the clock stands that
of the processors, which the work of others changes less. Memory is the most that is not of a file (RssAnon), looked at
each hundredth of a second: pages of mapped files are the system's to take away.

Prints a table in Markdown: by size, and what the largest size takes, over what the one before takes.
"""

import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread
from typing import Any

import click
import numpy as np
import pyarrow as pa
from pyarrow import parquet
from sizes import small

from xret.cli import main as xret_command
from xret.heads.evaluation.scoring import BATCH, embed_all
from xret.heads.retrieval.index import K, one_by_one, search_exactly, share_found
from xret.heads.retrieval.retriever import Query, Retriever
from xret.heads.training.callbacks import Callback
from xret.heads.training.train import train
from xret.pipeline.reading.batches import stored_batches
from xret.pipeline.store import OK, FeatureCache
from xret.pipeline.store.create import SetFacts, caption_set

PART = 100_000  # rows of a file of the source
QUERIES = 200
TOKENS, STATE = 12, 64  # tokens of a caption on average, and the width of their states
MOST_TOKENS = 1_000_000  # captions that get states
TEXT = "a photograph of thing number {} beside another one"


def write_source(folder: Path, rows: int, width: int, distinct: int) -> None:
    """Write embeddings as clip-retrieval does; after so many files of vectors they begin again, as links."""
    for kind in ("img_emb", "text_emb", "metadata"):
        (folder / kind).mkdir(parents=True)
    tested, validated = min(rows // 10, 100_000), min(rows // 100, 1000)
    for part, first in enumerate(range(0, rows, PART)):
        rng, number = np.random.default_rng(part), np.arange(first, min(first + PART, rows))
        files = [folder / kind / f"{kind}_{part:04d}.npy" for kind in ("img_emb", "text_emb")]
        if part >= distinct and len(number) == PART:
            for file in files:
                file.hardlink_to(file.with_name(file.name.replace(f"{part:04d}", f"{part % distinct:04d}")))
        else:
            centres = rng.standard_normal((max(2, len(number) // 100), width), np.float32)
            images = centres[rng.integers(len(centres), size=len(number))]
            images += 0.7 * rng.standard_normal(images.shape, np.float32)
            captions = images + 0.5 * rng.standard_normal(images.shape, np.float32)
            for file, values in zip(files, (images, captions), strict=True):
                np.save(file, values.astype(np.float16))
        split = np.full(len(number), "train", dtype=object)
        split[number % (rows // validated) == 1] = "val"
        split[number % (rows // tested) == 0] = "test"
        columns = {
            "image_path": [f"{row // 10_000:05d}/{row:09d}.jpg" for row in number.tolist()],
            "caption": [TEXT.format(row) for row in number.tolist()],
            "split": split,
        }
        parquet.write_table(pa.table(columns), folder / "metadata" / f"metadata_{part:04d}.parquet")


def command(*words: object) -> None:
    """Do what ``xret …`` does."""
    with redirect_stdout(io.StringIO()):
        xret_command(["--quiet", *map(str, words)], standalone_mode=False)


def open_store(store: Path) -> dict[str, float]:
    """Open a store and read its first batch of test."""
    began = time.perf_counter()
    cache = FeatureCache.open(store)
    images, captions = cache.image_set("vit"), cache.caption_set("vit")
    batches = stored_batches(images, captions, "test", image_fields={"global"}, caption_fields={"global"})
    next(batches.image_features(BATCH))
    return {"opening": time.perf_counter() - began}


class _Clock(Callback):
    """Notes when a training's first step and its first epoch end."""

    def __init__(self) -> None:
        self.began, self.seconds = time.perf_counter(), dict[str, float]()

    def on_step(self, step: int, values: Any) -> None:
        if step == 1:
            self.seconds["first step"] = time.perf_counter() - self.began

    def on_epoch(self, epoch: int, step: int, values: Any) -> None:
        self.seconds["epoch"] = time.perf_counter() - self.began - self.seconds["first step"]


def train_linear(store: Path, run: Path, dim: int) -> dict[str, float]:
    """Train an epoch of `linear` on the stream."""
    settings = {
        "model.dim": dim,
        "data.batch_size": 4096,
        "data.chunk": 1024,
        "schedule.epochs": 1,
        "runtime.cache": "stream",
        "data.text": "vit",
    }
    train(store, "linear", run, settings=settings, callbacks=[clock := _Clock()], title=None)
    return clock.seconds


def ask(run: Path, index: Path) -> dict[str, float]:
    """Ask an index for the images of captions; return the seconds of a query, and the recall of the exact top 10."""
    began = time.perf_counter()
    retriever = Retriever(run, index=index)
    gallery, opened = retriever.gallery, retriever.index_of("images")
    assert opened is not None
    ready = time.perf_counter() - began
    features = next(iter(retriever.batches("test").caption_features(QUERIES)))
    queries = retriever.model.compare.normalised(embed_all(retriever.model.embed_captions, [features]))
    took, answers = [], []
    for query in one_by_one(queries):
        began = time.perf_counter()
        hits = retriever.search(Query(query, "images"), K)
        took.append(time.perf_counter() - began)
        answers.append(np.array([int(hit.id[-13:-4]) for hit in hits]))
    exact = search_exactly(queries, opened.items, retriever.comparison("images"), K)
    named = [(np.array([int(gallery.image_ids[row][-13:-4]) for row in rows]), scores) for rows, scores in exact]
    return {"ready": ready, "query": float(np.median(took)), "recall": share_found(answers, named)}


def write_states(store: Path, captions: int) -> None:
    """Write states of tokens of all captions, or of the first million."""
    cache, rng = FeatureCache.open(store), np.random.default_rng(0)
    lengths = rng.integers(TOKENS // 2, TOKENS * 3 // 2 + 1, cache.captions)
    facts = SetFacts("states", "tokens", {"encoder": "states"}, "float16", STATE, STATE)
    features = caption_set(cache, facts, lengths)
    for chunk in range(-(-min(captions, MOST_TOKENS) // features.chunk_rows)):
        first, last = features.rows_in(chunk)
        arrays, here = features.blank(chunk), lengths[first:last]
        total = int(here.sum())
        arrays["token"][:total], arrays["local"][:total] = 1, rng.standard_normal((total, STATE), np.float32)
        arrays["start"][:], arrays["length"][:] = chunk * len(arrays["token"]) + np.cumsum(here) - here, here
        arrays["global"][:], arrays["status"][:] = 1, OK
        features.write(chunk, arrays)


def read_states(store: Path, captions: int) -> dict[str, float]:
    """Read the states of 100 random batches of captions."""
    began = time.perf_counter()
    features, rng = FeatureCache.open(store).caption_set("states"), np.random.default_rng(1)
    for _ in range(100):
        features.local(rng.integers(min(captions, MOST_TOKENS), size=BATCH))
    return {"batches of states": time.perf_counter() - began}


def steps(folder: Path, rows: int, width: int) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield the steps by name, each what it calls."""
    store, run, index, dim = folder / "s.zarr", folder / "run", folder / "index", min(128, width)
    given = ("--from", "embeddings", "--source", folder / "source", "--encoder", "ViT-B/32", "--store", store)
    yield "import", command, ("import", *given)
    yield "`cache info`", command, ("cache", "info", store)
    yield "`cache verify`", command, ("cache", "verify", store)
    yield "open", open_store, (store,)
    yield "train", train_linear, (store, run, dim)
    yield "evaluate", command, ("eval", run, "--device", "cpu")
    yield "export to Parquet", command, ("export", run, "--out", folder / "e.parquet")
    yield "index", command, ("index", run, "--out", index)
    yield "ask the index", ask, (run, index)
    yield "write states", write_states, (store, rows)
    yield "read states", read_states, (store, rows)


def timed(work: Callable[..., Any], words: tuple[Any, ...]) -> tuple[float, float, dict[str, float]]:
    """Return the seconds of the clock and of the processors that `work` takes, and what it times itself."""
    began, used = time.perf_counter(), time.process_time()
    found = work(*words)
    return time.perf_counter() - began, time.process_time() - used, found or {}


def measured(work: Callable[..., Any], words: tuple[Any, ...]) -> tuple[float, float, float, dict[str, float]]:
    """Return the most bytes that `work` takes in a process of its own, and what `timed` returns."""
    done, peak, context = Event(), 0, get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        process = pool.submit(os.getpid).result()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.01):
                lines = Path(f"/proc/{process}/status").read_text().splitlines()
                peak = max(peak, *(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")))

        (watcher := Thread(target=watch)).start()
        try:
            found = pool.submit(timed, work, words).result()
        finally:
            done.set()
            watcher.join()
        return peak, *found


def grown(
    folder: Path, rows: int, width: int, distinct: int, only: tuple[str, ...]
) -> Iterator[tuple[str, float, str]]:
    """Yield what was measured of a store of so many rows: a name, a number and its unit."""
    write_source(folder / "source", rows, width, distinct)
    for name, work, words in steps(folder, rows, width):
        if only and name.strip("`") not in only:
            continue
        os.sync()  # else a step waits for the disk, which still writes what the one before has made
        peak, seconds, used, found = measured(work, words)
        yield name, seconds, "s"
        yield f"{name}, processors", used, "s"
        yield f"{name}, memory", peak / 1e6, "MB"
        for inside, value in found.items():
            yield inside, value * (1e3 if inside == "query" else 1), {"query": "ms", "recall": ""}.get(inside, "s")
        if name == "import":
            files = [file for file in (folder / "s.zarr").rglob("*") if file.is_file()]
            yield "store", sum(file.stat().st_size for file in files) / 1e6, "MB"
            yield "store, files", len(files), ""
        if name == "export to Parquet":
            (folder / "e.parquet").unlink()


@click.command()
@click.option("--rows", default="10000,100000,1000000", show_default=True, help="The sizes, smallest first.")
@click.option("--width", default=512, show_default=True, help="Of the embeddings.")
@click.option("--distinct", default=1000, show_default=True, help="Files of 100,000 vectors; others are links to them.")
@click.option("--only", default="", help="The steps to take, and no others: import,cache info,…")
@click.option("--scratch", type=click.Path(path_type=Path), help="Where stores are made and deleted.")
@small(rows="200", width=16)
def main(rows: str, width: int, distinct: int, only: str, scratch: Path | None) -> None:
    """Measure each step at each size."""
    sizes = [int(size) for size in rows.split(",")]
    table: dict[str, list[float]] = {}
    units: dict[str, str] = {}
    for size in sizes:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            for name, value, unit in grown(Path(folder), size, width, distinct, tuple(filter(None, only.split(",")))):
                table.setdefault(name, []).append(value)
                units[name] = unit
                click.echo(f"{size:,} rows: {name} {value:.4g} {unit}".strip(), err=True)
    click.echo(
        "| step | " + " | ".join(f"{size:,}" for size in sizes) + " | grows |\n|---|" + "---|" * (len(sizes) + 1)
    )
    for name, values in table.items():
        growth = f"{values[-1] / values[-2]:.2f}" if len(values) > 1 else "–"
        cells = (f"{value:,.{2 if value < 10 else 0}f} {units[name]}".strip() for value in values)
        click.echo(f"| {name} | {' | '.join(cells)} | {growth} |")


if __name__ == "__main__":
    main()
