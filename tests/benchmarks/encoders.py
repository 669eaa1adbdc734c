"""How near extraction by an encoder of today comes to its bare network, what its features weigh, how fast JPEGs decode.

Weights are random, in the shape of published checkpoints: no figure here depends on their values. Each command prints
JSON lines:

    python tests/benchmarks/encoders.py rate b32 rsicd --data-root DIR
    python tests/benchmarks/encoders.py rate l14 rsicd --data-root DIR
    python tests/benchmarks/encoders.py bytes
    python tests/benchmarks/encoders.py decode FOLDER
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from PIL import Image

# By name the settings of a published vision tower: width, layers, heads, patch, side.
VITS = {
    "s14": (384, 12, 6, 14, 224),
    "b32": (768, 12, 12, 32, 224),
    "b16": (768, 12, 12, 16, 224),
    "l14": (1024, 24, 16, 14, 224),
    "so400m-14-384": (1152, 27, 16, 14, 384),
}


BARE = 4  # batches of which the bare network's rate is taken


@click.group()
def main() -> None:
    """Benchmarks of the encoders of today."""


def save_clip(folder: Path, name: str) -> Path:
    """Write a CLIP with random weights, whose image tower has the shape of a published one; return its folder."""
    import transformers as hf

    width, layers, heads, patch, side = VITS[name]
    vision = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "patch_size": patch}
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = hf.CLIPConfig(vision_config={**vision, "num_attention_heads": heads, "image_size": side}, text_config=text)
    hf.CLIPModel(config).save_pretrained(folder)
    size = {"height": side, "width": side}
    hf.CLIPImageProcessor(size={"shortest_edge": side}, crop_size=size).save_pretrained(folder)
    return folder


@main.command()
@click.argument("shape", type=click.Choice(list(VITS)))
@click.argument("dataset")
@click.option("--data-root", type=click.Path(path_type=Path))
@click.option("--split", default="val", show_default=True)
@click.option("--count", default=320, show_default=True, help="Images of the split.")
@click.option("--batch-size", default=32, show_default=True)
@click.option("--device", default="auto", show_default=True)
def rate(
    shape: str, dataset: str, data_root: Path | None, split: str, count: int, batch_size: int, device: str
) -> None:
    """Compare extraction from JPEGs on disk with the bare network on prepared tensors of the same images."""
    import torch

    from xret.pipeline.data.manifest import load_manifest
    from xret.pipeline.data.samples import read_samples
    from xret.pipeline.device import pick_device
    from xret.pipeline.encoders import load_visual
    from xret.pipeline.extraction.extraction import Options, extract
    from xret.pipeline.memory import keeping_memory

    target = str(pick_device(device))
    with tempfile.TemporaryDirectory() as work:
        name = f"hf:{save_clip(Path(work) / shape, shape)}"
        encoder: Any = load_visual(name, "imagenet", None, target)
        whole = load_manifest(dataset, data_root)
        samples = read_samples(whole)
        files = [whole.images / image.file_name for image in samples.images[slice(*samples.splits[split])]][:count]
        manifest = _some(files, Path(work) / "some")
        pixels = [encoder.decode(file)[0] for file in files]
        batches = [torch.stack(pixels[at : at + batch_size]) for at in range(0, len(pixels), batch_size)]

        @keeping_memory()  # as the extraction does
        @torch.inference_mode()
        def bare() -> float:
            """Return the seconds an image, of so many batches that they tell."""
            seconds = 0.0
            for batch in batches[:BARE]:
                given = batch.to(target)
                _wait(target)
                began = time.perf_counter()
                encoder._run(given, False)
                _wait(target)
                seconds += time.perf_counter() - began
            return seconds / sum(map(len, batches[:BARE]))

        bare()
        before = bare()
        # A batch a shard: of few large shards one core would have the last alone, which is little of a data set.
        options = Options(
            visual=name, text=None, batch_size=batch_size, device=device, splits=("test",), shard_images=batch_size
        )
        facts = extract(load_manifest(manifest), f"{work}/s.zarr", options).sets[0]
        alone = (before + bare()) / 2
    work_done = sum(facts.shares.values())
    line = {
        "shape": shape,
        "device": target,
        "images": facts.samples,
        "per_second": round(facts.per_second, 2),
        "bare_per_second": round(1 / alone, 2),
        "ratio": round(facts.per_second * alone, 3),
        "shares": {part: round(seconds / work_done, 3) for part, seconds in facts.shares.items()},
    }
    click.echo(json.dumps(line))


def _some(files: list[Path], folder: Path) -> Path:
    """Make a data set of these pictures, one caption each; return its manifest."""
    folder.mkdir()
    with (folder / "captions.jsonl").open("w") as lines:
        for file in files:
            lines.write(json.dumps({"file_name": file.name, "caption": "a picture", "split": "test"}) + "\n")
    (folder / "some.yaml").write_text(f"name: some\nimages: {files[0].parent.resolve()}\ncaptions: captions.jsonl\n")
    return folder / "some.yaml"


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()


@main.command("bytes")
@click.option("--shape", "shapes", type=click.Choice(list(VITS)), multiple=True, default=list(VITS))
@click.option("--images", default=16, show_default=True)
def bytes_(shapes: tuple[str, ...], images: int) -> None:
    """Measure what an image weighs in a store, float16, with all of its patches and with means of 2 by 2."""
    from xret.pipeline.data.manifest import load_manifest
    from xret.pipeline.extraction.extraction import Options, extract
    from xret.pipeline.store import FeatureCache

    for shape in shapes:
        with tempfile.TemporaryDirectory() as work:
            pictures = Path(work) / "pictures"
            pictures.mkdir()
            pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
            for number in range(images):
                Image.fromarray(pixels).save(pictures / f"{number}.jpg")
            manifest = load_manifest(_some(sorted(pictures.iterdir()), Path(work) / "some"))
            name, line = f"hf:{save_clip(Path(work) / shape, shape)}", {"shape": shape}
            for pool in (None, (2, 2)):
                options = Options(visual=name, text=None, pool=pool, splits=("test",), shard_images=images)
                extract(manifest, f"{work}/s{pool}.zarr", options)
                cache = FeatureCache.open(f"{work}/s{pool}.zarr")
                features = cache.image_set()
                key = "pooled_" if pool else ""
                line[f"{key}rows"] = features.rows
                line[f"{key}bytes"] = round(cache.store.size(f"images/{features.name}") / images)
            click.echo(json.dumps(line))


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.option("--images", default=300, show_default=True)
@click.option("--rounds", default=5, show_default=True)
def decode(folder: Path, images: int, rounds: int) -> None:
    """Compare decoders of JPEGs on one core: pixels of RGB from a file, without any resizing."""
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    torch.set_num_threads(1)
    files = sorted(folder.glob("*.jpg"))[:images]
    raw = [file.read_bytes() for file in files]
    ways: dict[str, Callable[[bytes, Path], Any]] = {
        "pillow": lambda data, file: np.asarray(Image.open(file).convert("RGB")),
        "torchvision": lambda data, file: decode_jpeg(
            torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB
        ),
    }
    try:
        from simplejpeg import decode_jpeg as simple
    except ImportError:
        click.echo("simplejpeg is not installed and is left out: pip install simplejpeg", err=True)
    else:
        ways["simplejpeg"] = lambda data, file: simple(data, "RGB")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            for data, file in zip(raw, files, strict=True):
                way(data, file)
            seconds[name].append(time.perf_counter() - began)
    rates = {name: round(len(files) / statistics.median(found), 1) for name, found in seconds.items()}
    width, height = Image.open(files[0]).size
    click.echo(json.dumps({"images": len(files), "first": f"{width} x {height}", "per_second": rates}))


if __name__ == "__main__":
    main()
