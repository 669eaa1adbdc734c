"""What a store on S3 costs: requests, an epoch from it, and an extraction into it.

    PYTHONPATH=tests/support python tests/benchmarks/object_store.py

The server is moto's on this machine, in a process of its own; each request waits for 20 ms, and all together move
100 MB/s. Prints one JSON line a figure:

- the requests of a first store, of each further chunk, and of opening;
- `epoch`: seconds of an epoch that `runtime.cache=stream` reads, features that are 36 x 2048 float16 an image, beside
  the same bytes in pieces of 32 MB, eight at once; rounds take turns, the fastest of each counts;
- `extract`: seconds of an extraction whose device takes 20 ms a picture, one batch at a time, beside the same into a
  folder, and the share of the time from the first batch to the last for which the device had nothing to do; features
  are 49 x 2048 float16. (moto takes in far less than 100 MB/s.)
"""

import importlib
import itertools
import multiprocessing
import shutil
import tempfile
import threading
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import fsspec
import numpy as np
import torch
from PIL import Image
from reading import PLAIN, epoch_of, make_store
from s3_server import S3Server, new_bucket
from sizes import say, seconds_of, small

import xret
from xret.pipeline.reading.batches import stored_batches
from xret.pipeline.store import FeatureCache

PIECE, PIECES = 32 << 20, 8  # bytes, and how many at once
CHANNELS = 2048


