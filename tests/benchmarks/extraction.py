"""How near extraction comes to its backbone, how flat its memory is, how fast it sees that nothing is left.

Each command prints one JSON line with the ratios of one run:

    python tests/benchmarks/extraction.py images rsicd --data-root DIR --visual resnet50 --visual-weights random:0
    python tests/benchmarks/extraction.py captions rsicd --data-root DIR --text-weights MiniLM
    python tests/benchmarks/extraction.py memory
    python tests/benchmarks/extraction.py resume
    python tests/benchmarks/extraction.py size STORE
    python tests/benchmarks/extraction.py update
    python tests/benchmarks/extraction.py syncs rsicd --data-root DIR --visual mobilenet_v2 --visual-weights FILE
    python tests/benchmarks/extraction.py kept rsicd --data-root DIR --visual mobilenet_v2 --visual-weights FILE
"""

import io
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import numpy as np
from PIL import Image

from xret.pipeline.data.manifest import load_manifest
from xret.pipeline.extraction.extraction import Options, extract
from xret.pipeline.extraction.summary import SetSummary
from xret.pipeline.memory import keeping_memory

common = [
    click.argument("dataset"),
    click.option("--data-root", type=click.Path(path_type=Path)),
    click.option("--split", default="val", show_default=True),
    click.option("--batch-size", default=64, show_default=True),
    click.option("--device", default="auto", show_default=True),
]


LACKING: dict[str, Any] = {"os.fsync": lambda _file: None, "xret.pipeline.memory._KEEPING": {}}


def options_of(*options: Any) -> Any:
    """Add the options to a command."""

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.group()
def main() -> None:
    """Benchmarks of stage one."""


