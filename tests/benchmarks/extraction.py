"""How near extraction comes to its backbone and to a plain loop, how flat its memory is, how fast it sees it is done.

Each command prints one JSON line with the ratios of one run:

    python tests/benchmarks/extraction.py images rsicd --data-root DIR --visual resnet50 --visual-weights random:0
    python tests/benchmarks/extraction.py images rsicd --data-root DIR --visual squeezenet1_1 --image-size 64
    python tests/benchmarks/extraction.py captions rsicd --data-root DIR --text-weights MiniLM
    python tests/benchmarks/extraction.py memory
    python tests/benchmarks/extraction.py resume
"""

import io
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import torch
import torchvision
from PIL import Image
from sizes import say, seconds_of, small
from torch import nn
from torchvision.transforms.v2 import functional

from xret.cli.memory import keep_freed_memory
from xret.pipeline.data.image_columns import ImageSample
from xret.pipeline.data.manifest import Manifest, load_manifest
from xret.pipeline.data.samples import read_samples
from xret.pipeline.device import cores, pick_device
from xret.pipeline.encoders.registry import load_text, load_visual
from xret.pipeline.encoders.spec import EncoderSpec
from xret.pipeline.extraction.extraction import extract
from xret.pipeline.extraction.options import Options

BATCH = 64
HOW: dict[str, Any] = {"splits": ("val",), "batch_size": BATCH}
SMALL = Options(EncoderSpec("squeezenet1_1", "random:0", image_size=48), EncoderSpec("words"), batch_size=256)


@click.group()
def main() -> None:
    """Benchmarks of stage one."""


@main.command()
@click.argument("dataset")
@click.option("--data-root", type=click.Path(path_type=Path))
@click.option("--visual", default="resnet50", show_default=True)
@click.option("--visual-weights", default="random:0", show_default=True)
@click.option("--image-size", type=int)
@small(visual="squeezenet1_1", rounds=1)
def images(
    dataset: str, data_root: Path | None, visual: str, visual_weights: str, image_size: int | None, rounds: int = 3
) -> None:
    """Compare extraction with the bare network on pictures in memory, and with a plain loop over the same pictures."""
    spec = EncoderSpec(visual, visual_weights, image_size=image_size)
    manifest, device = load_manifest(dataset, data_root), str(pick_device("auto"))
    encoder: Any = load_visual(spec, device)
    names = [image.file_name for image in validation_images(manifest)]
    batches = batched([encoder.decode(manifest.images / name)[0] for name in names])
    preset = encoder.identity["preprocessing"]

    def network(batch: list[torch.Tensor]) -> Callable[[], object]:
        there = torch.stack(batch).to(device)
        return lambda: encoder.features(there)

    def read(name: str) -> torch.Tensor:
        """Read a picture with torchvision alone; its resize gives slightly other pixels than Pillow's."""
        decoded = torchvision.io.decode_image(torchvision.io.read_file(str(manifest.images / name)), "RGB")
        resized = functional.resize(decoded, preset["resize"], preset["interpolation"], antialias=True)
        return functional.center_crop(resized, preset["crop"])

    def loop() -> None:
        """Read on every core, batch after batch, and encode; keep nothing."""
        with warnings.catch_warnings(), ThreadPoolExecutor(cores()) as threads:
            warnings.simplefilter("ignore", DeprecationWarning)  # torchvision's decoders will move elsewhere
            read_ahead = threads.map(read, names)
            for batch in batches:
                encoder.features(torch.stack([next(read_ahead) for _ in batch]))[0].cpu()

    compare(manifest, Options(spec, None, **HOW, device=device), network, batches, rounds, loop)


@main.command()
@click.argument("dataset")
@click.option("--data-root", type=click.Path(path_type=Path))
@click.option("--text-weights", required=True)
@small()
def captions(dataset: str, data_root: Path | None, text_weights: str) -> None:
    """Compare extraction with the bare network on prepared batches of the same captions, sorted by length."""
    manifest, device = load_manifest(dataset, data_root), str(pick_device("auto"))
    spec = EncoderSpec("bert", text_weights)
    encoder: Any = load_text(spec, device)
    texts = [caption.text for image in validation_images(manifest) for caption in image.captions]
    batches = batched(sorted(encoder.tokenize(texts), key=len))

    def network(batch: list[list[int]]) -> Callable[[], object]:
        padded = nn.utils.rnn.pad_sequence([torch.tensor(caption) for caption in batch], True, 0).to(device)
        length = torch.tensor([len(caption) for caption in batch], device=device)
        valid = (torch.arange(padded.shape[1], device=device) < length[:, None]).long()
        return lambda: encoder.network(input_ids=padded, attention_mask=valid)

    compare(manifest, Options(None, spec, **HOW, device=device), network, batches)