class Busy:
    """An encoder whose device is busy for a while with each picture, and computes nothing."""

    name, kind, space, extras, versions = "busy", "grid", None, (), {}
    rows, grid, cells, channels, global_channels = 49, (7, 7), (7, 7), CHANNELS, CHANNELS
    device, seconds, spans = threading.Lock(), 0.02, list[tuple[float, float]]()

    def __init__(self, weights: str, image_size: int, device: str) -> None:
        self.identity = {"encoder": "busy", "weights": weights, "preprocessing": {}, "layer": None}

    def decode(self, path: Any) -> tuple[torch.Tensor, tuple[int, int]]:
        return torch.zeros(3, 1, 1), (8, 8)

    def encode(self, pixels: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        with self.device:
            began = time.monotonic()
            time.sleep(self.seconds * len(pixels))
            self.spans.append((began, time.monotonic()))
        local = np.ones((len(pixels), self.rows, CHANNELS), np.float32)
        return local, local[:, 0]


def serve(pipe: Connection, latency: float, bytes_per_second: float) -> None:
    """Run a server until the other end of the pipe says a word; send the number of its requests whenever asked."""
    server = S3Server(latency, bytes_per_second)
    pipe.send(server.address)
    while pipe.recv() == "requests":
        pipe.send(len(server.requests))


def make_pictures(folder: Path, count: int) -> Path:
    """Make a data set of so many pictures with a caption each; return its manifest."""
    (folder / "pictures").mkdir(parents=True)
    for number in range(count):
        Image.fromarray(np.full((8, 8, 3), number % 256, np.uint8)).save(folder / f"pictures/{number}.png")
    rows = "".join(f"{number}.png,picture {number},train\n" for number in range(count))
    (folder / "captions.csv").write_text(f"file_name,caption,split\n{rows}")
    (folder / "set.yaml").write_text("name: set\nimages: pictures\ncaptions: captions.csv\n")
    return folder / "set.yaml"


@click.command()
@click.option("--latency", default=0.02, show_default=True, help="Seconds.")
@click.option("--rate", default=100e6, show_default=True, help="Bytes a second.")
@small(latency=0.001, images=16, channels=16, pictures=16, rounds=1)
def main(
    latency: float, rate: float, images: int = 2048, channels: int = CHANNELS, pictures: int = 512, rounds: int = 3
) -> None:
    """Count requests, and compare times with those of large reads and of a folder."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    server = context.Process(target=serve, args=(other, latency, rate), daemon=True)
    server.start()
    bucket = f"s3://{new_bucket(pipe.recv())}"

    def requests_of(work: Any) -> int:
        counts = []
        for act in (lambda: None, work):
            act()
            pipe.send("requests")
            counts.append(pipe.recv())
        return counts[1] - counts[0]

    with tempfile.TemporaryDirectory() as folder:
        count_requests(Path(folder), bucket, requests_of)
        read_epochs(Path(folder), bucket, images, channels, rounds)
        extract_both(Path(folder), bucket, pictures, rounds)
    pipe.send("end")
    server.join()


def count_requests(folder: Path, bucket: str, requests_of: Any) -> None:
    """Extract twice, the second time with 14 chunks more, eight pictures or captions each, and open the store."""
    counts = []
    for pictures in (56, 112):
        data, url = make_pictures(folder / str(pictures), pictures), f"{bucket}/{pictures}.zarr"
        counts.append(requests_of(partial(xret.extract, data, url, visual="object_store:Busy", text="words")))
    say(what="requests of a first store of 28 chunks", requests=counts[1])
    say(what="requests of each further chunk", requests=round((counts[1] - counts[0]) / 14, 2))
    say(what="requests to open a store", requests=requests_of(partial(FeatureCache.open, url)))


def read_epochs(folder: Path, bucket: str, images: int, channels: int, rounds: int) -> None:
    """Read epochs of a store, and the same bytes of one object."""
    make_store(folder, images, 36, channels)
    (fs, root), size = fsspec.core.url_to_fs(bucket), (folder / PLAIN).stat().st_size
    fs.put(str(folder / "s.zarr"), f"{root}/s.zarr", recursive=True)
    plain = np.memmap(folder / PLAIN, np.uint8, "r")
    pieces = {f"{root}/{first}": plain[first : first + PIECE].tobytes() for first in range(0, size, PIECE)}
    fs.pipe(pieces)
    fs.max_concurrency, number = 1, itertools.count()  # with more, s3fs asks for the size of an object first

    def stream() -> None:
        cache = FeatureCache.open(f"{bucket}/s.zarr")
        sets, fields = (cache.image_set(), cache.caption_set()), ({"local"}, {"token"})
        batches = stored_batches(*sets, "train", image_fields=fields[0], caption_fields=fields[1])
        times["epoch"].append(seconds_of(partial(epoch_of, batches, min(200, images), number)))

    def whole() -> None:
        fs.cat_ranges([*pieces], None, None, on_error="raise", batch_size=PIECES)

    times: dict[str, list[float]] = {"epoch": [], "pieces": []}
    for _ in range(rounds):
        stream()
        times["pieces"].append(seconds_of(whole))
    fastest = {what: min(found) for what, found in times.items()}
    say(what="epoch", mb=size // 10**6, **_rounded(fastest), ratio=round(fastest["pieces"] / fastest["epoch"], 2))


def extract_both(folder: Path, bucket: str, pictures: int, rounds: int) -> None:
    """Extract into the object store and into a folder, which waits for no writes."""
    data, number = make_pictures(folder / "extract", pictures), itertools.count()
    times: dict[str, list[float]] = {"extract": [], "folder": []}
    idle: dict[str, list[float]] = {"extract": [], "folder": []}
    spans = importlib.import_module("object_store").Busy.spans  # of the class that is named, not of `__main__`
    for _ in range(rounds):
        for what, place in (("extract", bucket), ("folder", str(folder))):
            spans.clear()
            url = f"{place}/e{next(number)}.zarr"
            summary = xret.extract(data, url, visual="object_store:Busy", text=None, workers=2)
            times[what].append(summary.sets[0].seconds)
            idle[what].append(1 - sum(end - begin for begin, end in spans) / (spans[-1][1] - spans[0][0]))
        shutil.rmtree(url)
    shares = {f"{what}_idle": min(found) for what, found in idle.items()}
    device = Busy.seconds * pictures
    say(what="extract", **_rounded({"device": device} | {what: min(found) for what, found in times.items()} | shares))


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {what: round(found, 3) for what, found in seconds.items()}


if __name__ == "__main__":
    main()