@main.command()
@options_of(*common)
@click.option("--visual", default="resnet50", show_default=True)
@click.option("--visual-weights", default="random:0", show_default=True)
@click.option("--image-size", default=224, show_default=True)
def images(dataset: str, data_root: Path | None, split: str, **options: Any) -> None:
    """Compare extraction with the bare network on prepared tensors of the same images."""
    import torch

    from xret.pipeline.data.samples import read_samples
    from xret.pipeline.device import pick_device
    from xret.pipeline.encoders import load_visual

    manifest = load_manifest(dataset, data_root)
    device = str(pick_device(options["device"]))
    encoder: Any = load_visual(options["visual"], options["visual_weights"], options["image_size"], device)
    samples = read_samples(manifest)
    names = [image.file_name for image in samples.images[slice(*samples.splits[split])]]
    batch = options["batch_size"]
    pixels = [encoder.decode(manifest.images / name)[0] for name in names]

    @keeping_memory()  # as the extraction does
    @torch.inference_mode()
    def bare() -> float:
        """Return seconds of the network alone over all batches but the ragged last."""
        seconds = 0.0
        for start in range(0, len(pixels) - batch + 1, batch):
            values = torch.stack(pixels[start : start + batch]).to(device).float().div_(255)
            values = (values - encoder._mean).div_(encoder._std).contiguous(memory_format=torch.channels_last)
            _wait(device)
            began = time.perf_counter()
            encoder.network(values)
            _wait(device)
            seconds += time.perf_counter() - began
        return seconds / (len(pixels) // batch * batch)

    encoder.encode(torch.stack(pixels[:batch]))
    before = bare()
    facts = _timed(manifest, Options(**options, text=None, splits=(split,)))
    _report(facts, (before + bare()) / 2, device)


@main.command()
@options_of(*common)
@click.option("--text-weights", required=True)
def captions(dataset: str, data_root: Path | None, split: str, **options: Any) -> None:
    """Compare extraction with the bare network on prepared batches of the same captions, sorted by length."""
    import torch
    from torch import nn

    from xret.pipeline.device import pick_device
    from xret.pipeline.encoders import load_text
    from xret.pipeline.store import FeatureCache

    manifest = load_manifest(dataset, data_root)
    device = str(pick_device(options["device"]))
    encoder: Any = load_text(options["text_weights"], device)
    with tempfile.TemporaryDirectory() as folder:
        extract(manifest, f"{folder}/words.zarr", Options(visual=None, text="words", splits=(split,)))
        cache = FeatureCache.open(f"{folder}/words.zarr")
        features = cache.caption_set()
        batches = []
        for shard in features.blocks.of_split(split):
            first, last = features.blocks.images(shard)
            start = int(cache.caption_start[first])
            texts = cache.caption_texts(start, start + int(cache.caption_count[first:last].sum()))
            ids = sorted(encoder.tokenize(texts), key=len)
            size = options["batch_size"]
            batches += [ids[begin : begin + size] for begin in range(0, len(ids), size)]

    @keeping_memory()  # as the extraction does
    @torch.inference_mode()
    def bare() -> float:
        seconds = 0.0
        for batch in batches:
            padded = nn.utils.rnn.pad_sequence([torch.tensor(caption) for caption in batch], True, 0).to(device)
            length = torch.tensor([len(caption) for caption in batch], device=device)
            valid = (torch.arange(padded.shape[1], device=device) < length[:, None]).long()
            _wait(device)
            began = time.perf_counter()
            encoder.network(input_ids=padded, attention_mask=valid)
            _wait(device)
            seconds += time.perf_counter() - began
        return seconds / sum(map(len, batches))

    encoder.encode(batches[0])
    before = bare()
    facts = _timed(manifest, Options(**options, visual=None, splits=(split,)))
    _report(facts, (before + bare()) / 2, device)


@main.command()
@options_of(*common)
@click.option("--visual", default="resnet50", show_default=True)
@click.option("--visual-weights", default="random:0", show_default=True)
@click.option("--rounds", default=3, show_default=True)
def syncs(dataset: str, data_root: Path | None, split: str, rounds: int, **options: Any) -> None:
    """Compare extraction with one that brings nothing to the disk, in turns."""
    _take_turns("os.fsync", load_manifest(dataset, data_root), Options(**options, text=None, splits=(split,)), rounds)


@main.command()
@options_of(*common)
@click.option("--visual", default="resnet50", show_default=True)
@click.option("--visual-weights", default="random:0", show_default=True)
@click.option("--rounds", default=3, show_default=True)
def kept(dataset: str, data_root: Path | None, split: str, rounds: int, **options: Any) -> None:
    """Compare extraction with one whose process gives the memory of each layer back, in turns."""
    wanted = Options(**options, text=None, splits=(split,))
    _take_turns("xret.pipeline.memory._KEEPING", load_manifest(dataset, data_root), wanted, rounds)


def _take_turns(without: str, manifest: Any, options: Options, rounds: int) -> None:
    """Compare extraction with one that lacks something, each in a process of its own."""
    rates: dict[str | None, list[float]] = {None: [], without: []}
    for number in range(2 * rounds):
        lacking = None if number % 4 in (0, 3) else without
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            rates[lacking].append(pool.submit(_rate, lacking, manifest, options).result())
    means = {lacking: statistics.mean(found) for lacking, found in rates.items()}
    line = {"per_second": means[None], "without": means[without], "ratio": means[None] / means[without]}
    click.echo(json.dumps({key: round(value, 3) for key, value in line.items()}))


def _rate(without: str | None, manifest: Any, options: Options) -> float:
    with patch(without, LACKING[without]) if without else nullcontext():
        return _timed(manifest, options).per_second


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()


def _timed(manifest: Any, options: Options) -> SetSummary:
    with tempfile.TemporaryDirectory() as folder:
        return extract(manifest, f"{folder}/s.zarr", options).sets[0]


def _report(facts: SetSummary, bare: float, device: str) -> None:
    work = sum(facts.shares.values())
    click.echo(
        json.dumps(
            {
                "set": facts.name,
                "device": device,
                "samples": facts.samples,
                "per_second": round(facts.per_second, 1),
                "bare_per_second": round(1 / bare, 1),
                "ratio": round(facts.per_second * bare, 3),
                "shares": {name: round(seconds / work, 3) for name, seconds in facts.shares.items()},
            }
        )
    )


@main.command()
@click.option("--few", default=2000, show_default=True)
@click.option("--many", default=20000, show_default=True)
def memory(few: int, many: int) -> None:
    """Compare the peak memory of extracting few and many images, each in a process of its own."""
    peaks = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in (few, many):
            manifest = same_picture(Path(folder, str(count)), count, side=224)
            made = [sys.executable, __file__, "peak", str(manifest), f"{folder}/{count}.zarr"]
            peaks[count] = int(subprocess.run(made, check=True, capture_output=True, text=True).stdout.split()[-1])
    facts = {f"peak_mb_{count}": round(peak / 1024) for count, peak in peaks.items()}
    click.echo(json.dumps({**facts, "ratio": round(peaks[many] / peaks[few], 3)}))


@main.command(hidden=True)
@click.argument("manifest")
@click.argument("store")
def peak(manifest: str, store: str) -> None:
    """Extract, and print the peak of this process in KiB."""
    options = Options(visual="resnet18", visual_weights="random:0", image_size=64, text="words", shard_images=256)
    extract(load_manifest(manifest), store, options)
    click.echo(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


@main.command()
@click.option("--samples", default=100_000, show_default=True)
def resume(samples: int) -> None:
    """Time how long a finished extraction takes to see that nothing is left."""
    code = (
        "import sys, time\n"
        "began = time.perf_counter()\n"
        "from xret.pipeline.data import manifest, samples\n"
        "from xret.pipeline.extraction import extraction, options\n"
        "loaded = time.perf_counter()\n"
        "chosen = manifest.load_manifest(sys.argv[1])\n"
        "samples.read_samples(chosen)\n"
        "read = time.perf_counter()\n"
        "options = extraction.Options(visual='squeezenet1_1', visual_weights='random:0', image_size=48, text='words')\n"
        "extraction.extract(chosen, sys.argv[2], options)\n"
        "ended = time.perf_counter()\n"
        "print(loaded - began, read - loaded, ended - read - (read - loaded), 'torch' in sys.modules)\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        manifest = same_picture(Path(folder, "data"), samples, side=32)
        options = Options(visual="squeezenet1_1", visual_weights="random:0", image_size=48, text="words")
        extract(load_manifest(manifest), f"{folder}/s.zarr", replace(options, batch_size=256))
        command = [sys.executable, "-c", code, str(manifest), f"{folder}/s.zarr"]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    imports, manifest_read, decided = (round(float(seconds), 2) for seconds in found[:3])
    click.echo(
        json.dumps(
            {
                "samples": samples,
                "seconds_importing": imports,
                "seconds_reading_manifest": manifest_read,
                "seconds_deciding": decided,
                "torch_imported": found[3] == "True",
            }
        )
    )


def same_picture(folder: Path, count: int, side: int) -> Path:
    """Make a data set of `count` names of one picture, a caption each; return its manifest."""
    (folder / "images").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "jpeg")
    with (folder / "captions.jsonl").open("w") as lines:
        for number in range(count):
            split = "train" if number % 10 else ("val" if number % 20 else "test")
            (folder / "images" / f"{number}.jpg").write_bytes(encoded.getvalue())
            words = f"a picture of thing {number % 97}"
            lines.write(json.dumps({"file_name": f"{number}.jpg", "caption": words, "split": split}) + "\n")
    manifest = folder / "same.yaml"
    manifest.write_text("name: same\nimages: images\ncaptions: captions.jsonl\n")
    return manifest


@main.command()
@click.option("--pictures", default=8192, show_default=True)
@click.option("--visual", default="mobilenet_v3_small", show_default=True)
@click.option("--text-weights", help="Of a BERT; without it, captions are words.")
@click.option("--device", default="auto", show_default=True)
def update(pictures: int, visual: str, text_weights: str | None, device: str) -> None:
    """Add 1% to so many pictures and change a caption: what an update costs over an extraction of all of them."""
    how = {"text": "bert", "text_weights": text_weights} if text_weights else {"text": "words"}
    options = Options(visual=visual, visual_weights="random:0", device=device, **how)
    with tempfile.TemporaryDirectory() as folder:
        before = different_pictures(Path(folder, "data"), 0, pictures)
        extract(load_manifest(before), f"{folder}/grown.zarr", options)
        more = pictures // 100
        after = load_manifest(different_pictures(Path(folder, "data"), pictures, more, changed=5))
        fresh, seconds = _timed_whole(after, f"{folder}/fresh.zarr", options)
        grown, again = _timed_whole(after, f"{folder}/grown.zarr", replace(options, update=True))
        facts = {
            "pictures": pictures,
            "more": more,
            "computed": [one.samples for one in grown],
            "found": [one.found for one in grown],
            "network_percent": round(100 * _network(grown) / _network(fresh), 2),
            "total_percent": round(100 * again / seconds, 2),
        }
    print(json.dumps(facts))


def _timed_whole(manifest: Any, store: str, options: Options) -> tuple[tuple[SetSummary, ...], float]:
    began = time.perf_counter()
    return extract(manifest, store, options).sets, time.perf_counter() - began


def _network(sets: tuple[SetSummary, ...]) -> float:
    return sum(one.shares["encode"] for one in sets)


def different_pictures(folder: Path, first: int, count: int, changed: int | None = None, side: int = 64) -> Path:
    """Add pictures of random pixels to a data set in `folder`; return its manifest. One caption may be changed."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for number in range(first, first + count):
        pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{number}.jpg")
    texts = {number: f"a picture of thing {number}" for number in range(first + count)}
    if changed is not None:
        texts[changed] = "another picture"
    lines = [f"{number}.jpg,{text},train" for number, text in texts.items()]
    (folder / "captions.csv").write_text("\n".join(["file_name,caption,split", *lines]) + "\n")
    (folder / "data.yaml").write_text("name: data\nimages: images\ncaptions: captions.csv\n")
    return folder / "data.yaml"


@main.command()
@click.argument("store")
def size(store: str) -> None:
    """Compare the bytes on disk of STORE's sets with raw values and with zstd-1, the best codec of those measured."""
    from numcodecs import Zstd

    from xret.pipeline.store import FeatureCache

    cache = FeatureCache.open(store)
    for modality in ("images", "captions"):
        for name in cache.set_names(modality):
            features = cache.image_set(name) if modality == "images" else cache.caption_set(name)
            rows = "local" if "local" in features.array_names() else "token"
            array = cache.store.open_array(f"{features.path}/{rows}")
            step = (array.shards or array.chunks)[0]
            block = np.asarray(array[:step])
            inner = array.chunks[0]
            packed = sum(len(Zstd(1).encode(block[at : at + inner].tobytes())) for at in range(0, step, inner))
            local = f"{features.path}/{rows}"
            click.echo(
                json.dumps(
                    {
                        "array": local,
                        "bytes_per_value": round(cache.store.size(local) / array.size, 4),
                        "raw": array.dtype.itemsize,
                        "zstd_1": round(packed / block.size, 4),
                        "set_bytes_over_raw_local": round(
                            cache.store.size(f"{modality}/{name}") / (array.size * array.dtype.itemsize), 4
                        ),
                    }
                )
            )


if __name__ == "__main__":
    main()