def validation_images(manifest: Manifest) -> tuple[ImageSample, ...]:
    """Return the images of the split that is measured."""
    samples = read_samples(manifest)
    return samples.images[slice(*samples.splits["val"])]


def batched(samples: list[Any]) -> list[list[Any]]:
    """Return samples in batches as an extraction takes them."""
    return [samples[at : at + BATCH] for at in range(0, len(samples), BATCH)]


def compare(
    manifest: Manifest,
    options: Options,
    network: Callable[[Any], Callable[[], object]],
    batches: list[list[Any]],
    rounds: int = 1,
    loop: Callable[[], None] | None = None,
) -> None:
    """Print the rate of an extraction over that of its network and of a plain loop, which alternate with it."""
    keep_freed_memory()  # as the command line does
    samples = sum(map(len, batches))

    @torch.inference_mode()
    def bare() -> float:
        """Return seconds a sample of the network alone."""
        seconds = 0.0
        for batch in batches:
            work = network(batch)
            began = time.perf_counter()
            work()
            if options.device.startswith("cuda"):
                torch.cuda.synchronize()
            seconds += time.perf_counter() - began
        return seconds / samples

    @torch.inference_mode()
    def plain() -> float:
        """Return seconds a sample of the plain loop."""
        return seconds_of(loop) / samples if loop else 0.0

    bare(), plain()
    over_network, over_loop = [], []
    for _ in range(rounds):
        before = bare(), plain()
        with tempfile.TemporaryDirectory() as folder:
            found = extract(manifest, f"{folder}/s.zarr", options).sets[0]
        alone, looped = (before[0] + bare()) / 2, (before[1] + plain()) / 2
        over_network.append(found.per_second * alone)
        over_loop.append(found.per_second * looped)
    work = sum(found.shares.values())
    shares = {name: round(seconds / work, 3) for name, seconds in found.shares.items()}
    rates = {"per_second": round(found.per_second, 1), "bare_per_second": round(1 / alone, 1)}
    if loop is not None:
        rates |= {"loop_per_second": round(1 / looped, 1), "over_loop": round(median(over_loop), 3)}
        rates["over_loop_range"] = [round(min(over_loop), 3), round(max(over_loop), 3)]
    say(set=found.name, samples=found.samples, **rates, ratio=round(median(over_network), 3), shares=shares)


@main.command()
@small(few=20, many=40)
def memory(few: int = 2000, many: int = 20000) -> None:
    """Compare the peak memory of extracting few and many images, each in a process of its own."""
    peaks = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in (few, many):
            manifest = same_picture(Path(folder, str(count)), count, side=224)
            made = [sys.executable, __file__, "peak", str(manifest), f"{folder}/{count}.zarr"]
            peaks[count] = int(subprocess.run(made, check=True, capture_output=True, text=True).stdout.split()[-1])
    say(peak_mb=[round(peak / 1024) for peak in peaks.values()], ratio=round(peaks[many] / peaks[few], 3))


@main.command(hidden=True)
@click.argument("manifest")
@click.argument("store")
def peak(manifest: str, store: str) -> None:
    """Extract, and print the peak of this process in KiB."""
    extract(load_manifest(manifest), store, SMALL)
    click.echo(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


@main.command()
@small(samples=100)
def resume(samples: int = 100_000) -> None:
    """Time how long a finished extraction takes to see that nothing is left, beside reading the manifest."""
    with tempfile.TemporaryDirectory() as folder:
        manifest = load_manifest(same_picture(Path(folder, "data"), samples, side=32))
        extract(manifest, f"{folder}/s.zarr", SMALL)
        reading = seconds_of(lambda: read_samples(manifest))
        deciding = seconds_of(lambda: extract(manifest, f"{folder}/s.zarr", SMALL)) - reading
    say(samples=samples, seconds={"reading_manifest": round(reading, 2), "deciding": round(deciding, 2)})


def same_picture(folder: Path, count: int, side: int) -> Path:
    """Make a data set of `count` names of one smooth picture, a caption each; return its manifest."""
    (folder / "images").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC).save(encoded, "jpeg", quality=90)
    with (folder / "captions.jsonl").open("w") as lines:
        for number in range(count):
            split = "train" if number % 10 else ("val" if number % 20 else "test")
            (folder / "images" / f"{number}.jpg").write_bytes(encoded.getvalue())
            words = f"a picture of thing {number % 97}"
            lines.write(json.dumps({"file_name": f"{number}.jpg", "caption": words, "split": split}) + "\n")
    manifest = folder / "same.yaml"
    manifest.write_text("name: same\nimages: images\ncaptions: captions.jsonl\n")
    return manifest


if __name__ == "__main__":
    main()
